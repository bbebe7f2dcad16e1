"""Pixel metrics against scikit-learn on all pixels at once and against AUPRO written out over all thresholds."""

import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from scipy.ndimage import label
from sklearn.metrics import average_precision_score, roc_auc_score

from mdps.benchmarks.metrics.pixels import PixelMetrics
from mdps.benchmarks.metrics.tables import Cells
from mdps.runtime.errors import UsageError

LIMITS = (0.3, 0.05, 1.0)
COARSE = (Cells(2**12, knee=1e-3), Cells(2**11), Cells(2**11))


def coarse():
    """Merges rows after 8,192 of them, as the default does after four million."""
    return PixelMetrics(capacity=2**13, cells=COARSE)


def aupro_over_all_thresholds(truths, maps, limit):
    """By the definition: for every threshold, which pixels lie at or above it, region by region."""
    regions = []
    for truth, values in zip(truths, maps, strict=True):
        labels, count = label(truth, structure=np.ones((3, 3)))
        regions += [np.sort(values[labels == index]) for index in range(1, count + 1)]
    normal = np.sort(np.concatenate([values[~truth] for truth, values in zip(truths, maps, strict=True)]))
    thresholds = np.unique(np.concatenate([values.ravel() for values in maps]))[::-1]

    def share_above(values):
        return 1 - np.searchsorted(values, thresholds, side="left") / len(values)

    rate = np.append(0, share_above(normal))
    overlap = np.append(0, sum(share_above(region) for region in regions) / len(regions))
    area = 0.0
    for x0, x1, y0, y1 in zip(rate, rate[1:], overlap, overlap[1:], strict=False):
        if x0 >= limit:
            break
        end = min(x1, limit)
        if x1 > x0:
            area += (end - x0) * (y0 + y0 + (y1 - y0) * (end - x0) / (x1 - x0)) / 2
    return area / limit


def test_the_reference_finds_what_is_counted_by_hand():
    """Two regions of 1 and 2 pixels, four good pixels; areas read off the curve on paper."""
    truth = np.array([[1, 0, 1, 1], [0, 0, 0, 0]], dtype=bool)[:, :4]
    values = np.array([[9, 7, 8, 1], [6, 5, 4, 3]], dtype=np.float32)
    # above 8: both regions' shares 1 and 1/2 at rate 0; the last pixel of the second is found at rate 1 only
    assert aupro_over_all_thresholds([truth], [values], 0.4) == pytest.approx(0.75)
    metrics = PixelMetrics()
    metrics.add(truth, values)
    assert metrics.aupro(0.4) == pytest.approx(0.75)
    assert metrics.aupro(1.0) == pytest.approx(0.75)


def test_pixels_that_touch_at_a_corner_are_one_region():
    truth = np.zeros((5, 5), dtype=bool)
    truth[0, 0] = truth[1, 1] = truth[4, 4] = True
    values = np.zeros((5, 5), dtype=np.float32)
    values[4, 4] = 1  # one region of two is found before any good pixel: a half, a third if there were three
    metrics = PixelMetrics()
    metrics.add(truth, values)
    # the other half comes at the last threshold, along a line from rate 0 to 1
    assert metrics.aupro(0.5) == pytest.approx(0.5 + 0.5 * 0.25)


def defects(rng, count=40, side=64):
    truths = np.zeros((count, side, side), dtype=bool)
    for truth in truths[::2]:
        for _ in range(3):
            y, x, h, w = rng.integers(0, 40, 4)
            truth[y : y + h // 2 + 1, x : x + w // 2 + 1] = True
    return truths


def smooth(rng, truths):
    return rng.normal(size=truths.shape) + truths


def ties(rng, truths):
    return np.round(smooth(rng, truths))


def narrow(rng, truths):
    return 0.5 + 1e-4 * (rng.random(truths.shape) + truths) / 2


def outliers(rng, truths):
    maps = smooth(rng, truths)
    maps[rng.random(maps.shape) < 1e-3] = 1e6
    return maps


def negative(rng, truths):
    return -np.exp(smooth(rng, ~truths))


def rising(rng, truths):
    """Each map lies above the one before: what comes early says nothing of what comes late."""
    return smooth(rng, truths) + np.arange(len(truths))[:, None, None]


def narrow_after_wide(rng, truths):
    maps = rng.random(truths.shape) + 0.2 * truths
    maps[len(maps) // 8 :] = 0.5 + 1e-3 * maps[len(maps) // 8 :]
    return maps


def tiny(rng, truths):
    """Values down to where float32 loses digits."""
    return 1e-40 * (1 + rng.random(truths.shape) + truths)


def constant(rng, truths):
    return np.full(truths.shape, 0.25)


def log_scale(rng, truths):
    return 10.0 ** (rng.uniform(-30, 30, truths.shape) + 3 * truths)


@pytest.fixture(
    params=[smooth, ties, narrow, outliers, negative, rising, narrow_after_wide, tiny, constant, log_scale],
    ids=lambda make: make.__name__,
)
def scored(request):
    rng = np.random.default_rng(7)
    truths = defects(rng)
    return truths, request.param(rng, truths).astype(np.float32)


def added(metrics, scored):
    for truth, values in zip(*scored, strict=True):
        metrics.add(truth, values)
    return metrics


def test_metrics_are_exact_while_no_rows_are_merged(scored):
    metrics = added(PixelMetrics(), scored)
    truths, maps = scored
    assert metrics.auroc() == pytest.approx(roc_auc_score(truths.ravel(), maps.ravel()), abs=1e-12)
    assert metrics.average_precision() == pytest.approx(
        average_precision_score(truths.ravel(), maps.ravel()), abs=1e-12
    )
    for limit in LIMITS:
        assert metrics.aupro(limit) == pytest.approx(aupro_over_all_thresholds(truths, maps, limit), abs=1e-9)
        assert metrics.error_bound(limit) == 0


def test_metrics_stay_within_the_bound_when_rows_are_merged(scored):
    """Cells 256 times coarser than the default's: far within the bound, and in practice below 1e-4 even so."""
    exact, metrics = added(PixelMetrics(), scored), added(coarse(), scored)
    errors = {limit: abs(metrics.aupro(limit) - exact.aupro(limit)) for limit in LIMITS}
    errors["auroc"] = abs(metrics.auroc() - exact.auroc())
    errors["ap"] = abs(metrics.average_precision() - exact.average_precision())
    assert max(errors.values()) < 1e-4, errors
    assert errors["auroc"] <= metrics.error_bound()
    assert all(errors[limit] <= metrics.error_bound(limit) for limit in LIMITS)
    distinct = len(np.unique(scored[1]))
    assert (metrics.error_bound() > 0) == (distinct > 2**13)


def test_the_default_promises_less_than_a_ten_thousandth_for_two_thousand_maps():
    """The bound for as many compactions as 2,000 maps of 256 x 256 cause: 2,000 / 64 tables, merged two by two."""
    metrics = PixelMetrics()
    metrics._compacted = [None] * (1 + math.floor(math.log2(2000 * 256**2 / 2**22)))
    assert 0 < max(metrics.error_bound(limit) for limit in LIMITS) < 1e-4


def test_a_pixel_alone_among_millions_is_a_defect_still_found():
    """Defects of one pixel in one map of many: rare ranks are kept apart."""
    rng = np.random.default_rng(3)
    truths = np.zeros((60, 64, 64), dtype=bool)
    truths[5, 10, 10] = truths[30, 3, 3] = True
    maps = rng.normal(size=truths.shape).astype(np.float32)
    maps[5, 10, 10], maps[30, 3, 3] = 3.9, 2.5
    metrics = added(coarse(), (truths, maps))
    assert metrics.auroc() == pytest.approx(roc_auc_score(truths.ravel(), maps.ravel()), abs=1e-5)
    assert metrics.average_precision() == pytest.approx(average_precision_score(truths.ravel(), maps.ravel()), abs=1e-4)


def test_the_order_of_maps_does_not_matter_while_exact(scored):
    forth = added(PixelMetrics(), scored)
    back = added(PixelMetrics(), (scored[0][::-1], scored[1][::-1]))
    assert forth.aupro(0.3) == pytest.approx(back.aupro(0.3), abs=1e-12)
    assert forth.auroc() == pytest.approx(back.auroc(), abs=1e-12)


def test_reading_a_metric_between_maps_changes_nothing(scored):
    once, often = coarse(), coarse()
    for truth, values in zip(*scored, strict=True):
        once.add(truth, values)
        often.add(truth, values)
        often.auroc()
    assert once.auroc() == often.auroc()
    assert once.aupro(0.3) == often.aupro(0.3)


def test_memory_does_not_grow_with_the_number_of_maps():
    rng = np.random.default_rng(0)
    truth = np.zeros((64, 64), dtype=bool)
    truth[:9, :9] = True

    def peak(maps):
        metrics = coarse()
        tracemalloc.start()
        for _ in range(maps):
            metrics.add(truth, rng.normal(size=truth.shape).astype(np.float32))
        metrics.auroc()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    few, many = peak(32), peak(256)
    assert many < 1.6 * few  # three more tables, where all values would take eight times as much
    assert few < 5e6


def test_what_is_undefined_is_no_number_and_no_error():
    metrics = PixelMetrics()
    assert math.isnan(metrics.auroc())
    metrics.add(np.zeros((4, 4), dtype=bool), np.arange(16, dtype=np.float32).reshape(4, 4))
    assert math.isnan(metrics.auroc())
    only_bad = PixelMetrics()
    only_bad.add(np.ones((4, 4), dtype=bool), np.zeros((4, 4), dtype=np.float32))
    assert math.isnan(only_bad.auroc())


def test_average_precision_and_aupro_need_what_they_measure():
    metrics = PixelMetrics()
    assert math.isnan(metrics.average_precision())
    assert math.isnan(metrics.aupro(0.3))
    metrics.add(np.zeros((4, 4), dtype=bool), np.zeros((4, 4), dtype=np.float32))
    assert math.isnan(metrics.average_precision())
    assert math.isnan(metrics.aupro(0.3))
    only_bad = PixelMetrics()
    only_bad.add(np.ones((4, 4), dtype=bool), np.zeros((4, 4), dtype=np.float32))
    assert math.isnan(only_bad.aupro(0.3))
    assert only_bad.average_precision() == 1.0  # every pixel found is a defect, as scikit-learn has it


@pytest.mark.parametrize(
    ("truth", "values", "says"),
    [
        (np.zeros((2, 2)), np.zeros((2, 3)), "should both be"),
        (np.zeros(4), np.zeros(4), "should both be"),
        (np.zeros((0, 4)), np.zeros((0, 4)), "should both be"),
        (np.zeros((2, 2)), np.array([[0, 1], [np.nan, 2]]), "1 of 4 values"),
        (np.zeros((2, 2)), np.array([[0, 1], [np.inf, 1e300]]), "2 of 4 values"),
    ],
)
def test_what_is_no_map_is_refused_and_counts_nothing(truth, values, says):
    metrics = PixelMetrics()
    with pytest.raises(UsageError, match=says):
        metrics.add(truth, values)
    assert math.isnan(metrics.auroc())


@pytest.mark.parametrize("limit", [0, -0.1, 1.1, math.nan])
def test_limits_of_no_curve_are_refused(limit):
    with pytest.raises(UsageError, match="limit of AUPRO"):
        PixelMetrics().aupro(limit)


def test_aupro_of_anomalib_is_the_same():
    pytest.importorskip("anomalib")
    import torch
    from anomalib.metrics.aupro import _AUPRO

    rng = np.random.default_rng(1)
    truths = defects(rng, 8, 48)
    maps = np.round(rng.normal(size=truths.shape) + truths, 2).astype(np.float32)
    ours = added(PixelMetrics(), (truths, maps))
    for limit in (0.3, 0.05):
        theirs = _AUPRO(fpr_limit=limit)
        theirs.update(torch.from_numpy(maps), torch.from_numpy(truths).float())
        assert ours.aupro(limit) == pytest.approx(float(theirs.compute()), abs=1e-5)  # they add up in float32


# Maps of whole numbers, so that a count of each number gives the exact metrics of any number of maps.
MANY = """
import resource
import numpy as np
from scipy.ndimage import label

def image(index):
    rng = np.random.default_rng(index)
    values = rng.standard_normal((256, 256), dtype=np.float32) + np.float32(index % 7 * 0.05)
    truth = np.zeros((256, 256), dtype=bool)
    if index % 2:
        y, x, h, w = rng.integers(1, 100, 4)
        truth[y : y + h, x : x + w] = True
        truth[250, 200 : 200 + index % 40] = True
        values[truth] += np.float32(1.2)
    return truth, np.clip(np.rint((values + 6) * 2**20), 0, 2**24 - 1).astype(np.float32)
"""
OURS = """
from mdps.benchmarks.metrics.pixels import PixelMetrics
metrics = PixelMetrics()
for index in range(2000):
    metrics.add(*image(index))
print(metrics.auroc(), metrics.average_precision(), metrics.aupro(0.3), metrics.aupro(0.05))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
COUNTED = """
good, bad, overlap, regions = np.zeros(2**24), np.zeros(2**24), np.zeros(2**24), 0
for index in range(2000):
    truth, values = image(index)
    level = values.astype(np.int64)
    np.add.at(good, level[~truth], 1)
    np.add.at(bad, level[truth], 1)
    labels, count = label(truth, np.ones((3, 3)))
    regions += count
    np.add.at(overlap, level[truth], 1 / np.bincount(labels.ravel())[labels[truth]])
good, bad, overlap = good[::-1], bad[::-1], overlap[::-1]
hits, rate, found = np.cumsum(bad), np.cumsum(good) / good.sum(), np.cumsum(overlap) / regions
precision = hits / np.maximum(hits + np.cumsum(good), 1)
def area(limit):
    inside = rate <= limit
    x = np.append(np.append(0, rate[inside]), limit)
    y = np.append(np.append(0, found[inside]), np.interp(limit, rate, found))
    return (np.diff(x) * (y[1:] + y[:-1]) / 2).sum() / limit
auroc = (bad * (1 - rate + good / good.sum() / 2)).sum() / bad.sum()
print(auroc, (bad * precision).sum() / bad.sum(), area(0.3), area(0.05))
"""


@pytest.mark.slow
def test_two_thousand_maps_need_less_than_a_gigabyte():
    """131 million pixels, 16 million distinct values: several times what is kept exactly."""

    def run(script):
        done = subprocess.run([sys.executable, "-c", MANY + script], check=True, capture_output=True, text=True)
        return [float(number) for number in done.stdout.split()]

    *ours, kilobytes = run(OURS)
    np.testing.assert_allclose(ours, run(COUNTED), atol=1e-6, rtol=0)
    assert kilobytes < 1e9 / 1024
