"""Which files a run judges, and what its outputs are called."""

import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from mdps.runtime.errors import UsageError
from mdps.runtime.image_files import IMAGE_SUFFIXES, image_files

_FORBIDDEN = frozenset('<>:"/\\|?*')  # what Windows refuses in a name
_LONGEST = 60  # characters of up to four bytes, where a name with its suffix may have 255 bytes


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


def output_names(images: Sequence[Path]) -> list[str]:
    """A name for each image's outputs: its path below the folder that all share, as one word, such as `scratch_003`.

    Every file system and shell takes the names as names, and no two are the same, even where case does not count.
    """
    taken: set[str] = set()
    return [_unique(_plain(words), taken) for words in _below_common_folder(images)]


def _below_common_folder(images: Sequence[Path]) -> list[str]:
    absolute = [os.path.abspath(image.with_suffix("")) for image in images]  # noqa: PTH100 - Path.absolute keeps ".."
    try:
        common = os.path.commonpath([os.path.dirname(path) for path in absolute])  # noqa: PTH120
    except ValueError:  # nothing given, or drives of Windows
        return [Path(path).name for path in absolute]
    return ["_".join(Path(path).relative_to(common).parts) for path in absolute]


def _plain(name: str) -> str:
    """`name` without what some file system or shell reads as something else: separators, leading dots and dashes."""
    kept = "".join("_" if _is_odd(character) else character for character in name)
    return kept[-_LONGEST:].strip(" .").lstrip("-") or "image"


def _is_odd(character: str) -> bool:
    return character in _FORBIDDEN or unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}


def _unique(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while _key(candidate) in taken:
        count += 1
        candidate = f"{name}~{count}"
    taken.add(_key(candidate))
    return candidate


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
