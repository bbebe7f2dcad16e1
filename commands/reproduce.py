"""`mdps reproduce`: parses, calls, prints."""

import json
from pathlib import Path
from typing import Any

import click

from mdps.benchmarks.options import ReproduceOptions
from mdps.commands.fields import fields
from mdps.commands.options import AS_JSON, CATEGORIES, DATASET, EVERY, RESOLUTION, TRACEBACK, largest_side
from mdps.commands.study import detector_settings, own_options
from mdps.commands.terminal import needs, say, spoken_warnings
from mdps.runtime.bundle import LoadOptions

TABLES = ("1", "2", "3", "4", "5", "ablation", "rho")


@click.command(
    epilog="""\b
Examples:
  mdps reproduce 1 mvtec --ckpt runs/ --out table1
  mdps reproduce 1 mvtec --ckpt runs/ --set preset=mvtec --peers draem,patchcore
  mdps reproduce 5 mvtec/bottle --ckpt bottle.safetensors --samples 1,2,4
  mdps reproduce ablation mvtec/bottle --ckpt bottle.safetensors
\b
--ckpt is one checkpoint, or a folder with <category>.safetensors or <category>/denoiser.safetensors for each category.
--set preset=mvtec (or btad) takes the authors' numbers of each category. Run it again after a stop: it goes on."""
)
@click.argument("table", type=click.Choice(TABLES))
@DATASET
@click.option("--ckpt", required=True, type=click.Path(path_type=Path), help="Checkpoint, or folder of checkpoints.")
@CATEGORIES
@EVERY
@fields(ReproduceOptions)
@detector_settings("samples", "method", own=ReproduceOptions)
@RESOLUTION
@fields(LoadOptions, only=["threads", "engine"])
@click.option("--out", type=click.Path(path_type=Path), help="Folder for all of it [default: reproduce-TABLE].")
@AS_JSON
@TRACEBACK
def reproduce(
    table: str, dataset: Path, ckpt: Path, out: Path | None, resolution: str, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Measure a table of the paper on the categories at hand, each row beside the paper's number.

    TABLE is 1 (MVTec AD), 2 (BTAD), 3 (time), 4 (metrics), 5 (N_s), ablation (guidance, mask, metrics, N_s, with paired
    differences) or rho. What cannot be run here shows the published number, marked so. `--set` changes the detector.
    Writes reproduce.json, reproduce.md, reproduce.png and a report of every run into --out.
    """
    with needs("export", "bench", "cpu"):
        from mdps.benchmarks.reproduce import reproduce as measure
    asked = own_options(ReproduceOptions, options, table=table, largest=largest_side(resolution))
    out = out or Path(f"reproduce-{table}")
    with spoken_warnings():
        found = measure(dataset, ckpt, out, asked, say=say)
    say(f"wrote {out / 'reproduce.md'}")
    click.echo(json.dumps(found.to_json()) if as_json else found.markdown().rstrip())
