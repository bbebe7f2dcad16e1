"""The study as a table, a plot and JSON."""

import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdps.benchmarks.bootstrap import Interval
from mdps.benchmarks.options import PRECISIONS
from mdps.benchmarks.trade.choices import GRADIENTS
from mdps.benchmarks.trade.exits import Exits
from mdps.benchmarks.trade.rows import Pair, Row
from mdps.benchmarks.trade.study import Trade
from mdps.runtime.atomic import write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(GRADIENTS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
PRECISION_MARKS = dict(zip(PRECISIONS, "sDP", strict=True))
AUROCS = {"image_auroc": "image AUROC %", "pixel_auroc": "pixel AUROC %"}
EXPLAINED = (
    "Milliseconds are of one image that lies in memory, medians of {rounds} interleaved rounds with one image each. "
    "AUROCs are in per cent with 95 % bootstrap intervals over the images. Agreement is Pearson's (Spearman's) "
    "correlation of an image's map with that of the first row, pixel by pixel, the mean over the images. "
    "The time of an early exit is what a good part takes on average, from the times of one pass and of both."
)


def write_report(found: Trade, out: Path) -> None:
    """trade.json, trade.md and trade.png in the folder `out`, each whole or not at all."""
    write_text(out / "trade.json", json.dumps(found.to_json(), indent=1) + "\n")
    write_text(out / "trade.md", markdown(found))
    write_bytes(out / "trade.png", plot(found))


def markdown(found: Trade) -> str:
    """The rows, the pairs, and what a reader must know."""
    machine, command = found.machine, found.settings.get("command")
    heading = [
        f"# What a millisecond buys: {found.category}, {found.rows[0].images} images",
        *([f"`{command}`"] if command else []),
        f"{machine['cpu']}, {machine['threads'] or machine['cpus']} threads, {machine['engine']}, "
        f"load {machine['load_average']}; checkpoint {machine['checkpoint_sha256'][:12]}",
        EXPLAINED.format(rounds=found.settings["rounds"]),
    ]
    problems = dict.fromkeys(f"- {problem}" for row in found.rows for problem in row.problems)
    ending = ["\n".join(problems)] if problems else []
    tables = [_table(_rows(found.rows)), "## Differences on the same images", _table(_pairs(found.pairs))]
    return "\n\n".join([*heading, *tables, *found.notes, *ending]) + "\n"


def _rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    yield ["way", "ms an image", "of the first", "image AUROC", "pixel AUROC", "agreement"]
    for row in rows:
        agreed = "" if row.agreement is None else f"{row.agreement.pearson:.3f} ({row.agreement.spearman:.3f})"
        ratio = "" if row.ratio_to_reference is None else f"{row.ratio_to_reference:.2f}"
        ms = "not timed" if row.median_ms is None else f"{row.median_ms:,.0f}"
        label = row.label if row.exits is None else f"{row.label} ({_left(row.exits)} exit)"
        yield [label, ms, ratio, *(_auroc(row, name) for name in AUROCS), agreed]


def _left(exits: Exits) -> str:
    shares = {"good": exits.good, "defective": exits.defective}
    return ", ".join(f"{share:.0%} of the {kind}" for kind, share in shares.items() if share is not None)


def _auroc(row: Row, name: str) -> str:
    if name not in row.metrics:
        return "undefined"
    low, high = row.intervals[name]
    return f"{100 * row.metrics[name]:.2f} ({100 * low:.2f} to {100 * high:.2f})"


def _pairs(pairs: Sequence[Pair]) -> Iterator[list[str]]:
    yield ["alike, or left out", "way", "against", "time", "image AUROC, points", "pixel AUROC, points"]
    for pair in pairs:
        time = "" if pair.time is None else f"{pair.time:.2f}"
        yield [pair.kind, pair.one, pair.other, time, *(_points(pair.found.get(name)) for name in AUROCS)]


def _points(interval: Interval | None) -> str:
    if interval is None:
        return "undefined"
    return f"{100 * interval.value:+.2f} ({100 * interval.low:+.2f} to {100 * interval.high:+.2f})"


def _table(lines: Iterator[list[str]]) -> str:
    head, *others = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *others))


def plot(found: Trade) -> bytes:
    """A PNG: image AUROC, pixel AUROC and agreement over the milliseconds of an image; a line a gradient."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, name in zip(panels, [*AUROCS, "agreement"], strict=True):
        for gradient in GRADIENTS:
            for passes in (2, 1):
                _line(axes, found.rows, name, gradient, passes)
        for row in found.rows:
            if mark := "^" if row.exits else PRECISION_MARKS.get(row.precision):
                axes.plot([row.median_ms], [_value(row, name)], mark, color="black", mfc="none", label=row.label)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
        axes.xaxis.set_minor_formatter(lambda ms, _: f"{ms:g}" if f"{ms:e}"[0] in "25" else "")
        axes.set_xlabel("ms an image, median")
        axes.set_ylabel(AUROCS.get(name, "correlation with the first row's maps"))
        axes.grid(alpha=0.3, which="both")
    _another_seed(panels[2], found.rows)
    handles, labels = panels[2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle(f"What a millisecond buys: {found.category}, {found.machine['cpu']}", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _line(axes: "Axes", rows: Sequence[Row], name: str, gradient: str, passes: int) -> None:
    shown = [row for row in rows if (row.gradient, row.passes, row.precision) == (gradient, passes, "fp32")]
    shown = [row for row in shown if row.exits is None]
    shown = sorted((row for row in shown if row.median_ms is not None), key=lambda row: row.steps)
    drawn: dict[str, Any] = {"label": f"{gradient}, {'both passes' if passes == 2 else 'no mask pass'}"}
    drawn |= {"color": COLOURS[gradient], "marker": "o", "mfc": None if passes == 2 else "none"}
    times, values = [row.median_ms or 0.0 for row in shown], [_value(row, name) for row in shown]
    style = "-" if passes == 2 else "--"
    axes.errorbar(times, values, yerr=_spread(shown, name), linestyle=style, capsize=2, **drawn)
    if passes == 2 and name != "agreement":
        for row, place in zip(shown, zip(times, values, strict=True), strict=True):
            axes.annotate(f"{row.steps}", place, fontsize=7, xytext=(3, 3), textcoords="offset points")


def _another_seed(axes: "Axes", rows: Sequence[Row]) -> None:
    """How far the reference agrees with itself under other noise: more than that nothing can mean."""
    for row in rows:
        if row.median_ms is None and row.agreement is not None:
            axes.axhline(row.agreement.pearson, color="grey", linestyle=":", label=row.label)


def _value(row: Row, name: str) -> float:
    if name == "agreement":
        return math.nan if row.agreement is None else row.agreement.pearson
    return 100 * row.metrics.get(name, math.nan)


def _spread(rows: Sequence[Row], name: str) -> list[list[float]] | None:
    """Lengths below and above the values, [2, n]."""
    if name == "agreement":
        return None
    ends = [(row.metrics.get(name, math.nan), row.intervals.get(name, (math.nan, math.nan))) for row in rows]
    return [[100 * (value - low) for value, (low, _) in ends], [100 * (high - value) for value, (_, high) in ends]]
