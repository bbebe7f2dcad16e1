"""Which files of a folder are images: one answer for training, calibration and inspection."""

import os
from pathlib import Path

from mdps.runtime.errors import UsageError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"})

LINES, MAPS, OVERLAYS = "results.jsonl", "maps", "overlays"  # what a run leaves; pictures of results, not of parts


def image_files(folder: Path, exclude: Path | None = None) -> list[Path]:
    """The images below `folder`, each folder's own before those of its subfolders, by name.

    Linked folders are entered too, each real one once: what lies behind a link is not passed over in silence, and a
    link to a folder above ends. Left out are hidden files and folders, the folder `exclude`, and what lies in `maps`
    and `overlays` beside a `results.jsonl`: an earlier run left it. UsageError for a folder that cannot be read.
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
        left = {MAPS, OVERLAYS} if LINES in files else set()
        folders[:] = [name for name in sorted(set(folders) - left) if name[0] != "." and is_new(here / name)]
        images += [
            here / name for name in sorted(files) if name[0] != "." and Path(name).suffix.lower() in IMAGE_SUFFIXES
        ]
    return images
