"""The numbers that the paper printed, from `benchmarks/paper.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

AVERAGE = "average"
_FILE = Path(__file__).parents[1] / "paper.json"
_PREFIXES = ("mvtec_ad_", "mvtec_", "btad_", "btech_")


@dataclass(frozen=True)
class PaperTable:
    """One printed table; `rows` is {category: {method: values}}, the values in the order of `metrics`.

    AUROCs are shares of 1 here, as everywhere in mdps; the paper prints per cent.
    """

    caption: str
    metrics: tuple[str, ...]
    rows: Mapping[str, Mapping[str, tuple[float, ...]]]

    @property
    def categories(self) -> tuple[str, ...]:
        """Names of the rows without the average; empty where the paper prints averages only."""
        return tuple(name for name in self.rows if name != AVERAGE)

    @property
    def methods(self) -> tuple[str, ...]:
        """Keys of the columns, in the paper's order."""
        return tuple(next(iter(self.rows.values())))

    def category(self, name: str) -> str | None:
        """The row for a folder's name ("mvtec_bottle", "Metal-Nut", ..), or None where the table has no such row."""
        return {plain_name(row): row for row in self.categories}.get(plain_name(name))

    def published(self, category: str, method: str) -> dict[str, float]:
        """{metric: value} of a cell; empty where nothing was printed."""
        row = self.rows.get(category) or {}
        return dict(zip(self.metrics, row.get(method, ()), strict=False))

    def published_mean(self, names: list[str], method: str) -> dict[str, float]:
        """The paper's mean over those of `names` that it has: the printed one for all of them, or for a table of means.

        A mean over other categories than ours would compare nothing.
        """
        rows = {row for row in map(self.category, names) if row is not None}
        if rows == set(self.categories):
            return self.published(AVERAGE, method)
        cells = [self.published(row, method) for row in sorted(rows)]
        cells = [cell for cell in cells if cell]
        return {metric: fmean(cell[metric] for cell in cells) for metric in self.metrics} if cells else {}


def plain_name(category: str) -> str:
    """A category's name without the data set's, case and separators: "mvtec_metal-nut" is "metalnut"."""
    plain = category.lower().replace("-", "_").replace(" ", "_")
    for prefix in _PREFIXES:
        plain = plain.removeprefix(prefix)
    return plain.replace("_", "")


@cache
def paper_table(name: str) -> PaperTable | None:
    """Table `name` ("1" to "5"), or None for what the paper shows as a figure without numbers."""
    table = _load()["tables"].get(name)
    if table is None:
        return None
    unit = 100.0 if table["unit"] == "%" else 1.0
    rows = {
        category: {method: tuple(round(value / unit, 6) for value in values) for method, values in cells.items()}
        for category, cells in table["rows"].items()
    }
    return PaperTable(table["caption"], tuple(table["metrics"]), rows)


def method_label(method: str) -> str:
    """The name of a method's key for people."""
    return str(_load()["methods"].get(method, method))


@cache
def _load() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return loaded
