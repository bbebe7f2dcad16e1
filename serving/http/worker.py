"""One thread a model: it alone runs the engine, on batches of whatever waits."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from mdps.runtime.detector import Result
from mdps.runtime.preprocessing import Observations


class Engine(Protocol):
    """The part of a detector that the thread needs."""

    def judge(self, observations: Observations) -> list[Result]:
        """Results for B pictures; none depends on the others."""


@dataclass(frozen=True)
class Answer:
    """A result, the moment (`time.perf_counter`) its batch began, and how many images it had."""

    result: Result
    begun: float
    images: int


@dataclass(eq=False)
class Item:
    """One picture's observation that waits; without it (`drop`) there is nothing to do.

    `until` (`time.monotonic`) is when nobody waits for its result any more.
    """

    engine: Engine
    observation: Observations | None
    until: float
    future: "asyncio.Future[Answer]" = field(repr=False)

    def drop(self) -> None:
        """Forget the work if it has not begun, and its memory at once, however long the queue is."""
        self.observation = None


class Worker:
    """Takes items in order and answers each through its future, on the event loop it was made on.

    A batch is what waits when the engine becomes free, at most `max_batch`. While others are on their way (`coming`
    says how many), it waits up to `max_wait` seconds for them, and never where nobody comes: one client alone loses
    no time. It holds no more images than are judged before the first of them is too late: on a slow engine whole
    batches would come too late for all. `seconds` is how long an image took lately, at first the given one.
    """

    def __init__(
        self, name: str, *, max_batch: int, max_wait: float, coming: Callable[[], int], seconds: float = 0.0
    ) -> None:
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        self._held: Item | None = None
        self._stopping = False
        self._max_batch, self._max_wait, self._coming = max_batch, max_wait, coming
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=f"mdps-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; without it nothing is ever answered."""
        return self._thread.is_alive()

    def submit(self, engine: Engine, observation: Observations, until: float = math.inf) -> Item:
        """Queue an observation; await the item's future for what came of it."""
        item = Item(engine, observation, until, self._loop.create_future())
        self._queue.put(item)
        return item

    def stop(self) -> None:
        """End the thread after all that is queued, and wait for it."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while batch := self._gather():
            work = [(item, observation) for item in batch if (observation := item.observation) is not None]
            if work:
                self._predict([item for item, _ in work], [observation for _, observation in work])

    def _gather(self) -> list[Item]:
        """At least one item, all for one engine; none when it is time to stop."""
        batch = [item for item in (self._held or self._next(None),) if item is not None]
        self._held = None
        until = time.perf_counter() + self._max_wait
        while batch and len(batch) < self._max_batch:
            item = self._next(until)
            if item is None:
                break
            is_other = item.engine is not batch[0].engine  # the model was reloaded in between
            if is_other or not self._is_in_time([*batch, item]):
                self._held = item
                break
            batch.append(item)
        return batch

    def _is_in_time(self, batch: Sequence[Item]) -> bool:
        return time.monotonic() + len(batch) * self.seconds <= min(item.until for item in batch)

    def _next(self, until: float | None) -> Item | None:
        """The next item; None where none comes in time, or any more."""
        if self._stopping:
            return None
        try:
            item = self._queue.get() if until is None else self._get_until(until)
        except Empty:
            return None
        self._stopping = item is None
        return item

    def _get_until(self, until: float) -> Item | None:
        try:
            return self._queue.get_nowait()
        except Empty:
            left = until - time.perf_counter()
            if left <= 0 or not self._coming():
                raise
            return self._queue.get(timeout=left)

    def _predict(self, items: Sequence[Item], observations: Sequence[Observations]) -> None:
        begun = time.perf_counter()
        try:
            results = items[0].engine.judge(Observations.joined(observations))
        except Exception as error:
            if len(items) > 1:  # one image's fault is not the others'
                for item, observation in zip(items, observations, strict=True):
                    self._predict([item], [observation])
                return
            self._deliver([(items[0], error)])
            return
        seconds = (time.perf_counter() - begun) / len(items)
        self.seconds = 0.7 * self.seconds + 0.3 * seconds if self.seconds else seconds
        self._deliver([(item, Answer(result, begun, len(items))) for item, result in zip(items, results, strict=True)])

    def _deliver(self, outcomes: list[tuple[Item, Answer | Exception]]) -> None:
        self._loop.call_soon_threadsafe(_settle, outcomes)


def _settle(outcomes: list[tuple[Item, Answer | Exception]]) -> None:
    for item, outcome in outcomes:
        if item.future.done():  # its request gave up meanwhile
            continue
        if isinstance(outcome, Exception):
            item.future.set_exception(outcome)
        else:
            item.future.set_result(outcome)
