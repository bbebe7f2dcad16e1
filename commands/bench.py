"""`mdps bench` and `mdps gpu-check`: what a machine can do."""

import json
from pathlib import Path
from typing import Any

import click

from mdps.benchmarks.bench.run import BenchOptions
from mdps.benchmarks.options import CheckOptions
from mdps.commands.fields import fields, settings
from mdps.commands.options import AS_JSON, BUNDLE, THREADS, TRACEBACK
from mdps.commands.terminal import SOME_FAILED, needs, say


@click.command(
    epilog="""\b
Examples:
  mdps bench bundle
  mdps bench bundle --ckpt denoiser.pt --peers patchcore,draem,padim,efficientad --out bench
  mdps bench bundle --batches 2,4,8,16 --samples 2,4,8,16 --torch none --peers none --json"""
)
@BUNDLE
@fields(BenchOptions)
@settings(BenchOptions, of="what is seldom changed")
@THREADS
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for bench.md, bench.png, bench.json, machine.json."
)
@AS_JSON
@TRACEBACK
def bench(bundle: Path, out: Path | None, as_json: bool, settings: dict[str, Any], **choices: Any) -> int:
    """Time a bundle beside torch and other detectors, one image at a time, in one interleaved run.

    Prints a table, or with --json a list of rows; who cannot run here is named with the reason. Exit code 1 where
    nobody could. Leave the machine alone meanwhile.
    """
    from mdps.benchmarks.bench.report import markdown, write
    from mdps.benchmarks.bench.run import run_bench

    if out is not None:
        with needs("bench"):
            import matplotlib  # noqa: F401 - before an hour of measuring, not after it
    result = run_bench(bundle, BenchOptions(**choices, **settings), say=say)
    if out is not None:
        write(result, out)
    click.echo(json.dumps([row.to_json() for row in result.rows]) if as_json else markdown(result).rstrip())
    return 0 if any(row.median_ms is not None for row in result.rows) else 1


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
@fields(CheckOptions)
@settings(CheckOptions, of="what is seldom changed")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("gpu-check"), show_default=True,
    help="Folder for gpu_check.md and gpu_check.json, written after every piece.",
)  # fmt: skip
@THREADS
@AS_JSON
@TRACEBACK
def gpu_check(out: Path, as_json: bool, settings: dict[str, Any], **options: Any) -> int:
    """Try every engine on this machine's card: parity with the torch oracle, latency, rate, memory.

    One command for a machine with an NVIDIA card. Every piece runs in a process of its own, the most valuable first;
    what does not load is named with the reason, and so is what does not fit into the minutes.
    """
    from mdps.benchmarks.gpu_check import check
    from mdps.benchmarks.gpu_check.report import markdown

    found = check(out, CheckOptions(**options, **settings), say)
    click.echo(json.dumps(found.to_json()) if as_json else markdown(found).rstrip())
    say(f"see {out / 'gpu_check.md'}")
    if any(row.state == "failed" or row.agrees is False for row in found.rows):
        return SOME_FAILED
    return 0 if any(row.agrees for row in found.rows) else 1
