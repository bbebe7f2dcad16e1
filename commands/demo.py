"""`mdps demo`: parses, calls, prints."""

from pathlib import Path

import click

from mdps.commands.options import AS_JSON, THREADS, TRACEBACK
from mdps.commands.terminal import needs, print_values, say


@click.command(
    epilog="""\b
Examples:
  mdps demo
  mdps demo --json --out /var/www/demo"""
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-report"),
    show_default=True,
    help="Folder for the report.",
)
@THREADS
@AS_JSON
@TRACEBACK
def demo(out: Path, threads: int | None, as_json: bool) -> None:
    """Export the checkpoint that ships with mdps, calibrate it, and judge photographs with defects put in."""
    with needs("export", "bench", "cpu"):
        from mdps.benchmarks.demo import run_demo
    print_values(run_demo(out, threads=threads, say=say).to_json(), as_json)
