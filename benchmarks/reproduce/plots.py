"""Plots of a reproduction: dots with intervals for methods, lines over a number that was varied."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mdps.benchmarks.reproduce.paper import AVERAGE
from mdps.benchmarks.reproduce.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {"image_auroc": "image AUROC %", "pixel_auroc": "pixel AUROC %"}
NUMBERED = {"5": ("mdps_", "posterior samples N_s"), "rho": ("rho_", "guidance scale rho")}


def plot(table: str, rows: Sequence[Row]) -> bytes:
    """A PNG with a panel for image and one for pixel AUROC of the measured rows; hollow marks are the paper's."""
    from matplotlib.figure import Figure

    several = len({row.category for row in rows if row.category != AVERAGE}) > 1
    shown = [row for row in rows if several or row.category != AVERAGE]
    lines = table in NUMBERED
    figure = Figure(figsize=(10, 4 if lines else 1.4 + 0.26 * len(shown)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=not lines)
    for axes, metric in zip(panels, PANELS, strict=True):
        if lines:
            _curves(axes, shown, metric, *NUMBERED[table])
        else:
            _dots(axes, shown, metric)
    panels[0].plot([], [], "k", marker="o", linestyle="none", label="here, 95 % interval")
    panels[0].plot([], [], "k", marker="o", mfc="none", linestyle="none", label="paper")
    panels[0].legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _dots(axes: "Axes", rows: Sequence[Row], metric: str) -> None:
    names = [f"{row.category}: {row.label}" for row in rows]
    places = [len(rows) - 1 - index for index in range(len(rows))]
    axes.errorbar([_value(row, metric) for row in rows], places, xerr=_spread(rows, metric), fmt="o", capsize=2)
    axes.plot([_paper(row, metric) for row in rows], places, "o", mfc="none", color="black")
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlim(right=100.5)
    axes.set_xlabel(PANELS[metric])
    axes.grid(axis="x", alpha=0.3)


def _curves(axes: "Axes", rows: Sequence[Row], metric: str, prefix: str, label: str) -> None:
    for category in dict.fromkeys(row.category for row in rows):
        own = [row for row in rows if row.category == category and row.method.startswith(prefix)]
        numbers = [float(row.method.removeprefix(prefix)) for row in own]
        values = [_value(row, metric) for row in own]
        drawn = axes.errorbar(numbers, values, yerr=_spread(own, metric), fmt="o-", capsize=2, label=category)
        colour = drawn.lines[0].get_color()
        axes.plot(numbers, [_paper(row, metric) for row in own], "o--", mfc="none", color=colour)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(sorted({float(row.method.removeprefix(prefix)) for row in rows if row.method.startswith(prefix)}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(label)
    axes.set_ylabel(PANELS[metric])
    axes.grid(alpha=0.3)


def _value(row: Row, metric: str) -> float:
    return 100 * row.metrics.get(metric, math.nan)


def _paper(row: Row, metric: str) -> float:
    return 100 * row.paper.get(metric, math.nan)


def _spread(rows: Sequence[Row], metric: str) -> Any:
    """Lengths below and above the values, [2, n]; nothing where there is no interval."""
    lows, highs = [], []
    for row in rows:
        value = row.metrics.get(metric, math.nan)
        low, high = row.intervals.get(metric, (value, value))
        lows.append(100 * max(0.0, value - low))
        highs.append(100 * max(0.0, high - value))
    return [lows, highs]
