"""Counts of images against scikit-learn on the pixels of those images, repeated as their weights say."""

import math

import numpy as np
import pytest
from sklearn.metrics import auc, roc_auc_score

from mdps.benchmarks.metrics.pixels import PixelCounts
from mdps.runtime.errors import UsageError


@pytest.fixture(params=["smooth", "ties", "narrow", "outliers", "rising"])
def scored(request):
    """Masks and maps [20, 96, 96]: more distinct values than bins, but for the ties."""
    rng = np.random.default_rng(7)
    truths = np.zeros((20, 96, 96), dtype=bool)
    for truth in truths[::2]:
        y, x, h, w = rng.integers(1, 40, 4)
        truth[y : y + h, x : x + w] = True
    maps = rng.normal(size=truths.shape) + truths
    if request.param == "ties":
        maps = np.round(maps)
    if request.param == "narrow":
        maps = 0.5 + 1e-5 * maps
    if request.param == "outliers":
        maps[rng.random(maps.shape) < 1e-3] = 1e6
    if request.param == "rising":
        maps += np.arange(20)[:, None, None]
    return truths, maps.astype(np.float32)


def added(counts, scored):
    for truth, values in zip(*scored, strict=True):
        counts.add(truth, values)
    return counts


def test_counts_give_the_metric_of_weighted_images(scored):
    truths, maps = scored
    counts = added(PixelCounts(), scored)
    weights = np.random.default_rng(0).integers(0, 3, len(truths))
    again = np.repeat(np.arange(len(truths)), weights)
    assert counts.auroc() == pytest.approx(roc_auc_score(truths.ravel(), maps.ravel()), abs=5e-5)
    assert counts.auroc(weights) == pytest.approx(roc_auc_score(truths[again].ravel(), maps[again].ravel()), abs=5e-5)
    assert len(counts) == len(truths)
    assert (counts.defective == truths.any(axis=(1, 2))).all()


def test_many_weightings_at_once_are_each_alone(scored):
    counts = added(PixelCounts(), scored)
    weights = np.random.default_rng(0).integers(0, 3, (70, len(counts)))
    np.testing.assert_allclose(counts.aurocs(weights)[::23], [counts.auroc(row) for row in weights[::23]], rtol=1e-12)


@pytest.mark.parametrize("weights", [np.ones(3), np.ones((2, 4)), -np.ones((1, 2))])
def test_weights_that_fit_no_images_are_refused(weights):
    counts = PixelCounts()
    for _ in range(2):
        counts.add(np.eye(3, dtype=bool), np.eye(3))
    with pytest.raises(UsageError, match="weights should be"):
        counts.aurocs(weights)


def test_the_curve_of_counts_encloses_their_area(scored):
    counts = added(PixelCounts(), scored)
    rate, found = counts.curve()
    assert (rate[0], found[0], rate[-1], found[-1]) == (0, 0, 1, 1)
    assert auc(rate, found) == pytest.approx(counts.auroc(), abs=1e-12)
    assert PixelCounts().curve() is None


def test_counts_come_back_from_their_file(scored, tmp_path):
    counts = added(PixelCounts(), scored)
    counts.save(tmp_path / "counts.npz")
    back = PixelCounts.load(tmp_path / "counts.npz")
    assert back.auroc() == counts.auroc()
    assert (back.defective == counts.defective).all()
    assert [file.name for file in tmp_path.iterdir()] == ["counts.npz"]
    PixelCounts().save(tmp_path / "none.npz")
    assert len(PixelCounts.load(tmp_path / "none.npz")) == 0


def test_other_files_are_refused_as_counts(tmp_path):
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "other.npz", values=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", **dict.fromkeys(("values", "good", "bad", "rows"), np.array([{}], dtype=object)))
    lengths = {"values": np.zeros(3), "good": np.zeros(3), "bad": np.zeros(2), "rows": np.array([3])}
    np.savez(tmp_path / "cut.npz", **lengths)
    for name in ("text.npz", "other.npz", "pickled.npz", "cut.npz", "absent.npz"):
        with pytest.raises(UsageError, match=f"{name} holds no pixel counts"):
            PixelCounts.load(tmp_path / name)


def test_what_is_undefined_is_no_number_and_no_error():
    counts = PixelCounts()
    assert math.isnan(counts.auroc())
    counts.add(np.zeros((4, 4), dtype=bool), np.arange(16).reshape(4, 4))
    assert math.isnan(counts.auroc())
    only_bad = PixelCounts()
    only_bad.add(np.ones((4, 4), dtype=bool), np.zeros((4, 4)))
    assert math.isnan(only_bad.auroc())


def test_what_is_no_map_is_refused_and_counts_nothing():
    counts = PixelCounts()
    with pytest.raises(UsageError, match="should both be"):
        counts.add(np.zeros((2, 2)), np.zeros((2, 3)))
    with pytest.raises(UsageError, match="1 of 4 values"):
        counts.add(np.zeros((2, 2)), np.array([[0, 1], [np.nan, 2]]))
    assert len(counts) == 0
