"""`mdps reproduce`, `mdps sweep`, `mdps trade`: studies on data with ground truth, of detectors that they export."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, TypeVar

import click

from mdps.benchmarks.options import ReproduceOptions, SweepOptions, TradeOptions
from mdps.commands.fields import Command, fields, settings
from mdps.commands.options import AS_JSON, CATEGORIES, DATASET, EVERY, RESOLUTION, THREADS, TRACEBACK, largest_side
from mdps.commands.terminal import needs, say, spoken_warnings
from mdps.export.options import ExportOptions
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.option import Dataclass, settings_of

T = TypeVar("T", ReproduceOptions, SweepOptions, TradeOptions)
FOR_ENGINES = ("engine", "compute_capability", "max_batch", "count_nodes")
TABLES = ("1", "2", "3", "4", "5", "ablation", "rho")
SWEPT = (
    "preset", "method", "gradient", "guidance_scale", "masked_guidance_scale", "mask_pass", "mask_lambda", "mask_range",
    "eta", "pixel", "smoothing_sigma", "top",
)  # fmt: skip
COMPARED = ("gradient", "steps", "mask_pass", "method")
CKPT = click.argument("ckpt", type=click.Path(path_type=Path))
CATEGORY = click.option("--category", help="Which category, where the data set has several.")


def detector_settings(*decided: str, own: type[Dataclass] | None = None) -> Callable[[Command], Command]:
    """Return `--set` for options of `mdps export` that the study does not decide, and for seldom ones of its own."""
    others = [one for one in settings_of(ExportOptions) if one.name not in (*decided, *FOR_ENGINES)]
    return settings(own, others, of="an option of `mdps export`, or one of the study that is seldom needed")


def own_options(cls: type[T], options: dict[str, Any], **decided: Any) -> T:
    """Return a study's options from those of its command; what `--set` says beside them is for the export."""
    values = options | options["settings"]
    own = {field.name: values[field.name] for field in fields_of(cls) if field.name in values}
    given = {name: value for name, value in own.items() if value is not None}
    choices = {name: value for name, value in options["settings"].items() if name not in own}
    return cls(**given, **decided, choices=choices, command=shlex.join(["mdps", *sys.argv[1:]]))


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


@click.command(
    epilog="""\b
Examples:
  mdps sweep denoiser.pt mvtec/bottle --out sweep
  mdps sweep bottle.pt mvtec/bottle --out sweep --confirm magnetic_tile --confirm-ckpt tile.pt"""
)
@CKPT
@DATASET
@fields(SweepOptions)
@CATEGORY
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


@click.command(
    epilog="""\b
Examples:
  mdps trade bottle.safetensors mvtec/bottle --out trade
  mdps trade bottle.safetensors mvtec/bottle --steps 2,5,10,20 --reduced none --out trade
\b
Run it again after a stop: it goes on. Leave the machine alone while it times."""
)
@CKPT
@DATASET
@CATEGORY
@fields(TradeOptions)
@detector_settings(*COMPARED, own=TradeOptions)
@EVERY
@RESOLUTION
@fields(LoadOptions, only=["threads", "engine"])
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for results and what is kept.")
@AS_JSON
@TRACEBACK
def trade(
    ckpt: Path, dataset: Path, category: str | None, out: Path, resolution: str, as_json: bool, **options: Any
) -> None:
    """Show what a millisecond buys: exact, jacobian-free and ddad guidance, steps, the mask pass, precision.

    Judges a category with ground truth in every way and times all of them in one interleaved run. Compares at equal
    steps and at equal time, with paired intervals. Writes trade.json, trade.md and trade.png into --out.
    """
    with needs("export", "bench", "cpu"):
        from mdps.benchmarks.trade import trade as measure
        from mdps.benchmarks.trade.report import markdown
        from mdps.commands.evaluate import chosen_categories
    found = chosen_categories(dataset, (category,) if category else ())
    if len(found) > 1:
        raise click.UsageError(f"{dataset} has {len(found)} categories: choose one with --category {found[0].name}")
    asked = own_options(TradeOptions, options, largest=largest_side(resolution))
    with spoken_warnings():
        result = measure(ckpt, found[0], out, asked, say=say)
    say(f"wrote {out / 'trade.md'}")
    click.echo(json.dumps(result.to_json()) if as_json else markdown(result).rstrip())
