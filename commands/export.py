"""`mdps export` and `mdps single-file`: what is made of a checkpoint."""

from pathlib import Path
from typing import Any

import click

from mdps.commands.fields import fields, settings
from mdps.commands.options import BUNDLE, FALSE_ALARM_RATE, ONE_FILE, TRACEBACK
from mdps.commands.terminal import needs, say, spoken_warnings
from mdps.export.options import ExportOptions
from mdps.runtime.bundle import LoadOptions


@click.command(
    epilog="""\b
Examples:
  mdps export --ckpt denoiser.pt
  mdps export --ckpt denoiser.pt --out bundle --image-size 256 --num-heads 4
  mdps export --ckpt model/ --out bundle --preset mvtec/bottle --backbone-weights wide_resnet101_2.pth
  mdps export --ckpt denoiser.pt --out bundle --no-mask-pass --samples 5
  mdps export --ckpt denoiser.pt --out bundle --calibrate good/ --single-file
  mdps export --ckpt denoiser.pt --out bundle --precision fp16 --engine tensorrt-rtx"""
)
@click.option("--ckpt", required=True, type=click.Path(path_type=Path), help="Checkpoint file or diffusers folder.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the bundle [default: beside the checkpoint].")
@click.option("--force", is_flag=True, help="Replace an existing --out.")
@click.option("--mode", type=click.Choice(["paper", "reference"]), help="[default: paper; reference with --preset]")
@click.option("--calibrate", "good", type=click.Path(path_type=Path), help="Images of good parts to calibrate on.")
@FALSE_ALARM_RATE
@click.option("--single-file", "one_file", is_flag=True, help=f"Write {ONE_FILE} too; needs --calibrate.")
@fields(ExportOptions)
@settings(ExportOptions, of="what is seldom changed")
@TRACEBACK
def export(
    ckpt: Path,
    out: Path | None,
    force: bool,
    mode: str | None,
    good: Path | None,
    false_alarm_rate: float,
    one_file: bool,
    settings: dict[str, Any],
    **choices: Any,
) -> None:
    """Turn a checkpoint into a bundle, and prove it against a plain torch implementation.

    What is not given comes from the checkpoint, then from the mode. `mdps inspect CKPT` says what must be given.
    """
    if mode and (mode == "reference") != (choices["preset"] is not None):
        raise click.UsageError("--mode reference takes its numbers from a --preset, and --mode paper has no preset")
    _check_before_export(good, one_file, choices["guidance_backend"], choices["precision"])
    with needs("export", "cpu"):
        from mdps.export import export_bundle
    bundle = export_bundle(ckpt, out, ExportOptions.of(choices | settings), force=force, say=say)
    engine = f" --engine {choices['engine']}" if choices["engine"] else ""
    if good is None:
        click.echo(f"wrote {bundle}; next: mdps calibrate {bundle} GOOD_FOLDER{engine}")
        return
    from mdps.serving.calibrate import calibrate_folder

    with spoken_warnings():
        calibration = calibrate_folder(bundle, good, false_alarm_rate)
    following = "" if calibration.doubt else f"; next: mdps predict {bundle} IMAGES --out results{engine}"
    click.echo(f"wrote {bundle}, threshold {calibration.threshold:.5g}{following}")
    if one_file:
        write_single_file(bundle, None, "default")


def _check_before_export(good: Path | None, one_file: bool, guidance_backend: str, precision: str) -> None:
    """Raise a UsageError for what would fail only after an export of minutes."""
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
        from mdps.runtime.image_files import find_images

        find_images([good])


@click.command(
    "single-file",
    epilog="""\b
Examples:
  mdps single-file bundle
  mdps single-file bundle --product blue --out blue.onnx""",
)
@BUNDLE
@click.option("--out", type=click.Path(path_type=Path), help=f"The file [default: {ONE_FILE} in the bundle].")
@fields(LoadOptions, only=["product"])
@TRACEBACK
def single_file(bundle: Path, out: Path | None, product: str) -> None:
    """Write a calibrated bundle as one ONNX file: picture in, map, score and verdict out.

    Any ONNX Runtime runs it, in C++, C#, Java or JavaScript, without mdps. Make it again after each calibration.
    """
    write_single_file(bundle, out, product)


def write_single_file(bundle: Path, out: Path | None, product: str) -> None:
    with needs("export", "cpu"):
        from mdps.export.single_file import export_single_file
    with spoken_warnings():
        written = export_single_file(bundle, out, product=product, say=say)
    click.echo(f"wrote {written}")
