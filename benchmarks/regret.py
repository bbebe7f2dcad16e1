"""How far `mdps tune` chose from the best it tried: `python -m mdps.benchmarks.regret BUNDLE CATEGORY --out FOLDER`.

Runs its search as it is, on synthetic defects, and once more on the same fitted terms with each candidate valued by
the test images. No test image takes part in the choice, and nothing is written into the bundle.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from mdps.benchmarks.data import category_of
from mdps.benchmarks.data.samples import Category
from mdps.benchmarks.kit import Fields, Say, exit_code, machine_facts, plain, quiet, say_on_stderr, table, write_report
from mdps.benchmarks.study.terms import TestSet, load_test_set
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.errors import require
from mdps.runtime.image_files import find_images
from mdps.runtime.manifest import Manifest
from mdps.tuning.candidates import Tried
from mdps.tuning.options import TuneOptions
from mdps.tuning.photographs import see, split
from mdps.tuning.search import Search, choose
from mdps.tuning.tune import Tuner, none_fits, refuse_tests
from mdps.tuning.value import KindValue, Truth, scores
from mdps.tuning.work import Work, hash_of

WITHIN = 0.02
LARGEST = 256  # side of the ground truth, as in an evaluation

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Tested(Truth):
    """The truth about test images, good ones among them, whose maps follow those of synthetic defects; one kind."""

    test: TestSet

    def values(self, good: Array, bad: Array, top: int) -> dict[str, KindValue]:
        """Return image and pixel AUROC over all test images; `good` has served for the scale."""
        maps = bad[-len(self.test.labels) :]
        return {"test": KindValue(self.test.image_auroc(scores(maps, top)), self.test.pixel_auroc(maps))}


@dataclass(frozen=True)
class Row(Fields):
    """A candidate: its value by synthetic defects, and by the test images (`true`, the mean of both AUROCs)."""

    name: str
    ms: float
    eligible: bool
    synthetic: float
    true: float
    image: float
    pixel: float


@dataclass(frozen=True)
class Regret(Fields):
    """How much better the best of the eligible candidates is than the one chosen, by the test images.

    `rank_correlation` is Spearman's of the two values of all candidates, the best of which come first; `stored` names
    the choice that the bundle holds, "" for none, and `left_out` candidates that no time was left for.
    """

    chosen: Row
    best: Row
    regret: float
    within: bool
    rank_correlation: float
    candidates: tuple[Row, ...]
    stored: str
    left_out: tuple[str, ...]
    settings: dict[str, Any]

    def told(self) -> list[str]:
        """Return it in a few sentences."""
        by_name = {row.name: row for row in self.candidates}
        named = {"chosen": self.chosen, "best": self.best, "in the bundle": by_name.get(self.stored)}
        return [
            f"regret {self.regret:.4f}, {'within' if self.within else 'NOT within'} {WITHIN:g}; rank correlation of "
            f"{len(self.candidates)} candidates {self.rank_correlation:.2f}",
            *(f"{how}: {row.name} ({row.image:.4f} / {row.pixel:.4f})" for how, row in named.items() if row),
            *(f"no time was left for {name}" for name in self.left_out),
        ]

    def markdown(self) -> str:
        """Return the verdict and all candidates."""
        head = ("candidate", "ms", "within the budget", "synthetic", "true", "image AUROC", "pixel AUROC")
        lines = [
            (row.name, f"{row.ms:.1f}", "yes" if row.eligible else "no",
             *(f"{value:.4f}" for value in (row.synthetic, row.true, row.image, row.pixel)))
            for row in self.candidates
        ]  # fmt: skip
        told = "\n".join(f"- {sentence}" for sentence in self.told())
        return "\n\n".join(["# Regret of a tuning", f"`{self.settings}`", told, table(head, lines)]) + "\n"


def compared(
    rows: Iterable[Row], chosen: str, stored: str = "", left_out: Iterable[str] = (), **settings: Any
) -> Regret:
    """Compare the candidate of the name `chosen` with the best."""
    ranked = sorted(rows, key=lambda row: -row.true)
    best, mine = next(row for row in ranked if row.eligible), next(row for row in ranked if row.name == chosen)
    values = np.array([[row.synthetic, row.true] for row in ranked])
    constant = (np.ptp(values, axis=0) == 0).any()
    correlation = math.nan if constant else float(spearmanr(values).statistic)
    regret = best.true - mine.true
    return Regret(
        mine, best, regret, regret <= WITHIN, correlation, tuple(ranked), stored, tuple(left_out), settings
    )  # fmt: skip


def measure(
    bundle: Path, folder: Path, good: Path, options: TuneOptions, asked: LoadOptions, out: Path, say: Say = quiet
) -> Regret:
    """Compare by the test images of the category in `folder` what a tuning on `good` chooses with the best it tries.

    Writes regret.json and .md to `out`, and keeps there what a stopped run needs to go on. UsageError where nothing
    fits the budget, and as `tune`.
    """
    refuse_tests(good)
    paths, manifest, category = find_images([good]), Manifest.read(bundle), category_of(folder)
    aligned = f"{bundle} aligns parts, and their ground truth does not go with them: take a bundle without --align"
    require(not manifest.aligned(asked.product), aligned)
    require(len({one.defective for one in category.test}) == 2, f"{folder} should hold good and defective test images")
    tuner = Tuner(bundle, manifest, paths, split(len(paths)), options, asked, 0.05, lambda name, _: say(name))
    work = Work(out / "regret.work", tuner.key | {"test": hash_of([sample.path for sample in category.test])})
    mine, theirs = _searched(tuner, category, work)
    chosen = choose(mine.tried, options.budget_ms)
    if chosen is None:
        raise none_fits(mine, options.budget_ms)
    tuning = manifest.tunings.get(asked.product)
    stored = tuning.evidence["chosen"] if tuning else ""
    settings = {"category": category.name, "bundle": bundle.name, **plain(options), **machine_facts()}
    rows = _rows(mine, theirs, options.budget_ms)
    found = compared(rows, chosen.candidate.name, stored, mine.left_out, **settings)
    write_report(out, "regret", found.to_json(), found.markdown())
    work.remove()
    return found


def _searched(tuner: Tuner, category: Category, work: Work) -> tuple[Search, Search]:
    """Return the search by synthetic defects, and that by the test images on the same terms, fitted once."""
    framing, side = tuner.manifest.preprocessing, tuner.side
    defects, images = tuner.images()
    tests = see([sample.path for sample in category.test], framing, side)
    test = load_test_set(category, framing, 1, LARGEST)
    both = replace(images, bad=defects.seen.joined(tests))
    truths = (images.truth, Tested(images.truth.kinds, images.truth.masks, test))
    mine, theirs = (tuner.search(replace(both, truth=truth), work) for truth in truths)
    for search in (mine, theirs):
        search.run(tuner.views)
    return mine, theirs


def _rows(mine: Search, theirs: Search, budget_ms: float) -> Iterator[Row]:
    """Yield each candidate that either search has tried, with both values."""
    known = [{one.candidate.name: one for one in search.tried} for search in (mine, theirs)]
    for name, one in (known[0] | known[1]).items():
        by_defects, by_tests = (
            found.get(name) or Tried.of(one.candidate, search.images.truth, search.images.count)
            for found, search in zip(known, (mine, theirs), strict=True)
        )
        value = by_tests.kinds["test"]
        yield Row(name, one.ms, one.ms <= budget_ms, by_defects.value, value.mean, value.image, value.pixel)


def main(argv: list[str] | None = None) -> int:
    """Run the command; a mistake of the user's is one sentence on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="mdps.benchmarks.regret", description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("category", type=Path, help="folder of a category with good and defective test images")
    parser.add_argument("--good", type=Path, help="what `mdps tune` was given [CATEGORY/train/good]")
    parser.add_argument("--budget-ms", type=float, default=100.0, help="as of `mdps tune` [100]")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no more candidates are begun [60]")
    parser.add_argument("--threads", type=int, help="processor threads [all]")
    parser.add_argument("--product", default="default", help="whose tuning in the bundle is named [default]")
    parser.add_argument("--out", type=Path, required=True, help="folder for regret.json and regret.md")
    given = parser.parse_args(argv)

    def work() -> None:
        options = TuneOptions(budget_ms=given.budget_ms, minutes=given.minutes)
        asked = LoadOptions(product=given.product, threads=given.threads)
        good = given.good or given.category / "train" / "good"
        found = measure(given.bundle, given.category, good, options, asked, given.out, say_on_stderr)
        print("\n".join(found.told()))

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
