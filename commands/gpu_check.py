"""`mdps gpu-check`: parses, calls, prints."""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mdps.commands.options import AS_JSON, THREADS, TRACEBACK
from mdps.commands.terminal import SOME_FAILED

if TYPE_CHECKING:
    from mdps.benchmarks.gpu_check.rows import Row


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
def gpu_check(
    minutes: float,
    out: Path,
    work: Path | None,
    device: str | None,
    cpu: bool,
    networks: tuple[str, ...],
    precisions: tuple[str, ...],
    samples: int,
    steps: int,
    rounds: int,
    matrix_side: int,
    authors_size: int,
    threads: int | None,
    as_json: bool,
) -> int:
    """Try every engine on this machine's card: parity with the torch oracle, latency, rate, memory.

    One command for a machine with an NVIDIA card. Every piece runs in a process of its own, the most valuable first;
    what does not load is named with the reason, and so is what does not fit into the minutes.
    """
    from mdps.benchmarks.gpu_check import items, report, run
    from mdps.runtime import cards
    from mdps.runtime.threads import available_cpus

    threads = threads or available_cpus()
    prepared = run.folder_of(out, work)
    choice = items.Choice(networks, precisions, (1, samples), threads=threads, matrix_side=matrix_side)
    options = ["--steps", str(steps), "--samples", f"1,{samples}", "--max-batch", str(samples)]
    options += ["--authors-size", str(authors_size)]
    if cpu:
        card, wanted = None, items.on_processor(prepared, choice)
        skipped = run.skip_all(items.on_card(prepared, choice), _why_no_card(device))
    else:
        card, wanted, skipped = cards.choose(device), items.on_card(prepared, choice), []
    if card and card.uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = card.uuid  # of all processes that are started here
        options += ["--compute-capability", card.compute_capability]
    say = partial(click.echo, err=True)
    machine = report.machine_facts() | {"steps": steps, "threads": threads, "minutes": minutes}
    doer = run.Workshop(prepared, rounds, threads, (card and card.uuid) or None, tuple(options))
    rows = run.run_check(
        wanted, run.Minutes(minutes * 60), doer,
        lambda found: report.write_report([*found, *skipped], machine, out, finished=False), say,
    )  # fmt: skip
    rows += skipped
    report.write_report(rows, machine, out, finished=True)
    click.echo(json.dumps(report.to_json(rows, machine, True)) if as_json else report.markdown(rows, machine).rstrip())
    say(f"see {out / 'gpu_check.md'}")
    return _exit_code(rows)


def _why_no_card(device: str | None) -> str:
    """Return the reason for which a run on the processor tries no card."""
    from mdps.runtime import cards
    from mdps.runtime.errors import BackendError

    try:
        cards.choose(device)
    except BackendError as error:
        return str(error)
    return "--cpu was given"


def _exit_code(rows: "Sequence[Row]") -> int:
    if any(row.state == "failed" or row.agrees is False for row in rows):
        return SOME_FAILED
    return 0 if any(row.agrees for row in rows) else 1
