"""Where training images come from."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import ImageError, UsageError
from mdps.runtime.image_files import IMAGE_SUFFIXES, image_files
from mdps.runtime.preprocessing import Preprocessing, to_uint8

Images = NDArray[np.uint8]
FEWEST = 2  # one image has no distribution


class Source(Protocol):
    """Anything that hands out good images of one size."""

    @property
    def fingerprint(self) -> str:
        """Names the images, so that a resumed run notices others."""

    @property
    def count(self) -> int | None:
        """How many images an epoch has; None where they are drawn without end."""

    def image(self, index: int, rng: np.random.Generator) -> Images:
        """Return image `index` (below `count`; 0 where that is None), uint8 [H, W, 3]; its chance comes from `rng`."""


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

    @property
    def count(self) -> int:
        return len(self.images)

    def image(self, index: int, rng: np.random.Generator) -> Images:
        image: Images = self.images[index]
        return image


class FileSource(ArraySource):
    """Image files, read through the preprocessing that the detector will use.

    Every file is read before the first step: UsageError for fewer than two (`where` names them), ImageError that names
    up to five files that cannot be read.
    """

    def __init__(self, paths: Sequence[Path], preprocessing: Preprocessing, where: str = "the list") -> None:
        if len(paths) < FEWEST:
            raise UsageError(
                f"{where} holds {len(paths)} {'image' if len(paths) == 1 else 'images'} "
                f"({', '.join(sorted(IMAGE_SUFFIXES))}); training needs at least {FEWEST} of good parts"
            )
        self.paths = tuple(paths)
        super().__init__(_read_all(paths, preprocessing))


class FolderSource(FileSource):
    """All images below a folder, as `FileSource` reads them; UsageError for a folder that is absent."""

    def __init__(self, folder: Path, preprocessing: Preprocessing) -> None:
        super().__init__(images_below(folder), preprocessing, str(folder))


class CropSource:
    """Windows of `size` cut at random from one large picture, uint8 [H, W, 3]: for textures without a position."""

    count = None

    def __init__(self, picture: Images, size: tuple[int, int]) -> None:
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            raise UsageError(f"the picture to crop must be uint8 [H, W, 3], not {picture.dtype} {list(picture.shape)}")
        if picture.shape[0] < size[0] or picture.shape[1] < size[1]:
            raise UsageError(f"a picture of {picture.shape[:2]} pixels is too small for crops of {size}")
        self.picture, self.size = picture, size

    @property
    def fingerprint(self) -> str:
        return _digest(self.picture)

    def image(self, index: int, rng: np.random.Generator) -> Images:
        height, width = self.size
        top, left = (int(rng.integers(0, n - m + 1)) for n, m in zip(self.picture.shape, self.size, strict=False))
        return self.picture[top : top + height, left : left + width]


def images_below(folder: Path) -> list[Path]:
    """Return `image_files` of `folder` in the order of their whole paths; UsageError if it is no folder."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give the folder that holds the images of good parts")
    return sorted(image_files(folder))


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
