"""The commands that study the method: the paper's tables, and a sweep of its open settings. Parse, call, print."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mdps.commands.fields import Command, settings
from mdps.commands.options import (
    AS_JSON,
    BACKEND,
    CATEGORIES,
    DATASET,
    EVERY,
    RESOLUTION,
    THREADS,
    TRACEBACK,
    largest_side,
)
from mdps.commands.options import listed as listed  # by this name for `mdps trade` too
from mdps.commands.terminal import needs, say, spoken_warnings
from mdps.export.options import ExportOptions

TABLES = ("1", "2", "3", "4", "5", "ablation", "rho")
# What a study decides itself, of the options of an export.
DECIDED = ("samples", "method")
SWEPT = (
    "preset", "method", "gradient", "guidance_scale", "masked_guidance_scale", "mask_pass", "mask_lambda", "mask_range",
    "eta", "pixel", "smoothing_sigma", "top",
)  # fmt: skip


FOR_ENGINES = ("backend", "compute_capability", "max_batch", "count_nodes")


def detector_settings(*decided: str) -> Callable[[Command], Command]:
    """`--set` for what `mdps export` can be told of the detector, but for what the study decides itself."""
    return settings(ExportOptions, without=(*decided, *FOR_ENGINES), of="an option of `mdps export`")


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _size(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise ValueError
    return float(text)


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
    callback=listed(_count, "1,2,4"),
    help="Numbers of posterior samples N_s [default: the table's: 1; 1,16 in 1, 2 and ablation; 1,2,4,8,16 in 5].",
)
@click.option(
    "--methods",
    callback=listed(str, "anoddpm,autoddpm"),
    help="Other detectors on the same denoiser: ddim, anoddpm, autoddpm, ddad, or none [default: the table's].",
)
@click.option(
    "--rho", "scales", callback=listed(_size, "50,100"), help="Of the table rho [default: 10,20,50,100,200,300]."
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
@detector_settings(*DECIDED)
@RESOLUTION
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Images judged at once.")
@THREADS
@BACKEND
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
        command=_command(),
        **{name: value for name, value in own.items() if value is not None},
    )
    out = out or Path(f"reproduce-{table}")
    with spoken_warnings():
        found = measure(dataset, ckpt, out, asked, say=say)
    say(f"wrote {out / 'reproduce.md'}")
    click.echo(json.dumps(found.to_json()) if as_json else found.markdown().rstrip())


@click.command(
    epilog="""\b
Examples:
  mdps sweep denoiser.pt mvtec/bottle --out sweep
  mdps sweep bottle.pt mvtec/bottle --out sweep --confirm magnetic_tile --confirm-ckpt tile.pt"""
)
@click.argument("ckpt", type=click.Path(path_type=Path))
@DATASET
@click.option("--rho", "scales", callback=listed(_size, "20,100"), help="Guidance scales [default: 20,50,100,200].")
@click.option(
    "--eta", "etas", callback=listed(_size, "0.3,1"), help="Weights of the pixel term [default: 0.1,0.3,1,2]."
)
@click.option("--lambda", "lambdas", callback=listed(_size, "0.1,0.25"), help="Of the mask [default: 0.05,0.1,0.25].")
@click.option(
    "--smoothing",
    "smoothings",
    callback=listed(_size, "0,1"),
    help="Sigma of the map's blur in pixels of a 64 x 64 image [default: 0,1,2].",
)
@click.option(
    "--top",
    "tops",
    callback=listed(_size, "125,500"),
    help="Pixels the image score averages, of a 256 x 256 map [default: 125,500,2000].",
)
@click.option(
    "--finalists",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="How many of the best weightings get a masked pass for each lambda.",
)
@click.option("--category", help="Which category, where the data set has several.")
@detector_settings(*SWEPT)
@EVERY
@RESOLUTION
@THREADS
@click.option(
    "--confirm", type=click.Path(path_type=Path), help="Another data set that the chosen and the default are tried on."
)
@click.option("--confirm-ckpt", type=click.Path(path_type=Path), help="Its checkpoint.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for sweep.json, .md and .png.")
@AS_JSON
@TRACEBACK
def sweep(
    ckpt: Path,
    dataset: Path,
    out: Path,
    confirm: Path | None,
    confirm_ckpt: Path | None,
    resolution: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Try the settings that the paper leaves open on one category with ground truth.

    Posterior samples are drawn once a rho; eta, smoothing and top are tried on them, lambda with a masked pass of the
    best few. Choose on one data set and --confirm on another: the best of many settings flatters itself where it was
    chosen.
    """
    if (confirm is None) != (confirm_ckpt is None):
        raise click.UsageError("--confirm and --confirm-ckpt belong together: give both, or none")
    with needs("export", "bench", "cpu"):
        from mdps.benchmarks.sweep import SweepOptions, run_sweep
        from mdps.benchmarks.sweep_report import markdown, to_json
    own = {name: options[name] for name in SweepOptions.__dataclass_fields__ if name in options}
    asked = SweepOptions(
        largest=largest_side(resolution),
        choices=options["settings"],
        command=_command(),
        **{name: value for name, value in own.items() if value is not None},
    )
    second = None if confirm is None or confirm_ckpt is None else (confirm, confirm_ckpt)
    with spoken_warnings():
        found = run_sweep(ckpt, dataset, out, asked, second, say=say)
    say(f"wrote {out / 'sweep.md'}")
    click.echo(json.dumps(to_json(found)) if as_json else markdown(found).rstrip())


def _command() -> str:
    return shlex.join(["mdps", *sys.argv[1:]])
