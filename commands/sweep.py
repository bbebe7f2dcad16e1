"""`mdps sweep`: parses, calls, prints."""

import json
from pathlib import Path
from typing import Any

import click

from mdps.commands.options import AS_JSON, DATASET, EVERY, RESOLUTION, THREADS, TRACEBACK, largest_side, listed
from mdps.commands.study import command_line, detector_settings, size
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
@click.option("--rho", "scales", callback=listed(size, "20,100"), help="Guidance scales [default: 20,50,100,200].")
@click.option("--eta", "etas", callback=listed(size, "0.3,1"), help="Weights of the pixel term [default: 0.1,0.3,1,2].")
@click.option("--lambda", "lambdas", callback=listed(size, "0.1,0.25"), help="Of the mask [default: 0.05,0.1,0.25].")
@click.option(
    "--smoothing",
    "smoothings",
    callback=listed(size, "0,1"),
    help="Sigma of the map's blur in pixels of a 64 x 64 image [default: 0,1,2].",
)
@click.option(
    "--top",
    "tops",
    callback=listed(size, "125,500"),
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
        command=command_line(),
        **{name: value for name, value in own.items() if value is not None},
    )
    second = None if confirm is None or confirm_ckpt is None else (confirm, confirm_ckpt)
    with spoken_warnings():
        found = run_sweep(ckpt, dataset, out, asked, second, say=say)
    say(f"wrote {out / 'sweep.md'}")
    click.echo(json.dumps(to_json(found)) if as_json else markdown(found).rstrip())
