"""`mdps train`: parses, calls, prints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mdps.commands.fields import fields, settings
from mdps.commands.options import TRACEBACK
from mdps.commands.terminal import needs, say, spoken_warnings
from mdps.training.config import TrainingConfig, paper_recipe, small_recipe


@click.command(
    epilog="""\b
Examples:
  mdps train good/ --out run
  mdps train mvtec/bottle --out run --recipe paper --precision bf16 --processes 4
  mdps train good/ --out run --recipe small --image-size 64 --minutes 30 --flip-horizontal
  mdps train good/ --out run --recipe small --crop 64 --scale 0.5
  mdps train good/ --out run --resume
  torchrun --nnodes 2 --nproc-per-node 4 ... -m mdps.cli train good/ --out run --batch 64
\b
Exit code: 130 where Ctrl-C or SIGTERM ended the run, after a checkpoint for --resume."""
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Run folder: denoiser, checkpoint, log.")
@click.option(
    "--recipe",
    type=click.Choice(["paper", "small"]),
    help="The paper's network and settings, or a network of 1.9 M parameters for short runs [default: paper].",
)
@click.option("--image-size", type=click.IntRange(8), help="Side images are resized to [default: 256, small: 64].")
@click.option(
    "--crop-size", type=click.IntRange(0), help="Side of the centre cut from them, 0: none "
    "[default: none, but 224 for the paper's recipe on MVTec AD].",
)  # fmt: skip
@click.option("--base", type=click.IntRange(1), help="Channels of the first level [default: 64, small: 32].")
@fields(TrainingConfig, recipes={"paper": paper_recipe(), "small": small_recipe()})
@settings(TrainingConfig, of="what is seldom changed (the defaults it lists are the paper's)")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="That share each batch, here.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out, with its own settings.")
@TRACEBACK
def train(
    folder: Path,
    out: Path,
    recipe: str | None,
    image_size: int | None,
    crop_size: int | None,
    base: int | None,
    processes: int,
    **options: Any,
) -> None:
    """Fit a denoiser to images of good parts.

    FOLDER holds them, or is a category of MVTec AD, BTAD, VisA, .. whose training images are taken. Leaves
    denoiser.safetensors in --out, ready for `mdps export`, and what docs/use/training.md lists.
    """
    options |= options.pop("settings")
    if options["steps"] and options["epochs"]:
        raise click.UsageError("a run is so many --steps or so many --epochs long: give one of them")
    with needs("train"):
        import accelerate  # noqa: F401

        from mdps import training
    tell: Callable[[str], object] = say if training.first_process() else str
    images, layout = _training_images(folder, tell)
    if options["resume"]:
        config, preprocessing = training.resumed_settings(
            out, recipe=recipe, image_size=image_size, crop_size=crop_size, base=base
        )
    else:
        if recipe is None and training.choose_device(options["device"]).type == "cpu":
            tell(
                "Warning: the paper's network (33 M parameters, 256 x 256, 2000 epochs) is for a GPU, and this machine "
                "would train it on its processor, which is far too slow: take --recipe small"
            )
        recipe = recipe or "paper"
        preprocessing = training.framing(recipe, layout, image_size, crop_size, options["crop"], say=tell)
        sizes = {"image_size": preprocessing.network_size[0], "base": base}
        config = training.RECIPES[recipe](training.NETWORKS[recipe](**_given(sizes)))
    how = {name: options.pop(name) for name in ("device", "resume")} | {"preprocessing": preprocessing}
    length = {"steps": None} if options["epochs"] else {}
    config = replace(config, **(_given(options) | length))
    with spoken_warnings():
        if processes > 1:
            path = training.fit_in_processes(processes, images, out, config, **how)
        else:
            path = training.fit(images, out, config, **how)
    if training.first_process():
        ended = training.outcome(out)
        how_far = f" after {ended.steps} steps in {ended.seconds:.0f} s, loss {ended.loss:.3f}" if ended else ""
        click.echo(f"wrote {path}{how_far}; next: mdps export --ckpt {path} --out BUNDLE")


def _training_images(folder: Path, say: Callable[[str], object]) -> tuple[Path | tuple[Path, ...], str]:
    """Return the images to learn from and their layout: a plain folder, or the images of a data set's category."""
    parts = [folder, *(sub for sub in folder.iterdir() if sub.is_dir())] if folder.is_dir() else []
    if not any((part / inner).is_dir() for part in parts for inner in ("train", "Data")):
        return folder, "plain"
    from mdps.benchmarks.data import find_categories

    found = find_categories(folder)
    if len(found) > 1:
        raise click.UsageError(f"{folder} holds {len(found)} categories: train on one, such as {found[0].root}")
    say(f"{found[0].name}: {len(found[0].train)} training images ({found[0].layout})")
    return found[0].train, found[0].layout


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given; the others keep the defaults of what they are passed to."""
    return {name: value for name, value in options.items() if value is not None}
