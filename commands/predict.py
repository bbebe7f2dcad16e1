"""`mdps predict`: parses, calls, prints."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mdps.commands.fields import fields
from mdps.commands.options import AS_JSON, BUNDLE, TRACEBACK
from mdps.commands.terminal import SOME_FAILED, say, spoken_warnings
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.option import build

if TYPE_CHECKING:
    from mdps.runtime import Detector

LONG = 30  # seconds


@click.command(
    epilog="""\b
Examples:
  mdps predict bundle photo.png --out results
  mdps predict bundle line1/ line2/ --out results --batch 8
  mdps predict bundle line/ --out results --engine onnxruntime-cuda --device 1
  mdps predict bundle line/ --out results --json | jq 'select(.verdict == "fail")'
\b
Exit code: 0 all judged, 3 some images, or all, could not be judged (a row says why),
2 wrong arguments, paths or bundle: nothing was done, 1 the run failed before its end."""
)
@BUNDLE
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="IMAGES_OR_FOLDERS...")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder for results, maps, overlays, report."
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace the results of an earlier run in --out; go on with a bundle that sees no defects on these parts.",
)
@AS_JSON
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Images judged at once.")
@fields(LoadOptions, without=["tuned"])
@click.option("--scores-only", is_flag=True, help="Scores and maps without verdicts: needs no calibration.")
@TRACEBACK
def predict(
    bundle: Path,
    inputs: tuple[Path, ...],
    out: Path,
    force: bool,
    as_json: bool,
    batch: int,
    scores_only: bool,
    **options: Any,
) -> int:
    """Judge images: verdicts, anomaly maps, pictures and a report.

    Writes results.csv, results.jsonl (path, score, threshold, verdict, map, ms, early_exit, judged_by, regions,
    shift_x, shift_y, turn, residual, fault, doubt, error), regions.csv, maps/*.npy (float32, in the unit of the
    score), overlays/*.png and report.html into --out.
    """
    from mdps.commands.messages import mention_plans
    from mdps.runtime import load
    from mdps.serving import folder
    from mdps.serving.report import report_run

    if not force:
        folder.refuse_previous_run(out)  # before a bundle is loaded in vain
    mention_plans(bundle)
    asked = build(LoadOptions, options | {"calibrated": not scores_only, "max_batch": max(8, batch), "force": force})
    printer = _RowPrinter(as_json)
    with spoken_warnings(), load(bundle, asked) as detector:
        if detector.doubt:
            warnings.warn(detector.doubt, stacklevel=1)
        _tell_of_tiles(detector, inputs, out)
        rows = folder.predict(detector, inputs, out, batch=batch, force=force, on_row=printer)
        report_run(detector, bundle, rows, out)
    errors = [row for row in rows if row.verdict == "error"]
    for row in errors:
        named = row.path in str(row.error)
        click.echo(_shown(str(row.error) if named else f"{row.path}: {row.error}"), err=True)
    if unaligned := sum(row.fault is not None for row in rows):
        click.echo(f"Warning: {unaligned} of {len(rows)} images were not aligned but judged as they lie", err=True)
    if printer.error is not None:
        raise printer.error
    click.echo(f"{len(rows) - len(errors)} of {len(rows)} images judged; see {out / 'report.html'}", err=as_json)
    return SOME_FAILED if errors else 0


def _tell_of_tiles(detector: "Detector", inputs: Sequence[Path], out: Path) -> None:
    """Say on a terminal how long a long run in tiles will take, and how far it is with each photograph."""
    if detector.tiles is None or not sys.stderr.isatty():
        return
    from mdps.runtime.image_files import find_images, known_headers

    cut, tile = detector.preprocessing.roi, detector.preprocessing.network_size
    sizes = [cut[2:] if cut else found.size for found in known_headers(find_images(inputs, exclude=out))[1]]
    tiles = sum(detector.tiles.count((height, width), tile) for width, height in sizes)
    if (seconds := tiles * detector.warm_up_seconds) > LONG:
        say(f"{tiles} tiles in {len(sizes)} images, about {seconds / 60:.1f} minutes")
    detector.watch_tiles(_TileBar())


class _TileBar:
    """Shows how far a photograph of many tiles is, and goes with its last one."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, of: int) -> None:
        from tqdm import tqdm

        self._bar = self._bar or tqdm(total=of, unit="tile", leave=False, disable=None)
        self._bar.update(done - self._bar.n)
        if done == of:
            self._bar.close()
            self._bar = None


def _shown(text: str) -> str:
    """Escape what a terminal would obey: control characters and marks of direction in names of files."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


class _RowPrinter:
    """Prints rows. Where stdout cannot be written it stops, and the run fails only when its files are complete."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.error: OSError | None = None

    def __call__(self, row: Any) -> None:
        if self.error is not None or (row.verdict == "error" and not self._as_json):
            return
        text = row.to_json() if self._as_json else f"{row.verdict or 'score':5} {row.score:.5g}  {_shown(row.path)}"
        try:
            click.echo(text)
        except BrokenPipeError:  # nobody wants the rest
            raise
        except OSError as error:
            self.error = error
