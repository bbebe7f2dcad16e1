"""Detection and localisation metrics, as MVTec AD papers report them, by scikit-learn.

Scores are float arrays (larger = more anomalous), labels bool or 0/1 arrays (1 = defective).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

from mdps.runtime.errors import UsageError


def auroc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve over [n] images; ties count one half."""
    return float(roc_auc_score(*checked_scores(labels, scores, "images")))


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """Average precision over [n] images: the step-wise area under the precision-recall curve."""
    return float(average_precision_score(*checked_scores(labels, scores, "images")))


def f1_max(labels: ArrayLike, scores: ArrayLike) -> float:
    """Largest F1 over all thresholds for [n] images."""
    precision, recall, _ = precision_recall_curve(*checked_scores(labels, scores, "images"))
    return float(np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12)))


def pixel_auroc(masks: ArrayLike, maps: ArrayLike) -> float:
    """Area under the ROC curve over the pixels of all images at once: masks and maps of one shape, [n, H, W] say."""
    return float(roc_auc_score(*checked_scores(masks, maps, "pixels")))


def checked_scores(labels: ArrayLike, scores: ArrayLike, what: str) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Flat arrays fit for a metric; UsageError if shapes differ, a score is not finite, or there is one class only."""
    truth, values = np.asarray(labels), np.asarray(scores, dtype=np.float64)
    if truth.shape != values.shape:
        raise UsageError(f"labels {truth.shape} and scores {values.shape} of the {what} differ in shape")
    if not np.isin(truth, (0, 1)).all():
        raise UsageError(f"labels of the {what} must be 0 (good) or 1 (defective)")
    if not np.isfinite(values).all():
        bad = int(np.count_nonzero(~np.isfinite(values)))
        raise UsageError(f"{bad} of {values.size} scores of the {what} are NaN or infinite")
    truth = truth.astype(bool)
    if truth.all() or not truth.any():
        raise UsageError(
            f"all {truth.size} {what} are {'defective' if truth.size and truth.all() else 'good'}; "
            "the metric needs both kinds"
        )
    return truth.ravel(), values.ravel()
