"""`mdps bench`: parses, calls, prints."""

import json
from pathlib import Path
from typing import Any

import click

from mdps.benchmarks.bench.run import BenchOptions
from mdps.commands.fields import fields, settings
from mdps.commands.options import AS_JSON, BUNDLE, THREADS, TRACEBACK
from mdps.commands.terminal import needs, say


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
