"""Threshold, mask range and map range of a product, from images of good parts only."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.engines import named
from mdps.runtime.errors import BackendError, CalibrationError, require
from mdps.runtime.fitness import Fitness
from mdps.runtime.pipeline import Inspection
from mdps.runtime.preprocessing import Observations, Picture, Views
from mdps.runtime.records import Record
from mdps.runtime.schedule import NoiseSchedule, Step
from mdps.runtime.scope import Scope
from mdps.runtime.settings import EXIT_SHARES, Settings
from mdps.runtime.tiles import Tiling

Array = NDArray[np.float32]
IMAGES = 8
SIGNAL = 0.5  # alpha of the x_t it is tried on: below it a wrong `prediction` shows less, above it wrong norms do
LIMIT = 0.5  # of the filter's error
NEGLIGIBLE = 0.01  # mean squared error that is right whatever the images: of nearly smooth ones the filter's is smaller


class CalibrationWarning(UserWarning):
    """The calibration is usable, but says less than was asked for."""


@dataclass(frozen=True)
class Calibration(Record):
    """The scores and maps of good parts, as one detector sees them.

    A score above `threshold` is a "fail". `false_alarm_rate` was asked for; `expected_false_alarm_rate` is what
    `images` good images can promise. `mask_low` and `mask_high` bound the maps of the first pass (the frozen mask
    range), `map_low` and `map_high` those of the last. `samples` and `seed` are those it was made with, `note` holds
    its warnings or is empty. `first_quantiles` are the scores of the first pass that a share of good images does
    not exceed, for each of EXIT_SHARES; a calibration of before they were recorded has none. `arithmetic` is what the
    engine computed the steps in, "" for the bundle's own precision: in another, scores differ. `fitness` says what was
    found of defects put into good parts, None where that was not tried. `tuned` is the name of the tuning it is of, ""
    for the published method, `aligned` that of how its parts were aligned, "" where they were not, `scope` that of
    the places that were inspected, "" for all.
    """

    threshold: float
    false_alarm_rate: float
    expected_false_alarm_rate: float
    images: int
    mask_low: float
    mask_high: float
    map_low: float
    map_high: float
    samples: int
    seed: int
    note: str = ""
    first_quantiles: tuple[float, ...] = ()
    arithmetic: Literal["", "bf16"] = ""
    fitness: Fitness | None = None
    tuned: str = ""
    aligned: str = ""
    scope: str = ""

    later: ClassVar[Mapping[str, Any]] = {"aligned": "", "scope": ""}

    def __post_init__(self) -> None:
        require(0 < self.false_alarm_rate < 1, f"false_alarm_rate {self.false_alarm_rate} should lie between 0 and 1")
        require(self.images >= 1, "a calibration needs at least one image")
        require(self.mask_low <= self.mask_high, "mask_low should not exceed mask_high")
        require(self.map_low <= self.map_high, "map_low should not exceed map_high")
        require(
            len(self.first_quantiles) in (0, len(EXIT_SHARES))
            and list(self.first_quantiles) == sorted(self.first_quantiles),
            f"first_quantiles should be {len(EXIT_SHARES)} rising scores or none",
        )

    @property
    def mask_range(self) -> tuple[float, float]:
        """Low and high of the frozen mask range."""
        return (self.mask_low, self.mask_high)

    @property
    def doubt(self) -> str:
        """Return the sentence of a `fitness` that is below the floor; empty where it is not, or was not measured."""
        return self.fitness.doubt if self.fitness else ""


class Judge(Protocol):
    """The members of a `Detector` that a calibration asks for."""

    engine: str
    scope: Scope

    @property
    def tuned(self) -> str:
        """The name of its tuning, or nothing."""

    @property
    def aligned(self) -> str:
        """The name of how it aligns parts, or nothing."""

    @property
    def denoises(self) -> bool:
        """Whether `predicted_noise` can be asked."""

    @property
    def settings(self) -> Settings:
        """Those it judges with."""

    @property
    def schedule(self) -> NoiseSchedule:
        """The one its denoiser was trained on."""

    @property
    def tiles(self) -> Tiling | None:
        """How it cuts pictures, of which it then judges one at a time."""

    def observe(self, images: Sequence[Picture]) -> Observations:
        """Return the views of pictures that it judges."""

    def inspect(
        self, observations: Views, *, mask_range: tuple[float, float] | None = None, early_exit: bool = True
    ) -> Inspection:
        """Return the arrays behind results."""

    def first_maps(self, observations: Views) -> Array:
        """Return the maps of the first pass alone."""

    def predicted_noise(self, noised: Array, step: Step) -> Array:
        """Return what the first pass's denoiser takes for the noise."""


def good_threshold(scores: Array, false_alarm_rate: float) -> tuple[float, float]:
    """Threshold from scores [n] of good images, and the false-alarm rate it promises.

    The k-th smallest of n scores, k = ceil((n + 1)(1 - rate)), is exceeded by the next good image with a probability of
    at most 1 - k / (n + 1) whatever the distribution (split conformal prediction). With too few images for the rate
    (k > n) it is the largest score, which promises 1 / (n + 1) only. CalibrationError where a score is no number.
    """
    if not len(scores) or not np.isfinite(scores).all():
        raise CalibrationError("a threshold needs at least one score, and every score a finite number")
    count = len(scores)
    # The small number keeps a product like 20 * 0.95, which is 19.000000000000004 or so, from counting as 20.
    rank = min(count, math.ceil((count + 1) * (1 - false_alarm_rate) - 1e-9))
    rank = max(rank, 1)
    return float(np.sort(scores)[rank - 1]), 1 - rank / (count + 1)


def first_quantiles(scores: Array) -> tuple[float, ...]:
    """From first-pass scores [n] of good images, for each of EXIT_SHARES: the k-th smallest, k = floor((n + 1) share).

    The next good image stays at or below it with a probability of at most that share, as in `good_threshold`; with so
    few images that k would be 0 it is the smallest.
    """
    ranks = [max(1, math.floor((len(scores) + 1) * share + 1e-9)) for share in EXIT_SHARES]
    return tuple(np.sort(scores)[[rank - 1 for rank in ranks]].tolist())


def exit_limit(calibration: Calibration | None, share: float, name: str) -> float | None:
    """The first-pass score up to which an image skips the masked pass, None for a `share` of 0; see `SamplerSettings`.

    It never exceeds the threshold, so that who skips the pass is good by both scores' measure: below a part of the good
    ones in the first pass, and no "fail" if that pass were the last. CalibrationError, naming the bundle `name`, where
    the calibration does not say.
    """
    if not share:
        return None
    remedy = "run `mdps calibrate BUNDLE GOOD_FOLDER`, or set the early exit to 0"
    if calibration is None:
        raise CalibrationError(
            f"an early exit compares an image with the first pass of good parts, and {name} has no calibration for "
            f"these settings and this product, or none was to be used: {remedy}"
        )
    if not calibration.first_quantiles:
        raise CalibrationError(
            f"the calibration of {name} has no scores of the first pass, which an early exit needs, for it was made "
            f"before they were recorded: {remedy}"
        )
    return min(calibration.first_quantiles[EXIT_SHARES.index(share)], calibration.threshold)


def calibrate(
    detector: Judge, images: Iterable[Picture], *, false_alarm_rate: float = 0.01, batch: int = 8,
    each: Callable[[Array], object] = lambda scores: None, known: Mapping[int, float] = MappingProxyType({}),
) -> Calibration:  # fmt: skip
    """Calibrate on `images` of good parts (never test images), whatever calibration the detector has.

    At most the share `false_alarm_rate`, in (0, 1), of further good parts is to fail; `batch` (1 or more) pictures are
    judged at once, their scores given to `each`. A frozen mask range is measured first, over the first pass of all.
    `known` are scores of some of the images, by their place, that count instead of what the detector gives them: those
    of images that it was fitted to.

    Raises ImageError for an image that cannot be read, CalibrationError without images, UsageError for a rate outside
    (0, 1), BackendError where the engine fails or gives NaN; warns with CalibrationWarning where there are too few
    images for the rate, where all maps are one value, and where the denoiser does not denoise these images.
    """
    require(0 < false_alarm_rate < 1, f"the false-alarm rate {false_alarm_rate} should lie between 0 and 1")
    pictures = list(images)
    if not pictures:
        raise CalibrationError("there are no images to calibrate on: give a folder of images of good parts")
    settings, batch = detector.settings, 1 if detector.tiles else batch
    frozen = _first_pass_range(detector, pictures, batch) if settings.mask.range != "per-image" else None
    good = _Good(known)
    for observations in _batches(detector, pictures, batch):
        each(good.add(detector.inspect(observations, mask_range=frozen, early_exit=False)))
    mask_low, mask_high = frozen or (good.first.low, good.first.high)
    threshold, expected = good_threshold(np.asarray(good.scores), false_alarm_rate)
    return Calibration(
        threshold=threshold,
        false_alarm_rate=false_alarm_rate,
        expected_false_alarm_rate=expected,
        images=len(pictures),
        mask_low=mask_low,
        mask_high=mask_high,
        map_low=good.last.low,
        map_high=good.last.high,
        samples=settings.sampler.samples,
        seed=settings.sampler.seed,
        note=_warned(
            too_few(len(pictures), false_alarm_rate, expected),
            _constant(good.last.low, good.last.high, threshold),
            noise_doubt(detector, _some(detector, pictures)) if detector.denoises else "",
        ),
        first_quantiles=first_quantiles(np.asarray(good.first_scores)),
        arithmetic=named(detector.engine).arithmetic,
        tuned=detector.tuned,
        aligned=detector.aligned,
        scope=detector.scope.name,
    )


@dataclass
class _Range:
    low: float = math.inf
    high: float = -math.inf

    def add(self, values: Array) -> None:
        if not np.isfinite(values).all():
            raise BackendError("an anomaly map of a calibration image holds NaN or infinite values")
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))


@dataclass
class _Good:
    """Scores of good images by the first pass and by the last, where `known` has none, and the ranges of their maps."""

    known: Mapping[int, float]
    scores: list[np.float32] = field(default_factory=list)
    first_scores: list[np.float32] = field(default_factory=list)
    first: _Range = field(default_factory=_Range)
    last: _Range = field(default_factory=_Range)

    def add(self, found: Inspection) -> Array:
        """Take what was found of the next images, and return their scores."""
        start = len(self.scores)
        scores = np.array(
            [self.known.get(start + index, one) for index, one in enumerate(found.anomaly_score)], np.float32
        )
        self.scores.extend(scores)
        self.first_scores.extend(found.first_score)
        self.first.add(found.first_map)
        self.last.add(found.anomaly_map)
        return scores


def _batches(detector: Judge, pictures: list[Picture], batch: int) -> Iterator[Observations]:
    for start in range(0, len(pictures), batch):
        yield detector.observe(pictures[start : start + batch])


def _first_pass_range(detector: Judge, pictures: list[Picture], batch: int) -> tuple[float, float]:
    found = _Range()
    for observations in _batches(detector, pictures, batch):
        found.add(detector.first_maps(observations))
    return (found.low, found.high)


def _some(detector: Judge, pictures: list[Picture]) -> Array:
    """Return a few of them as observations, from the first to the last."""
    chosen = pictures[:: max(1, len(pictures) // IMAGES)][:IMAGES]
    return np.concatenate([part.images for part in _batches(detector, chosen, 1)])


def _warned(*sentences: str) -> str:
    said = [sentence for sentence in sentences if sentence]
    for sentence in said:
        warnings.warn(sentence, CalibrationWarning, stacklevel=3)
    return "; ".join(said)


def _constant(low: float, high: float, threshold: float) -> str:
    if low < high:
        return ""
    return (
        f"every anomaly map of the good images is {low:g} throughout, so that the threshold {threshold:g} tells no "
        "defect from a good part: look at what the bundle compares (--stages, --eta) and at its checkpoint"
    )


def too_few(count: int, asked: float, expected: float) -> str:
    """Return a sentence where `count` good images cannot promise the false-alarm rate `asked`, empty where they can."""
    if expected <= asked + 1e-9:
        return ""
    needed = math.ceil(1 / asked - 1e-9) - 1
    images = "1 good image" if count == 1 else f"{count} good images"
    promise = f"a false-alarm rate of {expected:.3g} only, not {asked:.3g}"
    return f"{images} can promise {promise}: calibrate on at least {needed}"


def noise_doubt(detector: Judge, images: Array) -> str:
    """Return a sentence where the denoiser fails on good images [B, 3, H, W] in [-1, 1]; empty where it does not.

    No comparison of graphs shows a network that is misread: it still gives pictures. So what it makes of noised good
    images is compared with a Wiener filter for their mean spectrum, the best that is linear: trained networks err a
    sixth as much or less, misread ones three quarters as much or more (docs/use/running.md, "Is it the right
    denoiser?"). Of networks of simplex noise nothing was measured.
    """
    if detector.settings.sampler.noise != "gaussian":
        return ""
    step = signal_step(detector.schedule)
    error, linear = noise_error(detector.predicted_noise, images, step), linear_error(images, step.alpha_t)
    if error <= max(NEGLIGIBLE, LIMIT * linear):
        return ""
    return (
        f"the denoiser does not know these parts: the noise it sees in them is off by {error:.2g} (mean square), where "
        f"a linear filter is by {linear:.2g} and a trained denoiser by less than half of that; the export may have "
        "assumed wrong --norm-groups, --prediction or --schedule, or it was trained too little or on other parts"
    )


def noise_error(predicted: Callable[[Array, Step], Array], images: Array, step: Step) -> float:
    """Return the mean squared error of the `predicted` noise; predicting none gives 1."""
    rng, errors = np.random.default_rng(0), []
    for image in images:
        noise = rng.standard_normal((1, *image.shape), dtype=np.float32)
        noised = np.float32(step.alpha_t**0.5) * image + np.float32((1 - step.alpha_t) ** 0.5) * noise
        errors.append(np.square(predicted(noised, step) - noise).mean())
    return float(np.mean(errors))


def linear_error(images: Array, alpha: float) -> float:
    """Return that of the Wiener filter for the images' mean spectrum, taken to be equal in all directions."""
    height, width = images.shape[2:]
    spectrum = np.fft.fft2(images - images.mean(axis=(2, 3), keepdims=True))
    power = (np.abs(spectrum) ** 2).mean(axis=(0, 1)) / (height * width)
    rows, columns = np.meshgrid(np.fft.fftfreq(height), np.fft.fftfreq(width), indexing="ij")
    ring = np.rint(np.hypot(rows, columns) * min(height, width)).astype(int)
    power = (np.bincount(ring.ravel(), power.ravel()) / np.maximum(np.bincount(ring.ravel()), 1))[ring]
    return float((alpha * power / (alpha * power + 1 - alpha)).mean())


def signal_step(schedule: NoiseSchedule) -> Step:
    """Return the step at which a denoiser's error is compared with the filter's."""
    alphas = schedule.alphas_cumprod
    nearest = int(np.abs(alphas - SIGNAL).argmin())
    return Step(float(nearest), float(alphas[nearest]), float(alphas[nearest]), 0.0)
