"""Results of one run on one category, kept as files so that no run is made twice; its first pass alone as well."""

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.data.samples import Box
from mdps.benchmarks.evaluate.bundle import BundlePredictor
from mdps.benchmarks.evaluate.predictions import Prediction
from mdps.benchmarks.evaluate.results import Evaluation
from mdps.benchmarks.kit import Fields, plain, write_arrays
from mdps.benchmarks.metrics.bootstrap import ImageScores, Interval, bootstrap, bootstrap_difference
from mdps.benchmarks.metrics.pixels import PixelCounts
from mdps.runtime.atomic import write_text
from mdps.runtime.errors import UsageError
from mdps.runtime.pipeline import Inspection

AUROCS = {"image_auroc": "image AUROC %", "pixel_auroc": "pixel AUROC %"}


@dataclass(frozen=True)
class Outcome:
    """An evaluation without its pictures: `labels` and `scores` [n] of the judged images, `counts` of their pixels.

    `metrics` has the keys of `evaluate.METRICS`, NaN where undefined.
    """

    images: int
    metrics: dict[str, float]
    labels: tuple[bool, ...]
    scores: tuple[float, ...]
    counts: PixelCounts
    provenance: dict[str, Any]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, evaluation: Evaluation) -> Self:
        """Keep an evaluation without its pictures."""
        judged = [(row.defective, row.score) for row in evaluation.rows if row.score is not None]
        return cls(
            images=evaluation.images,
            metrics=dict(evaluation.metrics),
            labels=tuple(label for label, _ in judged),
            scores=tuple(score for _, score in judged),
            counts=evaluation.counts,
            provenance=dict(evaluation.provenance),
            problems=evaluation.problems,
        )

    def save(self, folder: Path, name: str) -> None:
        """`<name>.json` and `<name>.npz` in `folder`, the JSON last."""
        self.counts.save(folder / f"{name}.npz")
        record = {one.name: plain(getattr(self, one.name)) for one in fields(self) if one.name != "counts"}
        write_text(folder / f"{name}.json", json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """Read what `save` wrote; UsageError where a file is damaged."""
        path = folder / f"{name}.json"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            metrics = {key: math.nan if value is None else float(value) for key, value in record["metrics"].items()}
            labels, scores = tuple(map(bool, record["labels"])), tuple(map(float, record["scores"]))
            images, provenance, problems = int(record["images"]), record["provenance"], tuple(record["problems"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is damaged ({error}): remove its folder, and it is computed again") from error
        return cls(images, metrics, labels, scores, PixelCounts.load(folder / f"{name}.npz"), provenance, problems)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of image and pixel AUROC where they are defined."""
        found = {name: bootstrap(self._resampled(name)) for name in AUROCS if self._defined(name)}
        return {name: (interval.low, interval.high) for name, interval in found.items()}

    def minus(self, other: "Outcome") -> dict[str, Interval]:
        """This one's AUROCs minus the other's on the same images, with paired intervals; without undefined ones.

        Raises UsageError where the two judged other images.
        """
        names = [name for name in AUROCS if self._defined(name) and other._defined(name)]
        return {name: bootstrap_difference(self._resampled(name), other._resampled(name)) for name in names}

    def _defined(self, name: str) -> bool:
        if not math.isfinite(self.metrics[name]):
            return False
        defective = self.counts.defective
        return name == "image_auroc" or (bool(defective.any()) and not defective.all())

    def _resampled(self, name: str) -> ImageScores | PixelCounts:
        return self.counts if name == "pixel_auroc" else ImageScores(self.labels, self.scores)


@dataclass(frozen=True, kw_only=True)
class ResultRow(Fields):
    """The outcome in a row of a study: `metrics` are shares of 1, `intervals` their 95 % bootstrap over the images."""

    images: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    def with_interval(self, metric: str) -> str:
        """Return a metric in per cent with its interval, where there are such."""
        low, high = self.intervals.get(metric, (math.nan, math.nan))
        text = percent(self.metrics.get(metric))
        return f"{text} ({percent(low)} to {percent(high)})" if math.isfinite(low) and math.isfinite(high) else text


def percent(value: float | None) -> str:
    """Return a share of 1 in per cent with two digits; empty for nothing."""
    return "" if value is None or not math.isfinite(value) else f"{100 * value:.2f}"


def whiskers(rows: Sequence[ResultRow], metric: str) -> list[list[float]]:
    """Return the lengths below and above the values in per cent, [2, n]; nothing where there is no interval."""
    lows, highs = [], []
    for row in rows:
        value = row.metrics.get(metric, math.nan)
        low, high = row.intervals.get(metric, (value, value))
        lows.append(100 * max(0.0, value - low))
        highs.append(100 * max(0.0, high - value))
    return [lows, highs]


def points(interval: Interval | None) -> str:
    """Return a difference of AUROCs in points of per cent, with its interval."""
    if interval is None:
        return "undefined"
    return f"{100 * interval.value:+.2f} ({100 * interval.low:+.2f} to {100 * interval.high:+.2f})"


def differences_json(found: Mapping[str, Interval]) -> dict[str, Any]:
    """Return differences with their intervals as JSON values."""
    return {name: {"difference": i.value, "low": i.low, "high": i.high} for name, i in found.items()}


class TwoPassPredictor(BundlePredictor):
    """A bundle's predictor that also remembers what each pass said of every picture."""

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction | str]:
        """Predict; what the first pass and the last one said is in `first` and `last`, in the same order."""
        self.first: list[Prediction | str] = []
        self.last: list[Prediction | str] = []
        told: deque[tuple[float, NDArray[np.float32]]] = deque()
        self.watch(lambda found: told.extend(_each(found)))
        for prediction in super().predictions(paths):
            self.first.append(prediction if isinstance(prediction, str) else _first(prediction, *told.popleft()))
            self.last.append(prediction if isinstance(prediction, str) else replace(prediction, reconstruction=None))
            yield prediction

    def save_maps(self, path: Path) -> None:
        """Writes those of `last` and `first`, [n, h, w] each, NaN where there is none, into one compressed npz file."""
        write_arrays(path, last=_maps(self.last), first=_maps(self.first))


class Remembered:
    """A predictor that repeats `predictions` in their order; `like` says what the maps show."""

    threshold: float | None = None

    def __init__(self, like: BundlePredictor, predictions: Sequence[Prediction | str]) -> None:
        self.name, self.notes = f"{like.name}, first pass", like.notes
        self.provenance = dict(like.provenance) | {"pass": "first"}
        self._like, self._predictions = like, predictions

    def covered(self, size: tuple[int, int]) -> Box:
        """Return the box that the bundle's predictor covers."""
        return self._like.covered(size)

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction | str]:
        """The predictions, one for each path."""
        return (prediction for prediction, _ in zip(self._predictions, paths, strict=True))


def _maps(predictions: Sequence[Prediction | str]) -> NDArray[np.float32]:
    blank = np.full_like(next(one.anomaly_map for one in predictions if not isinstance(one, str)), np.nan)
    return np.stack([blank if isinstance(one, str) else one.anomaly_map for one in predictions])


def _each(found: Inspection) -> Iterator[tuple[float, NDArray[np.float32]]]:
    return zip(map(float, found.first_score), found.first_map[:, 0], strict=True)


def _first(prediction: Prediction, score: float, anomaly_map: NDArray[np.float32]) -> Prediction:
    """Return the first pass's score and map, cut as `prediction`'s was; the time of one pass was not measured alone."""
    (height, width), (whole_height, whole_width) = prediction.anomaly_map.shape, anomaly_map.shape
    top, left = (whole_height - height) // 2, (whole_width - width) // 2
    cut = anomaly_map[top : top + height, left : left + width]
    return replace(prediction, score=score, anomaly_map=cut, ms=math.nan, reconstruction=None)
