"""Rows of a benchmark, one a competitor, and their table, plots and JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mdps.benchmarks.bench.rounds import Measurement
from mdps.benchmarks.kit import Fields, figure_png, number, table, write_report
from mdps.runtime.atomic import write_bytes, write_text
from mdps.runtime.manifest import Manifest
from mdps.runtime.schedule import plan_steps

SCORE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Cost:
    """The work of sampling one posterior sample: calls of a step graph and useful FLOPs, None where not counted.

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
class Row(Fields):
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


@dataclass(frozen=True)
class Yardstick:
    """The scale that rows are put on: the baseline's ms an image and score, the matrix rate in GFLOP/s, the cost."""

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


@dataclass(frozen=True)
class Bench:
    """Rows, and the machine and bundle they were measured with."""

    rows: list[Row]
    machine: dict[str, Any]


def matrix_rate(one: Measurement) -> float | None:
    """GFLOP/s of the median matrix product."""
    return None if one.skipped or not one.ms else float(one.facts["matrix_flop"]) / median(one.ms) / 1e6


def baseline(measurements: Sequence[Measurement]) -> Measurement | None:
    """The first of our engines that ran: what a user gets who chooses nothing."""
    return next((one for one in measurements if one.spec.kind == "ours" and one.ms), None)


AXES: dict[str, Callable[[Row], int]] = {
    "images at once": lambda row: row.batch,
    "posterior samples N_s": lambda row: row.samples,
    "pixels of the image": lambda row: row.image_size[0] * row.image_size[1] if row.image_size else 0,
}


def plot_scaling(rows: Sequence[Row]) -> bytes:
    """A PNG with a panel for each of the three that was varied: ms an image of each of our engines."""
    from matplotlib.figure import Figure

    found = {label: lines for label, value in AXES.items() if (lines := curves(rows, value))}
    figure = Figure(figsize=(4.2 * len(found), 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (label, lines) in zip(panels, found.items(), strict=True):
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-", label=name)
        axes.set_xlabel(label)
        axes.set_ylabel("ms an image, median")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure_png(figure)


def curves(rows: Sequence[Row], value: Callable[[Row], int]) -> dict[str, list[tuple[int, float]]]:
    """{competitor: [(value, ms an image)]} of the rows that differ from their competitor's first in `value` alone."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for first in (row for row in rows if row.ratio_to_single is None):
        varied = [row for row in rows if _of(first, row) and value(row) != value(first)]
        points = [(value(row), row.median_ms / row.batch) for row in (first, *varied) if row.median_ms is not None]
        if varied:
            lines[first.name] = sorted(points)
    return lines


def _of(first: Row, row: Row) -> bool:
    return row.ratio_to_single is not None and row.name.startswith(f"{first.name}, ")


Cell = Callable[[Row], str]


def write(bench: Bench, out: Path) -> None:
    """Write bench.md, bench.png, bench.json (the rows) and machine.json into the folder `out`.

    scaling.png as well where batches, N_s or sizes were measured.
    """
    write_report(out, "bench", [row.to_json() for row in bench.rows], markdown(bench), plot(bench))
    write_text(out / "machine.json", json.dumps(bench.machine, indent=1) + "\n")
    if any(row.ratio_to_single is not None for row in bench.rows):
        write_bytes(out / "scaling.png", plot_scaling(bench.rows))


def markdown(bench: Bench) -> str:
    """The machine in a few lines, the competitors at one image, the sweep, and who was skipped."""
    ran = [row for row in bench.rows if row.median_ms is not None]
    swept = [row for row in ran if row.ratio_to_single is not None]
    parts = [_heading(bench.machine), _table([row for row in ran if row.ratio_to_single is None], COLUMNS)]
    if swept:
        parts.append(_table(swept, SWEEP_COLUMNS))
    parts += [f"Skipped {row.name}: {row.skipped}" for row in bench.rows if row.skipped]
    return "\n\n".join(parts) + "\n"


def _heading(machine: dict[str, Any]) -> str:
    height, width = machine["image_size"]
    rate, flop = machine["matrix_gflops_per_s"], machine["image_gflop"]
    lines = [
        f"{machine['bundle']} ({machine['bundle_sha256'][:12]}), {height} x {width}, {machine['steps']} steps an image",
        f"{machine['cpu']}, {machine['threads']} threads, device {machine['device']}, load {machine['load_average']}",
        f"medians of {machine['rounds']} interleaved rounds; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        f"fp32 matrix product {number(rate) or 'not measured'} GFLOP/s; "
        f"the denoiser's work {number(flop) or 'not counted'} GFLOP an image and sample",
    ]
    return "  \n".join(lines)


def _table(rows: Sequence[Row], columns: dict[str, Cell]) -> str:
    return table(list(columns), [[cell(row) for cell in columns.values()] for row in rows], left=(0, -1))


def percent(value: float | None) -> str:
    """Whole percent; nothing for None."""
    return "" if value is None else f"{value:.0%}"


def _agreement(row: Row) -> str:
    if row.score_difference is None:
        return row.note
    verdict = "same score" if row.score_agrees else "ANOTHER SCORE"
    return f"{verdict} (off by {row.score_difference:.1g}); {row.note}"


COLUMNS: dict[str, Cell] = {
    "one image": lambda row: row.name,
    "median ms": lambda row: number(row.median_ms),
    "p95 ms": lambda row: number(row.p95_ms),
    "times ours": lambda row: f"{row.ratio_to_ours:.2f}" if row.ratio_to_ours else "",
    "peak MB": lambda row: number(row.peak_mb),
    "of it to load": lambda row: number(row.loaded_mb),
    "cold start ms": lambda row: number(row.cold_ms),
    "step ms": lambda row: number(row.step_ms),
    "outside steps ms": lambda row: number(row.outside_ms),
    "GFLOP/s": lambda row: number(row.gflops_per_s),
    "of matrix rate": lambda row: percent(row.share_of_matrix_rate),
    "what": _agreement,
}
SWEEP_COLUMNS: dict[str, Cell] = {
    "batches, N_s, sizes": lambda row: row.name,
    "median ms": lambda row: number(row.median_ms),
    "p95 ms": lambda row: number(row.p95_ms),
    "images/s": lambda row: number(row.images_per_second),
    "an image, times a single one": lambda row: f"{row.ratio_to_single:.2f}",
    "peak MB": lambda row: number(row.peak_mb),
    "what": lambda row: row.note,
}


def plot(bench: Bench) -> bytes:
    """A PNG: a bar a competitor, median ms an image with p95, and peak memory."""
    from matplotlib.figure import Figure

    rows = [row for row in reversed(bench.rows) if row.median_ms is not None and row.ratio_to_single is None]
    names = [row.name for row in rows]
    figure = Figure(figsize=(11, 1.4 + 0.42 * len(rows)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True)
    medians = [row.median_ms or 0.0 for row in rows]
    above = [max(0.0, (row.p95_ms or 0.0) - (row.median_ms or 0.0)) for row in rows]
    colours = ["tab:blue" if row.name.startswith("mdps") else "tab:gray" for row in rows]
    bars = times.barh(names, medians, xerr=[[0.0] * len(rows), above], color=colours)
    times.bar_label(bars, [number(value) for value in medians], padding=3)
    times.margins(x=0.15)
    times.set_xlabel("ms an image, median and p95")
    memory.barh(names, [row.peak_mb or 0.0 for row in rows], color=colours)
    memory.set_xlabel("peak memory of its process, MB")
    figure.suptitle(
        f"{bench.machine['bundle']}, {bench.machine['cpu']}, {bench.machine['threads']} threads", fontsize=9
    )
    return figure_png(figure)
