"""`mdps trade`: parses, calls, prints."""

import json
from pathlib import Path
from typing import Any

import click

from mdps.commands.fields import fields
from mdps.commands.options import AS_JSON, DATASET, EVERY, RESOLUTION, TRACEBACK, listed
from mdps.commands.study import command_line, detector_settings
from mdps.commands.terminal import needs, spoken_warnings
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
@click.option("--steps", callback=listed(int, "3,5,10"), help="Numbers of steps N [default: 3,5,10].")
@click.option("--jacobian-free-rho", "free_scale", type=float, help="Its guidance scale [default: the exact one's].")
@click.option("--ddad-w", "ddad_scale", type=float, default=4.0, show_default=True, help="Guidance scale of ddad.")
@click.option(
    "--reduced", "precisions", callback=listed(str, "int8-features,fp16-weights,bf16-steps"),
    help="Of int8-features, fp16-weights and bf16-steps, or none [default: all].",
)  # fmt: skip
@click.option(
    "--calibration",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Good images for int8's ranges and the exits.",
)
@click.option(
    "--early-exit", "exits", callback=listed(float, "0.5,0.9"), help="Shares of good parts, or none [default: 0.5,0.9]."
)
@click.option("--rounds", type=click.IntRange(1), default=11, show_default=True, help="Times each way is timed.")
@detector_settings(*COMPARED)
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
        from mdps.benchmarks.trade.report import markdown
        from mdps.benchmarks.trade.study import TradeOptions
        from mdps.benchmarks.trade.study import trade as measure
        from mdps.commands.evaluate import chosen_categories
    found = chosen_categories(dataset, (category,) if category else ())
    if len(found) > 1:
        raise click.UsageError(f"{dataset} has {len(found)} categories: choose one with --category {found[0].name}")
    own = {name: options[name] for name in TradeOptions.__dataclass_fields__ if name in options}
    asked = TradeOptions(
        largest=None if resolution == "full" else int(resolution),
        choices=options["settings"],
        command=command_line(),
        **{name: value for name, value in own.items() if value is not None},
    )
    with spoken_warnings():
        result = measure(ckpt, found[0], out, asked, say=lambda text: click.echo(text, err=True))
    click.echo(f"wrote {out / 'trade.md'}", err=True)
    click.echo(json.dumps(result.to_json()) if as_json else markdown(result).rstrip())
