"""Judges the test images of a category and measures image and pixel metrics, as MVTec AD papers report them."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mdps.benchmarks.data.samples import Category, Sample, enlarged, truth_in_box
from mdps.benchmarks.evaluate.gallery import Example, Gallery
from mdps.benchmarks.evaluate.predictions import DetailedPredictor, Judge, Prediction, covered_box, predictions_of
from mdps.benchmarks.evaluate.results import METRICS, Evaluation, ScoredImage, by_defect_type
from mdps.benchmarks.kit import orders
from mdps.benchmarks.metrics import auroc, average_precision, f1_max
from mdps.benchmarks.metrics.found import RegionCounts
from mdps.benchmarks.metrics.pixels import PixelCounts, PixelMetrics
from mdps.runtime.errors import ImageError, MdpsError, require

_IMAGE: Mapping[str, Callable[[Sequence[bool], Sequence[float]], float]] = {
    "image_auroc": auroc,
    "image_ap": average_precision,
    "image_f1max": f1_max,
}
_PIXEL: Mapping[str, Callable[[PixelMetrics], float]] = {
    "pixel_auroc": lambda pixels: pixels.auroc(),
    "pixel_ap": lambda pixels: pixels.average_precision(),
    "aupro_0.30": lambda pixels: pixels.aupro(0.30),
    "aupro_0.05": lambda pixels: pixels.aupro(0.05),
}


def evaluate(
    predictor: Judge, category: Category, *, out: Path | None = None, largest: int | None = 256, every: int = 1
) -> Evaluation:
    """Judge every `every`-th test image of `category` and measure; with `out` write results, plots and a report there.

    Pixel metrics compare at the resolution of the ground truth: its longer side is reduced to `largest` first (256 as
    the paper works; None: not at all) and the map is enlarged to it, bilinearly. Both are cut to what the predictor's
    map shows. `ms_per_image` is the time from the decoded picture to its map: the median of the predictor's own times,
    and for a predictor that tells none the mean of the time between its answers (which then includes reading the file).

    A defective image without a mask counts for the image metrics and is left out of the pixel metrics. An image that
    cannot be judged becomes a row with an error. Raises UsageError for a category without test images or options out
    of range, and what the predictor raises as UsageError.
    """
    (evaluation,) = evaluate_in_turn([(predictor, out)], category, largest=largest, every=every)
    return evaluation


def evaluate_in_turn(
    judges: Sequence[tuple[Judge, Path | None]], category: Category, *, largest: int | None = 256, every: int = 1
) -> list[Evaluation]:
    """Evaluate several predictors, each with its folder, as `evaluate` does one.

    Each image is judged by one after another, in an order that changes, so that a disturbance meets all times alike.
    """
    require(every >= 1, f"--every {every} should be at least 1")
    require(largest is None or largest >= 1, f"the resolution {largest} should be at least 1")
    require(bool(category.test), f"{category.root} has no test images: nothing can be evaluated on it")
    samples = category.test[::every]
    paths = [sample.path for sample in samples]
    tallies = [_Tally(judge, category, largest) for judge, _ in judges]
    running = [(tally, predictions_of(judge, paths)) for tally, (judge, _) in zip(tallies, judges, strict=True)]
    rounds = zip(samples, orders(running, len(samples)), strict=True)
    for sample, order in tqdm(rounds, desc=category.name, total=len(samples), unit="image", disable=None):
        for tally, found in [(tally, _clocked(predictions)) for tally, predictions in order]:
            tally.add(sample, *found)
    return [tally.finished(every, out) for tally, (_, out) in zip(tallies, judges, strict=True)]


def _clocked(predictions: Iterator[Prediction | str]) -> tuple[Prediction | str, float]:
    """Return the next prediction, and milliseconds of the processor that it took."""
    start = time.process_time()
    return next(predictions), (time.process_time() - start) * 1000


class _Tally:
    """Adds up image after image in constant memory, but for the rows."""

    def __init__(self, predictor: Judge, category: Category, largest: int | None) -> None:
        self._predictor, self._category, self._largest = predictor, category, largest
        self._pixels, self._counts, self.gallery = PixelMetrics(), PixelCounts(), Gallery()
        self._regions: RegionCounts | None = None
        self._rows: list[ScoredImage] = []
        self._counted: list[tuple[str, bool]] = []
        self._unmasked: list[str] = []
        self._untrue: list[str] = []
        self._vanished: list[str] = []

    def add(self, sample: Sample, prediction: Prediction | str, processor_ms: float) -> None:
        """Take in one image; what is wrong with it becomes its row's error."""
        path = _below(sample.path, self._category.root)
        if isinstance(prediction, str):
            self._rows.append(ScoredImage(path, sample.kind, sample.defective, error=prediction))
            return
        if not (math.isfinite(prediction.score) and np.isfinite(prediction.anomaly_map).all()):
            reason = f"{self._predictor.name} gave a score or map that is no finite number"
            self._rows.append(ScoredImage(path, sample.kind, sample.defective, error=reason))
            return
        times = (prediction.ms, processor_ms)
        self._rows.append(ScoredImage(path, sample.kind, sample.defective, prediction.score, *times))
        truth = self._compare(sample, path, prediction)
        self.gallery.add(Example(sample.path, sample.kind, sample.defective, prediction, truth))

    def _compare(self, sample: Sample, path: str, prediction: Prediction) -> NDArray[np.bool_] | None:
        """The truth inside what the map shows, after both went into the pixel metrics; None where there is none."""
        if sample.defective and not sample.masks:
            self._unmasked.append(path)
            return None
        try:
            whole = sample.truth()
        except ImageError as error:
            self._untrue.append(str(error))
            return None
        truth = truth_in_box(whole, covered_box(self._predictor, (whole.shape[1], whole.shape[0])), self._largest)
        if whole.any() and not truth.any():
            self._vanished.append(path)
        large = enlarged(prediction.anomaly_map, truth.shape)
        self._pixels.add(truth, large)
        self._counts.add(truth, large)
        self._counted.append((sample.kind, sample.defective))
        if prediction.limit is not None:
            self._regions = self._regions or RegionCounts()
            self._regions.add(truth, prediction.anomaly_map, prediction.limit)
        return truth

    def finished(self, every: int, out: Path | None) -> Evaluation:
        """Return what was measured, after it was written to `out` if there is one."""
        evaluation = self._evaluation(every)
        if out is not None:
            from mdps.benchmarks.evaluate.report import write_evaluation

            write_evaluation(evaluation, self.gallery, self._predictor, out)
        return evaluation

    def _evaluation(self, every: int) -> Evaluation:
        judged = [row for row in self._rows if row.error is None]
        if not judged:
            raise MdpsError(f"none of {len(self._rows)} test images could be judged: {self._rows[0].error}")
        metrics, problems = self._metrics(judged)
        detailed = self._predictor if isinstance(self._predictor, DetailedPredictor) else None
        return Evaluation(
            predictor=self._predictor.name,
            category=self._category.name,
            images=len(judged),
            metrics=metrics,
            rows=tuple(self._rows),
            counts=self._counts,
            provenance={
                **self._predictor.provenance,
                "data": {"layout": self._category.layout, "every": every, "test_images": len(self._category.test)},
                "resolution": "full" if self._largest is None else self._largest,
            },
            problems=(*(detailed.notes if detailed else ()), *self._category.problems, *problems),
            threshold=detailed.threshold if detailed else None,
            regions=self._regions.to_json() if self._regions else None,
            defect_types=by_defect_type(
                [(row.kind, row.defective, row.score or 0.0) for row in judged], self._counts, self._counted
            ),
        )

    def _metrics(self, judged: Sequence[ScoredImage]) -> tuple[dict[str, float], list[str]]:
        labels, scores = [row.defective for row in judged], [row.score or 0.0 for row in judged]
        metrics, problems = dict.fromkeys(METRICS, math.nan), [*self._left_out()]
        if any(labels) and not all(labels):
            metrics |= {name: measure(labels, scores) for name, measure in _IMAGE.items()}
        else:
            kind = "defective" if any(labels) else "good"
            problems.append(f"image metrics are undefined: all {len(judged)} judged images are {kind}")
        metrics |= {name: measure(self._pixels) for name, measure in _PIXEL.items()}
        if math.isnan(metrics["pixel_auroc"]):
            problems.append("pixel metrics are undefined: no judged image has both a mask and a defect in it")
        middle = median if isinstance(self._predictor, DetailedPredictor) else fmean
        metrics["ms_per_image"] = float(middle([row.ms or 0.0 for row in judged]))
        return metrics, problems

    def _left_out(self) -> Iterator[str]:
        yield from (f"{row.path} could not be judged: {row.error}" for row in self._rows if row.error is not None)
        yield from self._untrue
        if self._unmasked:
            yield f"defective without a mask, so in the image metrics only: {_listed(self._unmasked)}"
        if self._vanished:
            yield f"masks with nothing left at this resolution or inside the crop: {_listed(self._vanished)}"


def _below(path: Path, root: Path) -> str:
    """The path that does not depend on where the data set lies."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _listed(names: Sequence[str], most: int = 10) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
