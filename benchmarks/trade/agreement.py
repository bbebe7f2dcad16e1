"""How far the maps of two runs say the same of the same images."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import UsageError


@dataclass(frozen=True)
class Agreement:
    """Means over the images of Pearson's and Spearman's correlation of two maps of an image, pixel by pixel.

    `lowest` is the smallest Pearson of an image. Images whose map is constant, or that were not judged, are left out.
    """

    pearson: float
    spearman: float
    lowest: float
    images: int

    def to_json(self) -> dict[str, float | int]:
        """The fields as plain JSON values."""
        return asdict(self)


def agreement(maps: NDArray[np.float32], reference: NDArray[np.float32]) -> Agreement | None:
    """Of maps [n, h, w] of the same images in the same order; None where no image has two maps that vary.

    Raises:
        UsageError: the two are of other images or another size.
    """
    if maps.shape != reference.shape:
        raise UsageError(f"only maps of the same images compare: {list(maps.shape)} against {list(reference.shape)}")
    from scipy.stats import rankdata

    pearson, spearman = [], []
    for ours, theirs in zip(maps, reference, strict=True):
        one, other = ours.ravel().astype(np.float64), theirs.ravel().astype(np.float64)
        if not (np.isfinite(one).all() and np.isfinite(other).all()) or one.std() == 0 or other.std() == 0:
            continue
        pearson.append(float(np.corrcoef(one, other)[0, 1]))
        spearman.append(float(np.corrcoef(rankdata(one), rankdata(other))[0, 1]))
    if not pearson:
        return None
    return Agreement(float(np.mean(pearson)), float(np.mean(spearman)), min(pearson), len(pearson))


def load_maps(path: Path, name: str) -> NDArray[np.float32]:
    """The maps "last" or "first" [n, h, w] that a runner left; "last" where there was one pass only."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found: NDArray[np.float32] = file[name]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise UsageError(f"{path} is damaged ({error}): remove its folder, and it is computed again") from error
    return found
