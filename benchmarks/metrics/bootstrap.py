"""How far a metric could be off because the test set is small: percentile bootstrap over images.

A resample draws as many good images from the good ones, and as many defective from the defective ones, as there are,
with replacement: the two kinds are strata, since a test set's share of defects is chosen and not found. Images are the
units, because pixels of one image are not independent. The interval lies between the quantiles of the metric over the
resamples (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3). A difference is paired: both
detectors are measured on the same resamples. With few images of a kind (below about ten) such intervals are too narrow.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdps.benchmarks.metrics import checked_scores
from mdps.runtime.errors import UsageError, require

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """The metric on the images themselves, and the ends of its confidence interval."""

    value: float
    low: float
    high: float


class Resampled(Protocol):
    """A metric of n images that can be computed again for other weights of them."""

    @property
    def defective(self) -> NDArray[np.bool_]:
        """Which images are defective, [n]."""

    def aurocs(self, weights: ArrayLike) -> NDArray[np.float64]:
        """The metric for each row of weights: [r, n] to [r]."""


class ImageScores:
    """Labels (1 = defective) and scores of n images, [n] each; UsageError as from `metrics.auroc`."""

    def __init__(self, labels: ArrayLike, scores: ArrayLike) -> None:
        self.defective, values = checked_scores(labels, scores, "images")
        self._order = np.argsort(values)
        ordered = values[self._order]
        self._starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))

    def aurocs(self, weights: ArrayLike) -> NDArray[np.float64]:
        """Image AUROC for each row of weights: [r, n] to [r]; ties count one half."""
        given = np.asarray(weights, dtype=np.float64)[:, self._order]
        defective = self.defective[self._order]
        good, bad = (np.add.reduceat(given * kind, self._starts, axis=1) for kind in (~defective, defective))
        below = np.cumsum(good, axis=1) - good / 2
        return np.asarray((bad * below).sum(axis=1) / (good.sum(axis=1) * bad.sum(axis=1)))


def bootstrap(metric: Resampled, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0) -> Interval:
    """A metric with its interval; equal seeds give equal resamples. UsageError where a kind of images is missing."""
    once, drawn = _weights(metric.defective, resamples, level, seed)
    return _interval(metric.aurocs(once)[0], metric.aurocs(drawn), level)


def bootstrap_difference(
    a: Resampled, b: Resampled, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> Interval:
    """The metric of `a` minus that of `b` (`PixelCounts` or `ImageScores` of the same images in the same order).

    UsageError where the two differ in which images are defective, or a kind of images is missing.
    """
    if not np.array_equal(a.defective, b.defective):
        sizes = [f"{len(each.defective)} images, {np.count_nonzero(each.defective)} defective" for each in (a, b)]
        raise UsageError(f"only results on the same images in one order compare: {sizes[0]}, against {sizes[1]}")
    once, drawn = _weights(a.defective, resamples, level, seed)
    return _interval(a.aurocs(once)[0] - b.aurocs(once)[0], a.aurocs(drawn) - b.aurocs(drawn), level)


def _weights(
    defective: NDArray[np.bool_], resamples: int, level: float, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Every image once, [1, n], and how often each is drawn, [resamples, n]."""
    require(resamples >= 1, f"resamples should be at least 1, not {resamples}")
    require(0 < level < 1, f"the level of an interval should lie between 0 and 1, not at {level}")
    if defective.all() or not defective.any():
        raise UsageError("an interval needs good and defective images, there is one kind only")
    generator = np.random.default_rng(seed)
    drawn = np.empty((resamples, len(defective)))
    for kind in (False, True):
        members = np.flatnonzero(defective == kind)
        drawn[:, members] = generator.multinomial(len(members), np.full(len(members), 1 / len(members)), resamples)
    return np.ones((1, len(defective))), drawn


def _interval(value: float, resampled: NDArray[np.float64], level: float) -> Interval:
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))
