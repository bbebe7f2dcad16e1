"""Options of the studies: their own, and those of the export that makes their detector."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from mdps.benchmarks.options import ReproduceOptions, SweepOptions, TradeOptions
from mdps.commands.fields import Command, settings
from mdps.export.options import ExportOptions
from mdps.runtime.option import Dataclass, settings_of

T = TypeVar("T", ReproduceOptions, SweepOptions, TradeOptions)
FOR_ENGINES = ("engine", "compute_capability", "max_batch", "count_nodes")


def detector_settings(*decided: str, own: type[Dataclass] | None = None) -> Callable[[Command], Command]:
    """Return `--set` for options of `mdps export` that the study does not decide, and for seldom ones of its own."""
    others = [one for one in settings_of(ExportOptions) if one.name not in (*decided, *FOR_ENGINES)]
    return settings(own, others, of="an option of `mdps export`, or one of the study that is seldom needed")


def own_options(cls: type[T], options: dict[str, Any], **decided: Any) -> T:
    """Return a study's options from those of its command; what `--set` says beside them is for the export."""
    values = options | options["settings"]
    own = {field.name: values[field.name] for field in fields(cls) if field.name in values}
    given = {name: value for name, value in own.items() if value is not None}
    choices = {name: value for name, value in options["settings"].items() if name not in own}
    return cls(**given, **decided, choices=choices, command=shlex.join(["mdps", *sys.argv[1:]]))
