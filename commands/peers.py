"""`mdps peers`: parses, calls, prints."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mdps.benchmarks.options import PeerOptions
from mdps.commands.fields import fields, settings
from mdps.commands.options import AS_JSON, CATEGORIES, DATASET, EVERY, RESOLUTION, TRACEBACK, largest_side
from mdps.commands.terminal import SOME_FAILED, needs, say, spoken_warnings
from mdps.runtime.errors import require
from mdps.runtime.option import Option, Setting

if TYPE_CHECKING:
    from mdps.benchmarks.evaluate.bundle import BundlePredictor

BESIDE = (
    Setting("product", str, "default", Option("Which of the tuned detectors of --beside.")),
    Setting("published", bool, False, Option("A row for --beside as published, too.")),
)


def _names(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


@click.command(
    epilog="""\b
Examples:
  mdps peers mvtec/bottle --out peers
  mdps peers mvtec --names patchcore,draem --image-size 256 --minutes 60 --device cuda --out peers
  mdps peers mvtec/bottle --beside bundle --set patches=1200 --threads 1 --out peers
  mdps peers parts --names reverse-distillation --backbone resnet18 --backbone-weights resnet18.pth --out peers
\b
Exit code: 0 all judged, 3 some images could not be judged, 1 or 2 nothing was."""
)
@DATASET
@click.option(
    "--names", callback=_names, default="patchcore,padim", show_default=True,
    help="Of patchcore, padim, draem, efficientad, stfpm, cflow, supersimplenet, reverse-distillation, fastflow.",
)  # fmt: skip
@CATEGORIES
@click.option(
    "--beside", type=click.Path(path_type=Path), help="Bundle whose tuned detector judges the same images in turn."
)
@click.option("--image-size", type=click.IntRange(32), default=256, show_default=True, help="Side of their images.")
@fields(PeerOptions)
@settings(PeerOptions, BESIDE, of="what is seldom changed, or what one detector needs")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@EVERY
@RESOLUTION
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for results and fitted networks.")
@AS_JSON
@TRACEBACK
def peers(
    dataset: Path,
    names: tuple[str, ...],
    categories: tuple[str, ...],
    beside: Path | None,
    image_size: int,
    every: int,
    resolution: str,
    out: Path,
    as_json: bool,
    settings: dict[str, Any],
    **options: Any,
) -> int:
    """Fit other detectors through anomalib to a data set and measure them as `mdps evaluate` measures a bundle.

    The same images, splits, ground truth, metrics and, where they take one, feature network. All judge each image in
    turn, so that their times compare. Nothing is downloaded; who cannot run here is named with the reason. Run it again
    after an interruption: fits go on where they were.
    """
    with needs("peers"):
        import anomalib  # noqa: F401 - before anything is read

        from mdps.benchmarks.evaluate.report import check_folder
        from mdps.benchmarks.peers.predict import compare, markdown
        from mdps.commands.evaluate import chosen_categories
    chosen = chosen_categories(dataset, categories)
    check_folder(out)
    given = {key: value for key, value in options.items() if value is not None} | settings
    product, published = (given.pop(one.name, one.default) for one in BESIDE)
    with spoken_warnings(), _opened(beside, product, published, given.get("threads")) as bundles:
        rows = compare(
            names, chosen, out, beside=bundles, every=every, largest=largest_side(resolution), say=say,
            size=(image_size, image_size), **given,
        )  # fmt: skip
    click.echo(json.dumps(rows) if as_json else markdown(rows).rstrip())
    judged = [row for row in rows if "skipped" not in row]
    if not judged:
        return 1
    tested = {category.name: -(-len(category.test) // every) for category in chosen}
    return SOME_FAILED if any(row["images"] < tested[row["category"]] for row in judged) else 0


@contextmanager
def _opened(
    bundle: Path | None, product: str, published: bool, threads: int | None
) -> "Iterator[list[BundlePredictor]]":
    """Yield the bundle's detectors: of the product, and as published where that is asked for."""
    require(bundle is not None or not published, "published=yes asks for a row of a bundle: give --beside BUNDLE")
    if bundle is None:
        yield []
        return
    with needs("cpu"):
        from mdps.benchmarks.evaluate.bundle import BundlePredictor
    with ExitStack() as opened:
        ways = (True, False) if published else (True,)
        yield [
            opened.enter_context(BundlePredictor(bundle, product=product, tuned=tuned, threads=threads))
            for tuned in ways
        ]
