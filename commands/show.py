"""`mdps demo`, `mdps inspect` and `mdps doctor`: what mdps does, what a file is, what works here."""

import json
from pathlib import Path

import click

from mdps.commands.options import AS_JSON, THREADS, TRACEBACK
from mdps.commands.terminal import needs, print_values, say, spoken_warnings


@click.command(
    epilog="""\b
Examples:
  mdps demo
  mdps demo --json --out /var/www/demo"""
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-report"),
    show_default=True,
    help="Folder for the report.",
)
@THREADS
@AS_JSON
@TRACEBACK
def demo(out: Path, threads: int | None, as_json: bool) -> None:
    """Export the checkpoint that ships with mdps, calibrate it, and judge photographs with defects put in."""
    with needs("export", "bench", "cpu"):
        from mdps.benchmarks.demo import run_demo
    with spoken_warnings():
        found = run_demo(out, threads=threads, say=say)
    print_values(found.to_json(), as_json)


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


@click.command()
@AS_JSON
@TRACEBACK
def doctor(as_json: bool) -> int:
    """Try every engine, judge the pictures in the package, and list cards, processors and versions."""
    from mdps.runtime.doctor import diagnose, prove

    diagnosis = prove(diagnose())
    print_values(diagnosis.to_json(), as_json)
    return 0 if diagnosis.works else 1
