"""The command line: parses, calls, prints. What a command needs is imported when it runs, so that help is quick."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mdps import __version__
from mdps.serving.terminal import needs, print_values, run

SOME_FAILED = 3  # exit code of a run in which some images could not be judged

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Machine-readable output on stdout, messages on stderr.")
PRODUCT = click.option("--product", default="default", show_default=True, help="Which of the bundle's calibrations.")
THREADS = click.option(
    "--threads", type=click.IntRange(1), help="Processor threads [default: all this process may use]."
)
SAMPLES = click.option("--samples", type=click.IntRange(1), help="Posterior samples an image [default: the bundle's].")


def _show_traceback(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(dict)["traceback"] = True


TRACEBACK = click.option(
    "--traceback", is_flag=True, expose_value=False, callback=_show_traceback, help="Show where an error came from."
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
    """


@cli.command(
    epilog="""\b
Examples:
  mdps predict bundle photo.png --out results
  mdps predict bundle line1/ line2/ --out results --batch 8
  mdps predict bundle line/ --out results --json | jq 'select(.verdict == "fail")'
\b
Exit code: 0 all judged, 3 some images could not be judged, 1 or 2 nothing was."""
)
@BUNDLE
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="IMAGES_OR_FOLDERS...")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder for results, maps, overlays, report."
)
@AS_JSON
@SAMPLES
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Images judged at once.")
@THREADS
@PRODUCT
@click.option("--scores-only", is_flag=True, help="Scores and maps without verdicts: needs no calibration.")
@TRACEBACK
def predict(
    bundle: Path,
    inputs: tuple[Path, ...],
    out: Path,
    as_json: bool,
    samples: int | None,
    batch: int,
    threads: int | None,
    product: str,
    scores_only: bool,
) -> int:
    """Judge images: verdicts, anomaly maps, pictures and a report.

    Writes results.csv, results.jsonl (path, score, threshold, verdict, map, ms, error), maps/*.npy (float32, in the
    unit of the score), overlays/*.png and report.html into --out.
    """
    from mdps.runtime import load
    from mdps.serving.run import inspect_folder

    detector = load(bundle, product=product, threads=threads, samples=samples, calibrated=not scores_only)
    rows = inspect_folder(detector, bundle, inputs, out, batch=batch, on_row=_row_printer(as_json))
    errors = [row for row in rows if row.verdict == "error"]
    for row in errors:
        click.echo(f"{row.path}: {row.error}", err=True)
    click.echo(f"{len(rows) - len(errors)} of {len(rows)} images judged; see {out / 'report.html'}", err=as_json)
    return SOME_FAILED if errors else 0


def _row_printer(as_json: bool) -> Callable[[Any], None]:
    def show(row: Any) -> None:
        if as_json:
            click.echo(row.to_json())
        elif row.verdict != "error":
            click.echo(f"{row.verdict or 'score':5} {row.score:.5g}  {row.path}")

    return show


@cli.command(
    epilog="""\b
Examples:
  mdps calibrate bundle good/
  mdps calibrate bundle good_blue/ --product blue --false-alarm-rate 0.005"""
)
@BUNDLE
@click.argument("good_folder", type=click.Path(path_type=Path))
@click.option(
    "--false-alarm-rate",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.01,
    show_default=True,
    help="Share of good parts that may fail.",
)
@SAMPLES
@PRODUCT
@THREADS
@AS_JSON
@TRACEBACK
def calibrate(
    bundle: Path,
    good_folder: Path,
    false_alarm_rate: float,
    samples: int | None,
    product: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Set the threshold and the map ranges from images of good parts, and store them in the bundle.

    Use images that took no part in training, and never those of a test.
    """
    from mdps.serving.run import calibrate_folder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the note says the same
        calibration = calibrate_folder(bundle, good_folder, false_alarm_rate, product, samples=samples, threads=threads)
    if calibration.note:
        click.echo(f"Warning: {calibration.note}", err=True)
    print_values(calibration.to_json(), as_json)


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
    if (path / "manifest.json").is_file():
        from mdps.runtime.manifest import Manifest

        print_values(Manifest.read(path).to_json(), as_json)
        return
    with needs("export"):
        from mdps.models.checkpoints import describe_checkpoint
    print_values(describe_checkpoint(path).to_json(), as_json)


@cli.command()
@AS_JSON
@TRACEBACK
def doctor(as_json: bool) -> int:
    """Try what this machine offers: engine providers, GPU, processors, versions."""
    from mdps.runtime.doctor import diagnose

    diagnosis = diagnose()
    print_values(diagnosis.to_json(), as_json)
    return 0 if diagnosis.works else 1


@cli.command(
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
    """Export the checkpoint that ships with mdps, calibrate it, and inspect photographs with defects put in."""
    with needs("export", "bench", "cpu"):
        from mdps.benchmarks.demo import run_demo
    print_values(run_demo(out, threads=threads, say=lambda text: click.echo(text, err=True)).to_json(), as_json)


def main() -> None:
    """Entry point of `mdps`."""
    sys.exit(run(cli))


def main_export() -> None:
    """Entry point of `mdps-export`."""
    sys.exit(run(cli))


if __name__ == "__main__":
    main()
