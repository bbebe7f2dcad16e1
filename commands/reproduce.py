"""`mdps reproduce`: parses, calls, prints."""

import json
from pathlib import Path
from typing import Any

import click

from mdps.commands.fields import fields
from mdps.commands.options import (
    AS_JSON,
    CATEGORIES,
    DATASET,
    EVERY,
    RESOLUTION,
    TRACEBACK,
    largest_side,
    listed,
)
from mdps.commands.study import command_line, count, detector_settings, size
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
@click.option(
    "--samples",
    callback=listed(count, "1,2,4"),
    help="Numbers of posterior samples N_s [default: the table's: 1; 1,16 in 1, 2 and ablation; 1,2,4,8,16 in 5].",
)
@click.option(
    "--methods",
    callback=listed(str, "anoddpm,autoddpm"),
    help="Other detectors on the same denoiser: ddim, anoddpm, autoddpm, ddad, or none [default: the table's].",
)
@click.option(
    "--rho", "scales", callback=listed(size, "50,100"), help="Of the table rho [default: 10,20,50,100,200,300]."
)
@click.option(
    "--peers",
    callback=listed(str, "patchcore,draem"),
    default="none",
    show_default=True,
    help="Detectors of anomalib, fitted to the good images: patchcore, draem, padim, ..",
)
@click.option("--peer-minutes", type=click.FloatRange(0, min_open=True), help="End each iterative fit within so many.")
@click.option("--textures", type=click.Path(path_type=Path), help="Pictures DRAEM pastes [default: scikit-image's].")
@click.option("--device", default="cpu", show_default=True, help="Where the peers are fitted: auto, cpu, cuda, cuda:N.")
@detector_settings("samples", "method")
@RESOLUTION
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Images judged at once.")
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
        from mdps.benchmarks.reproduce.run import ReproduceOptions
        from mdps.benchmarks.reproduce.run import reproduce as measure
    own = {name: options[name] for name in ReproduceOptions.__dataclass_fields__ if name in options}
    asked = ReproduceOptions(
        table=table,
        largest=largest_side(resolution),
        choices=options["settings"],
        command=command_line(),
        **{name: value for name, value in own.items() if value is not None},
    )
    out = out or Path(f"reproduce-{table}")
    with spoken_warnings():
        found = measure(dataset, ckpt, out, asked, say=say)
    say(f"wrote {out / 'reproduce.md'}")
    click.echo(json.dumps(found.to_json()) if as_json else found.markdown().rstrip())
