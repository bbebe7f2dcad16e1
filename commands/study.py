"""The settings of the detector that a study makes, and the command line it records."""

import shlex
import sys
from collections.abc import Callable

from mdps.commands.fields import Command, settings
from mdps.export.options import ExportOptions

FOR_ENGINES = ("backend", "compute_capability", "max_batch", "count_nodes")


def detector_settings(*decided: str) -> Callable[[Command], Command]:
    """`--set` for what `mdps export` can be told of the detector, but for what the study decides itself."""
    return settings(ExportOptions, without=(*decided, *FOR_ENGINES), of="an option of `mdps export`")


def count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def size(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise ValueError
    return float(text)


def command_line() -> str:
    """Return what was typed, for a study's record."""
    return shlex.join(["mdps", *sys.argv[1:]])
