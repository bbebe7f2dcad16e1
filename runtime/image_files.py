"""Image files before they are decoded: which there are, how one is opened, and what is odd about them for a network.

Training, calibration and inspection find the same files. What is odd is told from what files say of themselves, one
sentence each, so that thousands of them are looked through in a moment.
"""

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from mdps.runtime.errors import UsageError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"})

LINES, MAPS, OVERLAYS = "results.jsonl", "maps", "overlays"  # what a run leaves; pictures of results, not of parts

SMALL = 0.5  # of the network's side: what is enlarged more than twice is mostly made up
ASPECT = 1.02  # aspects nearer than that are the same
_DARK = "65535 counts as white, so images of 10 or 12 bits are nearly black; convert them to 8 bits first"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_image_name(name: str) -> bool:
    """Whether a file of this name counts as an image: by its suffix, and it is not hidden."""
    return name[0] != "." and Path(name).suffix.lower() in IMAGE_SUFFIXES


def find_images(inputs: Sequence[str | Path], exclude: Path | None = None) -> list[Path]:
    """Lists the images among `inputs`: files as they are, folders with all that lies below them, by name.

    `exclude` is a folder that is not entered: the outputs of an earlier run are no input of the next.
    Hidden files and folders are passed over, linked folders are not, and a file named twice is listed once.

    Raises:
        UsageError: an input is no file and no folder, a folder cannot be read or has no image.
    """
    found: dict[str, Path] = {}
    for given in inputs:
        for image in _images_of(Path(given), exclude):
            found.setdefault(os.path.realpath(image), image)
    return list(found.values())


def _images_of(given: Path, exclude: Path | None) -> list[Path]:
    try:
        if given.is_file():
            return [given]
        if not given.is_dir():
            found = "is neither an image nor a folder" if os.path.lexists(given) else "does not exist"
            raise UsageError(f"{given} {found}: give an image or a folder with images")
    except OSError as error:  # a name that is too long, a network drive that has gone
        raise UsageError(f"{given} cannot be read: {error.strerror or error}") from error
    images = image_files(given, exclude)
    if not images:
        raise UsageError(f"{given} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}), nor does a folder below it")
    return images


def image_files(folder: Path, exclude: Path | None = None) -> list[Path]:
    """The images below `folder`, each folder's own before those of its subfolders, by name.

    Linked folders are entered too, each real one once: what lies behind a link is not passed over in silence, and a
    link to a folder above ends. Left out are hidden files and folders, the folder `exclude`, and what lies in `maps`
    and `overlays` beside a `results.jsonl`: an earlier run left it. Listed by its name is also what cannot be read, so
    that it is missed by nobody: a link to nothing, a pipe, an empty folder called `x.png`, a folder that has just gone.
    UsageError for a folder that cannot be read.
    """
    images: list[Path] = []

    def refuse(error: OSError) -> None:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and Path(error.filename) != Path(folder):
            images.append(Path(error.filename))
            return
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error

    is_new = _only_once(folder, exclude)
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here = Path(place)
        left = {MAPS, OVERLAYS} if LINES in files else set()
        folders[:] = [name for name in sorted(set(folders) - left) if name[0] != "." and is_new(here / name)]
        own = [here / name for name in sorted(files) if is_image_name(name)]
        barren = not own and not folders and here != Path(folder) and is_image_name(here.name)
        images += [here] if barren else own
    return images


def _only_once(*known: Path | None) -> Callable[[Path], bool]:
    """A function that is true the first time it is asked of a real folder, and never of the `known` ones."""
    seen = {os.path.realpath(path) for path in known if path is not None}

    def is_new(path: Path) -> bool:
        real = os.path.realpath(path)
        return real not in seen and not seen.add(real)  # type: ignore[func-returns-value]

    return is_new


def open_file(path: str | Path) -> BinaryIO:
    """Open a file for reading; OSError for a pipe, device, socket or folder, of which some block and some never end."""
    _check_regular(Path(path).stat())  # before it is opened: a device may act on that alone
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115
    try:
        _check_regular(os.fstat(file.fileno()))  # it may be another by now
    except BaseException:
        file.close()
        raise
    return file


def without_waiting(path: str, flags: int) -> int:
    """An opener for `open` that never waits for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # no such flag on Windows


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")


class Framing(Protocol):
    """The part of `Preprocessing` that decides which pictures are odd; that module opens files by this one."""

    @property
    def image_size(self) -> tuple[int, int]:
        """(H, W) that pictures are resized to."""

    @property
    def roi(self) -> tuple[int, int, int, int] | None:
        """The region of interest that is cut out before."""


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


def odd_pictures(paths: Sequence[Path], preprocessing: Framing | None) -> list[str]:
    """Sentences about image files that are to be judged. Files that cannot be read are passed over.

    `preprocessing` is None where pictures keep their size.
    """
    files, headers = known_headers(paths)
    said = [*deep(files, headers)]
    if preprocessing is not None and preprocessing.roi is None:  # a region has one size, whatever the pictures'
        said += small(files, headers, preprocessing.image_size)
        said += sizes(files, headers, preprocessing.image_size) if _aspects_differ(headers) else ()
    return said


def odd_picture(image: "Image.Image", preprocessing: Framing | None) -> list[str]:
    """Sentences about one picture that is to be judged; `preprocessing` as of `odd_pictures`."""
    said = []
    if _is_deep(image.mode):
        said.append(f"the image has more than 8 bits: {_DARK}")
    if preprocessing and preprocessing.roi is None and _is_small(image.size, preprocessing.image_size):
        height, width = preprocessing.image_size
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
