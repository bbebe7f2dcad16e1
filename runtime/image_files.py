"""Which files of a folder are images: one answer for training, calibration and inspection."""

import os
from pathlib import Path

from mdps.runtime.errors import UsageError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"})


def image_files(folder: Path, exclude: Path | None = None) -> list[Path]:
    """The images below `folder`, each folder's own before those of its subfolders, by name.

    Linked folders are entered too, each real one once: what lies behind a link is not passed over in silence, and a
    link to a folder above ends. Hidden files and folders, and the folder `exclude`, are left out. UsageError for a
    folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error

    seen = {os.path.realpath(folder)} | ({os.path.realpath(exclude)} if exclude is not None else set())

    def is_new(path: Path) -> bool:
        real = os.path.realpath(path)
        return real not in seen and not seen.add(real)  # type: ignore[func-returns-value]

    images = []
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here = Path(place)
        folders[:] = [name for name in sorted(folders) if name[0] != "." and is_new(here / name)]
        images += [
            here / name for name in sorted(files) if name[0] != "." and Path(name).suffix.lower() in IMAGE_SUFFIXES
        ]
    return images
