"""A table, a plot and JSON of a benchmark."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mdps.benchmarks.bench import scaling
from mdps.benchmarks.bench.rows import Row
from mdps.benchmarks.bench.run import Bench
from mdps.runtime.atomic import write_bytes, write_text

Cell = Callable[[Row], str]


def write_report(bench: Bench, out: Path) -> None:
    """bench.md, bench.png, bench.json (the rows) and machine.json in the folder `out`, each whole or not at all.

    scaling.png as well where batches, N_s or sizes were measured.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "bench.json", json.dumps([row.to_json() for row in bench.rows], indent=1) + "\n")
    write_text(out / "machine.json", json.dumps(bench.machine, indent=1) + "\n")
    write_text(out / "bench.md", markdown(bench))
    write_bytes(out / "bench.png", plot(bench))
    if any(row.ratio_to_single is not None for row in bench.rows):
        write_bytes(out / "scaling.png", scaling.plot(bench.rows))


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
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 2), "---"]]
    lines += [[cell(row).replace("|", "/") for cell in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Three digits, or all before the point; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
