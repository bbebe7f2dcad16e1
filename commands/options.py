"""Options of the commands, in groups; names and ranges only, so that help is quick."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]

ONE_FILE = "detector.onnx"  # what `mdps single-file` writes into a bundle

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Machine-readable output on stdout, messages on stderr.")
THREADS = click.option(
    "--threads", type=click.IntRange(1), help="Processor threads [default: all this process may use]."
)
FALSE_ALARM_RATE = click.option(
    "--false-alarm-rate",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.01,
    show_default=True,
    help="Share of good parts that may fail.",
)
DATASET = click.argument("dataset", type=click.Path(path_type=Path))
CATEGORIES = click.option(
    "--category", "categories", multiple=True, help="Only this category; may be given several times."
)
EVERY = click.option(
    "--every", type=click.IntRange(1), default=1, show_default=True, help="Judge every n-th test image only."
)
RESOLUTION = click.option(
    "--resolution", type=click.Choice(["256", "full"]), default="256", show_default=True,
    help="Longer side that larger ground truth is reduced to for the pixel metrics; full: as it is.",
)  # fmt: skip


def largest_side(resolution: str) -> int | None:
    """Return the pixels that RESOLUTION stands for, None for all there are."""
    return None if resolution == "full" else int(resolution)


def _show_traceback(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(dict)["traceback"] = True


TRACEBACK = click.option(
    "--traceback", is_flag=True, expose_value=False, callback=_show_traceback, help="Show where an error came from."
)
