"""Regions of maps against scipy's labels, and where they come to lie on a photograph."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mdps.runtime.regions import MOST, Region, find

ndimage = pytest.importorskip("scipy.ndimage")


def by_scipy(values, limit):
    labels, _ = ndimage.label(values > limit, structure=np.ones((3, 3)))
    found = []
    for index, (rows, columns) in enumerate(ndimage.find_objects(labels), 1):
        box = (columns.start, rows.start, columns.stop - columns.start, rows.stop - rows.start)
        inside = labels == index
        found.append((box, int(inside.sum()), float(values[inside].max())))
    return sorted(found)


def as_tuples(regions):
    return sorted((one.box, one.area, one.peak) for one in regions)


@given(arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.sampled_from([0, 1, 2, 3])))
def test_small_maps_have_the_components_that_scipy_finds(values):
    found = find(values, 1.0)
    assert as_tuples(found) == by_scipy(values, 1.0)
    assert all(values[one.at[1], one.at[0]] == one.peak for one in found)
    assert [one.peak for one in found] == sorted((one.peak for one in found), reverse=True)


@pytest.mark.parametrize("turned", [False, True])
def test_corners_connect_and_a_gap_of_a_pixel_does_not(turned):
    values = np.float32([[2, 0, 0, 2], [0, 2, 0, 0], [0, 0, 0, 2]])
    found = find(values[:, ::-1] if turned else values, 1.0)
    assert sorted(one.area for one in found) == [1, 1, 2]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.45, 0.6])
def test_large_maps_with_long_winding_components_too(share):
    values = np.random.default_rng(3).random((150, 211), dtype=np.float32)
    whole = by_scipy(values, 1 - share)
    found = find(values, 1 - share)
    assert len(found) == min(MOST, len(whole))
    assert set(as_tuples(found)) <= set(whole)
    assert sorted(one.peak for one in found) == sorted(peak for _, _, peak in whole)[-MOST:]


def test_a_region_lies_on_the_photograph_where_the_map_shows_it():
    values = np.zeros((4, 8), np.float32)
    values[1, 2:4], values[2, 4] = 5, 7
    (one,) = find(values, 1.0, (100.0, 50.0, 180.0, 70.0), mm_per_pixel=0.5)
    assert one == Region(box=(120, 55, 30, 10), area=150, peak=7.0, at=(145, 62), mm_per_pixel=0.5)
    assert one.to_json() == {
        "box": [120, 55, 30, 10], "area": 150, "peak": 7.0, "at": [145, 62],
        "box_mm": [60.0, 27.5, 15.0, 5.0], "area_mm2": 37.5,
    }  # fmt: skip


def test_a_box_holds_every_pixel_that_a_part_of_the_map_covers():
    values = np.zeros((3, 3), np.float32)
    values[1, 1] = 2
    (one,) = find(values, 1.0, (0.0, 0.0, 10.0, 10.0))
    assert (one.box, one.area, one.at) == ((3, 3, 4, 4), 11, (5, 5))


def test_the_limit_itself_is_good_and_so_is_an_empty_map():
    assert find(np.full((3, 3), 1, np.float32), 1.0) == ()
    assert len(find(np.full((3, 3), 1.001, np.float32), 1.0)) == 1
