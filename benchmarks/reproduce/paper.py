"""The paper's tables: the numbers it printed, from `paper.json`, and the variants of our detector in each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from mdps.benchmarks.study import Changes, Variant, plain_name
from mdps.runtime.errors import UsageError

TABLES = ("1", "2", "3", "4", "5", "ablation", "rho")
OWN_METHODS = {"1": ("anoddpm", "autoddpm"), "2": ("anoddpm", "autoddpm"), "3": ("autoddpm",)}
SAMPLES = {"1": (1, 16), "2": (1, 16), "5": (1, 2, 4, 8, 16), "ablation": (1, 16)}
# Another method has settings of its own; what is chosen for MDPS says nothing of them.
_PUBLISHED: Mapping[str, Any] = dict.fromkeys(
    (
        "preset", "gradient", "guidance_norm", "guidance_scale", "masked_guidance_scale", "noise_level", "steps",
        "mask_pass", "mask_lambda", "mask_range", "stages", "eta", "pixel", "smoothing_sigma", "top",
    )
)  # fmt: skip
AVERAGE = "average"
_FILE = Path(__file__).with_name("paper.json")


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


def variants(
    table: str, samples: tuple[int, ...], methods: tuple[str, ...], scales: tuple[float, ...]
) -> tuple[Variant, ...]:
    """The rows of a table that our own sampler makes, in its order; `methods` are other detectors on our denoiser."""
    if table == "4":
        return METRICS
    if table == "rho":
        return tuple(Variant(f"rho_{scale:g}", f"rho = {scale:g}", Changes(guidance_scale=scale)) for scale in scales)
    if table == "ablation":
        return (*ABLATION, *METRICS[:2], *(_samples(count) for count in samples if count > 1))
    if table not in TABLES:
        raise UsageError(f"there is no table {table!r}; there are {', '.join(TABLES)}")
    others = tuple(Variant(name, method_label(name), export={**_PUBLISHED, "method": name}) for name in methods)
    return (*(_samples(count) for count in samples), *others)


def _samples(count: int) -> Variant:
    return Variant(f"mdps_{count}", f"MDPS, N_s = {count}", Changes(samples=count))


# Table 4. Without stages no features are compared, with eta 0 no pixels.
METRICS = (
    Variant("pixel_only", method_label("pixel_only"), Changes(samples=1), {"stages": (), "eta": 1.0, "pixel": "l1"}),
    Variant("perceptual_only", method_label("perceptual_only"), Changes(samples=1), {"eta": 0.0}),
    Variant("both", method_label("both"), Changes(samples=1)),
)
# The paper's section "Effectiveness of MDPS". Without guidance and mask what is left is DDIM.
ABLATION = (
    Variant("full", "MDPS", Changes(samples=1)),
    Variant("no_mask", "without mask", Changes(samples=1), first_pass=True),
    Variant("no_posterior", "without posterior (rho = 0)", Changes(guidance_scale=0.0, samples=1)),
    Variant("vanilla", "vanilla DDIM", Changes(guidance_scale=0.0, samples=1), first_pass=True),
)
