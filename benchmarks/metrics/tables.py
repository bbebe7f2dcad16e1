"""Sorted tables of values with the mass that lies on each, and how to merge their rows without moving much mass.

`PixelMetrics` and `PixelCounts` keep one row for each distinct value of the maps; where those are too many, rows merge.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Table:
    """`values`: float32 [k], ascending and distinct. `columns`: arrays [k] of the masses on them, counts or weights."""

    values: NDArray[np.float32]
    columns: tuple[NDArray[Any], ...]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Cells:
    """How finely one column is to be kept: its mass, from the largest value down, is cut into `count` cells.

    Without a `knee` the cells are of equal mass. With one they grow with the mass u above them, as shares of the whole:
    none is wider than `step` (u + knee), so that ranks near the top keep a small error relative to themselves.
    """

    count: int
    knee: float | None = None

    @property
    def step(self) -> float:
        """Width of a cell as a share of the column's mass, or of (u + knee)."""
        return 1 / self.count if self.knee is None else math.expm1(math.log1p(1 / self.knee) / self.count)

    def of(self, above: NDArray[np.float64], total: float) -> NDArray[np.int64]:
        """The cell in which the mass `above` [k] of `total` ends."""
        if total <= 0:
            return np.zeros(len(above), dtype=np.int64)
        share = above / total
        if self.knee is not None:
            share = np.log1p(share / self.knee) / math.log1p(1 / self.knee)
        return np.asarray(share * self.count).astype(np.int64)


def tabulate(values: NDArray[np.float32], *columns: NDArray[Any]) -> Table:
    """The table of `values` [n] in any order, equal ones added up, with `columns` of masses [n]."""
    return _summed(values, [[column] for column in columns])


def merge(tables: Sequence[Table]) -> Table:
    """One table of the rows of `tables`, equal values added up; nothing is lost."""
    if len(tables) == 1:
        return tables[0]
    values = np.concatenate([table.values for table in tables])
    return _summed(values, [[table.columns[index] for table in tables] for index in range(len(tables[0].columns))])


def _summed(values: NDArray[np.float32], columns: list[list[NDArray[Any]]]) -> Table:
    order = np.argsort(values, kind="stable")  # fast on runs that are sorted already
    values = values[order]
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: len(values)])
    # One column at a time: only one is in memory twice.
    return Table(values[starts], tuple(_added(np.concatenate(parts)[order], starts) for parts in columns))


def _added(column: NDArray[Any], starts: NDArray[np.intp]) -> NDArray[Any]:
    """Sums of the runs that begin at `starts`; counts in the narrowest of uint32 and uint64 that holds them."""
    if len(column) == 0:
        return column
    if column.dtype.kind == "f":
        return np.asarray(np.add.reduceat(column, starts, dtype=np.float64))
    sums = np.add.reduceat(column, starts, dtype=np.uint64)
    return sums.astype(np.uint32) if sums.max() < 2**32 else sums


def compact(table: Table, cells: Sequence[Cells]) -> Table:
    """`table` with rows merged that share a cell in every column (`cells`: one for each column).

    A row that spans a border of cells stays alone, so at most 2 (sum of counts) + 1 rows are left, and no group of rows
    that merge holds more of any column than one cell. A group takes the value of its middle row: rows move, but never
    past a row of another group.
    """
    starts = group_starts(table, cells)
    middle = (starts + np.append(starts[1:], len(table)) - 1) // 2
    return Table(table.values[middle], tuple(_added(column, starts) for column in table.columns))


def group_starts(table: Table, cells: Sequence[Cells]) -> NDArray[np.intp]:
    """Index of the first row of each group that `compact` would merge, ascending."""
    begins = np.zeros(len(table), dtype=bool)
    begins[:1] = True
    for column, fineness in zip(table.columns, cells, strict=True):
        below = np.cumsum(column, dtype=np.float64)
        total = float(below[-1]) if len(below) else 0.0
        above = total - below
        upper, lower = fineness.of(above, total), fineness.of(np.append(total, above[:-1]), total)
        alone = upper != lower
        begins[1:] |= alone[1:] | alone[:-1] | (upper[1:] != upper[:-1])
    return np.flatnonzero(begins)
