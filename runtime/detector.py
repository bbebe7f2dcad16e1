"""The detector: pictures in, verdicts out."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.alignment import Pose
from mdps.runtime.atomic import write_bytes, write_text, writing
from mdps.runtime.calibration import Calibration, exit_limit
from mdps.runtime.engines import DEFAULT
from mdps.runtime.errors import BackendError, ImageError, require
from mdps.runtime.inspected import restricted
from mdps.runtime.manifest import Manifest
from mdps.runtime.overlay import HeatRange, heat_picture, heat_range, own_range, photograph_picture, png, strip
from mdps.runtime.pipeline import Inspection, Inspector
from mdps.runtime.preprocessing import Observations, Picture, Preprocessing, Views, observe
from mdps.runtime.regions import Box, Region, find
from mdps.runtime.registration import Aligner
from mdps.runtime.schedule import NoiseSchedule, Step
from mdps.runtime.scope import inspected
from mdps.runtime.settings import Settings
from mdps.runtime.tiled import Tiled
from mdps.runtime.tiles import Tiling, sheets
from mdps.runtime.tuning import Tuning

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Result:
    """The detector's result for one picture.

    `verdict` is "fail" where `score` exceeds `threshold`; both it and the threshold are None without a calibration.
    `anomaly_map` [H, W] float32, larger is more anomalous; `mask` [H, W] bool, the mask of the method, made from the
    first pass's map; `posterior_sample` (the first) and `observation` [3, H, W] float32 in [-1, 1]; `times` in ms:
    preprocess, first_pass, masked_pass, score, total (in a batch: the batch's time divided by its images).
    Of a picture that was judged in tiles H and W are its own at their scale, and the last two float16.
    `early_exit`: the picture skipped the masked pass, so that score, map and sample are the first pass's.

    `regions` are the connected parts of the map above `pixel_limit`, the highest peak first (`runtime.regions`): at
    least one of every image that fails, unless scores are in another unit than the map. They are in pixels of the
    upright picture, of which the map shows `box` (left, top, right, bottom), or of the map where there was no picture;
    none without a calibration. `mm_per_pixel` is what the bundle says of the product's photographs.

    `judged_by`: of a tuned detector its own map, or where that left doubt the published method's on its scale, and the
    published method's of any other. A tuned one's `mask` is where the map exceeds 1, its `posterior_sample` None where
    it reconstructs nothing, and it also times photograph (its features) and published (the second judgement).

    `alignment` says how the part lay, where parts are aligned: map, mask, sample and observation lie as the picture
    does, what was judged lay as the reference view.

    `heat_range` is what map values are drawn in, the map's own range where there is none. As text a result is its
    verdict and score, in a notebook its overlay.
    """

    score: float
    threshold: float | None
    verdict: Literal["pass", "fail"] | None
    anomaly_map: NDArray[np.float32]
    mask: NDArray[np.bool_]
    posterior_sample: NDArray[np.float32] | None
    observation: NDArray[np.float32]
    times: dict[str, float]
    early_exit: bool = False
    judged_by: Literal["tuned", "published"] = "published"
    alignment: Pose | None = None
    pixel_limit: float | None = None
    box: Box | None = None
    mm_per_pixel: float | None = None
    heat_range: HeatRange | None = None

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Found when they are first asked for."""
        if self.pixel_limit is None:
            return ()
        return find(self.anomaly_map, self.pixel_limit, self.box, self.mm_per_pixel)

    @property
    def overlay(self) -> "Image.Image":
        """One picture of the image, its reconstruction, the map's heat over the image and the mask's contour."""
        sample, drawn_as = self.posterior_sample, self._drawn_as
        return strip(self.observation, sample, self.anomaly_map, self.mask, drawn_as, self.regions, self.box)

    @property
    def heat(self) -> "Image.Image":
        """The map's heat over the image alone, of tiled photographs pixel for pixel of the map."""
        return heat_picture(self.observation, self.anomaly_map, self._drawn_as, self.regions, self.box)

    def heat_over(self, photograph: "Image.Image") -> "Image.Image":
        """The map's heat over the upright photograph that was judged, at the photograph's resolution."""
        return photograph_picture(photograph, self.anomaly_map, self._drawn_as, self.regions, self.box)

    @property
    def _drawn_as(self) -> HeatRange:
        return self.heat_range or own_range(self.anomaly_map)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as `mdps predict` writes them of an image that it judges."""
        return {
            "score": float(self.score),
            "threshold": None if self.threshold is None else float(self.threshold),
            "verdict": self.verdict,
            "early_exit": self.early_exit,
            "judged_by": self.judged_by,
            "regions": None if self.pixel_limit is None else [region.to_json() for region in self.regions],
            **(self.alignment.told() if self.alignment else {}),
        }

    def save(self, path: Path | str) -> None:
        """Write the overlay to `path`, a PNG file, and `to_json` beside it, under the same name with .json.

        Raises UsageError for another kind of file, MdpsError where it cannot be written.
        """
        path = Path(path)
        require(path.suffix.lower() == ".png", f"{path} should end in .png: the JSON file beside it gets its name")
        with writing(path):
            write_bytes(path, png(self.overlay))
            write_text(path.with_suffix(".json"), json.dumps(self.to_json(), indent=2) + "\n")

    def show(self) -> None:
        """Open the overlay in the program that this machine has for pictures."""
        self.overlay.show()

    def _repr_png_(self) -> bytes:
        return png(self.overlay)

    def __str__(self) -> str:
        against = "without a threshold" if self.threshold is None else f"threshold {self.threshold:.4g}"
        return f"{self.verdict or 'no verdict'}: score {self.score:.4g}, {against}"


class Detector:
    """A loaded bundle. Calls are safe from several threads (they run one after another); close it, or use `with`.

    `manifest`, `calibration` (None without one), `product`, `engine` and `tuning` (None for the published method) are
    what it was loaded with, `scope` is the product's; `preprocessing` makes an observation [3, H, W] of a picture.
    `doubt` is a sentence where the calibration found that it does not see defects on these parts, else empty.
    `warm_up_seconds` is how long the last image took that `warm_up` ran; 0 before.

    Raises CalibrationError where the settings have an early exit and no calibration says for which scores, UsageError
    where the product's parts are aligned and OpenCV is not installed.
    """

    def __init__(
        self,
        manifest: Manifest,
        pipeline: Inspector,
        calibration: Calibration | None = None,
        *,
        product: str = "default",
        engine: str = DEFAULT,
        tuning: Tuning | None = None,
    ) -> None:
        self.manifest, self.calibration, self.product, self.tuning = manifest, calibration, product, tuning
        self.preprocessing, self.engine, self.scope = manifest.preprocessing, engine, manifest.scope(product)
        self.doubt, self._restricts = calibration.doubt if calibration else "", self.scope.restricts
        self.warm_up_seconds = 0.0
        self._exit_limit = exit_limit(calibration, pipeline.settings.sampler.early_exit, manifest.name)
        self._aligner = Aligner(manifest.alignments[product]) if product in manifest.alignments else None
        self._pipeline: Inspector | None = pipeline
        self._settings, self._engines = pipeline.settings, pipeline.engines
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def tiles(self) -> Tiling | None:
        """How it cuts photographs into tiles, judging one at a time; None where it resizes them."""
        return self.manifest.tiles

    @property
    def settings(self) -> Settings:
        """The bundle's settings, with a tuning's sampler or the samples, seed and early exit it was loaded with."""
        return self._settings

    @property
    def provenance(self) -> dict[str, object]:
        """Provenance for a stored result: checkpoint, settings, calibration, versions and engines."""
        return {
            "bundle": self.manifest.name,
            "checkpoint": self.manifest.checkpoint.to_json(),
            "settings": self._settings.to_json(),
            "product": self.product,
            "tuned": self.tuned or None,
            "aligned": self.aligned or None,
            "calibration": self.calibration.to_json() if self.calibration else None,
            "doubt": self.doubt or None,
            "versions": dict(self.manifest.versions),
            "engine": self.engine,
            "engines": dict(self._engines),
        }

    def __call__(self, image: Picture) -> Result:
        """Judge one picture (see `Picture`). Raises as `batch`."""
        return self.batch([image])[0]

    def batch(self, images: Sequence[Picture]) -> list[Result]:
        """A result for each picture, in their order, as the picture alone would get it; none for no pictures.

        Raises ImageError for the first bad picture, and as `inspect`.
        """
        if self.tiles and len(images) > 1:  # one of them may fill the memory
            return [self(image) for image in images]
        if not images:
            return []
        start = time.perf_counter()
        observations = self.observe(images)
        preprocess = (time.perf_counter() - start) * 1000
        return self._judge(observations, preprocess, start)

    def observe(self, images: Sequence[Picture]) -> Observations:
        """Return the views of one or more pictures that `judge` and `inspect` take; ImageError for the first bad one.

        May be called beside a call that judges.
        """
        view, photograph = self._views
        if self.tiles:
            return sheets(images, view, self.tiles, photograph, self._aligner)
        return observe(images, view, photograph, self._aligner)

    def watch_tiles(self, told: Callable[[int, int], object]) -> None:
        """Call `told` with how many of how many tiles of a picture were judged, as they are."""
        if isinstance(self._pipeline, Tiled):
            self._pipeline.progress = told

    def judge(self, observations: Views) -> list[Result]:
        """B results for pictures that `observe` was run on before, or `preprocessing`: float32 [B, 3, H, W], B >= 1.

        Raises as `inspect`, and ImageError for what was not aligned where parts are.
        """
        given = Observations.of(observations)
        if self._aligner is not None and len(given.poses) != len(given):
            raise ImageError("this product's parts are aligned: give what this detector's `observe` returns")
        parts = [given[index : index + 1] for index in range(len(given))] if self.tiles else [given]
        return [result for part in parts for result in self._judge(part, 0.0, time.perf_counter())]

    def _judge(self, observations: Observations, preprocess: float, start: float) -> list[Result]:
        found = self.inspect(observations)
        times = {"preprocess": preprocess, **found.times}
        times["total"] = (time.perf_counter() - start) * 1000
        each = {name: value / len(observations) for name, value in times.items()}
        results = [self._result(found, observations, index, each) for index in range(len(observations))]
        if self._aligner is None:
            return results
        return [self._as_it_lay(result, pose) for result, pose in zip(results, observations.poses, strict=True)]

    def inspect(
        self,
        observations: Views,
        *,
        mask_range: tuple[float, float] | None = None,
        early_exit: bool = True,
    ) -> Inspection:
        """The arrays behind results, for float32 [B, 3, H, W] in [-1, 1]; `mask_range` overrides the calibrated one.

        A tuned detector that reads photographs takes what `observe` returns, and nothing less. One that judges in tiles
        takes one picture as `observe` returns it, or tiles as arrays.
        `early_exit` False takes every image through both passes, whatever the settings say.
        Raises ImageError for observations of another shape, dtype or with NaN, CalibrationError where the mask range is
        frozen and not known, BackendError where the engine fails or gives NaN, after `close`, and in a forked process.
        """
        with self._computing(observations) as pipeline:
            if len(observations) > 1:  # the samples of one were counted when the bundle was loaded
                from mdps.runtime.memory import check_batch

                check_batch(self.manifest, self._settings, len(observations))
            # A range over a whole test set is never the calibrated one: whoever reproduces it gives it.
            if mask_range is None and self.calibration is not None and self._settings.mask.range == "frozen":
                mask_range = self.calibration.mask_range
            found = pipeline.inspect(observations, mask_range, self._exit_limit if early_exit else None)
        return self._restricted(found) if self._restricts else found

    def _restricted(self, found: Inspection) -> Inspection:
        """Return what was found of the inspected places alone."""
        height, width = found.anomaly_map.shape[2:]
        inside = inspected(self.scope, self.preprocessing.covered_box, (height, width))
        return restricted(found, inside, self._settings.score, self.tuning.cascade if self.tuning else None)

    def first_maps(self, observations: Views) -> NDArray[np.float32]:
        """Maps [B, 1, H, W] of the first pass alone; needs no calibration. Raises as `inspect`."""
        with self._computing(observations) as pipeline:
            return pipeline.first_maps(observations)

    def predicted_noise(self, noised: NDArray[np.float32], step: Step) -> NDArray[np.float32]:
        """Return the denoiser's estimate of the noise in `noised` [N, 3, H, W] at the time of `step`, in its shape.

        Raises as `inspect`.
        """
        with self._computing(noised) as pipeline:
            return pipeline.predicted_noise(noised, step)

    def warm_up(self) -> None:
        """Run one grey image through everything, so that the first real one costs no more than the others."""
        image, photograph = self._views
        grey = Observations(_grey(image), None if photograph is None else _grey(photograph))
        started = time.perf_counter()
        self.inspect(grey, mask_range=(0.0, 1.0), early_exit=False)
        self.warm_up_seconds = time.perf_counter() - started

    def close(self) -> None:
        """Free the engines, after a call that is running; a later call is a BackendError."""
        with self._lock:
            if self._pipeline is not None:
                self._pipeline.close()
            self._pipeline = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tuned(self) -> str:
        """The name of its tuning, "" for the published method: a calibration is of one of them."""
        return self.manifest.tuned(self.tuning)

    @property
    def aligned(self) -> str:
        """The name of how it aligns parts, "" where it does not: a calibration is of one way."""
        return self.manifest.aligned(self.product)

    @property
    def denoises(self) -> bool:
        """Whether the network was loaded, which a tuned detector may not need."""
        return self.tuning is None or bool(self.tuning.roles(self.manifest.settings))

    @property
    def schedule(self) -> NoiseSchedule:
        """The one its denoiser was trained on."""
        return self.manifest.schedule

    @property
    def pixel_limit(self) -> float | None:
        """The value of a map above which a pixel is in a region; None without a calibration.

        It is the threshold where a score is the mean of the map's highest pixels, as every tuned detector's is, so that
        each image that fails has a region. Elsewhere it is the hottest pixel of the good parts.
        """
        if self.calibration is None:
            return None
        in_unit_of_map = self.tuning is not None or self._settings.score.image_score == "top_mean"
        return self.calibration.threshold if in_unit_of_map else self.calibration.map_high

    @property
    def on_card(self) -> bool:
        """Whether the whole loop stays on a card, by whose events the times of passes and scoring are measured."""
        return self._open_pipeline().on_card

    def _open_pipeline(self) -> Inspector:
        if self._pipeline is None:
            raise BackendError("this detector was closed: load the bundle again")
        return self._pipeline

    @contextmanager
    def _computing(self, observations: Views) -> Iterator[Inspector]:
        """One call after another on what fits, and not in a forked process: engines' threads do not follow into it."""
        if os.getpid() != self._process:
            raise BackendError(
                "this detector was loaded before the process forked, and its engine does not work in the new one: "
                "load the bundle in each worker process"
            )
        self._check(Observations.of(observations))
        with self._lock:
            yield self._open_pipeline()

    @property
    def _views(self) -> tuple[Preprocessing, Preprocessing | None]:
        """Return what makes an observation of a picture, and a photograph where one is read."""
        return self.preprocessing, self.tuning.photograph if self.tuning else None

    def _check(self, given: Observations) -> None:
        for name, array, view in zip(
            ("observations", "photographs"), (given.images, given.photographs), self._views, strict=True
        ):
            if array is not None and view is not None:
                _check_view(array, name, view)

    def _result(self, found: Inspection, observations: Observations, index: int, times: dict[str, float]) -> Result:
        score, samples = float(found.anomaly_score[index]), found.posterior_samples
        threshold = self.calibration.threshold if self.calibration else None
        verdict: Literal["pass", "fail"] | None = None
        if threshold is not None:
            verdict = "fail" if score > threshold else "pass"
        return Result(
            score=score,
            threshold=threshold,
            verdict=verdict,
            anomaly_map=found.anomaly_map[index, 0],
            mask=found.mask[index, 0] > 0.5,
            posterior_sample=samples[index * (len(samples) // len(found.anomaly_map))] if len(samples) else None,
            observation=observations.whole(index),
            times=dict(times),
            early_exit=bool(found.early_exit[index]),
            judged_by="tuned" if found.tuned is not None and found.tuned[index] else "published",
            pixel_limit=self.pixel_limit,
            box=observations.boxes[index] if observations.boxes else None,
            mm_per_pixel=self.scope.mm_per_pixel,
            heat_range=heat_range(self.calibration),
        )

    def _as_it_lay(self, result: Result, pose: Pose) -> Result:
        """Return the result of an aligned picture for the picture as it was."""
        result = replace(result, alignment=pose)
        if self._aligner is None or not pose.moved:
            return result
        back = partial(self._aligner.back, pose=pose, box=self.preprocessing.covered_box(pose.size))
        sample = result.posterior_sample
        return replace(
            result,
            anomaly_map=back(result.anomaly_map),
            mask=back(result.mask),
            observation=back(np.asarray(result.observation, np.float32)),
            posterior_sample=None if sample is None else back(np.asarray(sample, np.float32)),
        )


def _grey(view: Preprocessing) -> NDArray[np.float32]:
    return np.zeros((1, 3, *view.network_size), dtype=np.float32)


def _check_view(array: NDArray[np.float32], name: str, view: Preprocessing) -> None:
    wanted = (3, *view.network_size)
    if array.ndim != 4 or array.shape[1:] != wanted or not len(array):
        raise ImageError(f"{name} should be [B, {', '.join(map(str, wanted))}], these are {list(array.shape)}")
    if array.dtype != np.float32:
        raise ImageError(f"{name} should be float32 in [-1, 1], these are {array.dtype}")
    if not np.isfinite(array).all():
        raise ImageError(f"{name} hold NaN or infinite values")
