"""The study as a table, a plot and JSON."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mdps.benchmarks.kit import figure_png, table
from mdps.benchmarks.study.outcomes import AUROCS, points, whiskers
from mdps.benchmarks.trade.rows import GRADIENTS, Exits, Pair, Row, Trade

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(GRADIENTS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
EXPLAINED = (
    "Milliseconds are of one image that lies in memory, medians of {rounds} interleaved rounds with one image each. "
    "AUROCs are in per cent with 95 % bootstrap intervals over the images. Agreement is Pearson's (Spearman's) "
    "correlation of an image's map with that of the first row, pixel by pixel, the mean over the images. "
    "The time of an early exit is what a good part takes on average, from the times of one pass and of both."
)


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
    tables = [_rows(found.rows), "## Differences on the same images", _pairs(found.pairs)]
    return "\n\n".join([*heading, *tables, *found.notes, *ending]) + "\n"


def _rows(rows: Sequence[Row]) -> str:
    head = ("way", "ms an image", "of the first", "image AUROC", "pixel AUROC", "agreement")
    lines = []
    for row in rows:
        agreed = "" if row.agreement is None else f"{row.agreement.pearson:.3f} ({row.agreement.spearman:.3f})"
        ratio = "" if row.ratio_to_reference is None else f"{row.ratio_to_reference:.2f}"
        ms = "not timed" if row.median_ms is None else f"{row.median_ms:,.0f}"
        label = row.label if row.exits is None else f"{row.label} ({_left(row.exits)} exit)"
        aurocs = (row.with_interval(name) or "undefined" for name in AUROCS)
        lines.append([label, ms, ratio, *aurocs, agreed])
    return table(head, lines, left=range(len(head)))


def _left(exits: Exits) -> str:
    shares = {"good": exits.good, "defective": exits.defective}
    return ", ".join(f"{share:.0%} of the {kind}" for kind, share in shares.items() if share is not None)


def _pairs(pairs: Sequence[Pair]) -> str:
    head = ("alike, or left out", "way", "against", "time", "image AUROC, points", "pixel AUROC, points")
    lines = []
    for pair in pairs:
        time = "" if pair.time is None else f"{pair.time:.2f}"
        lines.append([pair.kind, pair.one, pair.other, time, *(points(pair.found.get(name)) for name in AUROCS)])
    return table(head, lines, left=range(len(head)))


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
            if mark := "^" if row.exits else "P" if row.precision != "fp32" else "":
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
    return figure_png(figure)


def _line(axes: "Axes", rows: Sequence[Row], name: str, gradient: str, passes: int) -> None:
    shown = [row for row in rows if (row.gradient, row.passes, row.precision) == (gradient, passes, "fp32")]
    shown = [row for row in shown if row.exits is None]
    shown = sorted((row for row in shown if row.median_ms is not None), key=lambda row: row.steps)
    drawn: dict[str, Any] = {"label": f"{gradient}, {'both passes' if passes == 2 else 'no mask pass'}"}
    drawn |= {"color": COLOURS[gradient], "marker": "o", "mfc": None if passes == 2 else "none"}
    times, values = [row.median_ms or 0.0 for row in shown], [_value(row, name) for row in shown]
    style = "-" if passes == 2 else "--"
    axes.errorbar(
        times, values, yerr=None if name == "agreement" else whiskers(shown, name), linestyle=style, capsize=2, **drawn
    )
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
