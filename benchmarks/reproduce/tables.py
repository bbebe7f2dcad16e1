"""What a table of the reproduction says: a row for each category and method, measured or as the paper printed it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from mdps.benchmarks.reproduce.paper import AVERAGE, PaperTable, method_label

# Methods of the paper's tables for which no library exists that somebody maintains.
NO_LIBRARY = ("ran", "uniad", "anogan", "anoseg", "vt_adl", "pyramidflow")
ABSENT = "not all of these categories are in the data set"


@dataclass(frozen=True)
class Row:
    """One method on one category; "average" is the mean over the measured ones.

    `metrics`, `intervals` (95 %, bootstrap over the images) and `paper` hold shares of 1 under the names of
    `mdps evaluate`, and the paper's times in seconds; a published row has no metrics and says in `reason` why.
    """

    category: str
    method: str
    label: str
    kind: Literal["measured", "published"]
    images: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    problems: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a metric that is undefined there (no defective pixel, say) is null."""
        return {
            "category": self.category,
            "method": self.method,
            "label": self.label,
            "kind": self.kind,
            "images": self.images,
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
            "intervals": {name: [finite(low), finite(high)] for name, (low, high) in self.intervals.items()},
            "paper": self.paper,
            "reason": self.reason,
            "problems": list(self.problems),
            "provenance": self.provenance,
        }


def finite(value: float) -> float | None:
    """The value, or None where it is no number: JSON has no NaN."""
    return value if math.isfinite(value) else None


def averages(rows: Sequence[Row], paper: PaperTable | None) -> list[Row]:
    """A row a measured method: its mean over all categories, beside the paper's mean over the same categories.

    A method that misses some of the categories has no mean: it would be one over easier or harder data.
    """
    measured = [row for row in rows if row.kind == "measured"]
    categories = list(dict.fromkeys(row.category for row in measured))
    if len(categories) == 1 and (paper is None or paper.categories):
        return []  # it would repeat the one row; where the paper prints means only, it is what stands beside them
    found = []
    for method in dict.fromkeys(row.method for row in measured):
        own = [row for row in measured if row.method == method]
        if len(own) == len(categories):
            found.append(_average(own, {} if paper is None else paper.published_mean(categories, method)))
    return found


def _average(rows: Sequence[Row], paper: dict[str, float]) -> Row:
    names = [name for name in rows[0].metrics if all(name in row.metrics for row in rows)]
    return Row(
        category=AVERAGE,
        method=rows[0].method,
        label=rows[0].label,
        kind="measured",
        images=sum(row.images for row in rows),
        metrics={name: fmean(row.metrics[name] for row in rows) for name in names},
        paper=paper,
    )


def published_rows(
    paper: PaperTable, present: Sequence[str], rows: Sequence[Row], reasons: dict[str, str]
) -> list[Row]:
    """Every cell of the paper's table that `rows` did not measure, marked with the reason.

    `present` are the names of the categories at hand; `reasons` say why a method did not run here.
    """
    measured = {(_row_of(paper, row), row.method) for row in rows if row.kind == "measured"}
    at_hand = {paper.category(name) for name in present}
    ran = {method for _, method in measured}
    found = []
    for category, cells in paper.rows.items():
        for method in cells:
            if (category, method) not in measured:
                absent = category not in at_hand if category != AVERAGE else method in ran
                reason = ABSENT if absent else reason_for(method, reasons)
                found.append(_published(paper, category, method, reason))
    return found


def _row_of(paper: PaperTable, row: Row) -> str | None:
    """The paper's row that a measured one stands beside; a mean over fewer categories stands beside none."""
    if row.category != AVERAGE:
        return paper.category(row.category)
    return AVERAGE if row.paper == paper.published(AVERAGE, row.method) else None


def reason_for(method: str, reasons: dict[str, str]) -> str:
    """Why a method shows the published number only."""
    if method in NO_LIBRARY:
        return "no maintained library implements it"
    return reasons.get(method, "not asked for")


def _published(paper: PaperTable, category: str, method: str, reason: str) -> Row:
    return Row(
        category, method, method_label(method), "published", paper=paper.published(category, method), reason=reason
    )
