"""The live view of a model for the page: recent scores, newest picture, last failures. Bounded, and lost at exit."""

import itertools
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.detector import Result
from mdps.runtime.preprocessing import to_uint8

_SCORES, _FAILURES = 1000, 24
# For all models, or a page that goes from one to another takes pictures for those it has. Those of another run of the
# server must not look like this one's to a page that stayed open.
_IDS = itertools.count(int(time.time() * 1000) % 2**40 * 1000)


@dataclass(frozen=True)
class Entry:
    """One judged image: when (`time.time`), what came of it, how long it took in ms."""

    id: int
    time: float
    score: float
    verdict: str | None
    ms: float

    def to_json(self) -> list[Any]:
        """The fields in order: a page takes hundreds at once."""
        return [self.id, round(self.time, 3), self.score, self.verdict, round(self.ms, 1)]


@dataclass(frozen=True)
class Seen:
    """The sources of a drawn picture: uint8 [H, W, 3], the anomaly map [H, W]."""

    pixels: NDArray[np.uint8]
    anomaly_map: NDArray[np.float32]


class Live:
    """Filled and read on the event loop alone."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._scores: deque[Entry] = deque(maxlen=_SCORES)
        self._failures: OrderedDict[int, Seen] = OrderedDict()
        self._newest: tuple[int, Result] | None = None

    def add(self, result: Result, ms: float) -> None:
        """Take in one more result."""
        number = next(_IDS)
        self.counts[result.verdict or "none"] += 1
        self._scores.append(Entry(number, time.time(), result.score, result.verdict, ms))
        self._newest = (number, result)
        if result.verdict == "fail":
            # Copies: a result's arrays are views of its whole batch.
            self._failures[number] = Seen(to_uint8(result.observation), result.anomaly_map.copy())
            if len(self._failures) > _FAILURES:
                self._failures.popitem(last=False)

    def since(self, last: int) -> list[Entry]:
        """Results after the one with the id `last`, oldest first."""
        return [entry for entry in self._scores if entry.id > last]

    @property
    def failures(self) -> list[int]:
        """Ids of the failures whose pictures are still here, newest first."""
        return list(reversed(self._failures))

    def seen(self, number: int) -> Seen | None:
        """Return what to draw for an id: the newest, or one of the failures."""
        if number in self._failures:
            return self._failures[number]
        if self._newest is not None and self._newest[0] == number:
            result = self._newest[1]
            return Seen(to_uint8(result.observation), result.anomaly_map)
        return None
