"""How the server reports on itself: log lines on stderr, metrics for Prometheus, recent results for the page."""

import itertools
import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import prometheus_client as prometheus
from numpy.typing import NDArray

from mdps.runtime.detector import Result
from mdps.runtime.preprocessing import to_uint8
from mdps.runtime.regions import Box, Region

_LOGGER = logging.getLogger("mdps.serve")
_WAITING = 10_000  # lines; more are dropped and counted
_LAST_LINES = 2.0  # seconds that a reader has for them at the end
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SCORES, _FAILURES = 1000, 24
# For all models, or a page that goes from one to another takes pictures for those it has. Those of another run of the
# server must not look like this one's to a page that stayed open.
_IDS = itertools.count(int(time.time() * 1000) % 2**40 * 1000)


def event(name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event; `fields` become keys of its object, those that are None are left out."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, name, extra={"fields": {key: value for key, value in fields.items() if value is not None}})


class _JsonLines(logging.Formatter):
    """Formats a record as one line: time (UTC), level, event, then its fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Dropping(logging.handlers.QueueHandler):
    """Never waits: where the reader is too slow, lines are lost and counted."""

    def __init__(self, lines: "queue.Queue[logging.LogRecord]", on_drop: Callable[[], None]) -> None:
        super().__init__(lines)
        self._on_drop = on_drop

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # the writing thread formats it

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._on_drop()


class _Descriptor:
    """Writes past Python's buffers, whose locks would keep a process from ending while its reader stands still.

    So would the lock of a `logging.Handler`, which `logging` takes at exit.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lines = descriptor, _JsonLines()

    def handle(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a reader that has left is no reason to stop serving
            os.write(self._descriptor, (self._lines.format(record) + "\n").encode())


class _Listener(logging.handlers.QueueListener):
    def enqueue_sentinel(self) -> None:
        """Wait for a place in the queue, where it is full; `stop` calls this."""
        cast("queue.Queue[logging.LogRecord | None]", self.queue).put(None)


@contextmanager
def logging_to_stderr(on_drop: Callable[[], None]) -> Iterator[None]:
    """Log this server's events, and uvicorn's warnings, as JSON lines until the block ends.

    A thread writes them, so that a slow reader of the log holds up no answer.
    """
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING)
    listener = _Listener(lines, cast(logging.Handler, _Descriptor(sys.stderr.fileno())))
    handler = _Dropping(lines, on_drop)
    others = (logging.getLogger(name) for name in ("uvicorn.error", "asyncio"))
    loggers = {_LOGGER: logging.INFO} | dict.fromkeys(others, logging.ERROR)
    for logger, level in loggers.items():
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        last = threading.Thread(target=listener.stop, daemon=True)
        last.start()
        last.join(timeout=_LAST_LINES)


class Metrics:
    """All series of one server, in a registry of its own. Labels take few values: names of models, fixed words.

    Stages of a request: `read` its body, `prepare` (decode and resize), `queue`, `first_pass`, `masked_pass`, `score`,
    `answer`, and `total`.
    """

    def __init__(self) -> None:
        registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> prometheus.Gauge:
            return prometheus.Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> prometheus.Histogram:
            return prometheus.Histogram(name, text, labels, buckets=bounds, registry=registry)

        self._registry = registry
        self.stage = histogram("mdps_stage_seconds", "Time of a judged request by stage.", _SECONDS, "model", "stage")
        self.batch = histogram("mdps_batch_images", "Images judged at once.", (1, 2, 4, 8, 16, 32), "model")
        self.verdicts = counter("mdps_verdicts", "Images judged.", "model", "verdict")
        self.errors = counter("mdps_errors", "Requests without a result.", "kind")
        self.requests = counter("mdps_requests", "Requests answered.", "route", "status")
        self.nan = counter("mdps_nan", "Images for which the network gave NaN or infinity.", "model")
        self.reloads = counter("mdps_reloads", "Reloads of a model.", "model", "outcome")
        self.queue = gauge("mdps_queue_length", "Requests accepted and not yet answered.", "model")
        self.ready = gauge("mdps_model_ready", "1 where the model answers.", "model")
        self.threshold = gauge("mdps_threshold", "Score above which a part fails.", "model")
        self.fitness = gauge("mdps_fitness_auroc", "Ranks defects put into good images above good ones.", "model")
        graph = ("model", "engine", "graph", "provider")
        self.provider = gauge("mdps_provider_info", "What computes each graph.", *graph)
        self.dropped_logs = counter("mdps_dropped_log_lines", "Log lines nobody took in time.")

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)


@dataclass(frozen=True)
class Entry:
    """One judged image: when (`time.time`), its score and verdict, how long it took in ms."""

    id: int
    time: float
    score: float
    verdict: str | None
    ms: float

    def to_json(self) -> list[Any]:
        """Return the fields in order: a page takes hundreds at once."""
        return [self.id, round(self.time, 3), self.score, self.verdict, round(self.ms, 1)]


@dataclass(frozen=True)
class Seen:
    """The sources of a drawn picture: uint8 [H, W, 3], the anomaly map [H, W], regions and box of the `Result`."""

    pixels: NDArray[np.uint8]
    anomaly_map: NDArray[np.float32]
    regions: tuple[Region, ...] = ()
    box: Box | None = None


class Live:
    """Recent scores, newest picture and last failures of a model: bounded, lost at exit, for the event loop alone."""

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
            self._failures[number] = Seen(
                to_uint8(result.observation), result.anomaly_map.copy(), result.regions, result.box
            )
            if len(self._failures) > _FAILURES:
                self._failures.popitem(last=False)

    def since(self, last: int) -> list[Entry]:
        """Return the results after the one with the id `last`, oldest first."""
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
            return Seen(to_uint8(result.observation), result.anomaly_map, result.regions, result.box)
        return None
