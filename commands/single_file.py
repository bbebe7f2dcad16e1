"""`mdps single-file`: parses, calls, prints."""

from pathlib import Path

import click

from mdps.commands.fields import fields
from mdps.commands.options import BUNDLE, TRACEBACK
from mdps.commands.terminal import needs, say
from mdps.runtime.bundle import LoadOptions

ONE_FILE = "detector.onnx"  # what `mdps single-file` writes into a bundle


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
    written = export_single_file(bundle, out, product=product, say=say)
    click.echo(f"wrote {written}")
