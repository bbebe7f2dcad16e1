"""From measurements to rows: one competitor each, every number that a table, a plot or a program wants."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from mdps.benchmarks.bench.rounds import Measurement
from mdps.runtime.manifest import Manifest
from mdps.runtime.schedule import plan_steps

SCORE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Cost:
    """What the sampling of one posterior sample asks: calls of a step graph and useful FLOPs, None where not counted.

    A vector-Jacobian product counts as the same convolutions again; a second forward, as the authors' code makes, is
    not useful and not counted.
    """

    steps: int
    flop: int | None

    @classmethod
    def of(cls, manifest: Manifest, forward_flop: int | None) -> "Cost":
        """Of all passes of a bundle."""
        sampler = manifest.settings.sampler
        forwards = steps = 0
        for one in sampler.passes:
            count = len(plan_steps(manifest.schedule, sampler.time_index, one, sampler.eta_ddim)[1])
            backward = bool(one.guidance_scale) and sampler.gradient == "exact"
            steps, forwards = steps + count, forwards + count * (2 if backward else 1)
        return cls(steps, None if forward_flop is None else forwards * forward_flop)


@dataclass(frozen=True)
class Row:
    """One competitor. Times in ms for the whole batch; None where there is no such number, or it was `skipped`.

    `image_size` (H, W) is what its network sees.

    `ratio_to_ours` compares the time an image takes with that of the default engine (above 1 is slower);
    `ratio_to_single` that of a batch, of several samples or of another image size with one image and one sample of the
    same competitor.
    `loaded_mb` is the peak of memory before the first image. `cold_ms` is loading and the first image; `step_ms` one
    step of sampling, `outside_ms` all but the steps, both a batch. `gflops_per_s` counts useful FLOPs in the steps,
    `share_of_matrix_rate` divides by the machine's fp32 rate.
    """

    name: str
    median_ms: float | None = None
    p95_ms: float | None = None
    peak_mb: float | None = None
    loaded_mb: float | None = None
    ratio_to_ours: float | None = None
    ratio_to_single: float | None = None
    runs: int = 0
    batch: int = 1
    samples: int = 1
    image_size: tuple[int, int] | None = None
    images_per_second: float | None = None
    cold_ms: float | None = None
    load_ms: float | None = None
    first_ms: float | None = None
    step_ms: float | None = None
    outside_ms: float | None = None
    gflops_per_s: float | None = None
    share_of_matrix_rate: float | None = None
    score: float | None = None
    score_difference: float | None = None
    score_agrees: bool | None = None
    threads: int = 1
    device: str = "cpu"
    note: str = ""
    skipped: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Yardstick:
    """What rows are compared with: the baseline's ms an image and score, the matrix rate in GFLOP/s, the cost."""

    cost: Cost
    samples: int
    image_ms: float | None = None
    score: float | None = None
    matrix_rate: float | None = None
    image_size: tuple[int, int] | None = None

    def of(self, manifest: Manifest, forward_flop: int | None) -> "Yardstick":
        """The same for another bundle, whose score is another."""
        cost, sampler = Cost.of(manifest, forward_flop), manifest.settings.sampler
        size = manifest.preprocessing.network_size
        return replace(self, cost=cost, samples=sampler.samples, score=None, image_size=size)

    def row(self, one: Measurement, single: "Measurement | None" = None) -> Row:
        """The row of a measurement; `single` is the same competitor at one image and one sample, in the same rounds."""
        spec = one.spec
        samples = spec.samples or self.samples
        same: dict[str, Any] = {"name": spec.name, "batch": spec.batch, "samples": samples, "threads": spec.threads}
        same["image_size"] = self.image_size
        if one.skipped or not one.ms:
            return Row(**same, device=spec.device, skipped=one.skipped or "no run ended")
        middle, image_ms = median(one.ms), median(one.ms) / spec.batch
        difference = self._score_difference(one, samples)
        return Row(
            **same,
            device=spec.device,
            median_ms=middle,
            p95_ms=float(np.percentile(one.ms, 95)),
            peak_mb=one.peak_mb,
            loaded_mb=one.facts.get("loaded_mb"),
            ratio_to_ours=image_ms / self.image_ms if self.image_ms else None,
            ratio_to_single=image_ms / median(single.ms) if single is not None and single.ms else None,
            runs=len(one.ms),
            images_per_second=1000 / image_ms,
            score=one.facts.get("score"),
            score_difference=difference,
            score_agrees=None if difference is None else difference <= SCORE_TOLERANCE,
            note=one.facts.get("note", ""),
            **_cold(one),
            **self._steps(one, samples),
        )

    def _score_difference(self, one: Measurement, samples: int) -> float | None:
        score: float | None = one.facts.get("score")
        if score is None or self.score is None or samples != self.samples:
            return None
        return abs(score - self.score) / max(abs(self.score), 1e-12)

    def _steps(self, one: Measurement, samples: int) -> dict[str, Any]:
        if not one.passes_ms:
            return {}
        passes_ms = median(one.passes_ms)
        found: dict[str, Any] = {
            "step_ms": passes_ms / self.cost.steps,
            "outside_ms": median(all_ms - steps for all_ms, steps in zip(one.ms, one.passes_ms, strict=True)),
        }
        if self.cost.flop is not None:
            rate = self.cost.flop * one.spec.batch * samples / passes_ms / 1e6
            share = rate / self.matrix_rate if self.matrix_rate else None
            found |= {"gflops_per_s": rate, "share_of_matrix_rate": share}
        return found


def _cold(one: Measurement) -> dict[str, Any]:
    """Loading a peer is building and fitting it with random weights: no cold start."""
    if one.spec.kind == "peer":
        return {}
    load_ms, first_ms = one.facts["load_ms"], one.facts["first_ms"]
    return {"cold_ms": load_ms + first_ms, "load_ms": load_ms, "first_ms": first_ms}


def matrix_rate(one: Measurement) -> float | None:
    """GFLOP/s of the median matrix product."""
    return None if one.skipped or not one.ms else float(one.facts["matrix_flop"]) / median(one.ms) / 1e6


def baseline(measurements: Sequence[Measurement]) -> Measurement | None:
    """The first of our engines that ran: what a user gets who chooses nothing."""
    return next((one for one in measurements if one.spec.kind == "ours" and one.ms), None)
