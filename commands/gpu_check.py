"""`mdps gpu-check`: parses, calls, prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mdps.commands.options import AS_JSON, THREADS, TRACEBACK
from mdps.commands.terminal import SOME_FAILED, say


def _among(*known: str) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """Return a callback that reads some of the known names, between commas."""

    def convert(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
        given = value.split(",")
        for name in given:
            if name not in known:
                raise click.BadParameter(f"there is no {name!r}: choose among {', '.join(known)}")
        return tuple(name for name in known if name in given)

    return convert


@click.command(
    "gpu-check",
    epilog="""\b
Examples:
  mdps gpu-check
  mdps gpu-check --minutes 20 --out results
  mdps gpu-check --cpu --networks demo --steps 2
\b
Exit code: 0 all that ran agrees with the oracle, 3 something disagrees, crashed or hung, 1 nothing ran.""",
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=6.0, show_default=True, help="At most.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("gpu-check"), show_default=True,
    help="Folder for gpu_check.md and gpu_check.json, written after every piece.",
)  # fmt: skip
@click.option(
    "--work", type=click.Path(path_type=Path),
    help="Folder of bundles, plans and the oracle's numbers, used again where they are there [default: work in --out].",
)  # fmt: skip
@click.option("--device", help="Card: its index as nvidia-smi shows it, or its UUID [default: the first].")
@click.option("--cpu", is_flag=True, help="Check the engines of the processor; every other is named with the reason.")
@click.option(
    "--networks",
    callback=_among("demo", "authors"),
    default="demo,authors",
    show_default=True,
    help="Of the demo's network and one of the authors' size.",
)
@click.option(
    "--precisions",
    callback=_among("fp32", "fp16"),
    default="fp32,fp16",
    show_default=True,
    help="Of the denoiser.",
)
@click.option("--samples", type=click.IntRange(2), default=16, show_default=True, help="N_s to measure besides 1.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Of each pass.")
@click.option("--rounds", type=click.IntRange(1), default=200, show_default=True, help="Runs of each, at most.")
@click.option("--matrix-side", type=click.IntRange(16), default=8192, show_default=True, help="Of the rates' products.")
@click.option("--authors-size", type=click.IntRange(32), default=256, hidden=True, help="Of their images.")
@THREADS
@AS_JSON
@TRACEBACK
def gpu_check(out: Path, as_json: bool, **options: Any) -> int:
    """Try every engine on this machine's card: parity with the torch oracle, latency, rate, memory.

    One command for a machine with an NVIDIA card. Every piece runs in a process of its own, the most valuable first;
    what does not load is named with the reason, and so is what does not fit into the minutes.
    """
    from mdps.benchmarks.gpu_check import check
    from mdps.benchmarks.gpu_check.report import markdown, to_json
    from mdps.benchmarks.options import CheckOptions

    found = check(out, CheckOptions(**options), say)
    rows, machine = found.rows, found.machine
    click.echo(json.dumps(to_json(rows, machine, True)) if as_json else markdown(rows, machine).rstrip())
    say(f"see {out / 'gpu_check.md'}")
    if any(row.state == "failed" or row.agrees is False for row in rows):
        return SOME_FAILED
    return 0 if any(row.agrees for row in rows) else 1
