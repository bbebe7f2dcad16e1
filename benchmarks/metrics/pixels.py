"""Pixel metrics of any number of maps in bounded memory.

The maps' float32 values are their own bins: a sorted table holds, for every distinct value, how many good and how many
defective pixels have it and what share of defect regions they cover. No range need be known, and nothing is rounded.
While the tables have at most 2^22 rows (64 maps of 256 x 256 with no two values alike) the metrics are exact. Beyond,
rows of nearly equal rank are merged (`tables.compact`), and compacted tables of equal age are merged and compacted
again two by two: a pixel goes through one more compaction each time the number of pixels doubles, five for 2,000 such
maps.

How wrong that can be. Let F(y) be the share of good pixels above y, ties counting half. AUROC is the mean of 1 - F(y)
over the defective pixels y; the area under the PRO curve up to the limit L is the sum over the regions' pixels of their
weight times L - F(y), where that is positive. A compaction moves a pixel within the range of its group only. A group
holds at most step (u + knee) of the good pixels, u being the share of them above it, and at most one cell of the
defective pixels and of the regions' weights. So compacting all pixels once changes AUPRO at L by at most step (L +
knee) / L + cell, and AUROC by the same with L = 1: 1.3e-5 either way, 6.3e-5 for 2,000 maps
(`PixelMetrics.error_bound`). By the same argument average precision changes by about 2e-5 at the very most: of the
100,000 highest good pixels no two are merged, below them the number of false alarms is kept to 1e-5 of itself, and the
number of hits to 2^-19 of all. These are bounds for pixels that all err in one direction; what was measured is below
1e-6 (tests/benchmarks/test_streaming.py).
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import auc

from mdps.benchmarks.counts import PixelCounts
from mdps.benchmarks.pixels import checked, regions
from mdps.benchmarks.tables import Cells, Table, compact, merge, tabulate
from mdps.runtime.errors import UsageError

__all__ = ["PixelCounts", "PixelMetrics"]
CAPACITY = 2**22
GOOD, BAD, OVERLAP = Cells(2**20, knee=1e-4), Cells(2**19), Cells(2**18)


class PixelMetrics:
    """Pixel AUROC, average precision and AUPRO of maps that are added one after the other and not kept.

    Args:
        capacity: rows of exact tables that are kept before any are merged, about 25 bytes each.
        cells: how finely good pixels, defective pixels and overlaps with regions are kept beyond that.
    """

    def __init__(self, capacity: int = CAPACITY, cells: tuple[Cells, Cells, Cells] = (GOOD, BAD, OVERLAP)) -> None:
        self._capacity, self._cells = capacity, cells
        self._exact: list[Table] = []
        self._compacted: list[Table | None] = []  # by how often their rows were merged
        self._rows = self._regions = 0
        self._whole: Table | None = None

    def add(self, truth: ArrayLike, anomaly_map: ArrayLike) -> None:
        """Counts one image: `truth` bool [H, W], True where defective; `anomaly_map` float32 [H, W], larger there.

        Raises:
            UsageError: the shapes differ or are not [H, W], or a value of the map is NaN or infinite.
        """
        marked, values = checked(truth, anomaly_map)
        overlap, count = regions(marked)
        self._regions += count
        self._whole = None
        self._exact.append(tabulate(values.ravel(), ~marked.ravel(), marked.ravel(), overlap.ravel()))
        self._rows += len(self._exact[-1])
        if self._rows > self._capacity:
            self._shrink()

    def auroc(self) -> float:
        """Area under the ROC curve of all pixels, ties counting one half; NaN without pixels of both kinds."""
        good, bad, _ = self._columns()
        if not (good.sum() and bad.sum()):
            return math.nan
        below = np.cumsum(good) - good / 2
        return float((bad * below).sum() / (good.sum() * bad.sum()))

    def average_precision(self) -> float:
        """Average precision of all pixels, as scikit-learn defines it; NaN without defective pixels."""
        good, bad, _ = (column[::-1] for column in self._columns())
        if not bad.sum():
            return math.nan
        hits = np.cumsum(bad)
        return float((bad * hits / np.maximum(hits + np.cumsum(good), 1)).sum() / bad.sum())

    def aupro(self, limit: float) -> float:
        """Area under the per-region overlap up to the false-positive rate `limit`, divided by `limit`: in [0, 1].

        The overlap at a threshold is the mean, over the 8-connected regions of all masks, of the share of the region's
        pixels at or above it; the rate is over all good pixels, those of defective images too. Points of the curve are
        joined by lines (Bergmann et al. 2021, "The MVTec Anomaly Detection Dataset", section 5.2). NaN without regions
        or good pixels.

        Raises:
            UsageError: `limit` is not in (0, 1].
        """
        if not 0 < limit <= 1:
            raise UsageError(f"the limit of AUPRO should lie above 0 and not above 1, it is {limit}")
        good, _, overlap = (column[::-1] for column in self._columns())
        if not (self._regions and good.sum()):
            return math.nan
        rate = np.append(0.0, np.cumsum(good) / good.sum())
        found = np.append(0.0, np.cumsum(overlap) / self._regions)
        inside = int(np.searchsorted(rate, limit, side="right"))
        rates = np.append(rate[:inside], limit)
        return float(auc(rates, np.append(found[:inside], np.interp(limit, rate, found))) / limit)

    def error_bound(self, limit: float = 1.0) -> float:
        """What AUPRO at `limit`, and AUROC for a limit of 1, can be wrong by: 0 while nothing was merged."""
        good, bad, overlap = self._cells
        knee = good.knee or 1.0
        return len(self._compacted) * (good.step * (limit + knee) / limit + max(bad.step, overlap.step))

    def _columns(self) -> tuple[NDArray[Any], ...]:
        """Good pixels, defective pixels and overlaps, float64 [k], by ascending value."""
        tables = self._exact + [table for table in self._compacted if table is not None]
        if not tables:
            return (np.zeros(0),) * 3
        if self._whole is None:
            self._whole = merge(tables)
        return tuple(column.astype(np.float64) for column in self._whole.columns)

    def _shrink(self) -> None:
        """Makes room: where ties do not make the exact tables small, they join the compacted ones."""
        table = merge(self._exact)
        self._exact = [table] if len(table) <= self._capacity // 2 else []
        if not self._exact:
            self._carry(self._fitted(table))
        self._rows = sum(map(len, self._exact))

    def _fitted(self, table: Table) -> Table:
        return compact(table, self._cells) if len(table) > self._capacity // 2 else table

    def _carry(self, table: Table) -> None:
        """Puts a table among those of its age, as a binary counter adds one."""
        for age, other in enumerate(self._compacted):
            if other is None:
                self._compacted[age] = table
                return
            self._compacted[age] = None
            table = self._fitted(merge([table, other]))
        self._compacted.append(table)
