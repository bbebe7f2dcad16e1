"""Markdown, JSON and plot of a reproduction."""

import math
from collections.abc import Sequence

from mdps.benchmarks.reproduce.rows import ABSENT, Row

PERCENT = {"image_auroc": "image AUROC %", "pixel_auroc": "pixel AUROC %"}
ALSO = {"aupro_0.30": "AUPRO 0.30 %", "image_ap": "image AP %", "pixel_ap": "pixel AP %"}


def measured_table(rows: Sequence[Row], timed: bool) -> str:
    """A line a measured row: ours with its 95 % interval, the paper's beside it."""
    measured = [row for row in rows if row.kind == "measured"]
    if not measured:
        return "Nothing of this table could be measured here."
    beside = not timed and any(row.paper for row in measured)
    head = ["category", "method", *_pairs(timed, beside), *ALSO.values(), "ms an image", "images"]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for row in measured:
        cells = [row.category, row.label]
        for metric in PERCENT:
            cells.append(_with_interval(row, metric))
            if beside:
                cells.append(percent(row.paper.get(metric)))
        if timed:
            cells.append(seconds(row))
        cells += [percent(row.metrics.get(name)) for name in ALSO]
        lines.append([*cells, _ms(row.metrics.get("ms_per_image")), str(row.images)])
    return _markdown(lines)


def published_table(rows: Sequence[Row]) -> str:
    """The paper's numbers that nothing was measured for: a line a category, a column a method; then the reasons."""
    published = [row for row in rows if row.kind == "published"]
    methods = list(dict.fromkeys(row.method for row in published))
    labels = {row.method: row.label for row in published}
    lines = [["category", *(labels[method] for method in methods)], ["---", *["---:"] * len(methods)]]
    cells = {(row.category, row.method): row for row in published}
    for category in dict.fromkeys(row.category for row in published):
        found = [cells.get((category, method)) for method in methods]
        lines.append([category, *("measured" if row is None else printed(row) for row in found)])
    reasons = dict.fromkeys(f"- {row.label}: {row.reason}" for row in published if _of_method(row))
    return "\n\n".join([_markdown(lines), "\n".join(reasons)]).rstrip()


def _of_method(row: Row) -> bool:
    return row.reason != ABSENT


def printed(row: Row) -> str:
    """What the paper prints in a cell: image / pixel AUROC in per cent, or a time."""
    if "seconds_from" in row.paper:
        return seconds(row)
    return " / ".join(percent(row.paper.get(metric)) for metric in PERCENT)


def percent(value: float | None) -> str:
    """A share of 1 in per cent with two digits where it matters; empty for nothing."""
    return "" if value is None or not math.isfinite(value) else f"{100 * value:.2f}"


def seconds(row: Row) -> str:
    """The paper's time, a range where it prints one."""
    low, high = row.paper.get("seconds_from"), row.paper.get("seconds_to")
    if low is None or high is None:
        return ""
    return f"{low:g} s" if low == high else f"{low:g} to {high:g} s"


def _pairs(timed: bool, beside: bool) -> list[str]:
    columns = [name for label in PERCENT.values() for name in ((label, "paper") if beside else (label,))]
    return [*columns, "paper's time"] if timed else columns


def _with_interval(row: Row, metric: str) -> str:
    low, high = row.intervals.get(metric, (math.nan, math.nan))
    text = percent(row.metrics.get(metric))
    return f"{text} ({percent(low)} to {percent(high)})" if math.isfinite(low) and math.isfinite(high) else text


def _ms(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
