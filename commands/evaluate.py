"""`mdps evaluate`: parses, calls, prints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mdps.commands.fields import fields
from mdps.commands.options import AS_JSON, BUNDLE, CATEGORIES, DATASET, EVERY, RESOLUTION, TRACEBACK, largest_side
from mdps.commands.terminal import SOME_FAILED, needs, spoken_warnings
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.option import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from mdps.benchmarks.data.samples import Category
    from mdps.runtime.settings import Settings


@click.command(
    epilog="""\b
Examples:
  mdps evaluate bundle mvtec/bottle --out bottle
  mdps evaluate bundle mvtec --category bottle --category cable --json
  mdps evaluate bundle mvtec/bottle --every 8 --samples 4
\b
Exit code: 0 all judged, 3 some images could not be judged, 1 or 2 nothing was."""
)
@BUNDLE
@DATASET
@CATEGORIES
@EVERY
@RESOLUTION
@click.option(
    "--mask-range",
    type=click.Choice(["per-image", "frozen", "dataset"]),
    help="Where the mask's min and max come from [default: as exported]; dataset: the first pass's maps of the whole "
    "test set, as the authors' numbers were made, which no line can do.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for results, plots, pictures and a report.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Images judged at once.")
@fields(LoadOptions)
@AS_JSON
@TRACEBACK
def evaluate(
    bundle: Path,
    dataset: Path,
    categories: tuple[str, ...],
    every: int,
    resolution: str,
    mask_range: str | None,
    out: Path | None,
    as_json: bool,
    batch: int,
    **options: Any,
) -> int:
    """Measure a bundle on a data set with ground truth: image and pixel AUROC and AP, F1, AUPRO, time.

    DATASET is laid out like MVTec AD, MVTec AD 2, BTAD, VisA or MPDD: its root, or one category's folder. No
    calibration is needed; where the bundle has one, its threshold's errors are counted. The milliseconds are the median
    from a decoded picture to its map.
    """
    with needs("bench", "cpu"):
        from mdps.benchmarks.evaluate import evaluate as measure
        from mdps.benchmarks.evaluate.bundle import BundlePredictor
        from mdps.benchmarks.evaluate.report import check_folder, markdown, to_json, write_summary
        from mdps.commands.messages import mention_plans
    chosen = chosen_categories(dataset, categories)
    if out is not None:
        check_folder(out)
    many, largest = len(chosen) > 1, largest_side(resolution)
    mention_plans(bundle)
    asked = build(LoadOptions, options)
    with spoken_warnings(), BundlePredictor(bundle, asked, changes=_mask_range(mask_range), batch=batch) as predictor:
        found = [
            measure(predictor, one, out=out and (out / one.name if many else out), largest=largest, every=every)
            for one in chosen
        ]
    if out is not None and many:
        write_summary(found, out)
    failed = [(one, row) for one in found for row in one.failed]
    for one, row in failed:
        click.echo(f"{one.category}: {row.path} could not be judged: {row.error}", err=True)
    if out is not None:
        click.echo(f"see {out / 'report.html'}", err=True)
    click.echo(json.dumps(to_json(found)) if as_json else markdown(found).rstrip())
    return SOME_FAILED if failed else 0


def chosen_categories(dataset: Path, names: tuple[str, ...]) -> "tuple[Category, ...]":
    """Return the categories of a data set that have test images, or those of `names`; UsageError for none."""
    from mdps.benchmarks.data import find_categories
    from mdps.runtime.errors import UsageError

    found = {one.name: one for one in find_categories(dataset)}
    for name in names:
        if name not in found:
            raise UsageError(f"{dataset} has no category {name!r}: it has {', '.join(found)}")
    chosen = tuple(found[name] for name in names) or tuple(one for one in found.values() if one.test)
    if not chosen:
        raise UsageError(f"{dataset} has no test images: an evaluation needs some, good and defective ones")
    return chosen


def _mask_range(value: Any) -> "Callable[[Settings], Settings] | None":
    if value is None:
        return None

    def change(settings: "Settings") -> "Settings":
        return replace(settings, mask=replace(settings.mask, range=value))

    return change
