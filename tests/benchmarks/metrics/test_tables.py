"""Tables keep every mass, and merge rows only within a cell."""

import numpy as np

from mdps.benchmarks.metrics.tables import Cells, compact, group_starts, merge, tabulate


def test_a_group_holds_no_more_than_a_cell_and_keeps_its_place():
    rng = np.random.default_rng(0)
    values = np.sort(rng.normal(size=20_000)).astype(np.float32)
    table = tabulate(values, rng.integers(0, 3, 20_000), (rng.random(20_000) < 0.05).astype(int))
    cells = (Cells(300, knee=1e-2), Cells(100))
    starts = group_starts(table, cells)
    smaller = compact(table, cells)
    assert len(smaller) == len(starts) <= 2 * 400 + 1
    ends = np.append(starts[1:], len(table))
    assert (np.diff(smaller.values) > 0).all()
    assert (table.values[starts] <= smaller.values).all()
    assert (smaller.values <= table.values[ends - 1]).all()
    for column, fineness, left in zip(table.columns, cells, smaller.columns, strict=True):
        assert left.sum() == column.sum()
        above = 1 - np.cumsum(left) / column.sum()
        merged = ends - starts > 1
        widest = fineness.step * (above + fineness.knee) if fineness.knee else fineness.step
        assert (left[merged] / column.sum() <= np.broadcast_to(widest, len(left))[merged] + 1e-12).all()


def test_merged_tables_are_the_table_of_all_values():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 50, (3, 200)).astype(np.float32)
    weights = rng.random((3, 200))
    ones = np.ones(200, dtype=int)
    one = merge([tabulate(row, ones, weight) for row, weight in zip(values, weights, strict=True)])
    expected, counts = np.unique(values, return_counts=True)
    assert (one.values == expected).all()
    assert (one.columns[0] == counts).all()
    np.testing.assert_allclose(one.columns[1], [weights[values == value].sum() for value in expected])


def test_counts_beyond_32_bits_do_not_overflow():
    table = tabulate(np.zeros(1, np.float32), np.array([2**32 - 1], dtype=np.uint32))
    assert merge([table, table]).columns[0] == 2**33 - 2
