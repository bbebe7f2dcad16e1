"""Crops of photographs at a stated scale; half of them show places that are unlike the rest of their photograph."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import require
from mdps.runtime.image_files import known_headers
from mdps.runtime.memory import Need, check_room
from mdps.runtime.pictures import read_image
from mdps.runtime.tiles import Tiling, resized
from mdps.training.sources import Images, digest, read_all, require_enough

SHARE = 0.5  # of the crops that are drawn by unlikeness; the others come from anywhere
CELLS = 4  # of a crop's side


class CropsSource:
    """Crops of `side` x `side` from images [h, w, 3] of any sizes; an epoch has as many as would cover them all.

    UsageError for fewer than two images, or one that is smaller than a crop; `names` are theirs.
    """

    def __init__(self, images: Sequence[Images], side: int, names: Sequence[object] = (), scale: float = 1.0) -> None:
        for index, (height, width) in enumerate(image.shape[:2] for image in images):
            require(
                min(height, width) >= side,
                f"{names[index] if names else f'training image {index}'} has {width} x {height} pixels at a scale of "
                f"{scale:g}, too few for crops of {side}: lower --crop or raise --scale",
            )
        self.images, self.side = list(images), side
        covering = [-(-image.shape[0] // side) * -(-image.shape[1] // side) for image in images]
        self._shown = np.repeat(np.arange(len(images)), covering)
        self._places = [Places(image, side) for image in images]

    @property
    def fingerprint(self) -> str:
        return digest(*self.images)

    @property
    def count(self) -> int:
        return len(self._shown)

    def image(self, index: int, rng: np.random.Generator) -> Images:
        which = self._shown[index]
        top, left = self._places[which].corner(rng)
        crop: Images = self.images[which][top : top + self.side, left : left + self.side]
        return crop


class CropsOfFiles(CropsSource):
    """Crops of image files, all of which are read and resized by `scale` first; errors as those of `FileSource` too."""

    def __init__(self, paths: Sequence[Path], side: int, scale: float, where: str = "the list") -> None:
        require_enough(paths, where)
        self.paths = tuple(paths)
        pixels = sum(found.size[0] * found.size[1] for found in known_headers(paths)[1])
        held = Need({"photographs": round(3 * pixels * scale**2)})
        check_room(held, f"training on crops of {len(paths)} photographs", "lower --scale, or give fewer of them")
        super().__init__(read_all(paths, lambda path: scaled(path, scale)), side, paths, scale)


class Places:
    """Where crops of an image [h, w, 3] are cut: half of them anywhere, half where it is unlike the rest of itself."""

    def __init__(self, image: Images, side: int) -> None:
        self._most = np.array([image.shape[0] - side, image.shape[1] - side])
        self._cell = max(1, side // CELLS)
        weights = unlikeness(image, side)
        self._columns, self._up_to = weights.shape[1], weights.cumsum()

    def corner(self, rng: np.random.Generator) -> tuple[int, int]:
        """Draw the row and column at which a crop begins."""
        anywhere = rng.integers(0, self._most + 1)
        total = self._up_to[-1]
        if rng.random() >= SHARE or not total:
            return int(anywhere[0]), int(anywhere[1])
        begins = divmod(int(np.searchsorted(self._up_to, rng.random() * total, side="right")), self._columns)
        within = rng.integers(0, self._cell, 2)
        row, column = np.minimum(np.array(begins) * self._cell + within, self._most)
        return int(row), int(column)


def unlikeness(image: Images, side: int) -> NDArray[np.float64]:
    """Return how unlike the rest of an image [h, w, 3] the crops are that begin at each cell, a quarter of their side.

    A cell is known by the mean and the spread of its colours, and is as unlike the others as these lie away from their
    means over all cells, in standard deviations, squared; a crop is as unlike as its cells are on average.
    """
    cell = max(1, side // CELLS)
    rows, columns = (length // cell for length in image.shape[:2])
    strips = image[: rows * cell, : columns * cell].reshape(rows, cell, columns, cell, 3)
    known = np.stack([np.hstack([strip.mean(axis=(0, 2)), strip.std(axis=(0, 2))]) for strip in strips])
    deviations = (known - known.mean(axis=(0, 1))) / np.maximum(known.std(axis=(0, 1)), 1.0)
    cells = np.square(deviations).mean(axis=2)
    window = np.minimum(cells.shape, side // cell)
    crops = np.lib.stride_tricks.sliding_window_view(cells, window)
    return np.asarray(crops.mean(axis=(2, 3)), dtype=np.float64)


def scaled(path: Path, scale: float) -> Images:
    """Return the photograph [h, w, 3] with both sides resized by `scale`; ImageError where it cannot be read."""
    return resized(read_image(path), Tiling(scale))
