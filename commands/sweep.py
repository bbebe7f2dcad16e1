"""`mdps sweep`: parses, calls, prints."""

import json
from pathlib import Path
from typing import Any

import click

from mdps.benchmarks.options import SweepOptions
from mdps.commands.fields import fields
from mdps.commands.options import AS_JSON, DATASET, EVERY, RESOLUTION, THREADS, TRACEBACK, largest_side
from mdps.commands.study import detector_settings, own_options
from mdps.commands.terminal import needs, say, spoken_warnings

SWEPT = (
    "preset", "method", "gradient", "guidance_scale", "masked_guidance_scale", "mask_pass", "mask_lambda", "mask_range",
    "eta", "pixel", "smoothing_sigma", "top",
)  # fmt: skip


@click.command(
    epilog="""\b
Examples:
  mdps sweep denoiser.pt mvtec/bottle --out sweep
  mdps sweep bottle.pt mvtec/bottle --out sweep --confirm magnetic_tile --confirm-ckpt tile.pt"""
)
@click.argument("ckpt", type=click.Path(path_type=Path))
@DATASET
@fields(SweepOptions)
@click.option("--category", help="Which category, where the data set has several.")
@detector_settings(*SWEPT, own=SweepOptions)
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
        from mdps.benchmarks.study.sweep import markdown, run_sweep
    asked = own_options(SweepOptions, options, largest=largest_side(resolution))
    second = None if confirm is None or confirm_ckpt is None else (confirm, confirm_ckpt)
    with spoken_warnings():
        found = run_sweep(ckpt, dataset, out, asked, second, say=say)
    say(f"wrote {out / 'sweep.md'}")
    click.echo(json.dumps(found.to_json()) if as_json else markdown(found).rstrip())
