"""Fuzzes what reads foreign bytes: `python tests/hostile/fuzz TARGET --minutes 10 --seed 1`, from a checkout.

Minutes are of CPU time. Findings are written to --out and can be run again with --replay FILE. Linux only: the child
that reads the inputs is bounded by address space and CPU time.
"""

import importlib
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.dont_write_bytecode = True
TESTS = Path(__file__).resolve().parents[2]

import click  # noqa: E402
from engine import Target, fuzz, saved_case  # noqa: E402

TARGETS = {
    "manifest": ("manifests", "Manifests"),
    "checkpoint": ("checkpoints", "Checkpoints"),
    "request": ("queries", "Queries"),
}
_BUNDLE = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import conftest
conftest.make_line_bundle(pathlib.Path(sys.argv[2]))
"""


def _target(name: str) -> Target:
    module, kind = TARGETS[name]
    made: Target = getattr(importlib.import_module(module), kind)(*([_line_bundle()] if name == "manifest" else []))
    return made


def _line_bundle() -> Path:
    """Made in a process of its own: an engine's threads do not survive the fork of the children."""
    folder = Path(tempfile.mkdtemp(prefix="mdps-fuzz-bundle-"))
    subprocess.run([sys.executable, "-c", _BUNDLE, str(TESTS), str(folder)], check=True)
    return folder / "line"


@click.command(help=__doc__)
@click.argument("name", metavar="TARGET", type=click.Choice(list(TARGETS)))
@click.option("--minutes", type=click.FloatRange(min=0), default=10.0, show_default=True, help="CPU time.")
@click.option("--cases", type=click.IntRange(min=1), help="At most so many.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/fuzz"), show_default=True)
@click.option("--replay", type=click.Path(path_type=Path, exists=True), help="One saved finding, in this process.")
def main(name: str, minutes: float, cases: int | None, seed: int, out: Path, replay: Path | None) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    target = _target(name)
    if replay is not None:
        folder = Path(tempfile.mkdtemp(prefix="mdps-fuzz-"))
        target.start(folder)
        return target.run(saved_case(replay), folder)
    report = fuzz(target, seed, cpu_seconds=60 * minutes, cases=cases, say=lambda text: click.echo(text, err=True))
    report.save(out / name)
    click.echo(f"{name}, seed {seed}: {report}")
    for key, finding in report.findings.items():
        click.echo(f"\n{key}\n{finding.what}")
    sys.exit(bool(report.findings))


if __name__ == "__main__":
    main()
