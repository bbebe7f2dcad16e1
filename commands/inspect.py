"""`mdps inspect`: parses, calls, prints."""

import json
from pathlib import Path

import click

from mdps.commands.options import AS_JSON, TRACEBACK
from mdps.commands.terminal import needs, print_values


@click.command(
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
        from mdps.commands.messages import describe_bundle

        manifest = Manifest.read(path)
        if not as_json:
            print_values(describe_bundle(manifest, path), as_json)
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
