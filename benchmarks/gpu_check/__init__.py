"""`mdps gpu-check`: every engine that loads on a machine beside the torch oracle, with latency, rate and memory.

Does as much as fits into the minutes, the most valuable first; what is known is written after each piece.
"""

import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from mdps.benchmarks.bench.rounds import Measurement, Process, environment
from mdps.benchmarks.gpu_check.items import Item, Prepared, pieces
from mdps.benchmarks.gpu_check.report import Check, Row, State, facts, measured_row, prepared_row, write
from mdps.benchmarks.kit import Say, last_words
from mdps.benchmarks.options import CheckOptions
from mdps.runtime import cards
from mdps.runtime.errors import BackendError
from mdps.runtime.machine import available_cpus

GRACE = 3.0
"""An item that takes so many times what was thought is given up; more where there are more minutes than usual."""
USUAL = 360.0
LEAST = 20.0


@dataclass
class Minutes:
    """A stretch of time, and what is left of it."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.clock()

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (self.clock() - self.start)


Doer = Callable[[Item, float, dict[str, float], bool], Row]
"""Does one item within so many seconds, given the rates so far; what goes wrong is in the row.

The last argument, hurried: these are all that is left of the minutes, and fewer than the item would get, so that it is
no failure of the item's if they are not enough.
"""


def run_check(
    items: Sequence[Item], minutes: Minutes, do: Doer, written: Callable[[list[Row]], None], say: Say
) -> list[Row]:
    """A row an item. `written` is called with all rows so far after each of them."""
    rows: list[Row] = []
    without: dict[str, str] = {}  # prepared things that are not there, and families that do not load: why
    rates: dict[str, float] = {}
    patience = max(1.0, minutes.seconds / USUAL)
    for item in _once(items):
        reason = _obstacle(item, without, minutes.left)
        if reason:
            row = Row(item.name, "skipped", reason, item.network, item.precision, item.samples)
        else:
            say(f"{minutes.left:.0f} s left: {item.name}")
            left, enough = minutes.left, max(LEAST, GRACE * item.seconds) * patience
            row = do(item, min(left, enough), rates, left < enough)
        if row.state != "ran":
            if not reason:
                say(f"{row.state} {item.name}: {row.reason}")
            if item.thing or (not reason and row.load_ms is None and not row.findings):
                without.setdefault(item.thing or item.family, row.reason)
        elif item.spec is not None and item.spec.kind == "rate" and row.tflops is not None:
            rates[item.precision] = row.tflops
        rows.append(row)
        written(rows)
    return rows


def _once(items: Sequence[Item]) -> list[Item]:
    """Things are prepared before what needs them first, and not again."""
    found: dict[str, Item] = {}
    for item in items:
        found.setdefault(item.name, item)
    return list(found.values())


def _obstacle(item: Item, without: dict[str, str], left: float) -> str:
    for need in item.needs:
        if need in without:
            return f"there is no {need}: {without[need]}"
    if item.family in without:
        return f"as before: {without[item.family]}"
    if item.seconds > left:
        return f"does not fit: it takes some {math.ceil(item.seconds)} s and {max(0, math.floor(left))} s were left"
    return ""


@dataclass(frozen=True)
class Workshop:
    """The real doer: every item in a process of its own."""

    prepared: Prepared
    rounds: int
    threads: int
    device: str | None = None
    prepare_options: tuple[str, ...] = ()
    warm_up: int = 2

    def __call__(self, item: Item, limit: float, rates: dict[str, float], hurried: bool = False) -> Row:
        """See `Doer`."""
        if item.thing:
            return self._prepare(item, limit, hurried)
        assert item.spec is not None
        start = time.monotonic()
        with UsedMemory(self.device if item.on_card else None, item.on_card) as memory:
            one, failed = self._measure(item, limit, hurried)
        return measured_row(
            item, one, failed=failed, seconds=time.monotonic() - start, device_mb=memory.grown_mb, rates=rates
        )

    def _prepare(self, item: Item, limit: float, hurried: bool) -> Row:
        start = time.monotonic()
        if self.prepared.has(item.thing):
            return prepared_row(item, "ran", 0.0, "it was there")
        command = [sys.executable, "-m", "mdps.benchmarks.gpu_check.prepare", item.thing]
        command += ["--work", str(self.prepared.folder), *self.prepare_options]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=limit, check=False,
                env=environment(self.threads),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            state: State = "skipped" if hurried else "failed"
            return prepared_row(item, state, time.monotonic() - start, _too_long(limit, hurried))
        if not done.returncode:
            return prepared_row(item, "ran", time.monotonic() - start)
        said = last_words(done)
        reason = said.removeprefix("error: ") or f"its process ended with code {done.returncode}"
        absent = re.search(r"ModuleNotFoundError: No module named '(\w+)", said)
        if absent:
            reason = f"needs {absent[1]}, which is not installed here (a kit takes torch along with --with-torch)"
        foreseen = absent or said.startswith("error: ")
        return prepared_row(item, "skipped" if foreseen else "failed", time.monotonic() - start, reason)

    def _measure(self, item: Item, limit: float, hurried: bool) -> tuple[Measurement, bool]:
        """Opened and compared, warmed up, then runs until there are enough or its time is over."""
        assert item.spec is not None
        one, own = Measurement(item.spec), Minutes(limit)
        with Process(item.spec, limit) as process:
            one.facts = process.ask("open")
            for _ in range(self.warm_up):
                if not process.skipped:
                    process.ask("run", own.left)
            timed = Minutes(min(own.left / 2, item.seconds / 2))
            while not process.skipped and len(one.ms) < self.rounds and (timed.left > 0 or not one.ms):
                answer = process.ask("run", max(0.1, own.left))
                if not process.skipped:
                    one.add(answer)
            if not process.skipped:
                one.peak_mb = process.ask("peak", 10.0).get("peak_mb")
            one.skipped = process.skipped
            if not process.hung:
                return one, process.failed
            one.skipped = _too_long(limit, hurried) + (" at a run" if one.facts.get("load_ms") else " to load it")
            return one, not hurried


def _too_long(limit: float, hurried: bool) -> str:
    return f"out of minutes: the {limit:.0f} s left were not enough" if hurried else f"took longer than {limit:.0f} s"


class UsedMemory:
    """By how much the memory used on a card grows meanwhile, looked at four times a second."""

    def __init__(self, device: str | None, look: bool = True, seconds: float = 0.25) -> None:
        self._device, self._look, self._seconds = device, look, seconds
        self._before: int | None = None
        self._most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def grown_mb(self) -> float | None:
        """In 10^6 bytes; None where nobody tells."""
        return None if self._before is None else max(0, self._most - self._before) / 1e6

    def __enter__(self) -> Self:
        self._before = self._used() if self._look else None
        if self._before is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._before is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self._seconds):
            self._most = max(self._most, self._used() or 0)

    def _used(self) -> int | None:
        known = cards.cards()
        if not known:
            return None
        card = known[0] if self._device is None else cards.find(self._device, known)
        return None if card.total is None or card.free is None else card.total - card.free


def check(out: Path, options: CheckOptions, say: Say) -> Check:
    """Do as much as fits, with gpu_check.json and gpu_check.md in `out` after every piece; BackendError for no card."""
    threads = options.threads or available_cpus()
    prepared = Prepared(options.work or out / "work")
    card, skipped = cards.Card(), list[Row]()
    if options.cpu:
        skipped = skip_all(pieces(prepared, options, on_card=True), _why_no_card(options))
    else:
        card = cards.choose(options.device)
    wanted = pieces(prepared, options, on_card=not options.cpu)
    if card.uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = card.uuid  # of all processes that are started here
    machine = facts() | {"steps": options.steps, "threads": threads, "minutes": options.minutes}
    prepare = _prepare_options(options, card)
    workshop = Workshop(prepared, options.rounds, threads, card.uuid or None, prepare)
    minutes = Minutes(options.minutes * 60)
    rows = run_check(
        wanted, minutes, workshop, lambda found: write(Check(False, machine, [*found, *skipped]), out), say
    )
    done = Check(True, machine, [*rows, *skipped])
    write(done, out)
    return done


def _why_no_card(options: CheckOptions) -> str:
    try:
        cards.choose(options.device)
    except BackendError as error:
        return str(error)
    return "--cpu was given"


def _prepare_options(options: CheckOptions, card: cards.Card) -> tuple[str, ...]:
    """Arguments of `gpu_check.prepare`."""
    found = ["--steps", str(options.steps), "--samples", f"1,{options.samples}", "--max-batch", str(options.samples)]
    found += ["--authors-size", str(options.authors_size)]
    return (*found, *(("--compute-capability", card.compute_capability) if card.uuid else ()))


def skip_all(items: Sequence[Item], reason: str) -> list[Row]:
    """Rows of what is not tried at all."""
    return [
        Row(item.name, "skipped", reason, item.network, item.precision, item.samples)
        for item in _once(items)
        if item.spec is not None
    ]
