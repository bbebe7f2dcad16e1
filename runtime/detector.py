"""The detector: pictures in, verdicts out."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.calibration import Calibration, exit_limit
from mdps.runtime.engines import DEFAULT
from mdps.runtime.errors import BackendError, ImageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.pictures import describe
from mdps.runtime.pipeline import Inspection, Inspector
from mdps.runtime.preprocessing import Picture
from mdps.runtime.schedule import NoiseSchedule, Step
from mdps.runtime.settings import Settings


@dataclass(frozen=True)
class Result:
    """The detector's result for one picture.

    `verdict` is "fail" where `score` exceeds `threshold`; both it and the threshold are None without a calibration.
    `anomaly_map` [H, W] float32, larger is more anomalous; `mask` [H, W] bool, the mask of the method, made from the
    first pass's map; `posterior_sample` (the first) and `observation` [3, H, W] float32 in [-1, 1]; `times` in ms:
    preprocess, first_pass, masked_pass, score, total (in a batch: the batch's time divided by its images).
    `early_exit`: the picture skipped the masked pass, so that score, map and sample are the first pass's.
    """

    score: float
    threshold: float | None
    verdict: Literal["pass", "fail"] | None
    anomaly_map: NDArray[np.float32]
    mask: NDArray[np.bool_]
    posterior_sample: NDArray[np.float32]
    observation: NDArray[np.float32]
    times: dict[str, float]
    early_exit: bool = False


class Detector:
    """A loaded bundle. Calls are safe from several threads (they run one after another); close it, or use `with`.

    `manifest`, `calibration` (None without one), `product` and `engine` are what it was loaded with; `preprocessing`
    makes an observation [3, H, W] of a picture. `doubt` is a sentence where the calibration found that it does not see
    defects on these parts, else empty. `warm_up_seconds` is how long the last image took that `warm_up` ran; 0
    before.

    Raises CalibrationError where the settings have an early exit and no calibration says for which scores.
    """

    def __init__(
        self,
        manifest: Manifest,
        pipeline: Inspector,
        calibration: Calibration | None = None,
        *,
        product: str = "default",
        engine: str = DEFAULT,
    ) -> None:
        self.manifest, self.calibration, self.product = manifest, calibration, product
        self.preprocessing, self.engine = manifest.preprocessing, engine
        self.doubt = calibration.doubt if calibration else ""
        self.warm_up_seconds = 0.0
        self._exit_limit = exit_limit(calibration, pipeline.settings.sampler.early_exit, manifest.name)
        self._pipeline: Inspector | None = pipeline
        self._settings, self._engines = pipeline.settings, pipeline.engines
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def settings(self) -> Settings:
        """The bundle's settings with the samples, seed and early exit this detector was loaded with."""
        return self._settings

    @property
    def provenance(self) -> dict[str, object]:
        """Provenance for a stored result: checkpoint, settings, calibration, versions and engines."""
        return {
            "bundle": self.manifest.name,
            "checkpoint": self.manifest.checkpoint.to_json(),
            "settings": self._settings.to_json(),
            "product": self.product,
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
        if not images:
            return []
        start = time.perf_counter()
        observations = np.stack([self._observe(image) for image in images])
        preprocess = (time.perf_counter() - start) * 1000
        return self._judge(observations, preprocess, start)

    def judge(self, observations: NDArray[np.float32]) -> list[Result]:
        """B results for pictures that `preprocessing` was run on before: float32 [B, 3, H, W] in [-1, 1], B >= 1.

        Raises as `inspect`.
        """
        return self._judge(observations, 0.0, time.perf_counter())

    def _judge(self, observations: NDArray[np.float32], preprocess: float, start: float) -> list[Result]:
        found = self.inspect(observations)
        times = {"preprocess": preprocess, **found.times}
        times["total"] = (time.perf_counter() - start) * 1000
        each = {name: value / len(observations) for name, value in times.items()}
        return [self._result(found, observations, index, each) for index in range(len(observations))]

    def inspect(
        self,
        observations: NDArray[np.float32],
        *,
        mask_range: tuple[float, float] | None = None,
        early_exit: bool = True,
    ) -> Inspection:
        """The arrays behind results, for float32 [B, 3, H, W] in [-1, 1]; `mask_range` overrides the calibrated one.

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
            return pipeline.inspect(observations, mask_range, self._exit_limit if early_exit else None)

    def first_maps(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
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
        grey = np.zeros((1, 3, *self.preprocessing.network_size), dtype=np.float32)
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
    def schedule(self) -> NoiseSchedule:
        """The one its denoiser was trained on."""
        return self.manifest.schedule

    @property
    def on_card(self) -> bool:
        """Whether the whole loop stays on a card, by whose events the times of passes and scoring are measured."""
        return self._open_pipeline().on_card

    def _open_pipeline(self) -> Inspector:
        if self._pipeline is None:
            raise BackendError("this detector was closed: load the bundle again")
        return self._pipeline

    @contextmanager
    def _computing(self, observations: NDArray[np.float32]) -> Iterator[Inspector]:
        """One call after another on what fits, and not in a forked process: engines' threads do not follow into it."""
        if os.getpid() != self._process:
            raise BackendError(
                "this detector was loaded before the process forked, and its engine does not work in the new one: "
                "load the bundle in each worker process"
            )
        self._check(observations)
        with self._lock:
            yield self._open_pipeline()

    def _observe(self, image: Picture) -> NDArray[np.float32]:
        try:
            return self.preprocessing(image)
        except MemoryError as error:
            raise ImageError(f"{describe(image)} does not fit into memory") from error

    def _check(self, observations: NDArray[np.float32]) -> None:
        wanted = (3, *self.preprocessing.network_size)
        if observations.ndim != 4 or observations.shape[1:] != wanted or not len(observations):
            raise ImageError(
                f"observations should be [B, {', '.join(map(str, wanted))}], these are {list(observations.shape)}"
            )
        if observations.dtype != np.float32:
            raise ImageError(f"observations should be float32 in [-1, 1], these are {observations.dtype}")
        if not np.isfinite(observations).all():
            raise ImageError("observations hold NaN or infinite values")

    def _result(
        self, found: Inspection, observations: NDArray[np.float32], index: int, times: dict[str, float]
    ) -> Result:
        score = float(found.anomaly_score[index])
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
            posterior_sample=found.posterior_samples[index * self._settings.sampler.samples],
            observation=observations[index],
            times=dict(times),
            early_exit=bool(found.early_exit[index]),
        )
