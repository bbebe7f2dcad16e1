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
1e-6 (tests/benchmarks/metrics/test_streaming.py).
"""

import io
import math
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import auc

from mdps.benchmarks.metrics.tables import Cells, Table, compact, group_starts, merge, tabulate
from mdps.runtime.atomic import write_bytes
from mdps.runtime.errors import UsageError


def checked(truth: ArrayLike, anomaly_map: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Mask as bool and map as float32, both [H, W]; UsageError if they differ in shape or a value is not finite."""
    marked, values = np.asarray(truth, dtype=bool), np.asarray(anomaly_map)
    if marked.ndim != 2 or marked.shape != values.shape or not marked.size:
        raise UsageError(f"mask {marked.shape} and anomaly map {values.shape} should both be [H, W]")
    with np.errstate(over="ignore"):  # reported as infinite below
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        bad = int(np.count_nonzero(~np.isfinite(values)))
        raise UsageError(f"{bad} of {values.size} values of the anomaly map are NaN or infinite")
    return marked, values


def regions(truth: NDArray[np.bool_]) -> tuple[NDArray[np.float64], int]:
    """One over the size of the 8-connected region that each pixel of the mask [H, W] is in, 0 outside; their number."""
    from skimage.measure import label

    if not truth.any():
        return np.zeros(truth.shape), 0
    labels = label(truth, connectivity=2)  # type: ignore[no-untyped-call]
    sizes = np.bincount(labels.ravel())
    return np.where(truth, 1 / sizes[labels], 0.0), len(sizes) - 1


OF_AN_IMAGE = (Cells(2**11), Cells(2**11))
OF_ALL = (Cells(2**12), Cells(2**12))
_BATCH = 64  # resamples whose counts are in memory at once


class PixelCounts:
    """Counts of good and defective pixels of n images on common bins: AUROC follows from them for any weights.

    An image keeps about 4,000 values of its map with their counts (`tables.compact`: what merges is at most 1/2048 of
    its good pixels and 1/2048 of its defective ones); all images share about 8,000 bins, chosen by the ranks of all
    pixels. AUROC differs from the exact one by some 1e-5, and by 1e-3 if all pixels erred in one direction: enough for
    an interval; for the metric itself use `PixelMetrics`.
    """

    def __init__(self) -> None:
        self._images: list[Table] = []

    def __len__(self) -> int:
        return len(self._images)

    @property
    def defective(self) -> NDArray[np.bool_]:
        """Which images have defective pixels: [n]."""
        return np.array([bool(table.columns[1].any()) for table in self._images], dtype=bool)

    def add(self, truth: ArrayLike, anomaly_map: ArrayLike) -> None:
        """Counts one image; arguments and errors as in `PixelMetrics.add`."""
        marked, values = checked(truth, anomaly_map)
        table = tabulate(values.ravel(), ~marked.ravel(), marked.ravel())
        self._images.append(compact(table, OF_AN_IMAGE))
        self.__dict__.pop("_binned", None)

    def auroc(self, weights: ArrayLike | None = None) -> float:
        """Pixel AUROC where image i counts `weights`[i] times (once by default); NaN without pixels of both kinds."""
        given = np.ones(len(self)) if weights is None else np.asarray(weights)
        return float(self.aurocs(given[None])[0])

    def aurocs(self, weights: ArrayLike) -> NDArray[np.float64]:
        """The same for many weightings at once: [r, n] to [r]; UsageError for another shape, or a weight below 0."""
        given = np.asarray(weights, dtype=np.float64)
        if given.ndim != 2 or given.shape[1] != len(self) or (given < 0).any():
            raise UsageError(f"weights should be [resamples, {len(self)} images] and not negative, not {given.shape}")
        parts = [self._some(given[start : start + _BATCH]) for start in range(0, len(given), _BATCH)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """False-positive and true-positive rates [k] from 0 to 1, to plot; None without pixels of both kinds."""
        good, bad = (np.append(0.0, np.cumsum(counts.sum(axis=0)[::-1])) for counts in self._binned)
        return (good / good[-1], bad / bad[-1]) if good[-1] and bad[-1] else None

    def _some(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        good, bad = (weights @ counts for counts in self._binned)
        below = np.cumsum(good, axis=1) - good / 2
        with np.errstate(invalid="ignore"):
            return np.asarray((bad * below).sum(axis=1) / (good.sum(axis=1) * bad.sum(axis=1)))

    @cached_property
    def _binned(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Good and defective pixels, [n, bins], bins by ascending value."""
        if not self._images:
            return np.zeros((0, 1)), np.zeros((0, 1))
        every = merge(self._images)
        edges = every.values[group_starts(every, OF_ALL)]
        binned = np.zeros((2, len(self), len(edges)))
        for index, table in enumerate(self._images):
            bins = np.searchsorted(edges, table.values, side="right") - 1
            for kind, column in enumerate(table.columns):
                binned[kind, index] = np.bincount(bins, weights=column, minlength=len(edges))
        return binned[0], binned[1]

    def save(self, path: Path | str) -> None:
        """Writes all counts to one compressed npz file, which appears whole or not at all; OSError as from `open`."""
        tables = self._images or [Table(np.zeros(0, np.float32), (np.zeros(0, np.uint32),) * 2)]
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            values=np.concatenate([table.values for table in tables]),
            good=np.concatenate([table.columns[0] for table in tables]),
            bad=np.concatenate([table.columns[1] for table in tables]),
            rows=np.array([len(table) for table in self._images], dtype=np.int64),
        )
        write_bytes(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote; UsageError where the file is missing or is something else. No code in it can run."""
        try:
            with np.load(path, allow_pickle=False) as file:
                values, good, bad, rows = (file[name] for name in ("values", "good", "bad", "rows"))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UsageError(f"{path} holds no pixel counts: {error}; evaluate again to write it anew") from error
        if not len(values) == len(good) == len(bad) == rows.sum():
            raise UsageError(
                f"{path} holds no pixel counts: its arrays differ in length; evaluate again to write it anew"
            )
        counts = cls()
        ends = np.cumsum(rows)
        counts._images = [
            Table(values[start:end], (good[start:end], bad[start:end]))
            for start, end in zip(ends - rows, ends, strict=True)
        ]
        return counts


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
        """Return how far AUPRO at `limit`, and AUROC for a limit of 1, can be off: 0 while nothing was merged."""
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
