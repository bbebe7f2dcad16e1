"""Runs variants of a detector on categories, each once: bundles and results lie in a work folder under their hash."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mdps import __version__
from mdps.benchmarks.data.samples import Category
from mdps.benchmarks.evaluate import evaluate
from mdps.benchmarks.evaluate.predictions import Judge
from mdps.benchmarks.kit import Say, digest
from mdps.benchmarks.study.outcomes import Outcome, Remembered, TwoPassPredictor
from mdps.export import ExportOptions, export_bundle
from mdps.export.methods import PRESETS
from mdps.models.checkpoints import describe_checkpoint
from mdps.runtime.atomic import new_folder
from mdps.runtime.manifest import FILE_NAME, Manifest
from mdps.runtime.records import Record
from mdps.runtime.settings import PassSettings, Settings

LAST, FIRST, REPORT, MAPS = "last", "first", "report", "maps.npz"
_PREFIXES = ("mvtec_ad_", "mvtec_", "btad_", "btech_")


def plain_name(category: str) -> str:
    """A category's name without the data set's, case and separators: "mvtec_metal-nut" is "metalnut"."""
    plain = category.lower().replace("-", "_").replace(" ", "_")
    for prefix in _PREFIXES:
        plain = plain.removeprefix(prefix)
    return plain.replace("_", "")


@dataclass(frozen=True)
class Changes(Record):
    """Settings of the passes that differ from the bundle's: they need no other graphs. None leaves a value alone."""

    guidance_scale: float | None = None
    samples: int | None = None
    steps: int | None = None
    seed: int | None = None
    early_exit: float | None = None

    def __call__(self, settings: Settings) -> Settings:
        """`settings` with these: guidance scale and steps of both passes, the rest of the sampler."""
        sampler = settings.sampler
        if self.steps is not None:
            first = with_steps(sampler.first_pass, self.steps)
            masked = sampler.masked_pass and with_steps(sampler.masked_pass, self.steps)
            sampler = replace(sampler, first_pass=first, masked_pass=masked)
        if self.guidance_scale is not None:
            first = replace(sampler.first_pass, guidance_scale=self.guidance_scale)
            masked = sampler.masked_pass and replace(sampler.masked_pass, guidance_scale=self.guidance_scale)
            sampler = replace(sampler, first_pass=first, masked_pass=masked)
        if self.samples is not None:
            sampler = replace(sampler, samples=self.samples)
        if self.seed is not None:
            sampler = replace(sampler, seed=self.seed)
        if self.early_exit is not None:
            sampler = replace(sampler, early_exit=self.early_exit)
        return replace(settings, sampler=sampler)


def with_steps(one: PassSettings, steps: int) -> PassSettings:
    """A pass of N = `steps`; by the paper's index from the largest noise level below its own that N divides."""
    if one.skip is not None:
        return replace(one, skip=-(-one.noise_level // steps))
    return replace(one, steps=steps, noise_level=max(steps, one.noise_level - one.noise_level % steps))


@dataclass(frozen=True)
class Variant:
    """One row of a table on our denoiser.

    `export`: fields of ExportOptions that differ. `first_pass`: the row shows the first pass of the run, so without a
    mask; it costs nothing where the same run is in the table already.
    """

    method: str
    label: str
    changes: Changes = Changes()
    export: Mapping[str, Any] = field(default_factory=dict)
    first_pass: bool = False


class Bundles:
    """The bundles in `folder`, made from `choices`: the options of `mdps export` under their names, None for unset."""

    def __init__(self, folder: Path, choices: Mapping[str, Any], say: Say) -> None:
        self._folder, self._choices, self._say = folder, dict(choices), say
        self._hashes: dict[Path, str] = {}

    def get(self, checkpoint: Path, category: str, changes: Mapping[str, Any]) -> Path:
        """The bundle of a checkpoint with `changes` of the choices; raises as `export_bundle`.

        A preset without a category ("mvtec") is that category's ("mvtec/bottle").
        """
        options = ExportOptions.of(self._of_category(category) | dict(changes))
        key = digest([__version__, self.checkpoint_hash(checkpoint), options])
        bundle = self._folder / key
        if not (bundle / FILE_NAME).is_file():
            export_bundle(checkpoint, bundle, options, force=True, say=self._say)
        return bundle

    def checkpoint_hash(self, checkpoint: Path) -> str:
        """SHA-256 of the checkpoint, read once."""
        if checkpoint not in self._hashes:
            self._hashes[checkpoint] = describe_checkpoint(checkpoint).sha256
        return self._hashes[checkpoint]

    def _of_category(self, category: str) -> dict[str, Any]:
        preset = self._choices.get("preset")
        if preset is None or "/" in preset:
            return self._choices
        of_all = f"{preset}/"
        names = {plain_name(name.removeprefix(of_all)): name for name in PRESETS if name.startswith(of_all)}
        return self._choices | {"preset": names.get(plain_name(category), of_all + category)}


@dataclass(frozen=True)
class Runner:
    """`work` holds bundles and results; `every` and `largest` are as in `evaluate`, the rest as in `load`.

    `keep_maps` leaves the maps of both passes beside the results, in `maps.npz`.
    """

    work: Path
    bundles: Bundles
    every: int
    largest: int | None
    engine: str
    threads: int | None
    batch: int
    say: Say
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
        folder = self.place(category, [*how, MAPS] if self.keep_maps else how)
        if not folder.is_dir():
            self.say(f"{category.name}: {variant.label}")
            self._evaluate(bundle, changes, category, folder)
        return folder

    def _evaluate(self, bundle: Path, change: Callable[[Settings], Settings], category: Category, out: Path) -> None:
        predictor = TwoPassPredictor(
            bundle, changes=change, engine=self.engine, threads=self.threads, batch=self.batch
        )  # fmt: skip
        with predictor, new_folder(out) as new:
            self.evaluate(predictor, category, new, LAST)
            if predictor.settings.sampler.masked_pass is not None:
                self.evaluate(Remembered(predictor, predictor.first), category, new, FIRST)
            if self.keep_maps:
                predictor.save_maps(new / MAPS)

    def evaluate(self, predictor: Judge, category: Category, folder: Path, name: str) -> None:
        """Evaluate as `name` in the folder of results, with a report of what is named LAST."""
        report = folder / REPORT if name == LAST else None
        found = evaluate(predictor, category, out=report, largest=self.largest, every=self.every)
        Outcome.of(found).save(folder, name)

    def place(self, category: Category, what: list[Any]) -> Path:
        """Return the folder for results of `what` on the category's test images."""
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
