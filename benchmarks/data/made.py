"""Test sets made of another's images: where they are written, and the command that does it."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from PIL import Image

from mdps.benchmarks.kit import exit_code
from mdps.runtime.errors import require

SEED = 17


def refuse_used(out: Path) -> None:
    """UsageError for a folder that holds files."""
    require(not out.exists() or not any(out.iterdir()), f"{out} holds files: name another folder, or remove it")


def link(paths: Sequence[Path], folder: Path) -> None:
    """Fill a new folder with links to these files, numbered."""
    folder.mkdir(parents=True)
    for index, path in enumerate(paths):
        (folder / f"{index:03d}{path.suffix}").symlink_to(path.resolve())


def save(pixels: NDArray[Any], path: Path) -> None:
    """Write a picture, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def command(name: str, doc: str, write: Callable[[Path, Path], int], made: str, argv: list[str] | None) -> int:
    """Run the module `name` as a command that writes a set; a mistake of the user's is one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog=f"mdps.benchmarks.{name}", description=doc.splitlines()[0])
    parser.add_argument("category", type=Path, help="folder of a category with test images")
    parser.add_argument("--out", type=Path, required=True, help="folder that the set is written to")
    options = parser.parse_args(argv)

    def work() -> None:
        count = write(options.category, options.out)
        print(f"wrote {options.out} ({count} images {made})", file=sys.stderr)

    return exit_code(work)
