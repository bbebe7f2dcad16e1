"""The command line: parses, calls, prints. What a command needs is imported when it runs, so that help is quick."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from mdps import __version__

SOME_FAILED = 3  # exit code of a run in which some images could not be judged
_INTERRUPTED, _PIPE_CLOSED = 130, 141  # what a shell reports for the two signals

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
@PRODUCT
@THREADS
@AS_JSON
@TRACEBACK
def calibrate(
    bundle: Path, good_folder: Path, false_alarm_rate: float, product: str, threads: int | None, as_json: bool
) -> None:
    """Set the threshold and the map ranges from images of good parts, and store them in the bundle.

    Use images that took no part in training, and never those of a test.
    """
    from mdps.serving.run import calibrate_folder

    calibration = calibrate_folder(bundle, good_folder, false_alarm_rate, product, threads)
    _print(calibration.to_json(), as_json)


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

        _print(Manifest.read(path).to_json(), as_json)
        return
    with needs("export"):
        from mdps.models.checkpoints import describe_checkpoint
    _print(describe_checkpoint(path).to_json(), as_json)


@cli.command()
@AS_JSON
@TRACEBACK
def doctor(as_json: bool) -> int:
    """Try what this machine offers: engine providers, GPU, processors, versions."""
    from mdps.runtime.doctor import diagnose

    diagnosis = diagnose()
    _print(diagnosis.to_json(), as_json)
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
    _print(run_demo(out, threads=threads, say=lambda text: click.echo(text, err=True)).to_json(), as_json)


@contextmanager
def needs(*extras: str) -> Iterator[None]:
    """Turns a missing package into a sentence that says which extras bring it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "mdps":
            raise
        raise click.ClickException(
            f"this command needs {error.name}, which is not installed: pip install 'mdps[{','.join(extras)}]'"
        ) from error


def _print(values: Mapping[str, Any], as_json: bool) -> None:
    """One JSON object on one line, or a line a value with inner keys below their own."""
    click.echo(json.dumps(values) if as_json else "\n".join(_lines(values, "")))


def _lines(value: Any, indent: str) -> Iterator[str]:
    pairs = value.items() if isinstance(value, Mapping) else (("-", item) for item in value)
    for key, item in pairs:
        label = key if key == "-" else f"{key}:"
        if isinstance(item, Mapping) or (isinstance(item, list | tuple) and not _is_short(item)):
            yield f"{indent}{label}"
            yield from _lines(item, indent + "  ")
        else:
            yield f"{indent}{label} {_plain(item)}"


def _is_short(items: Sequence[Any]) -> bool:
    return all(isinstance(item, int | float) for item in items) and len(items) <= 8


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def run(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Runs a command and gives its exit code; whatever goes wrong ends as one sentence on stderr."""
    state: dict[str, bool] = {}
    try:
        result = command.main(args=arguments, prog_name=command.name, obj=state, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has left. Python would complain when it flushes at exit, so give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except Exception as error:
        if state.get("traceback"):
            traceback.print_exc()
        return _explain(error, state)


def _explain(error: Exception, state: Mapping[str, bool]) -> int:
    from mdps.runtime.errors import MdpsError

    if isinstance(error, MdpsError):
        click.echo(f"Error: {error}", err=True)
        return error.exit_code
    kind = type(error).__name__
    hint = "" if state.get("traceback") else "; run it again with --traceback to see where, and report it"
    click.echo(f"Error: unexpected {kind}: {error}{hint}", err=True)
    return 1


def main() -> None:
    """Entry point of `mdps`."""
    sys.exit(run(cli))


def main_export() -> None:
    """Entry point of `mdps-export`."""
    sys.exit(run(cli))


if __name__ == "__main__":
    main()
