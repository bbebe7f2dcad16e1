"""Data sets of good and defective images, recognised from how their folders are laid out.

`layouts` lists the layouts, `samples` says how masks are read.
"""

from pathlib import Path

from mdps.benchmarks.layouts import LOOKED_FOR, images_only, recognise, subfolders
from mdps.benchmarks.samples import Category, Sample
from mdps.runtime.errors import UsageError

__all__ = ["Category", "Sample", "find_categories"]


def find_categories(path: Path | str) -> tuple[Category, ...]:
    """The categories of a data set's root, or the one whose folder `path` is, in natural order.

    A folder of images and nothing else is one category with training images only. Nothing but names is read here,
    and VisA's table of its split; `Category.check` opens the masks.

    Raises:
        UsageError: `path` is no folder or cannot be read, no layout fits (the sentence says what was looked for), or
            VisA's table is missing or damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give the root of a data set, or the folder of one category")
    try:
        alone = recognise(folder)
        found = (alone,) if alone else tuple(filter(None, map(recognise, subfolders(folder))))
        if not found and (plain := images_only(folder)):
            found = (plain,)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from error
    if not found:
        raise UsageError(
            f"{folder} is laid out like no known data set: looked there and one folder below for {LOOKED_FOR}"
        )
    return found
