"""What is odd about training images, said before the first step: one sentence each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mdps.training.sources import Images

FEW = 10  # below it a network learns its images by heart
SMALL = 0.5  # of the network's side: what is enlarged more than twice is mostly made up
ASPECT = 1.02  # aspects nearer than that are the same


class Header(NamedTuple):
    """What a file says of itself: (width, height) and Pillow's mode."""

    size: tuple[int, int]
    mode: str


def check_files(paths: Sequence[Path], images: Images, resized: tuple[int, int]) -> list[str]:
    """Sentences about image files and what was read from them, uint8 [n, H, W, 3], resized to `resized` (H, W)."""
    headers = [_header(path) for path in paths]
    return [
        *_few(paths),
        *_sizes(paths, headers, resized),
        *_deep(paths, headers),
        *_small(paths, headers, resized),
        *_grey(paths, images),
        *_copies(paths, images),
        *_flat(paths, images),
    ]


def _header(path: Path) -> Header:
    from PIL import Image

    with Image.open(path) as image:
        return Header(image.size, image.mode)


def _few(paths: Sequence[Path]) -> Iterator[str]:
    if len(paths) < FEW:
        yield (
            f"there are only {len(paths)} training images: the denoiser will know them by heart and find every other "
            f"good part odd; give at least {FEW}, better a hundred"
        )


def _sizes(paths: Sequence[Path], headers: Sequence[Header], resized: tuple[int, int]) -> Iterator[str]:
    counts = Counter(header.size for header in headers).most_common()
    if len(counts) == 1:
        return
    usual = counts[0][0]
    odd = next(path for path, header in zip(paths, headers, strict=True) if header.size != usual)
    aspects = [width / height for (width, height), _ in counts]
    listed = ", ".join(f"{count} of {width} x {height}" for (width, height), count in counts[:4])
    more = f" and {len(counts) - 4} other sizes" if len(counts) > 4 else ""
    distorted = max(aspects) / min(aspects) > ASPECT
    effect = ", which distorts those of another aspect" if distorted else ""
    yield (
        f"the training images have {len(counts)} sizes ({listed}{more}; {odd.name} is unlike most): all are resized "
        f"to {resized[1]} x {resized[0]}{effect}"
    )


def _deep(paths: Sequence[Path], headers: Sequence[Header]) -> Iterator[str]:
    deep = [path for path, header in zip(paths, headers, strict=True) if header.mode.startswith(("I", "F"))]
    if deep:
        yield (
            f"{len(deep)} of {len(paths)} training images have more than 8 bits (such as {deep[0].name}): 65535 counts "
            "as white, so images of 10 or 12 bits are nearly black; convert them to 8 bits first"
        )


def _small(paths: Sequence[Path], headers: Sequence[Header], resized: tuple[int, int]) -> Iterator[str]:
    height, width = resized
    small = [
        (path, header.size)
        for path, header in zip(paths, headers, strict=True)
        if header.size[0] < SMALL * width or header.size[1] < SMALL * height
    ]
    if small:
        path, size = small[0]
        yield (
            f"{len(small)} of {len(paths)} training images are much smaller than the {width} x {height} they are "
            f"enlarged to (such as {path.name}, {size[0]} x {size[1]}): choose a smaller --image-size"
        )


def _grey(paths: Sequence[Path], images: Images) -> Iterator[str]:
    grey = (images[..., :1] == images).all(axis=(1, 2, 3))
    count = int(grey.sum())
    if 0 < count < len(paths):
        rarer = bool(count <= len(paths) / 2)
        name = paths[int(np.flatnonzero(grey == rarer)[0])].name
        yield (
            f"{count} of {len(paths)} training images are grey and the others in colour ({name} is of the rarer kind): "
            "the detector will accept both"
        )


def _copies(paths: Sequence[Path], images: Images) -> Iterator[str]:
    first: dict[bytes, Path] = {}
    copies = [
        (path, original)
        for path, image in zip(paths, images, strict=True)
        if (original := first.setdefault(image.tobytes(), path)) is not path
    ]
    if copies:
        yield (
            f"{len(copies)} of {len(paths)} training images are copies of others (such as {copies[0][0].name} of "
            f"{copies[0][1].name}): they add weight, not variety"
        )


def _flat(paths: Sequence[Path], images: Images) -> Iterator[str]:
    flat = (images == images[:, :1, :1]).all(axis=(1, 2, 3))
    if flat.any():
        name = paths[int(np.flatnonzero(flat)[0])].name
        yield f"{int(flat.sum())} of {len(paths)} training images show one colour only (such as {name}): take them out"
