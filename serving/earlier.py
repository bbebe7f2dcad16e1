"""Results of an earlier run in the folder of the next: they stay, unless they are to be replaced."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from mdps.runtime.errors import UsageError
from mdps.runtime.image_files import LINES, MAPS, OVERLAYS, open_file
from mdps.serving.rows import TABLE, TABLE_HEADER, writing

REPORT = "report.html"


def refuse_results(out: Path) -> None:
    """UsageError where `out` holds results of an earlier run, be it complete or not."""
    for name, nothing in ((LINES, 0), (TABLE, len(TABLE_HEADER)), (REPORT, 0)):
        with suppress(OSError):  # that there is none
            if (out / name).stat().st_size > nothing:
                raise UsageError(
                    f"--out {out} holds results of an earlier run ({name}): choose another folder, or replace them "
                    "with --force"
                )


def refuse_inputs_in(out: Path, images: Sequence[Path]) -> None:
    """UsageError where an image lies in a folder of `out` that the run writes into: it might be overwritten."""
    written = [os.path.realpath(out / name) for name in (MAPS, OVERLAYS)]
    for image in images:
        real = os.path.realpath(image)
        if any(os.path.commonpath([real, folder]) == folder for folder in written if _same_drive(real, folder)):
            raise UsageError(f"{image} lies in a folder that the run would write into: choose another --out than {out}")


def _same_drive(one: str, other: str) -> bool:
    return os.path.splitdrive(one)[0] == os.path.splitdrive(other)[0]


def remove_results(out: Path) -> None:
    """Removes the report and the maps and pictures that `results.jsonl` lists, and nothing else.

    Raises:
        MdpsError: one of them cannot be removed.
    """
    for path in (out / REPORT, *_listed(out)):
        with writing(path):
            path.unlink(missing_ok=True)


def _listed(out: Path) -> Iterator[Path]:
    with writing(out / LINES), open_file(out / LINES) as file:
        lines = file.read().splitlines()
    for line in lines:
        try:
            name = PurePosixPath(json.loads(line)["map"])
        except (ValueError, TypeError, KeyError):  # an image without a map, or no line of ours
            continue
        if name.parts == (MAPS, name.name) and name.suffix == ".npy":  # a file that we name, wherever the line is from
            yield out / name
            yield out / OVERLAYS / f"{name.stem}.png"
