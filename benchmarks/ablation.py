"""Paired comparisons of the ablation: does each part of the method help, and by how much, on the same images?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mdps.benchmarks.bootstrap import Interval
from mdps.benchmarks.reproduce.outcomes import Outcome


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
    """What a comparison found on one category: {"image_auroc", "pixel_auroc"} differences with 95 % intervals."""

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
        own = self.comparison
        return {
            "category": self.category,
            "comparison": own.name,
            "better": own.better,
            "worse": own.worse,
            "at_least": own.at_least,
            "holds": self.holds,
            **{name: {"difference": i.value, "low": i.low, "high": i.high} for name, i in self.found.items()},
        }


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
    lines = [head, ["---", "---", "---:", "---:", "---"]]
    for one in differences:
        found = [_points(one.found.get(name)) for name in ("image_auroc", "pixel_auroc")]
        lines.append([one.category, one.comparison.name, *found, _asked(one)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _points(interval: Interval | None) -> str:
    if interval is None:
        return "undefined"
    return f"{100 * interval.value:+.2f} ({100 * interval.low:+.2f} to {100 * interval.high:+.2f})"


def _asked(one: Difference) -> str:
    if one.comparison.at_least is None:
        return ""
    verdict = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}[one.holds]
    return f"pixel at least {100 * one.comparison.at_least:+.2f}: {verdict}"
