"""The search: what is tried in which order, within the time there is, and which candidate is chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mdps.models.backbones import Backbone
from mdps.runtime.settings import SamplerSettings
from mdps.runtime.tuning import StatisticKind
from mdps.tuning.candidates import BLURS, KINDS, WEIGHTS, Candidate, Raw, Tried
from mdps.tuning.compiled import Machine, Results
from mdps.tuning.photographs import Seen, unit
from mdps.tuning.reconstruct import DDAD, Reconstruction, Reconstructor
from mdps.tuning.statistics import (
    Blur,
    Distance,
    PhotographFeatures,
    Pixels,
    Statistic,
    View,
    fit,
    fit_pixels,
    residual_features,
)
from mdps.tuning.value import Truth
from mdps.tuning.work import Arrays, Work

MINUTES = 15.0
BEST_SAMPLERS = 2  # of which the residual's features are tried
HEDGE = 0.02
"""Of value: how much the same terms at both sizes of the photograph may be worse on synthetic defects.

How large these are is made up, and small ones call for one size only. docs/measure/tuning.md says what it gains.
"""
BEST_TERMS = 3  # of the photograph, and of a reconstruction, that are summed
RECONSTRUCTED = 60  # good images to fit the statistics of a reconstruction to

Array = NDArray[np.float32]
Progress = Callable[[str, float], object]
"""Is told what is begun, and which share of all steps lies behind."""


@dataclass(frozen=True)
class Images:
    """The pictures of a search: what is fitted to, what is held out (`count` for the scale first), and defects."""

    fit: Seen
    held: Seen
    bad: Seen
    count: int
    truth: Truth


@dataclass
class Search:
    """Tries terms and candidates one after another; what no time was left for is named in `left_out`."""

    images: Images
    backbone: Callable[[tuple[int, ...]], Backbone]
    reconstructor: Reconstructor | None
    work: Work
    machine: Machine = field(default_factory=Machine)
    minutes: float = MINUTES
    progress: Progress = lambda *_: None
    kinds: tuple[StatisticKind, ...] = KINDS
    tried: list[Tried] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _steps: int = 1
    _begun: int = 0

    def run(self, views: Sequence[View]) -> None:
        """Try everything, what is cheap first."""
        samplers = self.reconstructor.samplers if self.reconstructor else {}
        self._steps = len(views) + len(samplers) + BEST_SAMPLERS
        for view in views:
            self._within(f"statistics of the photograph at {_named(view)}", partial(self._photographs, view))
        for name, sampler in samplers.items():
            self._within(name, partial(self._reconstruction, name, sampler))
        for name in self._best_samplers():
            self._within(f"features of the residual, {name}", partial(self._residual, name))
        self._sums()
        if "position" not in self.kinds:
            self.left_out.append("position (in tiles there is no Gaussian of each place of a whole photograph)")
        for name in self.reconstructor.lacking if self.reconstructor else ():
            self.left_out.append(f"{name} (the bundle has no graph {DDAD}: export it again)")

    def _within(self, name: str, do: Callable[[], None]) -> None:
        if self.work.seconds >= 60 * self.minutes:
            self.left_out.append(name)
            return
        self.progress(name, self._begun / self._steps)
        self._begun += 1
        do()

    def _add(self, *raws: Raw, weights: tuple[float, ...] = ()) -> None:
        scales = [raw.scale(self.images.count) for raw in raws]
        if all(low < high for low, high in scales):
            self.tried.append(
                Tried.of(Candidate(raws, weights or (1.0,) * len(raws)), self.images.truth, self.images.count)
            )

    # Statistics of the photograph

    def _photographs(self, view: View) -> None:
        made = self.work.keep(f"photograph {view}", lambda: self._of_photographs(view))
        source = {f"features of the photograph at {_named(view)}": float(made["ms"])}
        for kind in self.kinds:
            name = f"{kind}, {_named(view)}"
            self._blurred(made, Statistic(kind, "photograph", view, 0.0), name, source)

    def _of_photographs(self, view: View) -> Arrays:
        module = PhotographFeatures(self.backbone(view.stages), view.stages, view.size)
        made = self.machine.run(module, *([unit(seen.photographs)] for seen in self._seen()))
        return self._distances(made.sets, "photograph", view) | {"ms": np.asarray(made.ms)}

    def _seen(self) -> tuple[Seen, Seen, Seen]:
        return self.images.fit, self.images.held, self.images.bad

    def _distances(self, features: Sequence[Sequence[Array]], of: Any, view: View) -> Arrays:
        """Return raw maps by every kind of statistic, given the features of what is fitted to, of good and of bad."""
        found: Arrays = {}
        for kind in self.kinds:
            module = fit(Statistic(kind, of, view, 0.0), [torch.from_numpy(stage) for stage in features[0]])
            found |= _maps(kind, self.machine.run(module, *features[1:]))
        return found

    def _blurred(self, made: Arrays, statistic: Statistic, name: str, sources: dict[str, float], **more: Any) -> None:
        kind = statistic.kind
        parts = sources | {name: float(made[f"{kind} ms"])}
        for blur in BLURS:
            good, bad = (_blur(made[f"{kind} {which}"], blur) for which in ("good", "bad"))
            called = f"{name}, blur {blur:g}" if blur else name
            chosen = replace(statistic, blur=blur)
            self._add(Raw(called, kind, statistic.of, blur, parts, good, bad, statistic=chosen, **more))

    # Reconstructions

    def _reconstruction(self, name: str, sampler: SamplerSettings) -> None:
        made = self.work.keep(name, lambda: self._of_reconstruction(sampler))
        score = {name: float(made["ms"]), f"the map, {name}": float(made["score ms"])}
        good, bad = made["map good"], made["map bad"]
        self._add(Raw(f"map, {name}", "map", "reconstruction", 0.0, score, good, bad, sampler=name))
        for blur in BLURS:
            called = f"pixels, {name}" + (f", blur {blur:g}" if blur else "")
            parts = self._needed(name) | {called: float(made[f"pixels {blur} ms"])}
            good, bad = made[f"pixels {blur} good"], made[f"pixels {blur} bad"]
            self._add(Raw(called, "pixels", "reconstruction", blur, parts, good, bad, sampler=name))

    def _of_reconstruction(self, sampler: SamplerSettings) -> Arrays:
        fitted, *others = self._reconstructed(sampler)
        found: Arrays = {"map good": others[0].maps, "map bad": others[1].maps}
        found |= {"ms": np.asarray(others[0].ms), "score ms": np.asarray(others[0].score_ms)}
        y, *observed = (seen.observations for seen in self._seen())
        for blur in BLURS:
            module = fit_pixels(torch.from_numpy(y[: len(fitted.samples)]), torch.from_numpy(fitted.samples), blur)
            inputs = [[images, one.samples] for images, one in zip(observed, others, strict=True)]
            found |= _maps(f"pixels {blur}", self.machine.run(module, *inputs))
        return found

    def _reconstructed(self, sampler: SamplerSettings) -> list[Reconstruction]:
        assert self.reconstructor is not None
        fitted = self.images.fit.observations[:RECONSTRUCTED]
        return self.reconstructor.run(sampler, fitted, self.images.held.observations, self.images.bad.observations)

    def _best_samplers(self) -> list[str]:
        best: dict[str, float] = {}
        for one in self.tried:
            name = one.candidate.raws[0].sampler
            if name:
                best[name] = max(best.get(name, 0.0), one.value)
        return sorted(best, key=lambda name: -best[name])[:BEST_SAMPLERS]

    def _residual(self, name: str) -> None:
        assert self.reconstructor is not None
        view, sampler = self.reconstructor.view, self.reconstructor.samplers[name]
        made = self.work.keep(f"residual, {name}", lambda: self._of_residual(sampler, view))
        (source,) = [
            one.candidate.raws[0].sources for one in self.tried if one.candidate.raws[0].name == f"pixels, {name}"
        ]
        sources = {part: ms for part, ms in source.items() if not part.startswith("pixels")}
        sources |= {f"features of the residual, {name}": float(made["ms"])}
        for kind in self.kinds:
            statistic = Statistic(kind, "residual", view, 0.0)
            self._blurred(made, statistic, f"{kind} of the residual, {name}", sources, sampler=name)

    def _of_residual(self, sampler: SamplerSettings, view: View) -> Arrays:
        inputs = [
            [seen.observations[: len(one.samples)], one.samples]
            for seen, one in zip(self._seen(), self._reconstructed(sampler), strict=True)
        ]
        made = self.machine.run(residual_features(self.backbone(view.stages), view), *inputs)
        return self._distances(made.sets, "residual", view) | {"ms": np.asarray(made.ms)}

    def _needed(self, name: str) -> dict[str, float]:
        """Return the parts that samples by this sampler need: where it has a second pass, its mask's map too."""
        assert self.reconstructor is not None
        made = self.work.keep(name, dict)
        parts = {name: float(made["ms"])}
        if self.reconstructor.samplers[name].masked_pass:
            parts |= {f"the map, {name}": float(made["score ms"])}
        return parts

    def inputs(self, raw: Raw, seen: Seen) -> list[Tensor]:
        """Return what the module of a term takes of these images, or the map [n, 1, H, W] of a reconstruction."""
        if raw.view:
            module = PhotographFeatures(self.backbone(raw.view.stages), raw.view.stages, raw.view.size)
            return self._made(module, unit(seen.photographs))
        assert self.reconstructor is not None
        y = seen.observations
        (made,) = self.reconstructor.run(self.reconstructor.samplers[raw.sampler], y)
        if raw.kind == "map":
            return [torch.from_numpy(made.maps[:, None])]
        if raw.statistic is None:
            return [torch.from_numpy(y), torch.from_numpy(made.samples)]
        view = raw.statistic.view
        return self._made(residual_features(self.backbone(view.stages), view), y, made.samples)

    def _made(self, module: nn.Module, *inputs: Array) -> list[Tensor]:
        (made,) = self.machine.run(module, inputs).sets
        return [torch.from_numpy(stage) for stage in made]

    def fit(self, raw: Raw, inputs: Sequence[Tensor]) -> Distance | Pixels | None:
        """Return the module of a term, fitted to these inputs; None for the map of a reconstruction."""
        if raw.kind == "map":
            return None
        return fit(raw.statistic, inputs) if raw.statistic else fit_pixels(inputs[0], inputs[1], raw.blur)

    def sampler(self, candidate: Candidate) -> SamplerSettings | None:
        """Return the one that reconstructs for a candidate, None where none does."""
        name = candidate.sampler
        return self.reconstructor.samplers[name] if self.reconstructor and name else None

    # Sums

    def _sums(self) -> None:
        for raws in dict.fromkeys(self._at_both_sizes(one.candidate) for one in self.tried):
            if raws:
                self._add(*raws)
        ours = _unlike([one.candidate for one in self._ranked() if not one.candidate.sampler])
        theirs = _unlike([one.candidate for one in self._ranked() if one.candidate.sampler])
        for mine in ours:
            for other in theirs:
                for weight, of_other in WEIGHTS:
                    self._add(*mine.raws, *other.raws, weights=(*[weight] * len(mine.raws), of_other))
        for first, second in combinations(ours, 2):
            together = dict.fromkeys((*first.raws, *second.raws))
            if len({raw.view for raw in together}) < len(together):  # one run of the feature network serves both
                self._add(*together)

    def _at_both_sizes(self, candidate: Candidate) -> tuple[Raw, ...]:
        """Return its terms, all of the photograph, at every size at which they were tried; none where that is one."""
        terms = dict.fromkeys(raw for one in self.tried for raw in one.candidate.raws if raw.view)
        wanted = {raw.at_any_size for raw in candidate.raws}
        found = tuple(raw for raw in terms if raw.at_any_size in wanted)
        return found if len(found) > len(candidate.raws) else ()

    def _ranked(self) -> list[Tried]:
        return sorted(self.tried, key=lambda one: -one.value)


def choose(tried: Sequence[Tried], budget_ms: float) -> Tried | None:
    """Return the best of those within the budget, of equals the simplest, and where it costs little at both sizes.

    Equal to the best are those within one standard error of it (Breiman et al. 1984), taken over the kinds of defects;
    of these the one of fewest terms, then the best. Where it reconstructs nothing, which would see another size, the
    same terms at both sizes of the photograph take its place if their value is less by at most HEDGE. None where
    nothing fits.
    """
    eligible = [one for one in tried if one.ms <= budget_ms]
    if not eligible:
        return None
    best = max(eligible, key=lambda one: one.value)
    equal = [one for one in eligible if one.value == best.value or _equal(one, best)]
    chosen = min(equal, key=lambda one: (len(one.candidate.raws), -one.value, one.ms))
    return next((one for one in eligible if _hedges(one, chosen)), chosen)


def _hedges(one: Tried, chosen: Tried) -> bool:
    ours, theirs = one.candidate, chosen.candidate
    return (
        not theirs.sampler
        and len(ours.sizes) > len(theirs.sizes) > 0
        and ours.at_any_size == theirs.at_any_size
        and one.value >= chosen.value - HEDGE
    )


def _equal(one: Tried, best: Tried) -> bool:
    differences = np.array([best.kinds[kind].mean - one.kinds[kind].mean for kind in best.kinds])
    return len(differences) > 1 and bool(differences.mean() <= differences.std(ddof=1) / np.sqrt(len(differences)))


def _unlike(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first few of which no two differ by their blur alone."""
    first: dict[tuple[Any, ...], Candidate] = {}
    for one in candidates:
        first.setdefault(tuple((raw.kind, raw.view, raw.sampler, raw.of) for raw in one.raws), one)
    return list(first.values())[:BEST_TERMS]


def _named(view: View) -> str:
    return f"{view.size} pixels, stages {','.join(map(str, view.stages))}"


def _maps(name: str, made: Results) -> Arrays:
    """Return the raw maps of good images and of defects under this name, and their time."""
    (good,), (bad,) = made.sets
    return {f"{name} good": good[:, 0], f"{name} bad": bad[:, 0], f"{name} ms": np.asarray(made.ms)}


@torch.inference_mode()
def _blur(maps: Array, sigma: float) -> Array:
    found: Array = Blur(maps.shape[1:], sigma)(torch.from_numpy(maps)[:, None])[:, 0].numpy()
    return found
