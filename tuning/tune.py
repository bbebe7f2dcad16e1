"""A bundle and a folder of good parts: the search, the tuning in the bundle, its calibration and its fitness."""

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

from mdps.models.backbones import Backbone, load_backbone
from mdps.runtime.alignment import Alignment
from mdps.runtime.atomic import writing
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.calibration import Calibration, CalibrationWarning
from mdps.runtime.detector import Detector
from mdps.runtime.engines import DEFAULT
from mdps.runtime.errors import MdpsError, UsageError, require
from mdps.runtime.image_files import find_images, odd_pictures
from mdps.runtime.loading import choose_engine, open_detector
from mdps.runtime.manifest import FILE_NAME, Manifest
from mdps.runtime.pipeline import Inspector
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.registration import Aligner, align
from mdps.runtime.tuning import Tuning
from mdps.serving.calibrate import calibrated, fingerprint
from mdps.tuning.candidates import KINDS, TOP, Candidate, Tried, scale_of, views
from mdps.tuning.cascade import Found, Judged, Published, look
from mdps.tuning.compiled import Machine
from mdps.tuning.crossfit import crossfitted
from mdps.tuning.evidence import evidence
from mdps.tuning.graphs import Fitted, Fused, write
from mdps.tuning.options import TuneOptions
from mdps.tuning.outcome import Outcome, Shown
from mdps.tuning.photographs import Defects, Seen, Split, defects, doubt_of, photograph, see, side_of, split
from mdps.tuning.reconstruct import Reconstructor
from mdps.tuning.report import write_report
from mdps.tuning.search import Images, Progress, Search, choose
from mdps.tuning.statistics import Distance, Pixels, View
from mdps.tuning.tiles import cut as cut_tiles
from mdps.tuning.tiles import framing
from mdps.tuning.value import Truth, scores
from mdps.tuning.work import Work, hash_of

TESTS, BESIDE = ("test", "ground_truth"), ("train", "ground_truth")
TIMED = 15  # images by which the chosen detector's time is measured
SLACK = 1.1  # of the budget: the parts' times were measured one after another


class _TooSlowError(MdpsError):
    def __init__(self, ms: float) -> None:
        super().__init__(f"{ms:.0f} ms an image are more than the budget")
        self.ms = ms


def refuse_tests(good: Path) -> None:
    """UsageError for a folder of a test set; warn where one above it is called "test".

    Whoever chooses by test images measures nothing by them afterwards.
    """
    place = good.resolve()
    for folder in (place, place.parent):
        if folder.name.lower() in TESTS and any((folder.parent / name).is_dir() for name in BESIDE):
            raise UsageError(f"{good} belongs to a test set, which no detector may be chosen by: give training images")
    require(
        not (place / "test").is_dir(), f"{good} holds a folder `test`: give the folder of its good images for training"
    )
    if any(part.lower() == "test" for part in place.parts):
        warnings.warn(f"{good} lies in a folder called test: no test image may take part in a tuning", stacklevel=3)


def tune(
    bundle: Path,
    good: Path,
    options: TuneOptions,
    asked: LoadOptions,
    rate: float,
    progress: Progress = lambda *_: None,
) -> Outcome:
    """Tune the bundle for the product that is asked for, on images of good parts alone, and calibrate it.

    `asked` says the product, and the engine and threads that will run it; at most the share `rate` of good parts is to
    fail. Goes on where a run on the same bundle and images was stopped.

    Raises UsageError for paths and options that cannot be used, CalibrationError for too few images, ImageError naming
    images that cannot be read, MdpsError where nothing fits the budget or the disk is full.
    """
    refuse_tests(good)
    paths, manifest = find_images([good]), Manifest.read(bundle)
    resized = None if manifest.tiles else manifest.preprocessing
    for sentence in (doubt_of(len(paths)), *odd_pictures(paths, resized)):
        if sentence:
            warnings.warn(sentence, stacklevel=2)
    with writing(bundle / FILE_NAME), tempfile.TemporaryFile(dir=bundle):
        pass  # where no file can be made, none of it can be written at the end
    manifest = manifest.with_alignment(asked.product, align(paths) if options.align else None)
    work, outcome = _searched(bundle, manifest, paths, options, asked, rate, progress)
    if outcome.calibration.doubt:
        warnings.warn(outcome.calibration.doubt, CalibrationWarning, stacklevel=2)
    write_report(report_of(bundle, options), outcome, f"Tuning of {manifest.name}, product {asked.product}")
    work.remove()
    return outcome


def _searched(
    bundle: Path, manifest: Manifest, paths: list[Path], options: TuneOptions, asked: LoadOptions, rate: float,
    progress: Progress,
) -> tuple[Work, Outcome]:  # fmt: skip
    """Return what came of a tuning on the photographs, or on tiles of a half of them."""
    with tempfile.TemporaryDirectory(prefix="mdps-tiles-") as folder:
        made = Tuner(bundle, manifest, paths, split(len(paths)), options, asked, rate, progress)
        if manifest.tiles:
            progress("cutting tiles", 0.0)
            align = Aligner(made.alignment) if made.alignment else None
            cut = cut_tiles(paths, manifest.preprocessing, manifest.tiles, Path(folder), align)
            made = replace(made, paths=cut.tiles, parts=cut.parts, owners=cut.owners, apart=cut.apart, tiles=cut.each)
        work = Work(_work(bundle, options), made.key)
        return work, made.run(work)


def report_of(bundle: Path, options: TuneOptions) -> Path:
    """Return where the page goes."""
    return options.report or bundle.resolve().with_name(f"{bundle.resolve().name}.tune.html")


def none_fits(search: Search, budget_ms: float) -> UsageError:
    """Return the error where no candidate keeps the budget."""
    quickest = min((one.ms for one in search.tried), default=0.0)
    return UsageError(
        f"no detector fits in {budget_ms:g} ms an image on this machine, where the quickest takes "
        f"{quickest:.0f} ms: give more --budget-ms"
    )


def _work(bundle: Path, options: TuneOptions) -> Path:
    return options.work or bundle.resolve().with_name(f"{bundle.resolve().name}.tune")


@dataclass(frozen=True)
class Tuner:
    """A bundle, the images to tune it on and how: makes what a search needs, and settles what it found.

    In tiles the images are these, each of one of the `owners`, with `tiles` to a photograph that is judged, and the
    threshold is of photographs `apart`.
    """

    bundle: Path
    manifest: Manifest
    paths: list[Path]
    parts: Split
    options: TuneOptions
    asked: LoadOptions
    rate: float
    progress: Progress
    owners: Sequence[Path] = ()
    apart: Sequence[Path] = ()
    tiles: int = 1

    def run(self, work: Work) -> Outcome:
        """Search, and write and calibrate the best that keeps the budget."""
        bad, images = self.images()
        search = self.search(images, work)
        search.run(self.views)
        return self._settle(search, bad)

    @property
    def key(self) -> dict[str, Any]:
        """All that the results of a search depend on."""
        files, graphs = self.manifest.files, self.manifest.graphs
        return {
            "bundle": {role: files[graph.file].sha256 for role, graph in graphs.items()},
            "framing": self.framing.to_json(),
            "images": hash_of(self.paths),
            "defects a kind": self.options.per_kind,
            "settings": self.manifest.settings.to_json(),
            "engine": [self.asked.engine, self.asked.threads],
            "aligned": self.manifest.aligned(self.asked.product),
        }

    @property
    def framing(self) -> Preprocessing:
        """The way from a picture to an image."""
        return framing(self.manifest)

    @property
    def budget(self) -> float:
        """Milliseconds that one of the images may take."""
        return self.options.budget_ms / self.tiles

    @cached_property
    def views(self) -> list[View]:
        """Of the photographs."""
        return views(self.side)

    @cached_property
    def side(self) -> int:
        """Of the photographs, as they are kept and as the tuned detector will see them."""
        return side_of(self.paths, self.framing)

    @property
    def alignment(self) -> Alignment | None:
        """How the parts are aligned, if they are."""
        return self.manifest.alignments.get(self.asked.product)

    def search(self, images: Images, work: Work) -> Search:
        """Return the search among all candidates by these images, not yet begun."""
        published = replace(self.asked, tuned=False, calibrated=False)
        engine = choose_engine(Bundle.of(self.bundle, self.manifest, published), published)
        machine = Machine(engine.name if engine.reads == "onnx" else DEFAULT, self.asked.threads)
        reconstructor = Reconstructor(self.bundle, self.manifest, replace(published, engine=engine.name))
        kinds = tuple(kind for kind in KINDS if kind != "position" or not self.manifest.tiles)
        return Search(
            images, cache(self._backbone), reconstructor, work, machine, self.options.minutes, self.progress, kinds
        )  # fmt: skip

    def images(self) -> tuple[Defects, Images]:
        """Return synthetic defects, and the images of a search with them."""
        self.progress("reading images", 0.0)
        framing, side = self.framing, self.side
        align = Aligner(self.alignment) if self.alignment and not self.manifest.tiles else None
        count = len(self.parts.fit)
        seen = see(self._files(self._rows), framing, side, align)
        fitted, held = seen.pick(range(count)), seen.pick(range(count, len(self._rows)))
        self.progress("putting defects in", 0.0)
        bad = defects(self._files(self.parts.bearing), framing, side, self.options.per_kind, align=align)
        return bad, Images(fitted, held, bad.seen, len(self.parts.scale), Truth(bad.kinds, bad.masks))

    @property
    def _rows(self) -> tuple[int, ...]:
        """Those that are fitted to, then those held out."""
        return (*self.parts.fit, *self.parts.held)

    def _files(self, rows: Sequence[int]) -> list[Path]:
        return [self.paths[row] for row in rows]

    @property
    def _whole(self) -> list[Path]:
        """The images that a calibration is on."""
        return list(self.apart) or self._files(self._rows)

    def _backbone(self, stages: tuple[int, ...]) -> Backbone:
        """Return the bundle's feature network; UsageError where the weights that are found are others."""
        name, known = self.manifest.settings.score.backbone, self.manifest.network.get("backbone_weights_sha256")
        backbone = load_backbone(name, self.options.backbone_weights, stages)
        require(
            not known or known == backbone.weights_sha256,
            f"the weights of {name} that are found here are not those in {self.bundle}: name their file with "
            "--set backbone-weights=FILE",
        )
        return backbone

    def _settle(self, search: Search, bad: Defects) -> Outcome:
        """Write the best candidate that keeps the budget when all of it runs together."""
        budget = self.budget
        while chosen := choose(search.tried, budget):
            try:
                return self._written(chosen, search, bad)
            except _TooSlowError as slow:
                self.progress(f"{chosen.candidate.name}: {slow}", 1.0)
                budget = min(budget * self.budget / slow.ms, 0.99 * chosen.ms)
        raise none_fits(search, self.budget)

    def _written(self, chosen: Tried, search: Search, bad: Defects) -> Outcome:
        seen = search.images.fit.joined(search.images.held)
        candidate, modules = crossfitted(search, chosen.candidate, seen)
        good, maps = candidate.fused(len(seen.images), self.manifest.preprocessing.network_size)
        alone = Judged(scores(good, TOP), scores(maps, TOP), self.rate, 0.0)
        options = replace(self.options, budget_ms=self.budget)
        told, settled = evidence(search, chosen, options, self.parts), list[tuple[Found, Calibration]]()

        def settle(manifest: Manifest) -> tuple[Tuning, Calibration]:
            found = self._cascade(replace(alone, ms=self._time(manifest)), seen, search)
            for row, again in found.maps.items():
                maps[row] = again
            tuning = replace(
                manifest.tunings[self.asked.product], cascade=found.cascade,
                evidence=told | self._told(found, Shown(bad, found.judged.bad, maps)),
            )  # fmt: skip
            self.progress("calibrating", 1.0)
            with self._open(replace(manifest, tunings=manifest.tunings | {self.asked.product: tuning})) as loaded:
                settled.append((found, calibrated(loaded, self._whole, self.rate)))
            return tuning, settled[0][1]

        self.progress(f"writing {chosen.candidate.name}", 1.0)
        tuning = write(self.bundle, self.asked.product, self._fused(candidate, modules, search), settle)
        ((found, calibration),) = settled
        shown = Shown(bad, found.judged.bad, maps)
        return Outcome(chosen, search, calibration, self.budget, found.judged.ms, shown, tuning.evidence)

    def _fused(self, candidate: Candidate, modules: Sequence[Distance | Pixels | None], search: Search) -> Fused:
        terms = candidate.terms([scale_of(raw.good) for raw in candidate.raws])
        shown = any(raw.view for raw in candidate.raws)
        return Fused(
            terms=[Fitted(term, module) for term, module in zip(terms, modules, strict=True)],
            top=TOP,
            backbone=self._backbone((1, 2, 3)),
            photograph=photograph(self.manifest.preprocessing, self.side) if shown else None,
            sampler=search.sampler(candidate),
            alignment=self.alignment,
        )

    def _cascade(self, alone: Judged, seen: Seen, search: Search) -> Found:
        if self.manifest.tiles:
            return Found.none(alone, "a cascade is of whole photographs")
        if not self.options.cascade:
            return Found.none(alone, "it was not asked for")
        published = Published(
            lambda: self._open(self.manifest, tuned=False), seen, search.images.bad,
            self.manifest.settings.mask.range, search.work, lambda said: self.progress(said, 1.0),
        )  # fmt: skip
        return look(alone, published, self.options.budget_ms, 60 * self.options.minutes - search.work.seconds)

    def _told(self, found: Found, shown: Shown) -> dict[str, Any]:
        """Return the scores that a calibration goes by, and what there is to tell of a cascade."""
        images, fitted = self.owners or self.paths, dict[Path, float]()
        for row, score in zip(self._rows, found.judged.good.tolist(), strict=True):
            fitted[images[row]] = max(score, fitted.get(images[row], score))
        return {
            "cascade": found.told,
            "fitted": {fingerprint(path): score for path, score in fitted.items()},
            "found": shown.told(),
        }

    def _time(self, manifest: Manifest) -> float:
        """Return ms an image; `_TooSlowError` where these exceed the budget."""
        with self._open(manifest) as loaded:
            ms = median(loaded(path).times["total"] for path in self._whole[:TIMED]) / self.tiles
        if ms > SLACK * self.budget:
            raise _TooSlowError(ms)
        return ms

    def _open(self, manifest: Manifest, *, tuned: bool = True) -> Detector:
        asked = replace(self.asked, tuned=tuned, calibrated=False, warm_up=True, early_exit=0.0)
        opened = Bundle.of(self.bundle, manifest, asked)

        def detector(pipeline: Inspector, engine: str) -> Detector:
            return Detector(manifest, pipeline, product=asked.product, engine=engine, tuning=opened.tuning)

        return open_detector(opened, asked, detector)
