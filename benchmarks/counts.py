"""What a bootstrap of pixel AUROC resamples: how many good and defective pixels each image has at each level."""

import io
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdps.benchmarks.pixels import checked
from mdps.benchmarks.tables import Cells, Table, compact, group_starts, merge, tabulate
from mdps.runtime.atomic import write_bytes
from mdps.runtime.errors import UsageError

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
        """The same for many weightings at once: weights [r, n] to AUROC [r].

        Raises:
            UsageError: `weights` has another shape, or one below 0.
        """
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
        """What `save` wrote; UsageError where the file is missing or is something else. No code in it can run."""
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
