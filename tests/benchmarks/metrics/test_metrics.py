"""Metrics against their definitions, counted by hand."""

import numpy as np
import pytest

from mdps.benchmarks import metrics
from mdps.runtime.errors import UsageError


@pytest.fixture
def scored() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 40)
    return labels, np.round(labels + rng.normal(0, 1, 40), 1)  # rounded: there are ties


def test_auroc_is_the_share_of_pairs_in_the_right_order(scored):
    labels, scores = scored
    bad, good = scores[labels == 1][:, None], scores[labels == 0][None]
    assert metrics.auroc(labels, scores) == pytest.approx(((bad > good) + 0.5 * (bad == good)).mean())


def test_average_precision_and_f1_over_all_thresholds(scored):
    labels, scores = scored
    rows = []
    for threshold in np.unique(scores)[::-1]:
        found = scores >= threshold
        hits = (found & (labels == 1)).sum()
        rows.append((hits / found.sum(), hits / labels.sum()))
    precision, recall = np.array(rows).T
    assert metrics.average_precision(labels, scores) == pytest.approx((np.diff(recall, prepend=0) * precision).sum())
    assert metrics.f1_max(labels, scores) == pytest.approx(np.nanmax(2 * precision * recall / (precision + recall)))


def test_pixel_auroc_counts_all_pixels_at_once():
    masks = np.zeros((2, 4, 4), dtype=bool)
    masks[0, :2] = True
    maps = np.where(masks, 0.6, 0.5).astype(np.float32)
    assert metrics.pixel_auroc(masks, maps) == 1.0
    maps[1] += 0.2  # the whole good image now lies above the defect: 16 of the 24 good pixels
    assert metrics.pixel_auroc(masks, maps) == pytest.approx(8 / 24)


@pytest.mark.parametrize("measure", [metrics.auroc, metrics.average_precision, metrics.f1_max, metrics.pixel_auroc])
@pytest.mark.parametrize(
    ("labels", "scores", "says"),
    [
        ([0, 0, 0], [1.0, 2.0, 3.0], "3 .* are good"),
        ([1, 1], [1.0, 2.0], "2 .* are defective"),
        ([0, 1], [1.0, 2.0, 3.0], "differ in shape"),
        ([0, 1], [np.nan, 2.0], "1 of 2 scores"),
        ([0, 255], [1.0, 2.0], "must be 0"),
        ([], [], "needs both kinds"),
    ],
)
def test_what_has_no_value_is_an_error(measure, labels, scores, says):
    with pytest.raises(UsageError, match=says):
        measure(labels, scores)
