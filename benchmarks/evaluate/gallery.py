"""The few images an evaluation shows: those judged right with the largest margin, and those most wrong."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.benchmarks.data.samples import Box, share_in_box
from mdps.benchmarks.evaluate.predictions import Prediction
from mdps.runtime.overlay import HeatRange, strip
from mdps.runtime.preprocessing import read_image, to_unit


@dataclass(frozen=True)
class Example:
    """A judged image; `truth` [H, W] is its mask inside what the map shows, None where there is none."""

    path: Path
    kind: str
    defective: bool
    prediction: Prediction
    truth: NDArray[np.bool_] | None

    def margin(self, threshold: float) -> float:
        """How far the score lies on the right side of the threshold; negative on the wrong one."""
        distance = self.prediction.score - threshold
        return distance if self.defective else -distance


class Gallery:
    """Keeps the `keep` highest and lowest scores of good and of defective images: whatever the threshold, those are it.

    Memory does not grow with the number of images.
    """

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._kept: dict[tuple[bool, int], list[Example]] = {}

    def add(self, example: Example) -> None:
        """Take in an image, and let go of one that it displaces."""
        for sign in (1, -1):
            kept = self._kept.setdefault((example.defective, sign), [])
            kept.append(example)
            kept.sort(key=lambda one: -sign * one.prediction.score)
            del kept[self._keep :]

    def best(self, threshold: float) -> list[Example]:
        """Of each kind the images on the right side of the threshold that lie farthest from it."""
        found = [*self._kept.get((True, 1), []), *self._kept.get((False, -1), [])]
        return [example for example in found if example.margin(threshold) > 0]

    def worst(self, threshold: float) -> list[Example]:
        """The images most on the wrong side of the threshold, or nearest to it, most wrong first; none of the best."""
        best = {id(example) for example in self.best(threshold)}
        found = [*self._kept.get((True, -1), []), *self._kept.get((False, 1), [])]
        ranked = sorted(found, key=lambda example: example.margin(threshold))
        return [example for example in ranked if id(example) not in best]

    def heat_range(self) -> HeatRange:
        """One for all pictures, so that the same colour is the same value: from the coolest to the hottest pixel."""
        maps = [example.prediction.anomaly_map for example in self._all()]
        return HeatRange(float(min(m.min() for m in maps)), float(max(m.max() for m in maps)))

    def _all(self) -> Iterator[Example]:
        for kept in self._kept.values():
            yield from kept


def picture(example: Example, box: Box, heat: HeatRange) -> Image.Image:
    """The image inside `box` (pixels of the upright photograph), its reconstruction if any, heat, and true contour."""
    anomaly_map = example.prediction.anomaly_map
    size = (anomaly_map.shape[1], anomaly_map.shape[0])
    photograph = read_image(example.path).resize(size, Image.Resampling.BILINEAR, box=box)
    truth = np.zeros(anomaly_map.shape, dtype=bool)
    if example.truth is not None:
        whole = (0.0, 0.0, float(example.truth.shape[1]), float(example.truth.shape[0]))
        truth = share_in_box(example.truth, whole, size) >= 0.5
    return strip(to_unit(np.asarray(photograph)), example.prediction.reconstruction, anomaly_map, truth, heat)
