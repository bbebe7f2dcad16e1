"""The command line: parses, calls, prints. What a command needs is imported when it runs, so that help is quick."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mdps import __version__
from mdps.benchmarks.commands import COMMANDS
from mdps.serving.command import predict
from mdps.serving.hints import mention_plans
from mdps.serving.http.command import serve
from mdps.serving.options import (
    AS_JSON,
    BACKEND,
    BUNDLE,
    DEVICE,
    PRODUCT,
    PROVIDER,
    SAMPLES,
    THREADS,
    TRACEBACK,
    export_choices,
    plan_choices,
    training_choices,
)
from mdps.serving.terminal import needs, print_values, run, say, spoken_warnings

ONE_FILE = "detector.onnx"  # what `mdps single-file` writes into a bundle

FALSE_ALARM_RATE = click.option(
    "--false-alarm-rate",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.01,
    show_default=True,
    help="Share of good parts that may fail.",
)


@click.group("mdps", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mdps")
@TRACEBACK
def cli() -> None:
    """Finds defects with a diffusion model (MDPS): from a checkpoint to a verdict.

    \b
    Start with:
      mdps demo
    \b
    Then, with your own denoiser and images of good parts:
      mdps export --ckpt denoiser.pt --out bundle
      mdps calibrate bundle good/
      mdps predict bundle line/ --out results
    \b
    A denoiser from images of good parts alone, on a processor:
      mdps train good/ --out run --recipe small --minutes 45
    """


@cli.command(
    epilog="""\b
Examples:
  mdps calibrate bundle good/
  mdps calibrate bundle good_blue/ --product blue --false-alarm-rate 0.005"""
)
@BUNDLE
@click.argument("good_folder", type=click.Path(path_type=Path))
@FALSE_ALARM_RATE
@SAMPLES
@PRODUCT
@THREADS
@BACKEND
@PROVIDER
@DEVICE
@AS_JSON
@TRACEBACK
def calibrate(bundle: Path, good_folder: Path, false_alarm_rate: float, as_json: bool, **options: Any) -> None:
    """Set the threshold and the map ranges from images of good parts, and store them in the bundle.

    Use images that took no part in training, and never those of a test. All of them are used or none: one that cannot
    be read ends the command, which names it and changes nothing.
    """
    from mdps.runtime.manifest import Manifest
    from mdps.serving.run import calibrate_folder
    from mdps.serving.told import next_predict, told_calibration

    mention_plans(bundle)
    before = Manifest.read(bundle, verify=False).calibrations.get(options["product"])
    with spoken_warnings():
        calibration = calibrate_folder(bundle, good_folder, false_alarm_rate, **options)
    if (bundle / ONE_FILE).is_file():
        click.echo(f"Warning: {bundle / ONE_FILE} keeps its threshold until `mdps single-file {bundle}`", err=True)
    if as_json:
        print_values(calibration.to_json(), as_json)
        return
    print_values(told_calibration(calibration, before), as_json)
    click.echo(next_predict(bundle, options))


@cli.command(
    "single-file",
    epilog="""\b
Examples:
  mdps single-file bundle
  mdps single-file bundle --product blue --out blue.onnx""",
)
@BUNDLE
@click.option("--out", type=click.Path(path_type=Path), help=f"The file [default: {ONE_FILE} in the bundle].")
@PRODUCT
@TRACEBACK
def single_file(bundle: Path, out: Path | None, product: str) -> None:
    """Write a calibrated bundle as one ONNX file: picture in, map, score and verdict out.

    Any ONNX Runtime runs it, in C++, C#, Java or JavaScript, without mdps. Make it again after each calibration.
    """
    _write_single_file(bundle, out, product)


def _write_single_file(bundle: Path, out: Path | None, product: str) -> None:
    with needs("export", "cpu"):
        from mdps.export.single_file import export_single_file
    written = export_single_file(bundle, out, product=product, say=say)
    click.echo(f"wrote {written}")


@cli.command(
    epilog="""\b
Examples:
  mdps inspect denoiser.pt
  mdps inspect bundle --json"""
)
@click.argument("path", type=click.Path(path_type=Path))
@AS_JSON
@TRACEBACK
def inspect(path: Path, as_json: bool) -> None:
    """Say what a checkpoint or a bundle is."""
    from mdps.runtime.manifest import FILE_NAME, Manifest

    if (path / FILE_NAME).is_file():
        from mdps.serving.told import told_bundle

        manifest = Manifest.read(path)
        if not as_json:
            print_values(told_bundle(manifest, path), as_json)
            click.echo("\nAll that its manifest says:")
        print_values(manifest.to_json(), as_json)
        return
    if path.is_dir() and not any((path / inner / "config.json").is_file() for inner in (".", "unet")):
        raise click.UsageError(
            f"{path} is neither a bundle (a folder with {FILE_NAME}, as `mdps export` writes it) nor a checkpoint (a "
            "file, or a folder with config.json, as diffusers saves it)"
        )
    with needs("export"):
        from mdps.models.checkpoints import describe_checkpoint
    report = describe_checkpoint(path)
    click.echo(json.dumps(report.to_json()) if as_json else report)


@cli.command(
    epilog="""\b
Examples:
  mdps export --ckpt denoiser.pt
  mdps export --ckpt denoiser.pt --out bundle --image-size 256 --num-heads 4
  mdps export --ckpt model/ --out bundle --preset mvtec/bottle --backbone-weights wide_resnet101_2.pth
  mdps export --ckpt denoiser.pt --out bundle --no-mask-pass --samples 5
  mdps export --ckpt denoiser.pt --out bundle --calibrate good/ --single-file
  mdps export --ckpt denoiser.pt --out bundle --precision fp16 --backend tensorrt-rtx"""
)
@click.option("--ckpt", required=True, type=click.Path(path_type=Path), help="Checkpoint file or diffusers folder.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the bundle [default: beside the checkpoint].")
@click.option("--force", is_flag=True, help="Replace an existing --out.")
@click.option("--mode", type=click.Choice(["paper", "reference"]), help="[default: paper; reference with --preset]")
@click.option("--calibrate", "good", type=click.Path(path_type=Path), help="Images of good parts to calibrate on.")
@FALSE_ALARM_RATE
@click.option("--single-file", "one_file", is_flag=True, help=f"Write {ONE_FILE} too; needs --calibrate.")
@click.option("--count-nodes", is_flag=True, help="Count the graphs' nodes, and what torch performs for a guided step.")
@export_choices
@plan_choices
@TRACEBACK
def export(
    ckpt: Path,
    out: Path | None,
    force: bool,
    mode: str | None,
    good: Path | None,
    false_alarm_rate: float,
    one_file: bool,
    **choices: Any,
) -> None:
    """Turn a checkpoint into a bundle, and prove it against a plain torch implementation.

    What is not given comes from the checkpoint, then from the mode. `mdps inspect CKPT` says what must be given.
    """
    if mode and (mode == "reference") != (choices["preset"] is not None):
        raise click.UsageError("--mode reference takes its numbers from a --preset, and --mode paper has no preset")
    _check_before_export(good, one_file, choices["guidance_backend"], choices["precision"])
    with needs("export", "cpu"):
        from mdps.export import ExportOptions, export_bundle
    bundle = export_bundle(ckpt, out, ExportOptions.of(choices), force=force, say=say)
    engine = f" --backend {choices['backend']}" if choices["backend"] else ""
    if good is None:
        click.echo(f"wrote {bundle}; next: mdps calibrate {bundle} GOOD_FOLDER{engine}")
        return
    from mdps.serving.run import calibrate_folder

    with spoken_warnings():
        threshold = calibrate_folder(bundle, good, false_alarm_rate).threshold
    click.echo(f"wrote {bundle}, threshold {threshold:.5g}; next: mdps predict {bundle} IMAGES --out results{engine}")
    if one_file:
        _write_single_file(bundle, None, "default")


def _check_before_export(good: Path | None, one_file: bool, guidance_backend: str, precision: str) -> None:
    """What would fail after an export of minutes, said before it."""
    if good is not None and precision == "bf16":
        raise click.UsageError("--calibrate runs on the CPU, which has no bf16: calibrate on the machine with the card")
    if one_file and good is None:
        raise click.UsageError(
            "--single-file needs a calibration, or it could give no verdict: add --calibrate GOOD_FOLDER, or run "
            "`mdps calibrate BUNDLE GOOD_FOLDER` and `mdps single-file BUNDLE` after the export"
        )
    if one_file and guidance_backend == "traced":
        raise click.UsageError("--single-file needs --guidance-backend onnx: no ONNX file can hold a torch program")
    if good is not None:
        from mdps.serving.inputs import find_images

        find_images([good])


@cli.command(
    epilog="""\b
Examples:
  mdps train good/ --out run
  mdps train mvtec/bottle --out run --recipe paper --precision bf16 --processes 4
  mdps train good/ --out run --recipe small --image-size 64 --minutes 30 --flip-horizontal
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
@training_choices
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
    denoiser.safetensors in --out, ready for `mdps export`, and what docs/training.md lists.
    """
    if options["steps"] and options["epochs"]:
        raise click.UsageError("a run is so many --steps or so many --epochs long: give one of them")
    with needs("train"):
        import accelerate  # noqa: F401

        from mdps import training
    tell: Callable[[str], object] = say if training.first_process() else str
    images, layout = _training_images(folder, tell)
    if options["resume"]:
        config, preprocessing = training.begun(
            out, recipe=recipe, image_size=image_size, crop_size=crop_size, base=base
        )
    else:
        if recipe is None and training.choose_device(options["device"]).type == "cpu":
            tell(
                "Warning: the paper's network (33 M parameters, 256 x 256, 2000 epochs) is for a GPU, and this machine "
                "would train it on its processor, which is far too slow: take --recipe small"
            )
        recipe = recipe or "paper"
        preprocessing = training.framing(recipe, layout, image_size, crop_size, say=tell)
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
    """What to learn from, and the layout it comes in: a plain folder, or a data set's category (its images only)."""
    parts = [folder, *(sub for sub in folder.iterdir() if sub.is_dir())] if folder.is_dir() else []
    if not any((part / inner).is_dir() for part in parts for inner in ("train", "Data")):
        return folder, "plain"
    from mdps.benchmarks.datasets import find_categories

    found = find_categories(folder)
    if len(found) > 1:
        raise click.UsageError(f"{folder} holds {len(found)} categories: train on one, such as {found[0].root}")
    say(f"{found[0].name}: {len(found[0].train)} training images ({found[0].layout})")
    return found[0].train, found[0].layout


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of what they are passed to."""
    return {name: value for name, value in options.items() if value is not None}


@cli.command()
@AS_JSON
@TRACEBACK
def doctor(as_json: bool) -> int:
    """Try ONNX Runtime's providers, OpenVINO and TensorRT, and list cards, processors and versions."""
    from mdps.runtime.doctor import diagnose

    diagnosis = diagnose()
    print_values(diagnosis.to_json(), as_json)
    return 0 if diagnosis.works else 1


for command in (predict, serve, *COMMANDS):
    cli.add_command(command)


def main() -> None:
    """Entry point of `mdps`."""
    sys.exit(run(cli))


def main_export() -> None:
    """Entry point of `mdps-export`."""
    sys.exit(run(export, name="mdps-export"))


if __name__ == "__main__":
    main()
