"""The settings of the detector that a study makes, and the command line it records."""

import shlex
import sys
from collections.abc import Callable

from mdps.commands.fields import Command, settings
from mdps.export.options import ExportOptions
from mdps.runtime.option import Dataclass, settings_of

FOR_ENGINES = ("engine", "compute_capability", "max_batch", "count_nodes")


def detector_settings(*decided: str, own: type[Dataclass] | None = None) -> Callable[[Command], Command]:
    """Return `--set` for options of `mdps export` that the study does not decide, and for seldom ones of its own."""
    others = [one for one in settings_of(ExportOptions) if one.name not in (*decided, *FOR_ENGINES)]
    return settings(own, others, of="an option of `mdps export`, or one of the study that is seldom needed")


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
