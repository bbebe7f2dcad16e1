"""Metrics of each kind of defect by itself, against all good images: they tell where a mean comes from."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mdps.benchmarks.counts import PixelCounts
from mdps.benchmarks.metrics import auroc

HEADS = ("kind of defect", "images", "image AUROC", "pixel AUROC")


@dataclass(frozen=True)
class KindMetrics:
    """One kind of defect: how many images were judged, image and pixel AUROC (NaN where undefined)."""

    kind: str
    images: int
    image_auroc: float
    pixel_auroc: float

    def to_json(self) -> dict[str, Any]:
        """The fields, null where undefined."""
        return {name: None if value != value else value for name, value in asdict(self).items()}

    def cells(self) -> tuple[str, ...]:
        """Texts under HEADS, empty where undefined."""
        aurocs = ("" if math.isnan(value) else f"{value:.4f}" for value in (self.image_auroc, self.pixel_auroc))
        return (self.kind, str(self.images), *aurocs)


def by_kind(
    judged: Sequence[tuple[str, bool, float]], counts: PixelCounts, counted: Sequence[tuple[str, bool]]
) -> tuple[KindMetrics, ...]:
    """Each kind of defect in `judged` (kind, whether defective, score) against the good images, by name.

    `counted` has kind and whether defective of each image in `counts`. Pixel AUROC compares the defect's pixels with
    all others of its images and of the good ones. Empty where there is one kind only: it would say what the whole says.
    """
    kinds = sorted({kind for kind, defective, _ in judged if defective})
    if len(kinds) < 2:
        return ()
    return tuple(_one(kind, judged, counts, counted) for kind in kinds)


def _one(
    kind: str,
    judged: Sequence[tuple[str, bool, float]],
    counts: PixelCounts,
    counted: Sequence[tuple[str, bool]],
) -> KindMetrics:
    own = [(defective, score) for name, defective, score in judged if name == kind or not defective]
    labels, scores = [label for label, _ in own], [score for _, score in own]
    weights = np.array([name == kind or not defective for name, defective in counted], dtype=np.float64)
    image = auroc(labels, scores) if len(set(labels)) == 2 else math.nan
    return KindMetrics(kind, sum(labels), image, counts.auroc(weights) if len(weights) else math.nan)
