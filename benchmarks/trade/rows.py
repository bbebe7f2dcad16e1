"""Numbers of the study: one row a way of spending time, and pairs of rows on the same images."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from mdps.benchmarks.bootstrap import Interval
from mdps.benchmarks.reproduce.outcomes import Outcome
from mdps.benchmarks.trade.agreement import Agreement
from mdps.benchmarks.trade.choices import EXACT, GRADIENTS, Choice
from mdps.benchmarks.trade.exits import Exits

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class Measured:
    """What was found of a choice; `ms` is empty where its time is that of another. `exits` only of an early exit."""

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
class Row:
    """`metrics`: image and pixel AUROC, `intervals` their 95 % bootstrap intervals, both without undefined ones.

    `agreement` is with the maps of the reference; `ratio_to_reference` compares median times, an image each. With an
    early exit the time is what a good part takes on average.
    """

    name: str
    label: str
    gradient: str
    steps: int
    passes: int
    precision: str
    images: int
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    agreement: Agreement | None
    exits: Exits | None
    median_ms: float | None
    p95_ms: float | None
    ratio_to_reference: float | None
    runs: int
    problems: tuple[str, ...]
    provenance: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


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
        differences = {
            name: {"difference": i.value, "low": i.low, "high": i.high} for name, i in self.found.items()
        }  # fmt: skip
        return {"kind": self.kind, "one": self.one, "other": self.other, "time": self.time, **differences}


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
