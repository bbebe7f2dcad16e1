"""How good a candidate is: AUROCs of synthetic defects, of which the worst kinds count most."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.records import Record
from mdps.serving.fitness import auroc

Array = NDArray[np.float32]
WORST = 0.25  # share of the kinds


@dataclass(frozen=True)
class KindValue(Record):
    """Of one kind: AUROC of its images against good ones, and of its pixels against the rest of these images."""

    image: float
    pixel: float

    @property
    def mean(self) -> float:
        return (self.image + self.pixel) / 2


def worst_aware(kinds: Mapping[str, KindValue]) -> float:
    """Return the mean of two: the mean of (image + pixel) / 2 over all kinds, and that over the worst quarter."""
    ordered = sorted(kind.mean for kind in kinds.values())
    worst = ordered[: math.ceil(WORST * len(ordered))]
    return float(np.mean(ordered) + np.mean(worst)) / 2


@dataclass(frozen=True)
class Truth:
    """The truth about the maps that are valued: the kind of each defective image, and its pixels [m, H, W]."""

    kinds: tuple[str, ...]
    masks: NDArray[np.bool_]

    def values(self, good: Array, bad: Array, top: int) -> dict[str, KindValue]:
        """Return the values by kind of maps [n, H, W] of good images and [m, H, W] of defective ones."""
        good_scores, bad_scores = scores(good, top), scores(bad, top)
        found = {}
        for kind in dict.fromkeys(self.kinds):
            rows = [index for index, name in enumerate(self.kinds) if name == kind]
            maps, masks = bad[rows], self.masks[rows]
            image = auroc(good_scores, bad_scores[rows])
            found[kind] = KindValue(round(image, 4), round(auroc(maps[~masks], maps[masks]), 4))
        return found


def scores(maps: Array, top: int) -> Array:
    """Return the mean of the `top` largest pixels of each map."""
    flat = maps.reshape(len(maps), -1)
    found: Array = np.partition(flat, -top, axis=1)[:, -top:].mean(axis=1)
    return found
