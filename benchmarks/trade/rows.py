"""The ways of spending time that are compared, a row for each, and pairs of rows on the same images."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.kit import Fields
from mdps.benchmarks.metrics.bootstrap import Interval
from mdps.benchmarks.options import PRECISIONS
from mdps.benchmarks.study import Changes, Variant
from mdps.benchmarks.study.outcomes import Outcome, ResultRow, differences_json
from mdps.runtime.calibration import exit_limit
from mdps.runtime.engines import ENGINES
from mdps.runtime.errors import UsageError
from mdps.runtime.manifest import Manifest

EXACT, FREE, DDAD = "exact", "jacobian-free", "ddad"
GRADIENTS = (EXACT, FREE, DDAD)
ENGINE_OF = {f"{row.arithmetic}-steps": row.name for row in ENGINES if row.arithmetic}
"""The engine that computes in a precision of PRECISIONS."""
OTHER_SEED = 1


@dataclass(frozen=True)
class Choice:
    """One way: a gradient, N steps a pass, one pass or two, and the precision ("" or one of PRECISIONS).

    `scale` is the gradient's guidance scale, None for the bundle's own; `seed` None for the bundle's own. `early_exit`
    is the share of `SamplerSettings`, 0 for none.
    """

    gradient: str
    steps: int
    mask_pass: bool = True
    precision: str = ""
    scale: float | None = None
    seed: int | None = None
    early_exit: float = 0.0

    @property
    def name(self) -> str:
        """For programs: such as "exact_10", "jacobian-free_5_one_pass"."""
        parts = [self.gradient, str(self.steps), "" if self.mask_pass else "one_pass", self.precision]
        parts += ["" if self.seed is None else f"seed_{self.seed}", f"exit_{self.early_exit:g}" * bool(self.early_exit)]
        return "_".join(part for part in parts if part)

    @property
    def label(self) -> str:
        """For people."""
        parts = [self.gradient, f"N = {self.steps}", "" if self.mask_pass else "no mask pass"]
        parts += [PRECISIONS.get(self.precision, ""), "" if self.seed is None else f"seed {self.seed}"]
        parts.append(f"early exit {self.early_exit:g}" * bool(self.early_exit))
        return ", ".join(part for part in parts if part)

    @property
    def engine(self) -> str | None:
        """The engine that computes it, None for the study's own."""
        return ENGINE_OF.get(self.precision)

    @property
    def variant(self) -> Variant:
        """The variant to run; with one pass, the first of a run of two."""
        export: dict[str, Any] = {"gradient": self.gradient}
        export |= {"calibrated": self.steps} if self.early_exit else {}
        if self.scale is not None:
            # The export tries its graphs out: at the scale of another gradient they would rightly be refused.
            export |= {"guidance_scale": self.scale, "masked_guidance_scale": self.scale}
        changes = Changes(self.scale, steps=self.steps, seed=self.seed, early_exit=self.early_exit or None)
        return Variant(self.name, self.label, changes, export, first_pass=not self.mask_pass)


def choices(
    steps: Sequence[int],
    equal_time: Mapping[str, Sequence[int]],
    scales: Mapping[str, float],
    precisions: Sequence[str],
    exits: Sequence[float] = (),
) -> tuple[Choice, ...]:
    """All of them, the reference first: exact with the most of `steps` and both passes.

    `equal_time`: the steps of each gradient that take as long as the exact gradient's. `scales`: guidance scales of
    gradients whose own the bundle's is not.
    """
    most = max(steps)
    found = [Choice(EXACT, most)]
    for gradient in GRADIENTS:
        for count in sorted({*steps, *equal_time.get(gradient, ())}, reverse=True):
            found += [Choice(gradient, count, both, scale=scales.get(gradient)) for both in (True, False)]
    found += [Choice(EXACT, most, precision=precision) for precision in precisions]
    found += [Choice(EXACT, most, early_exit=share) for share in exits]
    found.append(Choice(EXACT, most, seed=OTHER_SEED))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Agreement(Fields):
    """Means over the images of Pearson's and Spearman's correlation of two maps of an image, pixel by pixel.

    `lowest` is the smallest Pearson of an image. Images whose map is constant, or that were not judged, are left out.
    """

    pearson: float
    spearman: float
    lowest: float
    images: int


def agreement(maps: NDArray[np.float32], reference: NDArray[np.float32]) -> Agreement | None:
    """Of maps [n, h, w] of the same images in order, else UsageError; None where no image has two maps that vary."""
    if maps.shape != reference.shape:
        raise UsageError(f"only maps of the same images compare: {list(maps.shape)} against {list(reference.shape)}")
    from scipy.stats import pearsonr, spearmanr

    pearson, spearman = [], []
    for ours, theirs in zip(maps, reference, strict=True):
        one, other = ours.ravel().astype(np.float64), theirs.ravel().astype(np.float64)
        if not (np.isfinite(one).all() and np.isfinite(other).all()) or one.std() == 0 or other.std() == 0:
            continue
        pearson.append(float(pearsonr(one, other).statistic))
        spearman.append(float(spearmanr(one, other).statistic))
    if not pearson:
        return None
    return Agreement(float(np.mean(pearson)), float(np.mean(spearman)), min(pearson), len(pearson))


def load_maps(path: Path, name: str) -> NDArray[np.float32]:
    """The maps "last" or "first" [n, h, w] that a runner left; "last" where there was one pass only."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found: NDArray[np.float32] = file[name]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise UsageError(f"{path} is damaged ({error}): remove its folder, and it is computed again") from error
    return found


@dataclass(frozen=True)
class Exits:
    """Shares of the good and of the defective test images that skipped the masked pass; None where there are none."""

    good: float | None
    defective: float | None

    @classmethod
    def of(cls, first: Outcome, bundle: Path, share: float) -> "Exits":
        """From the scores of the first pass, and the calibration of a bundle with an early exit at that share."""
        limit = exit_limit(Manifest.read(bundle, verify=False).calibrations["default"], share, bundle.name)
        assert limit is not None
        labels, left = np.array(first.labels), np.array(first.scores) <= limit
        shares = [float(left[labels == kind].mean()) if (labels == kind).any() else None for kind in (False, True)]
        return cls(*shares)

    def ms(self, one_pass: Sequence[float], both: Sequence[float]) -> list[float]:
        """Expected ms of a good part, from the times of one pass and of both in the same rounds."""
        share = self.good or 0.0
        return [share * one + (1 - share) * two for one, two in zip(one_pass, both, strict=True)]


@dataclass(frozen=True)
class Measured:
    """Measurements of a choice; `ms` is empty where its time is that of another. `exits` only of an early exit."""

    choice: Choice
    outcome: Outcome
    agreement: Agreement | None
    ms: Sequence[float]
    exits: Exits | None = None

    @property
    def median_ms(self) -> float:
        """NaN where it was not timed."""
        return median(self.ms) if self.ms else math.nan


@dataclass(frozen=True)
class Row(ResultRow):
    """A way: `metrics` are image and pixel AUROC, without undefined ones.

    `agreement` is with the maps of the reference; `ratio_to_reference` compares median times, an image each. With an
    early exit the time is what a good part takes on average.
    """

    name: str
    label: str
    gradient: str
    steps: int
    passes: int
    precision: str
    agreement: Agreement | None
    exits: Exits | None
    median_ms: float | None
    p95_ms: float | None
    ratio_to_reference: float | None
    runs: int


def row_of(one: Measured, reference: Measured) -> Row:
    """The row of a choice."""
    choice, intervals = one.choice, one.outcome.intervals()
    return Row(
        name=choice.name,
        label=choice.label,
        gradient=choice.gradient,
        steps=choice.steps,
        passes=2 if choice.mask_pass else 1,
        precision=choice.precision or "fp32",
        images=one.outcome.images,
        metrics={name: one.outcome.metrics[name] for name in intervals},
        intervals=intervals,
        agreement=one.agreement,
        exits=one.exits,
        median_ms=one.median_ms if one.ms else None,
        p95_ms=float(np.percentile(one.ms, 95)) if one.ms else None,
        ratio_to_reference=one.median_ms / reference.median_ms if one.ms else None,
        runs=len(one.ms),
        problems=one.outcome.problems,
        provenance=one.outcome.provenance,
    )


@dataclass(frozen=True)
class Pair:
    """`one` minus `other` on the same images: {"image_auroc", "pixel_auroc"} with paired 95 % intervals.

    `kind` says what is alike: "equal steps", "equal time", or what `one` leaves out. `time` is its time as a share of
    the other's, None where it was not timed.
    """

    kind: str
    one: str
    other: str
    time: float | None
    found: dict[str, Interval]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        own = {"kind": self.kind, "one": self.one, "other": self.other, "time": self.time}
        return own | differences_json(self.found)


def pairs(found: Sequence[Measured]) -> Iterator[Pair]:
    """The comparisons that the study is made for; `found` has the reference first."""
    reference = found[0]
    usual = [one for one in found if not one.choice.precision and one.choice.seed is None and one.exits is None]
    both = [one for one in usual if one.choice.mask_pass]
    exact = [one for one in both if one.choice.gradient == EXACT]
    for gradient in GRADIENTS[1:]:
        cheap = [one for one in both if one.choice.gradient == gradient]
        for full in exact:
            yield from (_pair("equal steps", one, full) for one in cheap if one.choice.steps == full.choice.steps)
            yield _pair("equal time", min(cheap, key=lambda one: _apart(one, full)), full)
    yield from (_pair("fewer steps", one, reference) for one in exact[1:])
    for one in usual:
        if not one.choice.mask_pass:
            yield from (_pair("no mask pass", one, two) for two in both if _same_but_mask(one.choice, two.choice))
    yield from (_pair("less precision", one, reference) for one in found if one.choice.precision)
    yield from (_pair("early exit", one, reference) for one in found if one.exits is not None)
    yield from (_pair("another seed", one, reference) for one in found if one.choice.seed is not None)


def _apart(one: Measured, other: Measured) -> float:
    return abs(math.log(one.median_ms / other.median_ms))


def _same_but_mask(one: Choice, two: Choice) -> bool:
    return (one.gradient, one.steps) == (two.gradient, two.steps)


def _pair(kind: str, one: Measured, other: Measured) -> Pair:
    time = one.median_ms / other.median_ms if one.ms and other.ms else None
    return Pair(kind, one.choice.label, other.choice.label, time, one.outcome.minus(other.outcome))


@dataclass(frozen=True)
class Trade(Fields):
    """Rows and pairs of the study, the reference first."""

    category: str
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    machine: dict[str, Any]
    settings: dict[str, Any]
