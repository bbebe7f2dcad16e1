"""Warnings about training images, said before the first step: one sentence each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mdps.runtime.image_files import deep, known_headers, sizes, small, verb
from mdps.training.sources import Images

KIND = "training images"
FEW = 10  # below it a network learns its images by heart


def check_files(paths: Sequence[Path], images: Images, resized: tuple[int, int]) -> list[str]:
    """Return sentences about files and what was read of them, uint8 [n, H, W, 3], resized to `resized` (H, W)."""
    files, headers = known_headers(paths)  # the images are read already: one that has gone since is no harm
    return [
        *_few(paths),
        *sizes(files, headers, resized, KIND),
        *deep(files, headers, KIND),
        *small(files, headers, resized, KIND, ": choose a smaller --image-size"),
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


def _grey(paths: Sequence[Path], images: Images) -> Iterator[str]:
    grey = (images[..., :1] == images).all(axis=(1, 2, 3))
    count = int(grey.sum())
    if 0 < count < len(paths):
        rarer = bool(count <= len(paths) / 2)
        name = paths[int(np.flatnonzero(grey == rarer)[0])].name
        yield (
            f"{count} of {len(paths)} training images {verb(count, 'is', 'are')} grey and the others in colour ({name} "
            "is of the rarer kind): the detector will accept both"
        )


def _copies(paths: Sequence[Path], images: Images) -> Iterator[str]:
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


def _flat(paths: Sequence[Path], images: Images) -> Iterator[str]:
    flat = (images == images[:, :1, :1]).all(axis=(1, 2, 3))
    if flat.any():
        name = paths[int(np.flatnonzero(flat)[0])].name
        count = int(flat.sum())
        yield (
            f"{count} of {len(paths)} training images {verb(count, 'shows', 'show')} one colour only (such as {name}): "
            f"take {verb(count, 'it', 'them')} out"
        )
