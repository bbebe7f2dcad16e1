"""Intervals against scipy's bootstrap, and how often they hold the true value where it is known."""

import numpy as np
import pytest
from scipy import stats

from mdps.benchmarks import metrics
from mdps.benchmarks.metrics.bootstrap import (
    ImageScores,
    Interval,
    bootstrap,
    bootstrap_difference,
)
from mdps.benchmarks.metrics.pixels import PixelCounts
from mdps.runtime.errors import UsageError


def scores_of(rng, good=40, bad=60, shift=1.2):
    labels = np.repeat([0, 1], [good, bad])
    return labels, rng.normal(size=good + bad) + shift * labels


def counts_of(rng, good=8, bad=8, shift=1.0, level=0.0):
    """Images that differ in how well their defects stand out, as real ones do."""
    counts = PixelCounts()
    for index in range(good + bad):
        truth = np.zeros((8, 8), dtype=bool)
        truth[: 4 * (index >= good), :5] = True
        counts.add(truth, rng.normal(size=(8, 8)) + truth * (shift + level * rng.normal()))
    return counts


def test_the_value_is_the_metric_itself():
    labels, scores = scores_of(np.random.default_rng(0))
    scores = np.round(scores, 1)  # ties
    interval = bootstrap(ImageScores(labels, scores), resamples=200)
    assert interval.value == pytest.approx(metrics.auroc(labels, scores), abs=1e-12)
    assert interval.low < interval.value < interval.high


def test_a_weighted_image_is_that_image_several_times():
    rng = np.random.default_rng(0)
    labels, scores = scores_of(rng)
    scores = np.round(scores, 1)
    order = rng.permutation(len(labels))
    labels, scores = labels[order], scores[order]
    weights = rng.integers(0, 4, (3, len(labels)))
    expected = [metrics.auroc(np.repeat(labels, row), np.repeat(scores, row)) for row in weights]
    np.testing.assert_allclose(ImageScores(labels, scores).aurocs(weights), expected, atol=1e-12)


def test_the_interval_is_scipys():
    """scipy resamples the two groups on their own too, by the percentile method; 5,000 resamples leave about 2e-3."""
    labels, scores = scores_of(np.random.default_rng(1))

    def auroc(good, bad, axis=-1):
        below = (good[..., None, :] < bad[..., :, None]).mean(axis=(-1, -2))
        return below

    theirs = stats.bootstrap(
        (scores[labels == 0], scores[labels == 1]),
        auroc,
        n_resamples=5000,
        method="percentile",
        batch=250,
        rng=np.random.default_rng(5),
    ).confidence_interval
    ours = bootstrap(ImageScores(labels, scores), resamples=5000)
    assert ours.low == pytest.approx(theirs.low, abs=4e-3)
    assert ours.high == pytest.approx(theirs.high, abs=4e-3)


def test_an_interval_of_95_percent_holds_the_true_value_that_often():
    """Normal scores a distance d apart have AUROC Phi(d / sqrt 2). 300 test sets leave 1.3 percent of chance."""
    rng = np.random.default_rng(2)
    true = stats.norm.cdf(1.2 / np.sqrt(2))
    intervals = [bootstrap(ImageScores(*scores_of(rng)), resamples=300, seed=index) for index in range(300)]
    held = np.mean([interval.low <= true <= interval.high for interval in intervals])
    assert 0.90 < held < 0.985


def test_pixel_intervals_hold_the_true_value_though_pixels_of_an_image_go_together():
    """Defects of an image share a random height: drawing pixels and not images would hold it in far fewer cases."""
    rng = np.random.default_rng(3)
    true = stats.norm.cdf(1.0 / np.sqrt(2 + 0.8**2))
    intervals = [bootstrap(counts_of(rng, 20, 40, level=0.8), resamples=200, seed=index) for index in range(60)]
    held = np.mean([interval.low <= true <= interval.high for interval in intervals])
    assert held > 0.85  # three standard deviations below 0.95


def test_a_paired_difference_is_narrower_than_two_single_ones():
    """The second detector is the first and a little noise: the difference is near 0, the metrics vary far more."""
    rng = np.random.default_rng(4)
    labels, scores = scores_of(rng)
    a, b = ImageScores(labels, scores), ImageScores(labels, scores + 0.1 * rng.normal(size=len(scores)))
    difference, single = bootstrap_difference(a, b), bootstrap(a)
    assert difference.value == pytest.approx(bootstrap(a).value - bootstrap(b).value)
    assert difference.high - difference.low < 0.5 * (single.high - single.low)
    assert bootstrap_difference(a, a) == Interval(0, 0, 0)
    back = bootstrap_difference(b, a)
    assert (back.value, back.low, back.high) == pytest.approx((-difference.value, -difference.high, -difference.low))


def test_a_difference_of_pixel_metrics_is_the_difference_of_their_values():
    a, b = (counts_of(np.random.default_rng(0), shift=shift) for shift in (1.5, 1.0))
    difference = bootstrap_difference(a, b, resamples=200)
    assert difference.value == pytest.approx(a.auroc() - b.auroc())
    assert 0 < difference.low < difference.value < difference.high


def test_each_kind_is_drawn_as_often_as_there_are_images_of_it():
    labels, scores = scores_of(np.random.default_rng(0), 3, 5)
    seen = []

    class Watched(ImageScores):
        def aurocs(self, weights):
            seen.append(np.asarray(weights))
            return super().aurocs(weights)

    bootstrap(Watched(labels, scores), resamples=50)
    for weights in seen:
        assert (weights[:, labels == 0].sum(axis=1) == 3).all()
        assert (weights[:, labels == 1].sum(axis=1) == 5).all()


def test_equal_seeds_give_equal_intervals():
    counts = counts_of(np.random.default_rng(0))
    first = bootstrap(counts, resamples=100, seed=3)
    assert first == bootstrap(counts, resamples=100, seed=3)
    assert first != bootstrap(counts, resamples=100, seed=4)
    assert first.value == bootstrap(counts, resamples=100, seed=4).value


def test_a_lower_level_is_a_narrower_interval():
    labels, scores = scores_of(np.random.default_rng(0))
    wide, narrow = (bootstrap(ImageScores(labels, scores), level=level) for level in (0.95, 0.5))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_what_cannot_be_resampled_is_refused():
    labels, scores = scores_of(np.random.default_rng(0))
    with pytest.raises(UsageError, match="needs both kinds"):
        bootstrap(ImageScores(np.zeros(5), np.arange(5)))
    with pytest.raises(UsageError, match="good and defective"):
        bootstrap(counts_of(np.random.default_rng(0), bad=0))
    with pytest.raises(UsageError, match="good and defective"):
        bootstrap(PixelCounts())
    with pytest.raises(UsageError, match=r"same images.*100 images, 60 defective.*99 images, 59 defective"):
        bootstrap_difference(ImageScores(labels, scores), ImageScores(labels[:-1], scores[:-1]))
    with pytest.raises(UsageError, match="resamples"):
        bootstrap(ImageScores(labels, scores), resamples=0)
    with pytest.raises(UsageError, match="level"):
        bootstrap(ImageScores(labels, scores), level=1.0)
