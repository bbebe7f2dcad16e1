"""Warnings about pictures that are odd for a network, by what their files say of themselves: one sentence each.

Nothing is decoded, so that thousands of files are looked through in a moment.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mdps.runtime.image_files import open_file

if TYPE_CHECKING:
    from PIL import Image

    from mdps.runtime.preprocessing import Preprocessing

SMALL = 0.5  # of the network's side: what is enlarged more than twice is mostly made up
ASPECT = 1.02  # aspects nearer than that are the same
_DARK = "65535 counts as white, so images of 10 or 12 bits are nearly black; convert them to 8 bits first"


class Header(NamedTuple):
    """A file's own description: (width, height) and Pillow's mode."""

    size: tuple[int, int]
    mode: str


def header(path: Path) -> Header:
    """Read an image file's header; raises whatever the system or Pillow does where there is none."""
    from PIL import Image

    with open_file(path) as file, Image.open(file) as image:
        return Header(image.size, image.mode)


def known_headers(paths: Sequence[Path]) -> tuple[list[Path], list[Header]]:
    """The files that can be read, and their headers."""
    files, headers = [], []
    for path in paths:
        with suppress(Exception):
            headers.append(header(path))
            files.append(path)
    return files, headers


def odd_pictures(paths: Sequence[Path], preprocessing: "Preprocessing") -> list[str]:
    """Sentences about image files that are to be judged. Files that cannot be read are passed over."""
    files, headers = known_headers(paths)
    said = [*deep(files, headers)]
    if preprocessing.roi is None:  # the region of interest has one size, whatever the pictures'
        said += small(files, headers, preprocessing.image_size)
        said += sizes(files, headers, preprocessing.image_size) if _aspects_differ(headers) else ()
    return said


def odd_picture(image: "Image.Image", preprocessing: "Preprocessing") -> list[str]:
    """Sentences about one picture that is to be judged."""
    height, width = preprocessing.image_size
    said = []
    if _is_deep(image.mode):
        said.append(f"the image has more than 8 bits: {_DARK}")
    if preprocessing.roi is None and _is_small(image.size, preprocessing.image_size):
        said.append(
            f"the image is much smaller ({image.width} x {image.height}) than the {width} x {height} it is enlarged to"
        )
    return said


def sizes(
    paths: Sequence[Path], headers: Sequence[Header], resized: tuple[int, int], kind: str = "images"
) -> Iterator[str]:
    """Says it where files have several sizes, all resized to `resized` (H, W); `kind` is what the files are called."""
    counts = Counter(found.size for found in headers).most_common()
    if len(counts) < 2:
        return
    usual = counts[0][0]
    odd = next(path for path, found in zip(paths, headers, strict=True) if found.size != usual)
    listed = ", ".join(f"{count} of {width} x {height}" for (width, height), count in counts[:4])
    more = f" and {len(counts) - 4} other sizes" if len(counts) > 4 else ""
    effect = ", which distorts those of another aspect" if _aspects_differ(headers) else ""
    yield (
        f"the {kind} have {len(counts)} sizes ({listed}{more}; {odd.name} is unlike most): all are resized "
        f"to {resized[1]} x {resized[0]}{effect}"
    )


def deep(paths: Sequence[Path], headers: Sequence[Header], kind: str = "images") -> Iterator[str]:
    """Says it where files have more than 8 bits."""
    found = [path for path, one in zip(paths, headers, strict=True) if _is_deep(one.mode)]
    if found:
        have = verb(len(found), "has", "have")
        yield f"{len(found)} of {len(paths)} {kind} {have} more than 8 bits (such as {found[0].name}): {_DARK}"


def small(
    paths: Sequence[Path], headers: Sequence[Header], resized: tuple[int, int], kind: str = "images", hint: str = ""
) -> Iterator[str]:
    """Says it where files are much smaller than `resized` (H, W), with a `hint` at what to do behind it."""
    height, width = resized
    found = [(path, one.size) for path, one in zip(paths, headers, strict=True) if _is_small(one.size, resized)]
    if found:
        path, size = found[0]
        are, they_are = verb(len(found), "is", "are"), verb(len(found), "it is", "they are")
        yield (
            f"{len(found)} of {len(paths)} {kind} {are} much smaller than the {width} x {height} {they_are} "
            f"enlarged to (such as {path.name}, {size[0]} x {size[1]}){hint}"
        )


def verb(count: int, one: str, many: str) -> str:
    """The form that agrees with `count`."""
    return one if count == 1 else many


def _is_deep(mode: str) -> bool:
    return mode.startswith("I")  # floats are read on a scale to 255


def _is_small(size: tuple[int, int], resized: tuple[int, int]) -> bool:
    return size[0] < SMALL * resized[1] or size[1] < SMALL * resized[0]


def _aspects_differ(headers: Sequence[Header]) -> bool:
    aspects = [found.size[0] / found.size[1] for found in headers]
    return bool(aspects) and max(aspects) / min(aspects) > ASPECT
