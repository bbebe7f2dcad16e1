"""Where training images come from, and how they are varied."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import ImageError, UsageError
from mdps.runtime.preprocessing import Preprocessing, to_uint8

Images = NDArray[np.uint8]
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"})
FEWEST = 2  # one image has no distribution


class Source(Protocol):
    """Anything that hands out good images of one size."""

    @property
    def fingerprint(self) -> str:
        """Names the images, so that a resumed run notices others."""

    def batch(self, rng: np.random.Generator, count: int) -> Images:
        """`count` images drawn at random: uint8 [count, H, W, 3]."""


class ArraySource:
    """Images held in memory, uint8 [n, H, W, 3]; UsageError if they are of another kind or fewer than two."""

    def __init__(self, images: Images) -> None:
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise UsageError(f"training images must be uint8 [n, H, W, 3], not {images.dtype} {list(images.shape)}")
        if len(images) < FEWEST:
            raise UsageError(f"training needs at least {FEWEST} images of good parts, not {len(images)}")
        self.images = images

    @property
    def fingerprint(self) -> str:
        return _digest(self.images)

    def batch(self, rng: np.random.Generator, count: int) -> Images:
        return self.images[rng.integers(0, len(self.images), count)]


class FolderSource(ArraySource):
    """All images below a folder, read through the preprocessing that the detector will use.

    Every file is read before the first step: UsageError for a folder that is absent or has too few images, ImageError
    that names up to five files that cannot be read.
    """

    def __init__(self, folder: Path, preprocessing: Preprocessing) -> None:
        paths = image_files(folder)
        if len(paths) < FEWEST:
            raise UsageError(f"{folder} holds {len(paths)} images; training needs at least {FEWEST} of good parts")
        super().__init__(_read_all(paths, preprocessing))


class CropSource:
    """Windows of `size` cut at random from one large picture, uint8 [H, W, 3]: for textures without a position."""

    def __init__(self, picture: Images, size: tuple[int, int]) -> None:
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            raise UsageError(f"the picture to crop must be uint8 [H, W, 3], not {picture.dtype} {list(picture.shape)}")
        if picture.shape[0] < size[0] or picture.shape[1] < size[1]:
            raise UsageError(f"a picture of {picture.shape[:2]} pixels is too small for crops of {size}")
        self.picture, self.size = picture, size
        self._windows = np.lib.stride_tricks.sliding_window_view(picture, size, axis=(0, 1))  # [rows, columns, 3, h, w]

    @property
    def fingerprint(self) -> str:
        return _digest(self.picture)

    def batch(self, rng: np.random.Generator, count: int) -> Images:
        rows, columns = (rng.integers(0, n, count) for n in self._windows.shape[:2])
        return np.moveaxis(self._windows[rows, columns], 1, -1)


def image_files(folder: Path) -> list[Path]:
    """Image files below `folder` in the order of their names, hidden ones left out; UsageError if it is no folder."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give the folder that holds the images of good parts")
    files = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def vary(images: Images, rng: np.random.Generator, *, horizontal: bool, vertical: bool, shift: int) -> Images:
    """Each image of [n, H, W, 3] mirrored left-right or top-bottom with probability one half, and moved by up to
    `shift` pixels with mirrored edges; draws nothing for what is off."""
    for wanted, axis in ((horizontal, 2), (vertical, 1)):
        if wanted:
            chosen = rng.random(len(images)) < 0.5
            images = np.where(chosen[:, None, None, None], np.flip(images, axis), images)
    return _shifted(images, rng, shift) if shift else images


def _shifted(images: Images, rng: np.random.Generator, shift: int) -> Images:
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (shift, shift), (shift, shift), (0, 0)), mode="reflect")
    offsets = rng.integers(0, 2 * shift + 1, (count, 2))
    return np.stack([padded[i, y : y + height, x : x + width] for i, (y, x) in enumerate(offsets)])


def _read_all(paths: Sequence[Path], preprocessing: Preprocessing) -> Images:
    images, faults = [], []
    for path in paths:
        try:
            images.append(to_uint8(preprocessing(path)))
        except ImageError as error:
            faults.append(str(error))
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ImageError(f"{len(faults)} of {len(paths)} training images cannot be read: {'; '.join(faults[:5])}{more}")
    return np.stack(images)


def _digest(array: Images) -> str:
    return hashlib.sha256(repr(array.shape).encode() + array.tobytes()).hexdigest()
