"""Plots of an evaluation: ROC curves of images and pixels, and histograms of the scores with the threshold."""

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import precision_recall_curve, roc_curve

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""False-positive rates and true-positive rates, both [n] and rising."""


def image_curve(labels: ArrayLike, scores: ArrayLike) -> Curve:
    """The ROC curve of images of both kinds."""
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    return false, true


def best_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """The score above or at which F1 is largest, for images of both kinds; half-way to the next lower score.

    The middle is what a detector with "score > threshold" would be given, and the margins of the images mean something.
    """
    precision, recall, thresholds = precision_recall_curve(labels, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    chosen = thresholds[int(np.argmax(f1[:-1]))]
    values = np.asarray(scores, dtype=np.float64)
    below = values[values < chosen]
    return float((chosen + below.max()) / 2) if below.size else float(chosen) - 1e-12


def roc_plot(curves: Sequence[tuple[str, Curve]]) -> bytes:
    """PNG of the named curves, the whole and its upper left corner."""
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    whole, corner = figure.subplots(1, 2)
    for axes in (whole, corner):
        for name, (false, true) in curves:
            axes.plot(false, true, label=name)
        axes.set_xlabel("false-positive rate")
        axes.grid(alpha=0.3)
    whole.plot([0, 1], [0, 1], color="0.7", linewidth=1, linestyle="--")
    whole.set(ylabel="true-positive rate", xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), title="ROC")
    corner.set(xlim=(-0.002, 0.2), ylim=(0.6, 1.005), title="its upper left corner")
    whole.legend(loc="lower right")
    return _png(figure)


def scores_plot(
    good: Sequence[float], defective: Sequence[float], lines: Sequence[tuple[str, float]], title: str
) -> bytes:
    """PNG of both kinds' score histograms on the same bins, a vertical line at each named threshold."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    axes = figure.subplots()
    together = [*good, *defective, *(value for _, value in lines)]
    bins = np.linspace(min(together), max(together) + 1e-9, 41).tolist()
    for scores, name, colour in ((good, "good", "tab:green"), (defective, "defective", "tab:red")):
        if scores:
            axes.hist(scores, bins=bins, alpha=0.6, color=colour, label=f"{len(scores)} {name}")
    for (name, value), style in zip(lines, ("-", "--"), strict=False):
        axes.axvline(value, color="black", linestyle=style, label=f"{name} {value:.4g}")
    axes.set(xlabel="anomaly score", ylabel="images", title=title)
    axes.legend()
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
