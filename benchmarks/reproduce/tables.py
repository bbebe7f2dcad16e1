"""Rows of a table of the paper, measured and published, paired differences of the ablation, their tables and plots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from mdps.benchmarks.kit import figure_png, table
from mdps.benchmarks.metrics.bootstrap import Interval
from mdps.benchmarks.reproduce.paper import AVERAGE, PaperTable, method_label
from mdps.benchmarks.study.outcomes import AUROCS, Outcome, ResultRow, differences_json, percent, points, whiskers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Methods of the paper's tables for which no library exists that somebody maintains.
NO_LIBRARY = ("ran", "uniad", "anogan", "anoseg", "vt_adl", "pyramidflow")
ABSENT = "not all of these categories are in the data set"


@dataclass(frozen=True)
class Row(ResultRow):
    """One method on one category; "average" is the mean over the measured ones.

    `metrics` and `paper` hold shares of 1 under the names of `mdps evaluate`, and the paper's times in seconds; a
    published row has no metrics and says in `reason` why.
    """

    category: str
    method: str
    label: str
    kind: Literal["measured", "published"]
    paper: dict[str, float] = field(default_factory=dict)
    reason: str = ""


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
                reason, numbers = ABSENT if absent else _reason(method, reasons), paper.published(category, method)
                found.append(Row(category, method, method_label(method), "published", paper=numbers, reason=reason))
    return found


def _row_of(paper: PaperTable, row: Row) -> str | None:
    """The paper's row that a measured one stands beside; a mean over fewer categories stands beside none."""
    if row.category != AVERAGE:
        return paper.category(row.category)
    return AVERAGE if row.paper == paper.published(AVERAGE, row.method) else None


def _reason(method: str, reasons: dict[str, str]) -> str:
    return "no maintained library implements it" if method in NO_LIBRARY else reasons.get(method, "not asked for")


@dataclass(frozen=True)
class Comparison:
    """`better` minus `worse`, methods of the table "ablation"; `at_least` is what the pixel AUROC must gain, if any."""

    name: str
    better: str
    worse: str
    at_least: float | None = None


COMPARISONS = (
    Comparison("guidance, first pass", "no_mask", "vanilla", at_least=0.003),
    Comparison("guidance, both passes", "full", "no_posterior"),
    Comparison("mask pass against none", "full", "no_mask"),
    Comparison("both metrics against pixels alone", "full", "pixel_only"),
    Comparison("both metrics against features alone", "full", "perceptual_only"),
)


@dataclass(frozen=True)
class Difference:
    """Differences of a comparison on one category: {"image_auroc", "pixel_auroc"} differences with 95 % intervals."""

    category: str
    comparison: Comparison
    found: Mapping[str, Interval]

    @property
    def holds(self) -> bool | None:
        """Whether the pixel AUROC gains what it must; None where nothing is asked or measured."""
        pixel = self.found.get("pixel_auroc")
        if self.comparison.at_least is None or pixel is None:
            return None
        return pixel.value >= self.comparison.at_least

    def to_json(self) -> dict[str, Any]:
        """The names compared, and for each AUROC its difference and interval."""
        compared = asdict(self.comparison)
        own = {"category": self.category, "comparison": compared.pop("name"), **compared, "holds": self.holds}
        return own | differences_json(self.found)


def compare(category: str, outcomes: Mapping[str, Outcome]) -> list[Difference]:
    """All comparisons whose two methods are in `outcomes` ({method: outcome} on the same images of one category)."""
    counts = sorted(int(method.removeprefix("mdps_")) for method in outcomes if method.startswith("mdps_"))
    more = [Comparison(f"N_s = {count} against 1", f"mdps_{count}", "full") for count in counts]
    return [
        Difference(category, one, outcomes[one.better].minus(outcomes[one.worse]))
        for one in (*COMPARISONS, *more)
        if one.better in outcomes and one.worse in outcomes
    ]


def differences_table(differences: list[Difference]) -> str:
    """Markdown: a line a comparison, differences of AUROC in points of per cent with their 95 % intervals."""
    head = ["category", "comparison", "image AUROC, points", "pixel AUROC, points", "asked"]
    lines = [
        [one.category, one.comparison.name, *(points(one.found.get(name)) for name in AUROCS), _asked(one)]
        for one in differences
    ]
    return table(head, lines, left=(0, 1, -1))


def _asked(one: Difference) -> str:
    if one.comparison.at_least is None:
        return ""
    verdict = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}[one.holds]
    return f"pixel at least {100 * one.comparison.at_least:+.2f}: {verdict}"


ALSO = {"aupro_0.30": "AUPRO 0.30 %", "image_ap": "image AP %", "pixel_ap": "pixel AP %"}


def measured_table(rows: Sequence[Row], timed: bool) -> str:
    """A line a measured row: ours with its 95 % interval, the paper's beside it."""
    measured = [row for row in rows if row.kind == "measured"]
    if not measured:
        return "Nothing of this table could be measured here."
    beside = not timed and any(row.paper for row in measured)
    head = ["category", "method", *_pairs(timed, beside), *ALSO.values(), "ms an image", "images"]
    lines = []
    for row in measured:
        cells = [row.category, row.label]
        for metric in AUROCS:
            cells.append(row.with_interval(metric))
            if beside:
                cells.append(percent(row.paper.get(metric)))
        if timed:
            cells.append(seconds(row))
        cells += [percent(row.metrics.get(name)) for name in ALSO]
        lines.append([*cells, _ms(row.metrics.get("ms_per_image")), str(row.images)])
    return table(head, lines, left=(0, 1))


def published_table(rows: Sequence[Row]) -> str:
    """The paper's numbers that nothing was measured for: a line a category, a column a method; then the reasons."""
    published = [row for row in rows if row.kind == "published"]
    methods = list(dict.fromkeys(row.method for row in published))
    labels = {row.method: row.label for row in published}
    lines = []
    cells = {(row.category, row.method): row for row in published}
    for category in dict.fromkeys(row.category for row in published):
        found = [cells.get((category, method)) for method in methods]
        lines.append([category, *("measured" if row is None else printed(row) for row in found)])
    reasons = dict.fromkeys(f"- {row.label}: {row.reason}" for row in published if row.reason != ABSENT)
    shown = table(["category", *(labels[method] for method in methods)], lines)
    return "\n\n".join([shown, "\n".join(reasons)]).rstrip()


def printed(row: Row) -> str:
    """Return the paper's cell: image / pixel AUROC in per cent, or a time."""
    if "seconds_from" in row.paper:
        return seconds(row)
    return " / ".join(percent(row.paper.get(metric)) for metric in AUROCS)


def seconds(row: Row) -> str:
    """The paper's time, a range where it prints one."""
    low, high = row.paper.get("seconds_from"), row.paper.get("seconds_to")
    if low is None or high is None:
        return ""
    return f"{low:g} s" if low == high else f"{low:g} to {high:g} s"


def _pairs(timed: bool, beside: bool) -> list[str]:
    columns = [name for label in AUROCS.values() for name in ((label, "paper") if beside else (label,))]
    return [*columns, "paper's time"] if timed else columns


def _ms(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:,.0f}"


NUMBERED = {"5": ("mdps_", "posterior samples N_s"), "rho": ("rho_", "guidance scale rho")}


def plot(table: str, rows: Sequence[Row]) -> bytes:
    """A PNG with a panel for image and one for pixel AUROC of the measured rows; hollow marks are the paper's."""
    from matplotlib.figure import Figure

    several = len({row.category for row in rows if row.category != AVERAGE}) > 1
    shown = [row for row in rows if several or row.category != AVERAGE]
    lines = table in NUMBERED
    figure = Figure(figsize=(10, 4 if lines else 1.4 + 0.26 * len(shown)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=not lines)
    for axes, metric in zip(panels, AUROCS, strict=True):
        if lines:
            _curves(axes, shown, metric, *NUMBERED[table])
        else:
            _dots(axes, shown, metric)
    panels[0].plot([], [], "k", marker="o", linestyle="none", label="here, 95 % interval")
    panels[0].plot([], [], "k", marker="o", mfc="none", linestyle="none", label="paper")
    panels[0].legend(fontsize=8)
    return figure_png(figure)


def _dots(axes: "Axes", rows: Sequence[Row], metric: str) -> None:
    names = [f"{row.category}: {row.label}" for row in rows]
    places = [len(rows) - 1 - index for index in range(len(rows))]
    axes.errorbar([_value(row, metric) for row in rows], places, xerr=whiskers(rows, metric), fmt="o", capsize=2)
    axes.plot([_paper(row, metric) for row in rows], places, "o", mfc="none", color="black")
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlim(right=100.5)
    axes.set_xlabel(AUROCS[metric])
    axes.grid(axis="x", alpha=0.3)


def _curves(axes: "Axes", rows: Sequence[Row], metric: str, prefix: str, label: str) -> None:
    for category in dict.fromkeys(row.category for row in rows):
        own = [row for row in rows if row.category == category and row.method.startswith(prefix)]
        numbers = [float(row.method.removeprefix(prefix)) for row in own]
        values = [_value(row, metric) for row in own]
        drawn = axes.errorbar(numbers, values, yerr=whiskers(own, metric), fmt="o-", capsize=2, label=category)
        colour = drawn.lines[0].get_color()
        axes.plot(numbers, [_paper(row, metric) for row in own], "o--", mfc="none", color=colour)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(sorted({float(row.method.removeprefix(prefix)) for row in rows if row.method.startswith(prefix)}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(label)
    axes.set_ylabel(AUROCS[metric])
    axes.grid(alpha=0.3)


def _value(row: Row, metric: str) -> float:
    return 100 * row.metrics.get(metric, math.nan)


def _paper(row: Row, metric: str) -> float:
    return 100 * row.paper.get(metric, math.nan)
