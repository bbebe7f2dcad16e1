"""The study: which gradients, steps, passes and precisions find how much in how many milliseconds."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mdps.benchmarks.bench.machine import machine_facts
from mdps.benchmarks.datasets import Category
from mdps.benchmarks.options import PRECISIONS, TradeOptions
from mdps.benchmarks.reproduce.bundles import plain
from mdps.benchmarks.reproduce.outcomes import Outcome
from mdps.benchmarks.reproduce.runner import FIRST, LAST, MAPS, Runner, settled
from mdps.benchmarks.trade.agreement import agreement, load_maps
from mdps.benchmarks.trade.choices import DDAD, EXACT, GRADIENTS, Choice, choices
from mdps.benchmarks.trade.exits import Exits
from mdps.benchmarks.trade.precision import PreciseBundles
from mdps.benchmarks.trade.rows import Measured, Pair, Row, pairs, row_of
from mdps.benchmarks.trade.timing import Clock, Times, Way, middle, steps_within
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.errors import BackendError, UsageError, require
from mdps.runtime.loading import choose_engine, open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.settings import Settings

T = TypeVar("T")
Say = Callable[[str], None]
PILOT_ROUNDS = 3


def _scales(options: TradeOptions) -> dict[str, float]:
    """Return the guidance scales of the gradients that do not take the bundle's own."""
    free = {} if options.free_scale is None else {GRADIENTS[1]: options.free_scale}
    return free | {DDAD: options.ddad_scale}


@dataclass(frozen=True)
class Trade:
    """What was found, the reference first."""

    category: str
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    machine: dict[str, Any]
    settings: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "category": self.category,
            "settings": self.settings,
            "machine": self.machine,
            "rows": [row.to_json() for row in self.rows],
            "pairs": [pair.to_json() for pair in self.pairs],
            "notes": list(self.notes),
        }


def trade(ckpt: Path, category: Category, out: Path, options: TradeOptions, say: Say = lambda _: None) -> Trade:
    """Measures everything on one category and writes trade.json, .md and .png into `out`.

    Judgements and times that `out` holds are not made again. Raises UsageError for a category without test images or a
    detector without guidance or mask pass, and as an export.
    """
    from mdps.benchmarks.trade.report import write_report

    require(bool(category.test), f"{category.root} has no test images: nothing can be compared on it")
    out.mkdir(parents=True, exist_ok=True)
    study = _Study(ckpt, category, out, options, say)
    found = study.found()
    write_report(found, out)
    return found


class _Study:
    """One run over a category."""

    def __init__(self, ckpt: Path, category: Category, out: Path, options: TradeOptions, say: Say) -> None:
        self._ckpt, self._category, self._out, self._options, self._say = ckpt, category, out, options, say
        good = _spread(category.train, options.calibration)
        self._bundles = PreciseBundles(out / "bundles", options.choices, say, good, options.threads)
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
            machine=machine_facts(self._manifest) | {"engine": self._engine, "threads": options.threads},
            settings={key: value for key, value in plain(asdict(options)).items() if value is not None},
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
        """The precisions that this detector can be reduced to; the others are named."""
        possible = []
        for name in self._options.precisions:
            choice = Choice(EXACT, max(self._options.steps), precision=name)
            try:
                bundle = self._bundle(choice)
                if choice.engine:
                    _check_opens(bundle, choice.engine)
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
