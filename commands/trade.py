"""`mdps trade`: parses, calls, prints."""

import json
from pathlib import Path
from typing import Any

import click

from mdps.benchmarks.options import TradeOptions
from mdps.commands.fields import fields
from mdps.commands.options import AS_JSON, DATASET, EVERY, RESOLUTION, TRACEBACK, largest_side
from mdps.commands.study import detector_settings, own_options
from mdps.commands.terminal import needs, say, spoken_warnings
from mdps.runtime.bundle import LoadOptions

COMPARED = ("gradient", "steps", "mask_pass", "method")


@click.command(
    epilog="""\b
Examples:
  mdps trade bottle.safetensors mvtec/bottle --out trade
  mdps trade bottle.safetensors mvtec/bottle --steps 2,5,10,20 --reduced none --out trade
\b
Run it again after a stop: it goes on. Leave the machine alone while it times."""
)
@click.argument("ckpt", type=click.Path(path_type=Path))
@DATASET
@click.option("--category", help="Which category, where the data set has several.")
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
