"""Runs variants and peers on categories, each once: results and bundles lie in the work folder under their hash."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mdps.benchmarks.datasets import Category
from mdps.benchmarks.evaluate import evaluate
from mdps.benchmarks.peers import peer_judge
from mdps.benchmarks.reproduce.bundles import Bundles, digest, plain
from mdps.benchmarks.reproduce.outcomes import Outcome
from mdps.benchmarks.reproduce.passes import Mapped, Remembered, TwoPasses
from mdps.benchmarks.reproduce.variants import Variant
from mdps.runtime.atomic import new_folder
from mdps.runtime.manifest import Manifest
from mdps.runtime.settings import Settings

LAST, FIRST, REPORT, MAPS = "last", "first", "report", "maps.npz"


@dataclass(frozen=True)
class Runner:
    """`work` holds bundles, results and fitted peers; `every`, `largest` as in `evaluate`, the rest as in `load`.

    `keep_maps` leaves the maps of both passes beside the results, in `maps.npz`.
    """

    work: Path
    bundles: Bundles
    every: int
    largest: int | None
    engine: str
    threads: int | None
    batch: int
    say: Callable[[str], None]
    keep_maps: bool = False

    def run(self, variant: Variant, category: Category, checkpoint: Path) -> Outcome:
        """The outcome of a variant; from disk where the same settings ran before. Raises as an export or a bundle."""
        folder = self.folder(variant, category, checkpoint)
        first = variant.first_pass and (folder / f"{FIRST}.json").is_file()
        return Outcome.load(folder, FIRST if first else LAST)

    def folder(self, variant: Variant, category: Category, checkpoint: Path) -> Path:
        """The results of a variant, computed if they are not there; raises as `run`."""
        bundle = self.bundles.get(checkpoint, category.name, variant.export)
        changes = settled(variant)
        settings = changes(Manifest.read(bundle).settings)
        how = ["bundle", bundle.name, settings.to_json(), self.engine, self.threads, self.batch]
        folder = self._folder(category, [*how, MAPS] if self.keep_maps else how)
        if not folder.is_dir():
            self.say(f"{category.name}: {variant.label}")
            self._judge(bundle, changes, category, folder)
        return folder

    def run_peer(self, name: str, category: Category, size: tuple[int, int], options: dict[str, Any]) -> Outcome:
        """The outcome of a detector of anomalib, pictures resized to `size` (H, W). Raises as `peer_judge`."""
        folder = self._folder(category, ["peer", name, list(size), plain(options)])
        if not folder.is_dir():
            self.say(f"{category.name}: {name}")
            judge = peer_judge(name, category, work=self.work / "peers", size=size, **options)
            with new_folder(folder) as new:
                found = evaluate(judge, category, out=new / REPORT, largest=self.largest, every=self.every)
                Outcome.of(found).save(new, LAST)
        return Outcome.load(folder, LAST)

    def network_size(self, category: Category, checkpoint: Path) -> tuple[int, int]:
        """(H, W) that the category's denoiser sees."""
        return Manifest.read(self.bundles.get(checkpoint, category.name, {})).preprocessing.network_size

    def _judge(self, bundle: Path, changes: Callable[[Settings], Settings], category: Category, folder: Path) -> None:
        judge_of = Mapped if self.keep_maps else TwoPasses
        with (
            judge_of(bundle, changes=changes, engine=self.engine, threads=self.threads, batch=self.batch) as judge,
            new_folder(folder) as new,
        ):
            found = evaluate(judge, category, out=new / REPORT, largest=self.largest, every=self.every)
            Outcome.of(found).save(new, LAST)
            if judge.settings.sampler.masked_pass is not None:
                first = Remembered(judge, judge.first)
                found = evaluate(first, category, largest=self.largest, every=self.every)
                Outcome.of(found).save(new, FIRST)
            if isinstance(judge, Mapped):
                judge.save(new / MAPS)

    def _folder(self, category: Category, what: list[Any]) -> Path:
        images = [[sample.path.relative_to(category.root).as_posix(), _bytes(sample.path)] for sample in category.test]
        key = digest([what, category.name, images, self.every, self.largest])
        return self.work / "results" / category.name / key


def settled(variant: Variant) -> Callable[[Settings], Settings]:
    """A variant's changes; a frozen mask range, which nobody calibrated, becomes the test set's, as the authors' is."""

    def change(settings: Settings) -> Settings:
        changed = variant.changes(settings)
        if changed.mask.range != "frozen":
            return changed
        return replace(changed, mask=replace(changed.mask, range="dataset"))

    return change


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
