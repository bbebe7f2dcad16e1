"""`mdps trade`: what a millisecond buys. Gradients, steps, the mask pass and precision, weighed against time."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mdps.benchmarks.data.samples import Category
from mdps.benchmarks.kit import Say, T, digest, given, measured_with, orders, quiet, write_report
from mdps.benchmarks.options import PRECISIONS, TradeOptions
from mdps.benchmarks.study import FIRST, LAST, MAPS, Runner, settled
from mdps.benchmarks.study.outcomes import Outcome
from mdps.benchmarks.trade.bundles import CalibratedBundles
from mdps.benchmarks.trade.report import markdown, plot
from mdps.benchmarks.trade.rows import (
    DDAD,
    ENGINE_OF,
    EXACT,
    GRADIENTS,
    Choice,
    Exits,
    Measured,
    Trade,
    agreement,
    choices,
    load_maps,
    pairs,
    row_of,
)
from mdps.runtime.atomic import write_text
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.detector import Detector
from mdps.runtime.errors import BackendError, UsageError, require
from mdps.runtime.loading import choose_engine, open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import read_image
from mdps.runtime.settings import Settings

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Way:
    """A bundle and the settings it judges with, which its graphs can compute; `engine` where it is not the clock's."""

    name: str
    bundle: Path
    settings: Settings
    engine: str | None = None


@dataclass(frozen=True)
class Clock:
    """How to measure: `pictures` are the images of the rounds in turns; `engine` and `threads` as in `load`."""

    pictures: Sequence[Path]
    rounds: int
    engine: str
    threads: int | None

    def kept(self, ways: Sequence[Way], path: Path) -> Times:
        """Measure, or read from `path` what was measured before of exactly these ways."""
        asked = [[way.name, way.bundle.name, way.settings.to_json(), way.engine] for way in ways]
        pictures = [picture.name for picture in self.pictures]
        key = digest([asked, pictures, self.rounds, self.engine, self.threads])
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["key"] == key:
                return {name: list(map(float, values)) for name, values in before["ms"].items()}
        found = self.measure(ways)
        write_text(path, json.dumps({"key": key, "ms": found}, indent=1) + "\n")
        return found

    def measure(self, ways: Sequence[Way]) -> Times:
        """Milliseconds of one image lying in memory, all passes and scoring, a number a round; after one untimed round.

        Ways of one bundle share its loaded graphs. Raises as `open_pipeline` and for pictures that cannot be read.
        """
        with ExitStack() as opened:
            detectors = self._open(ways, opened)
            any_of_them = detectors[ways[0].name]
            images = [any_of_them.preprocessing(read_image(path))[None] for path in self.pictures]
            for detector in detectors.values():
                _ms(detector, images[0])
            found: Times = {way.name: [] for way in ways}
            rounds = enumerate(orders(list(detectors.items()), self.rounds))
            for index, order in tqdm(rounds, total=self.rounds, desc="timing", unit="round", disable=None):
                for name, detector in order:
                    found[name].append(_ms(detector, images[index % len(images)]))
            return found

    def _open(self, ways: Sequence[Way], opened: ExitStack) -> dict[str, Detector]:
        manifests = {way.bundle: Manifest.read(way.bundle) for way in ways}
        pipelines = {
            (path, engine): open_pipeline(
                Bundle(path, manifests[path], manifests[path].settings), opened, engine=engine, threads=self.threads
            )
            for path, engine in dict.fromkeys((way.bundle, self._engine(way)) for way in ways)
        }
        return {
            way.name: Detector(
                manifests[way.bundle], replace(pipelines[way.bundle, self._engine(way)], settings=way.settings)
            )
            for way in ways
        }

    def _engine(self, way: Way) -> str:
        return way.engine or self.engine


def _ms(detector: Detector, image: NDArray[np.float32]) -> float:
    """A mask range that is not the image's own is taken as (0, 1): it costs the same."""
    start = time.perf_counter()
    detector.inspect(image, mask_range=(0.0, 1.0))
    return (time.perf_counter() - start) * 1000


def steps_within(budget: float, few: tuple[int, float], many: tuple[int, float], noise_level: int) -> int:
    """How many steps take `budget` ms, where (N, ms) of few and of many steps are known and time grows evenly with N.

    Of the numbers whose time is within a tenth of the budget one that divides the noise level is taken, as it changes
    nothing but N; else the nearest number.
    """
    (low, low_ms), (high, high_ms) = few, many
    a_step = max((high_ms - low_ms) / (high - low), 1e-9)
    wanted = low + (budget - low_ms) / a_step
    nearest = min(max(1, round(wanted)), noise_level)
    whole = [n for n in range(1, noise_level + 1) if noise_level % n == 0 and abs(n - wanted) * a_step <= budget / 10]
    return min(whole, key=lambda n: abs(n - wanted)) if whole else nearest


def middle(times: Mapping[str, Sequence[float]], name: str) -> float | None:
    """The median of a way, None where it was not timed."""
    return median(times[name]) if times.get(name) else None


PILOT_ROUNDS = 3


def trade(ckpt: Path, category: Category, out: Path, options: TradeOptions, say: Say = quiet) -> Trade:
    """Measures everything on one category and writes trade.json, .md and .png into `out`.

    Judgements and times that `out` holds are not made again. Raises UsageError for a category without test images or a
    detector without guidance or mask pass, and as an export.
    """
    require(bool(category.test), f"{category.root} has no test images: nothing can be compared on it")
    out.mkdir(parents=True, exist_ok=True)
    study = _Study(ckpt, category, out, options, say)
    found = study.found()
    write_report(out, "trade", found.to_json(), markdown(found), plot(found))
    return found


class _Study:
    """One run over a category."""

    def __init__(self, ckpt: Path, category: Category, out: Path, options: TradeOptions, say: Say) -> None:
        self._ckpt, self._category, self._out, self._options, self._say = ckpt, category, out, options, say
        good = _spread(category.train, options.calibration)
        self._bundles = CalibratedBundles(out / "bundles", options.choices, say, good, options.threads)
        self._manifest = Manifest.read(self._bundle(Choice(EXACT, max(options.steps))))
        _check(self._manifest.settings)
        reference = Bundle(self._bundle(Choice(EXACT, max(options.steps))), self._manifest, self._manifest.settings)
        self._engine = choose_engine(reference, LoadOptions(engine=options.engine, threads=options.threads)).name
        self._notes: list[str] = []

    def found(self) -> Trade:
        """Everything; what takes long is kept on the way."""
        options = self._options
        wanted = choices(options.steps, self._equal_time(), _scales(options), self._possible(), self._exits())
        folders = {one: self._runner(one).folder(one.variant, self._category, self._ckpt) for one in wanted}
        self._say(f"timing {len(wanted)} ways, {options.rounds} rounds: leave the machine alone")
        times = self._clock(options.rounds).kept([*map(self._way, _timed(wanted))], self._out / "times.json")
        measured = self._measured(folders, times)
        return Trade(
            category=self._category.name,
            rows=tuple(row_of(one, measured[0]) for one in measured),
            pairs=tuple(pairs(measured)),
            notes=tuple(dict.fromkeys(self._notes)),
            machine=measured_with(self._manifest) | {"engine": self._engine, "threads": options.threads},
            settings=given(options),
        )

    def _equal_time(self) -> dict[str, list[int]]:
        """Steps of the cheap gradients that take as long as the exact one's, by a short measurement that is kept."""
        few, many = min(self._options.steps), max(self._options.steps)
        scales = _scales(self._options)
        ends = [Choice(name, n, scale=scales.get(name)) for name in GRADIENTS for n in (few, many)]
        ends += [Choice(EXACT, n) for n in self._options.steps if n not in (few, many)]
        times = self._clock(PILOT_ROUNDS).kept([*map(self._way, ends)], self._out / "pilot.json")
        level = self._manifest.settings.sampler.first_pass.noise_level
        found = {}
        for name in GRADIENTS[1:]:
            line = [(n, middle(times, Choice(name, n).name) or 0.0) for n in (few, many)]
            budgets = [middle(times, Choice(EXACT, n).name) or 0.0 for n in self._options.steps]
            found[name] = [steps_within(budget, line[0], line[1], level) for budget in budgets]
        return found

    def _possible(self) -> list[str]:
        """The precisions that this machine can compute in; the others are named."""
        possible, bundle = [], self._bundle(Choice(EXACT, max(self._options.steps)))
        for name in self._options.precisions:
            try:
                _check_opens(bundle, ENGINE_OF[name])
            except (UsageError, BackendError) as error:
                self._notes.append(f"{PRECISIONS[name]}: left out, {error}")
            else:
                possible.append(name)
        return possible

    def _exits(self) -> tuple[float, ...]:
        """The early exits; none where there is nothing to calibrate on."""
        if self._category.train or not self._options.exits:
            return self._options.exits
        self._notes.append("early exit: left out, this category has no good training images to calibrate it on")
        return ()

    def _measured(self, folders: Mapping[Choice, Path], times: Times) -> list[Measured]:
        reference = load_maps(next(iter(folders.values())) / MAPS, LAST)
        found = []
        for choice, folder in folders.items():
            which = LAST if choice.mask_pass else FIRST
            outcome = self._runner(choice).run(choice.variant, self._category, self._ckpt)
            same = agreement(load_maps(folder / MAPS, which), reference)
            exits = self._who_left(choice, folder)
            found.append(Measured(choice, outcome, same, _times_of(choice, times, exits), exits))
        return found

    def _who_left(self, choice: Choice, folder: Path) -> Exits | None:
        if not choice.early_exit:
            return None
        return Exits.of(Outcome.load(folder, FIRST), self._bundle(choice), choice.early_exit)

    def _bundle(self, choice: Choice) -> Path:
        return self._bundles.get(self._ckpt, self._category.name, choice.variant.export)

    def _way(self, choice: Choice) -> Way:
        bundle = self._bundle(choice)
        settings = settled(choice.variant)(Manifest.read(bundle, verify=False).settings)
        return Way(choice.name, bundle, settings if choice.mask_pass else _one_pass(settings), choice.engine)

    def _clock(self, rounds: int) -> Clock:
        samples = self._category.test
        pictures = [sample.path for sample in _spread(samples, rounds)]
        return Clock(pictures, rounds, self._engine, self._options.threads)

    def _runner(self, choice: Choice) -> Runner:
        options = self._options
        return Runner(
            work=self._out, bundles=self._bundles, every=options.every, largest=options.largest,
            engine=choice.engine or self._engine, threads=options.threads, batch=1, say=self._say, keep_maps=True,
        )  # fmt: skip


def _scales(options: TradeOptions) -> dict[str, float]:
    """Return the guidance scales of the gradients that do not take the bundle's own."""
    free = {} if options.free_scale is None else {GRADIENTS[1]: options.free_scale}
    return free | {DDAD: options.ddad_scale}


def _check_opens(bundle: Path, engine: str) -> None:
    """Raise BackendError or UsageError where this machine's `engine` does not open the bundle."""
    manifest = Manifest.read(bundle, verify=False)
    with ExitStack() as opened:
        open_pipeline(Bundle(bundle, manifest, manifest.settings), opened, engine=engine)


def _check(settings: Settings) -> None:
    passes = settings.sampler.passes
    if len(passes) < 2 or not any(one.guidance_scale for one in passes):
        raise UsageError("the study compares guidance and mask pass, and this detector lacks one: choose other options")


def _one_pass(settings: Settings) -> Settings:
    return replace(settings, sampler=replace(settings.sampler, masked_pass=None))


def _timed(wanted: Sequence[Choice]) -> list[Choice]:
    """Another seed takes no other time, and an early exit that of one pass or of both."""
    return [one for one in wanted if one.seed is None and not one.early_exit]


def _times_of(choice: Choice, times: Times, exits: Exits | None) -> Sequence[float]:
    if exits is None:
        return times.get(choice.name, ())
    both = Choice(choice.gradient, choice.steps)
    return exits.ms(times[replace(both, mask_pass=False).name], times[both.name])


def _spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, evenly from first to last."""
    many = len(items)
    return [items[index * many // min(count, many)] for index in range(min(count, many))]
