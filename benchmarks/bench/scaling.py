"""How the cost of an image grows with the batch, the samples and the image's size, drawn."""

import io
from collections.abc import Callable, Sequence

from mdps.benchmarks.bench.rows import Row

AXES: dict[str, Callable[[Row], int]] = {
    "images at once": lambda row: row.batch,
    "posterior samples N_s": lambda row: row.samples,
    "pixels of the image": lambda row: row.image_size[0] * row.image_size[1] if row.image_size else 0,
}


def plot(rows: Sequence[Row]) -> bytes:
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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


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
