"""One interleaved run: every competitor once a round, in an order that changes, so that noise hits all alike."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from mdps.benchmarks.bench.process import Process
from mdps.benchmarks.bench.spec import Spec

Say = Callable[[str], None]


@dataclass
class Measurement:
    """What is known of a competitor: `facts` of its opening, an entry a round in the lists; or why it was skipped."""

    spec: Spec
    facts: dict[str, Any] = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)
    passes_ms: list[float] = field(default_factory=list)
    peak_mb: float | None = None
    skipped: str = ""


def measure(specs: Sequence[Spec], *, rounds: int, warm_up: int, patience: float, say: Say) -> list[Measurement]:
    """Opens all, one after another; warms each up; then `rounds` rounds. Measurements in the order of `specs`."""
    found = [Measurement(spec) for spec in specs]
    with ExitStack() as opened:
        running = []
        for one in found:  # started one by one, so that no cold start has another beside it
            say(f"loading {one.spec.name}")
            process = opened.enter_context(Process(one.spec, patience))
            running.append((one, process))
            _open(one, process, warm_up)
            if one.skipped:
                say(f"skipped {one.spec.name}: {one.skipped}")
        for number, order in enumerate(orders(running, rounds), start=1):
            say(f"round {number} of {rounds}")
            for one, process in order:
                _time(one, process)
        for one, process in running:
            if not one.skipped:
                one.peak_mb = process.ask("peak").get("peak_mb")
    return found


def orders(items: Sequence[Any], rounds: int) -> Iterable[list[Any]]:
    """Shuffled anew for each round, the same in every run: none always follows the same other."""
    stream = random.Random(0)
    for _ in range(rounds):
        yield stream.sample(items, len(items))


def _open(one: Measurement, process: Process, warm_up: int) -> None:
    answer = process.ask("open")
    for _ in range(warm_up):
        if not process.skipped:
            process.ask("run")
    one.skipped, one.facts = process.skipped, answer


def _time(one: Measurement, process: Process) -> None:
    if one.skipped:
        return
    answer = process.ask("run")
    if process.skipped:
        one.skipped = process.skipped
        return
    one.ms.append(answer["ms"])
    if answer["passes_ms"] is not None:
        one.passes_ms.append(answer["passes_ms"])
