"""Recall and precision of listed regions, by size, on maps where they can be counted by hand."""

import numpy as np
import pytest

from mdps.benchmarks.metrics.found import RegionCounts, cells


def image(*boxes, side=100, value=1):
    pixels = np.zeros((side, side), np.float32)
    for left, top, width, height in boxes:
        pixels[top : top + height, left : left + width] = value
    return pixels


def test_defects_are_found_and_regions_right_where_they_share_a_pixel():
    counts = RegionCounts()
    truth = image((10, 10, 5, 5), (60, 60, 10, 10), (0, 90, 30, 10)) > 0  # 25, 100 and 300 of 10,000 pixels
    counts.add(truth, image((14, 14, 2, 2), (30, 0, 20, 10), (10, 80, 20, 15), value=3), 2.0)
    counts.add(np.zeros((100, 100), bool), image((5, 5, 1, 1), value=2.1), 2.0)
    counts.add(np.zeros((100, 100), bool), image((5, 5, 1, 1), value=2.0), 2.0)
    found = counts.to_json()
    assert found["small"] == {"defects": 1, "found": 1, "recall": 1, "regions": 2, "right": 1, "precision": 0.5}
    assert found["medium"] == {"defects": 1, "found": 0, "recall": 0, "regions": 1, "right": 0, "precision": 0}
    assert found["large"] == {"defects": 1, "found": 1, "recall": 1, "regions": 1, "right": 1, "precision": 1}
    assert found["all"] == {
        "defects": 3, "found": 2, "recall": pytest.approx(2 / 3), "regions": 4, "right": 2, "precision": 0.5,
    }  # fmt: skip
    assert (found["good"], found["good_with_regions"]) == (2, 1)
    assert next(cells(found)) == ("small", "1", "1", "1.000", "2", "1", "0.500")


def test_a_coarse_map_lies_over_the_truth_pixel_by_pixel():
    counts = RegionCounts()
    coarse = image((2, 3, 1, 1), side=10)
    for left, met in ((29, 1), (30, 0), (20, 1), (19, 0)):
        counts = RegionCounts()
        counts.add(image((left, 35, 1, 1)) > 0, coarse, 0.5)
        assert counts.to_json()["all"]["found"] == met
    assert counts.to_json()["all"]["recall"] == 0
    assert RegionCounts().to_json()["all"]["recall"] is None
