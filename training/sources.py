"""Where training images come from, and warnings about them before the first step: one sentence each."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import ImageError, require
from mdps.runtime.image_files import IMAGE_SUFFIXES, deep, image_files, known_headers, sizes, small, verb
from mdps.runtime.preprocessing import Preprocessing, to_uint8

Images = NDArray[np.uint8]
FEWEST = 2  # one image has no distribution
KIND = "training images"
FEW = 10  # below it a network learns its images by heart


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
        _check_kind(images, "training images", "n, H, W, 3")
        require(len(images) >= FEWEST, f"training needs at least {FEWEST} images of good parts, not {len(images)}")
        self.images = images

    @property
    def fingerprint(self) -> str:
        return digest(self.images)

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
        require_enough(paths, where)
        self.paths = tuple(paths)
        super().__init__(np.stack(read_all(paths, lambda path: to_uint8(preprocessing(path)))))


def images_below(folder: Path) -> list[Path]:
    """Return `image_files` of `folder` in the order of their whole paths; UsageError if it is no folder."""
    require(folder.is_dir(), f"{folder} is not a folder; give the folder that holds the images of good parts")
    return sorted(image_files(folder))


def require_enough(paths: Sequence[Path], where: str) -> None:
    """Raise UsageError for too few files; `where` names them."""
    require(
        len(paths) >= FEWEST,
        f"{where} holds {len(paths)} {'image' if len(paths) == 1 else 'images'} "
        f"({', '.join(sorted(IMAGE_SUFFIXES))}); training needs at least {FEWEST} of good parts",
    )


def read_all(paths: Sequence[Path], read: Callable[[Path], Images]) -> list[Images]:
    """Return what `read` makes of each file; ImageError that names up to five that cannot be read."""
    images, faults = [], []
    for path in paths:
        try:
            images.append(read(path))
        except ImageError as error:
            faults.append(str(error))
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ImageError(f"{len(faults)} of {len(paths)} training images cannot be read: {'; '.join(faults[:5])}{more}")
    return images


def _check_kind(images: Images, name: str, axes: str) -> None:
    right = images.dtype == np.uint8 and images.ndim == axes.count(",") + 1 and images.shape[-1] == 3
    require(right, f"{name} must be uint8 [{axes}], not {images.dtype} {list(images.shape)}")


def digest(*arrays: Images) -> str:
    """Return a hash of the shapes and pixels of arrays, in their order."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(repr(array.shape).encode())
        found.update(array.tobytes())
    return found.hexdigest()


def check_files(paths: Sequence[Path], images: Sequence[Images], resized: tuple[int, int] | None) -> list[str]:
    """Return sentences about files and what was read of them, uint8 [H, W, 3] each.

    `resized` is (H, W) where all were resized to that, whatever their size and aspect.
    """
    files, headers = known_headers(paths)  # the images are read already: one that has gone since is no harm
    return [
        *_few(paths),
        *(sizes(files, headers, resized, KIND) if resized else ()),
        *deep(files, headers, KIND),
        *(small(files, headers, resized, KIND, ": choose a smaller --image-size") if resized else ()),
        *_grey(paths, images),
        *_copies(paths, images),
        *_flat(paths, images),
    ]


def _few(paths: Sequence[Path]) -> Iterator[str]:
    if len(paths) < FEW:
        yield (
            f"there are only {len(paths)} training images: the denoiser will know them by heart and find every other "
            f"good part odd; give at least {FEW}, better a hundred"
        )


def _grey(paths: Sequence[Path], images: Sequence[Images]) -> Iterator[str]:
    grey = np.array([(image[..., :1] == image).all() for image in images])
    count = int(grey.sum())
    if 0 < count < len(paths):
        rarer = bool(count <= len(paths) / 2)
        name = paths[int(np.flatnonzero(grey == rarer)[0])].name
        yield (
            f"{count} of {len(paths)} training images {verb(count, 'is', 'are')} grey and the others in colour ({name} "
            "is of the rarer kind): the detector will accept both"
        )


def _copies(paths: Sequence[Path], images: Sequence[Images]) -> Iterator[str]:
    first: dict[bytes, Path] = {}
    copies = [
        (path, original)
        for path, image in zip(paths, images, strict=True)
        if (original := first.setdefault(image.tobytes(), path)) is not path
    ]
    if copies:
        count = len(copies)
        yield (
            f"{count} of {len(paths)} training images {verb(count, 'is a copy of another', 'are copies of others')} "
            f"(such as {copies[0][0].name} of {copies[0][1].name}): {verb(count, 'it adds', 'they add')} weight, not "
            "variety"
        )


def _flat(paths: Sequence[Path], images: Sequence[Images]) -> Iterator[str]:
    flat = np.array([(image == image[:1, :1]).all() for image in images])
    if flat.any():
        name = paths[int(np.flatnonzero(flat)[0])].name
        count = int(flat.sum())
        yield (
            f"{count} of {len(paths)} training images {verb(count, 'shows', 'show')} one colour only (such as {name}): "
            f"take {verb(count, 'it', 'them')} out"
        )
