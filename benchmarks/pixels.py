"""One image's pixels: its mask and map checked, and the regions of the mask."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdps.runtime.errors import UsageError


def checked(truth: ArrayLike, anomaly_map: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Mask as bool and map as float32, both [H, W]; UsageError if they differ in shape or a value is not finite."""
    marked, values = np.asarray(truth, dtype=bool), np.asarray(anomaly_map)
    if marked.ndim != 2 or marked.shape != values.shape or not marked.size:
        raise UsageError(f"mask {marked.shape} and anomaly map {values.shape} should both be [H, W]")
    with np.errstate(over="ignore"):  # reported as infinite below
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        bad = int(np.count_nonzero(~np.isfinite(values)))
        raise UsageError(f"{bad} of {values.size} values of the anomaly map are NaN or infinite")
    return marked, values


def regions(truth: NDArray[np.bool_]) -> tuple[NDArray[np.float64], int]:
    """One over the size of the 8-connected region that each pixel of the mask [H, W] is in, 0 outside; their number."""
    from skimage.measure import label

    if not truth.any():
        return np.zeros(truth.shape), 0
    labels = label(truth, connectivity=2)  # type: ignore[no-untyped-call]
    sizes = np.bincount(labels.ravel())
    return np.where(truth, 1 / sizes[labels], 0.0), len(sizes) - 1
