"""Terms that are tried, each with its raw maps, and candidates: sums of terms on one scale."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from mdps.runtime.settings import PassSettings, SamplerSettings
from mdps.runtime.tuning import Kind, Source, StatisticKind, Term
from mdps.tuning.statistics import Statistic, View
from mdps.tuning.value import KindValue, Truth, worst_aware

LOW, HIGH = 0.5, 0.995  # quantiles of the maps of held-out good images that become 0 and 1
HALVED = 192  # side of photographs from which on they are also seen at half of it
TOP = 1  # pixels that the score counts
BLURS = (0.0, 1.0, 2.0, 6.0)
KINDS: tuple[StatisticKind, ...] = ("shared", "position", "bank")  # the quickest first
WEIGHTS = ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0))

Array = NDArray[np.float32]


def views(side: int) -> list[View]:
    """Return the views of photographs kept at `side`, the quickest first."""
    sizes = (side // 2, side) if side >= HALVED else (side,)
    return [View(size, stages, size // 8) for size in sizes for stages in ((1, 2, 3), (1, 2), (2, 3))]


def samplers(published: SamplerSettings, levels: int) -> dict[str, SamplerSettings]:
    """Return the samplers of few calls on a schedule of `levels`, the quickest first.

    Their rules are those of the bundle's graphs. Guided are those whose gradient is "ddad": DiffusionAD's second call,
    and DDAD from T = 250 with the w of `export.methods`.
    """
    base = replace(
        published, time_index="paper", eta_ddim=1.0, masked_pass=None, samples=1, early_exit=0.0, antithetic=False,
        first_pass=PassSettings(1, 0.0, steps=1),
    )  # fmt: skip
    one = {level: PassSettings(level, 0.0, steps=1) for level in (20, 50, 100, 200, 250)}
    second = PassSettings(100, 1.0, steps=1, target="previous")
    found = {f"one call, T = {level}": replace(base, first_pass=one[level]) for level in (20, 50, 100, 200)}
    found["noise pair, T = 200"] = replace(base, first_pass=one[200], samples=2, antithetic=True)
    found["DiffusionAD"] = replace(base, first_pass=one[250], masked_pass=second, gradient="ddad")
    for calls in (3, 5, 10):
        guided = PassSettings(250, 4.0, skip=-(-250 // calls))
        found[f"DDAD, {calls} calls"] = replace(base, time_index="reference", first_pass=guided, gradient="ddad")
    return {name: one for name, one in found.items() if all(level.noise_level < levels for level in one.passes)}


def guided(sampler: SamplerSettings) -> bool:
    """Whether a sampler runs the graph of DDAD's guided step."""
    return any(one.guidance_scale for one in sampler.passes)


@dataclass(frozen=True, eq=False)
class Raw:
    """One term that was tried: raw maps [n, h, w] of held-out good images, those for the scale first, and of defects.

    `sources` are the parts that it needs to be computed, each with its time in ms; its own is among them. `statistic`
    is None where it is the map or the pixels of the reconstruction by `sampler`, "" for a term of the photograph.
    """

    name: str
    kind: Kind
    of: Source
    blur: float
    sources: dict[str, float]
    good: Array
    bad: Array
    statistic: Statistic | None = None
    sampler: str = ""

    def scale(self, count: int) -> tuple[float, float]:
        """Return the raw values that become 0 and 1, by the first `count` good images."""
        return scale_of(self.good[:count])

    @property
    def view(self) -> View | None:
        """Of the photograph, where it is of one."""
        return self.statistic.view if self.statistic and self.of == "photograph" else None

    @property
    def at_any_size(self) -> tuple[object, ...]:
        """All that the term is but for the size at which it sees the photograph."""
        return (self.kind, self.of, self.blur, self.sampler, self.view and self.view.stages)


def scale_of(maps: Array) -> tuple[float, float]:
    """Return the quantiles of raw maps that become 0 and 1; the same number twice where all are one value."""
    low, high = np.quantile(maps, (LOW, HIGH))
    return float(low), float(high)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A weighted sum of terms."""

    raws: tuple[Raw, ...]
    weights: tuple[float, ...] = (1.0,)

    @cached_property
    def ms(self) -> float:
        """Milliseconds an image: a part that two terms need counts once."""
        parts: dict[str, float] = {}
        for raw in self.raws:
            parts |= raw.sources
        return sum(parts.values())

    @property
    def sampler(self) -> str:
        """The name of the one that reconstructs, "" where none does."""
        return next((raw.sampler for raw in self.raws if raw.sampler), "")

    @property
    def sizes(self) -> set[int]:
        """At which its terms see the photograph."""
        return {raw.view.size for raw in self.raws if raw.view}

    @property
    def at_any_size(self) -> set[tuple[object, ...]]:
        """Its terms and weights, whatever the size at which they see the photograph."""
        return {(raw.at_any_size, weight) for raw, weight in self._weighted}

    @property
    def name(self) -> str:
        named = [raw.name if weight == 1 else f"{weight:g} x {raw.name}" for raw, weight in self._weighted]
        return " + ".join(named)

    @property
    def _weighted(self) -> list[tuple[Raw, float]]:
        return list(zip(self.raws, self.weights, strict=True))

    def terms(self, scales: Sequence[tuple[float, float]]) -> tuple[Term, ...]:
        """Return the terms of a tuning, on these scales."""
        return tuple(
            Term(f"term_{index}", raw.kind, raw.of, low, high, weight)
            for index, ((raw, weight), (low, high)) in enumerate(zip(self._weighted, scales, strict=True), 1)
        )

    def fused(self, count: int, size: tuple[int, int]) -> tuple[Array, Array]:
        """Return the fused maps of good images and of defects, [n, H, W] and [m, H, W]; scale as in `Raw.scale`."""
        good, bad = (
            sum(_on_scale(maps, *raw.scale(count), weight, size) for raw, weight, maps in self._maps(which))
            for which in ("good", "bad")
        )
        return np.asarray(good), np.asarray(bad)

    def _maps(self, which: Literal["good", "bad"]) -> list[tuple[Raw, float, Array]]:
        return [(raw, weight, getattr(raw, which)) for raw, weight in self._weighted]


def _on_scale(maps: Array, low: float, high: float, weight: float, size: tuple[int, int]) -> Array:
    scaled = torch.from_numpy((maps.astype(np.float32) - low) * (weight / (high - low)))[:, None]
    found: Array = F.interpolate(scaled, size, mode="bilinear", align_corners=False)[:, 0].numpy()
    return found


@dataclass(frozen=True, eq=False)
class Tried:
    """A candidate and what it is worth."""

    candidate: Candidate
    kinds: dict[str, KindValue]

    @cached_property
    def value(self) -> float:
        return worst_aware(self.kinds)

    @property
    def ms(self) -> float:
        return self.candidate.ms

    @classmethod
    def of(cls, candidate: Candidate, truth: Truth, count: int) -> "Tried":
        """Value a candidate on the images of the search; `count` as in `Raw.scale`."""
        size: tuple[int, int] = truth.masks.shape[1:]
        return cls(candidate, truth.values(*candidate.fused(count, size), TOP))
