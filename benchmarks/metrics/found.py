"""Regions that a detector lists beside the defects of the ground truth: how many are found, how many are right."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.data.samples import scaled_to

SIZES = {"small": 0.0025, "medium": 0.02, "large": 1.0}
"""Up to which share of the image."""
HEADS = ("size of defect or region", "defects", "found", "recall", "regions", "right", "precision")
_KEYS = ("defects", "found", "regions", "right")


class RegionCounts:
    """Counts by size. A defect is found, and a region right, that has a pixel in common with one of the others."""

    def __init__(self) -> None:
        self._counts = {size: dict.fromkeys(_KEYS, 0) for size in SIZES}
        self._good = self._empty = 0

    def add(self, truth: NDArray[np.bool_], anomaly_map: NDArray[np.float32], limit: float) -> None:
        """Count an image: `truth` bool [H, W], a map [h, w] of the same place, above whose `limit` regions lie."""
        hot = scaled_to(anomaly_map > limit, truth.shape)
        for parts, others, number, met in ((truth, hot, "defects", "found"), (hot, truth, "regions", "right")):
            for size, hit in _parts(parts, others):
                self._counts[size][number] += 1
                self._counts[size][met] += hit
        self._good += not truth.any()
        self._empty += not truth.any() and not hot.any()

    def to_json(self) -> dict[str, Any]:
        """Return counts, recall and precision of each size and of all, and of the good images how many have regions."""
        sizes = {**self._counts, "all": {key: sum(one[key] for one in self._counts.values()) for key in _KEYS}}
        found: dict[str, Any] = {
            size: {
                **one,
                "recall": _share(one["found"], one["defects"]),
                "precision": _share(one["right"], one["regions"]),
            }
            for size, one in sizes.items()
        }
        return {**found, "good": self._good, "good_with_regions": self._good - self._empty}


def cells(counted: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield texts under HEADS for each size and for all."""
    for size in (*SIZES, "all"):
        one = counted[size]
        recall, precision = ("" if one[key] is None else f"{one[key]:.3f}" for key in ("recall", "precision"))
        yield size, *(str(one[key]) for key in _KEYS[:2]), recall, *(str(one[key]) for key in _KEYS[2:]), precision


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _parts(parts: NDArray[np.bool_], others: NDArray[np.bool_]) -> Iterator[tuple[str, bool]]:
    """Yield the size of each connected part, corners included, and whether it has a pixel in common with the others."""
    from skimage.measure import label

    labels = label(parts, connectivity=2)  # type: ignore[no-untyped-call]
    met = set(np.unique(labels[others]).tolist())
    for index, count in enumerate(np.bincount(labels.ravel())[1:], 1):
        yield next(size for size, most in SIZES.items() if count <= most * parts.size), index in met
