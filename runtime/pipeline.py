"""From observations to maps and scores on arrays: both passes of the method and the scoring between and after them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import BackendError, CalibrationError
from mdps.runtime.graphs import SCORE, Graphs
from mdps.runtime.noise import Noise
from mdps.runtime.preprocessing import Observations, Views
from mdps.runtime.sampler import alone, posterior_sampling, step_scalars
from mdps.runtime.schedule import NoiseSchedule, Step
from mdps.runtime.session import Arrays, Session
from mdps.runtime.settings import MaskSettings, Settings

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Inspection:
    """The arrays found on B images with N_s samples each.

    `anomaly_map` [B, 1, H, W], `anomaly_score` [B]; `first_map` and `first_score` are those of the first pass (the same
    where there is no other); `mask` [B, 1, H, W], made from `first_map`, is the one the masked pass ran under, unless
    the first one's samples guided it;
    `posterior_samples` [B * N_s, 3, H, W] of the last pass, image-major; `times` in ms for all B; `early_exit` [B]
    bool: which images skipped the masked pass, so that their map, score and samples are the first pass's.

    Of a tuned detector (`runtime.fused`) the first map and score are the last, `posterior_samples` is one an image, or
    empty where nothing is reconstructed; `tuned` [B] bool says which images it judged itself, None of another detector.
    """

    anomaly_map: Array
    anomaly_score: Array
    mask: Array
    first_map: Array
    first_score: Array
    posterior_samples: Array
    times: dict[str, float]
    early_exit: NDArray[np.bool_]
    tuned: NDArray[np.bool_] | None = None


class Inspector(Protocol):
    """The foundation of a detector: `Pipeline`, or another way to compute the same."""

    @property
    def settings(self) -> Settings:
        """Those of the bundle, with what was overridden when it was loaded."""

    @property
    def engines(self) -> dict[str, str]:
        """The provider that runs each graph, as its engine says."""

    @property
    def on_card(self) -> bool:
        """Whether the whole loop stays on a card, by whose events `Inspection.times` are measured."""

    def inspect(
        self, observations: Views, mask_range: tuple[float, float] | None, exit_limit: float | None = None
    ) -> Inspection:
        """Both passes on float32 [B, 3, H, W]; `mask_range` is needed unless the range is per image.

        An image whose first-pass score is no higher than `exit_limit` skips the masked pass. Raises CalibrationError
        without a range, BackendError where a map or score is no finite number.
        """

    def first_maps(self, observations: Views) -> Array:
        """Maps [B, 1, H, W] of the first pass alone, which need no mask range: what a calibration measures it on."""

    def predicted_noise(self, noised: Array, step: Step) -> Array:
        """Return what the first pass's denoiser takes for the noise in `noised` [N, 3, H, W] at the time of `step`."""

    def close(self) -> None:
        """Free what was loaded."""


@dataclass(frozen=True)
class Pipeline:
    """The method on a set of sessions, those of the settings' roles.

    `at_once` images go through the graphs together. The last digits of a result depend on how many, as an engine sums
    in another order then, and on a CPU many are hardly faster than one by one.
    """

    graphs: Graphs[Session]
    schedule: NoiseSchedule
    settings: Settings
    noise: Noise
    at_once: int = 1

    def inspect(
        self, observations: Views, mask_range: tuple[float, float] | None, exit_limit: float | None = None
    ) -> Inspection:
        check_range(self.settings, mask_range)
        parts = apart(observations, self.at_once)
        found = joined([self._inspect(part, mask_range, exit_limit) for part in parts])
        check_finite(found.anomaly_map, found.anomaly_score)
        return found

    def _inspect(
        self, given: Observations, mask_range: tuple[float, float] | None, exit_limit: float | None
    ) -> Inspection:
        clock, observations = Clock(), given.images
        features = self._features(observations, clock)
        samples, first = self._first(given, features, mask_range, clock)
        leaves = first["anomaly_score"] <= (-np.inf if exit_limit is None else exit_limit)  # never a NaN
        batch = _Batch(given, features, first["mask"], samples)
        samples, found = self._last(batch, first, ~leaves, mask_range, clock)
        return Inspection(
            anomaly_map=found["anomaly_map"],
            anomaly_score=found["anomaly_score"],
            mask=first["mask"],
            first_map=first["anomaly_map"],
            first_score=first["anomaly_score"],
            posterior_samples=samples,
            times=clock.times,
            early_exit=leaves,
        )

    def first_maps(self, observations: Views) -> Array:
        clock, parts = Clock(), []
        for part in apart(observations, self.at_once):
            _, found = self._first(part, self._features(part.images, clock), (0.0, 1.0), clock)
            parts.append(found)
        maps, scores = (np.concatenate([part[name] for part in parts]) for name in ("anomaly_map", "anomaly_score"))
        check_finite(maps, scores)
        return maps

    def first_samples(self, given: Observations) -> Array:
        """Return the samples of the first pass, of which nothing is scored."""
        return self._sample(0, given, np.ones_like(given.images[:, :1]))

    def predicted_noise(self, noised: Array, step: Step) -> Array:
        session = self.graphs.step(self.settings.sampler.first_pass.guidance_scale)
        feeds = alone(noised) | step_scalars(step) | {"guidance_scale": np.zeros((), dtype=np.float32)}
        return session.run({name: feeds[name] for name in session.inputs}, ["eps"])["eps"]

    @property
    def on_card(self) -> bool:
        return False

    @property
    def engines(self) -> dict[str, str]:
        return {role: session.provider for role, session in self.graphs.roles.items()}

    def close(self) -> None:
        for session in self.graphs.roles.values():
            session.close()

    def _features(self, observations: Array, clock: "Clock") -> Arrays:
        """Features of y, computed once an image and not once a sample or pass."""
        with clock("score"):
            features = self.graphs.features
            return {} if features is None else features.run({"image": observations})

    def _first(
        self, given: Observations, features: Arrays, mask_range: tuple[float, float] | None, clock: "Clock"
    ) -> tuple[Array, Arrays]:
        """Samples of the unmasked pass, and what the score graph says of them."""
        with clock("first_pass"):
            samples = self.first_samples(given)
        with clock("score"):
            return samples, self._score(samples, given.images, features, mask_range)

    def _last(
        self,
        batch: "_Batch",
        first: Arrays,
        stay: NDArray[np.bool_],
        mask_range: tuple[float, float] | None,
        clock: "Clock",
    ) -> tuple[Array, Arrays]:
        """Samples and findings: of the masked pass for the images that `stay`, of the first for the others."""
        if self.settings.sampler.masked_pass is None or not stay.any():
            return batch.samples, first
        if stay.all():
            return self._masked(batch, mask_range, clock)
        rows = np.repeat(stay, self.settings.sampler.samples)
        samples, found = self._masked(batch.pick(stay, rows), mask_range, clock)
        merged = {name: _replaced(first[name], stay, array) for name, array in found.items()}
        return _replaced(batch.samples, rows, samples), merged

    def _masked(self, batch: "_Batch", mask_range: tuple[float, float] | None, clock: "Clock") -> tuple[Array, Arrays]:
        """Samples of the masked pass, and map and score of them."""
        with clock("masked_pass"):
            samples = self._sample(1, batch.given, batch.mask, batch.samples)
        with clock("score"):
            wanted = ("anomaly_map", "anomaly_score")
            return samples, self._score(samples, batch.given.images, batch.features, mask_range, wanted)

    def _sample(self, pass_index: int, given: Observations, mask: Array, previous: Array | None = None) -> Array:
        noise = self.noise if given.corners is None else self.noise.placed(given.corners)
        *_, last = posterior_sampling(
            self.graphs, self.schedule, self.settings.sampler, given.images, mask, pass_index, noise, previous,
            reuse=True,
        )  # fmt: skip
        return last.x

    def _score(
        self,
        samples: Array,
        observations: Array,
        features: Arrays,
        mask_range: tuple[float, float] | None,
        outputs: Sequence[str] | None = None,
    ) -> Arrays:
        by_image = samples.reshape(len(observations), self.settings.sampler.samples, *samples.shape[1:])
        feeds = {"posterior_samples": by_image, "observation": observations, **features}
        scalars = mask_scalars(self.settings.mask, mask_range)
        feeds |= {name: np.asarray(value, dtype=np.float32) for name, value in scalars.items()}
        score = self.graphs.need(SCORE)
        return score.run({name: feeds[name] for name in score.inputs if name in feeds}, outputs)


@dataclass(frozen=True)
class _Batch:
    """The part of the first pass that the masked one needs."""

    given: Observations
    features: Arrays
    mask: Array
    samples: Array

    def pick(self, images: NDArray[np.bool_], rows: NDArray[np.bool_]) -> "_Batch":
        """Only some of the images, whose samples are `rows`."""
        features = {name: array[images] for name, array in self.features.items()}
        corners = None if self.given.corners is None else self.given.corners[images]
        given = Observations(self.given.images[images], corners=corners)
        return _Batch(given, features, self.mask[images], self.samples[rows])


def _replaced(old: Array, where: NDArray[np.bool_], new: Array) -> Array:
    copy = old.copy()
    copy[where] = new
    return copy


class Clock:
    """Adds up milliseconds under names: those of a pipeline, and `more`."""

    def __init__(self, *more: str) -> None:
        self.times = dict.fromkeys(("first_pass", "masked_pass", "score", *more), 0.0)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[name] += (time.perf_counter() - start) * 1000


def check_range(settings: Settings, mask_range: tuple[float, float] | None) -> None:
    """Raise CalibrationError where a mask cannot be made for want of a range."""
    if mask_range is None and settings.mask.range != "per-image":
        raise CalibrationError(
            f'the mask range is "{settings.mask.range}" and no range was calibrated: '
            "run `mdps calibrate BUNDLE GOOD_FOLDER`"
        )


def mask_scalars(settings: MaskSettings, mask_range: tuple[float, float] | None) -> dict[str, float]:
    """Return the mask inputs of the score graph, by name."""
    low, high = mask_range or (0.0, 0.0)
    frozen = float(mask_range is not None and settings.range != "per-image")
    return {"mask_lambda": settings.mask_lambda, "mask_low": low, "mask_high": high, "mask_frozen": frozen}


def check_finite(maps: Array, scores: Array) -> None:
    """Raise BackendError for the first image whose map or score is no finite number: there is no verdict of one."""
    finite = np.isfinite(scores) & np.isfinite(maps).all(axis=(1, 2, 3))
    if not finite.all():
        raise BackendError(
            f"the network gave NaN or infinite values for image {int(np.argmin(finite))} of the batch, so there is no "
            "verdict: check its parity report, and export again in fp32 if it is a half-precision bundle"
        )


def chunks(observations: Array, size: int) -> list[Array]:
    """The images in parts of at most `size`."""
    return [observations[start : start + size] for start in range(0, len(observations), size)]


def apart(observations: Views, size: int) -> list[Observations]:
    """Return the same of all views of the images."""
    given = Observations.of(observations)
    return [given[start : start + size] for start in range(0, len(given), size)]


def joined(parts: Sequence[Inspection]) -> Inspection:
    """Of all images, in their order; times add up."""
    if len(parts) == 1:
        return parts[0]
    arrays = [field.name for field in fields(Inspection) if getattr(parts[0], field.name) is not None]
    return Inspection(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays if name != "times"},
        times={name: sum(part.times[name] for part in parts) for name in parts[0].times},
    )
