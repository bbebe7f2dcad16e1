"""Which files of a folder are images, for training, calibration and inspection alike; and how one is opened."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mdps.runtime.errors import UsageError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"})

LINES, MAPS, OVERLAYS = "results.jsonl", "maps", "overlays"  # what a run leaves; pictures of results, not of parts

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
