"""Brings a ground truth and an anomaly map to one grid: that of the truth, inside what the map shows."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.benchmarks.looks import Box


def truth_in_box(truth: NDArray[np.bool_], box: Box, largest: int | None) -> NDArray[np.bool_]:
    """The part `box` of `truth` [H, W], its longer side reduced to at most `largest` (None: never).

    Reduced by averaging (Pillow's box filter); a pixel is defective where at least half of what it covers is.
    """
    width, height = max(1, round(box[2] - box[0])), max(1, round(box[3] - box[1]))
    if largest is not None and max(width, height) > largest:
        share = largest / max(width, height)
        width, height = max(1, round(width * share)), max(1, round(height * share))
    return share_in_box(truth, box, (width, height)) >= 0.5


def share_in_box(truth: NDArray[np.bool_], box: Box, size: tuple[int, int]) -> NDArray[np.float32]:
    """Share of defective pixels float32 [H, W] in each cell when `box` of `truth` is resized to `size` (W, H)."""
    picture = Image.fromarray(truth.astype(np.float32))
    return np.asarray(picture.resize(size, Image.Resampling.BOX, box=box))


def enlarged(anomaly_map: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    """`anomaly_map` [h, w] resized to `shape` (H, W), bilinear with half-pixel centres."""
    if anomaly_map.shape == shape:
        return anomaly_map
    picture = Image.fromarray(np.ascontiguousarray(anomaly_map, dtype=np.float32))
    return np.asarray(picture.resize((shape[1], shape[0]), Image.Resampling.BILINEAR))
