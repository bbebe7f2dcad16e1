"""A served model: admits requests up to its bound, prepares and judges them, and swaps a bundle that changed."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mdps.runtime.detector import Detector, Result
from mdps.runtime.errors import BackendError, ImageError, MdpsError
from mdps.runtime.manifest import FILE_NAME
from mdps.runtime.preprocessing import Observations
from mdps.serving.http.options import ServerOptions
from mdps.serving.http.refusals import Refusal, bad_request
from mdps.serving.http.telemetry import Metrics, event
from mdps.serving.http.worker import Answer, Item, Worker

_RETRY = 10.0  # seconds between attempts while a bundle cannot be loaded, such as one that is being copied
Prepare = Callable[[Detector], Observations]
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Prediction:
    """A result and how long (seconds) its stages took; `images` were judged at once."""

    result: Result
    stages: dict[str, float]
    images: int


@dataclass(eq=False)
class Loaded:
    """A detector with the state its bundle was read in; closed when retired and no request uses it any more."""

    detector: Detector
    stamp: Stamp | None
    since: float
    users: int = 0
    retired: bool = False


def stamp_of(bundle: Path) -> Stamp | None:
    """Return a value that changes whenever the bundle's manifest is written; None while there is none."""
    try:
        stat = (bundle / FILE_NAME).stat()
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


class Model:
    """All methods run on the event loop. `load` (on a thread) reads the bundle, verifies its hashes and warms it up."""

    version = "1"

    def __init__(
        self,
        name: str,
        path: Path,
        first: Loaded,
        *,
        load: Callable[[], Detector],
        options: ServerOptions,
        metrics: Metrics,
        pool: Executor,
    ) -> None:
        self.name, self.path, self.problem = name, path, ""
        self.current, self._load, self._metrics, self._pool = first, load, metrics, pool
        self._limit = options.limits.queue
        self._accepted = self._preparing = 0
        self._reloading = asyncio.Lock()
        self._worker = Worker(
            name,
            max_batch=options.batch,
            max_wait=options.batch_wait,
            coming=lambda: self._preparing,
            seconds=first.detector.warm_up_seconds,
        )
        metrics.queue.labels(name).set_function(lambda: self._accepted)
        metrics.ready.labels(name).set_function(lambda: self.ready)
        self._describe()

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return self._worker.alive

    @property
    def detector(self) -> Detector:
        """The detector new requests are judged by."""
        return self.current.detector

    @property
    def doubt(self) -> dict[str, str]:
        """Return what its answers say of a detector that does not see defects on these parts; empty of another."""
        return {"doubt": self.detector.doubt} if self.detector.doubt else {}

    @property
    def queue_length(self) -> int:
        """Requests accepted and not yet answered."""
        return self._accepted

    def check_room(self, deadline: float) -> None:
        """Raise Refusal 503 where a request that must be answered by then (the loop's time) has no place or no chance.

        A model that nobody waits for takes every request: only by judging does it learn how long that takes.
        """
        if not self.ready:
            raise Refusal(503, "not_ready", f"{self.name} does not answer any more: restart the server")
        waiting = self._accepted
        wait, left = waiting * self._worker.seconds, deadline - asyncio.get_running_loop().time()
        if waiting >= self._limit or (waiting and wait + self._worker.seconds > left):
            late = "" if waiting >= self._limit else ", too many for this request's deadline"
            raise Refusal(
                503,
                "queue_full",
                f"{self.name} has {waiting} requests waiting{late}: try again",
                retry_after=max(1, math.ceil(wait)),
            )

    @contextmanager
    def admitted(self, deadline: float) -> Iterator[None]:
        """Hold a place among the accepted requests, or raise the refusal of `check_room` at once."""
        self.check_room(deadline)
        self._accepted += 1
        try:
            yield
        finally:
            self._accepted -= 1

    async def predict(self, prepare: Prepare, deadline: float) -> Prediction:
        """Judge what `prepare` makes on a thread of the pool; cancelling drops work that has not begun.

        Nobody waits after `deadline` (the loop's time).

        Raises Refusal 400 for the picture, 500 for the engine.
        """
        loaded = self.current
        loaded.users += 1
        started = time.perf_counter()
        try:
            observation = await self._prepare(prepare, loaded.detector)
            queued = time.perf_counter()
            item = self._worker.submit(loaded.detector, observation, deadline)
            answer = await self._outcome(item)
        finally:
            loaded.users -= 1
            self._close_if_done(loaded)
        return self._measured(answer, prepared=queued - started, waited=answer.begun - queued)

    async def _prepare(self, prepare: Prepare, detector: Detector) -> Observations:
        self._preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, prepare, detector)
        except ImageError as error:
            raise Refusal(400, "bad_image", str(error)) from error
        except MemoryError as error:
            raise Refusal(413, "too_large", "the picture does not fit into memory") from error
        finally:
            self._preparing -= 1

    async def _outcome(self, item: Item) -> Answer:
        try:
            return await item.future
        except BackendError as error:
            if "NaN" in str(error):
                self._metrics.nan.labels(self.name).inc()
                raise Refusal(500, "nan", str(error)) from error
            raise Refusal(500, "engine", str(error)) from error
        except MdpsError as error:
            raise Refusal(500, "engine", str(error)) from error
        finally:
            item.drop()

    def _measured(self, answer: Answer, *, prepared: float, waited: float) -> Prediction:
        of_detector = {k: v / 1000 for k, v in answer.result.times.items() if k not in ("preprocess", "total")}
        stages = {"prepare": prepared, "queue": waited, **of_detector}
        self._metrics.batch.labels(self.name).observe(answer.images)
        self._metrics.verdicts.labels(self.name, answer.result.verdict or "none").inc()
        return Prediction(answer.result, stages, answer.images)

    async def reload(self) -> None:
        """Load the bundle again and let new requests go to it; requests under way keep the old one.

        Refusal 400 where it cannot be loaded: then everything stays as it was, and `problem` says why.
        """
        async with self._reloading:
            stamp = stamp_of(self.path)
            try:
                detector = await asyncio.get_running_loop().run_in_executor(None, self._load)
            except MdpsError as error:
                self.problem = f"the bundle changed and cannot be loaded, the one before it goes on: {error}"
                self._metrics.reloads.labels(self.name, "failed").inc()
                raise bad_request(self.problem) from error
            old, self.current = self.current, Loaded(detector, stamp, time.time())
            old.retired, self.problem = True, ""
            self._close_if_done(old)
            self._describe()
            self._metrics.reloads.labels(self.name, "loaded").inc()
            event("reloaded", model=self.name, threshold=self._threshold())

    def close(self) -> None:
        """Judge what is queued, end the thread, free the engine."""
        self._worker.stop()
        self.detector.close()

    def _close_if_done(self, loaded: Loaded) -> None:
        if loaded.retired and not loaded.users:
            loaded.retired = False  # closed once
            # Its close waits for a batch whose requests have given up; the event loop must not.
            asyncio.get_running_loop().run_in_executor(None, loaded.detector.close)

    def _threshold(self) -> float | None:
        calibration = self.detector.calibration
        return calibration.threshold if calibration else None

    def _describe(self) -> None:
        """Tell the metrics, and of a doubt the log, what is loaded."""
        calibration = self.detector.calibration
        fitness = calibration.fitness if calibration else None
        self._metrics.fitness.labels(self.name).set(fitness.auroc if fitness else math.nan)
        if self.doubt:
            event("unfit", level=logging.WARNING, model=self.name, **self.doubt)
        threshold = self._threshold()
        self._metrics.threshold.labels(self.name).set(math.nan if threshold is None else threshold)
        for graph, provider in self.engines.items():
            self._metrics.provider.labels(self.name, self.detector.engine, graph, provider).set(1)

    @property
    def engines(self) -> dict[str, str]:
        """Return the name of the engine that computes each graph."""
        engines = self.detector.provenance["engines"]
        return {str(graph): str(provider) for graph, provider in dict(engines).items()}  # type: ignore[call-overload]


async def watch(models: Collection[Model], every: float | None) -> None:
    """Look at each bundle every so many seconds, for ever, and load again those that changed; None only says so."""
    tried: dict[str, tuple[Stamp | None, float]] = {}
    while True:
        await asyncio.sleep(every or 1.0)
        for model in models:
            stamp = await asyncio.to_thread(stamp_of, model.path)
            if stamp == model.current.stamp or stamp is None:
                continue
            if every is None:
                _say_once(model)
            elif _is_due(tried.get(model.name), stamp):
                await _try_reload(model)
                tried[model.name] = (stamp, asyncio.get_running_loop().time())


def _is_due(last: tuple[Stamp | None, float] | None, stamp: Stamp) -> bool:
    return last is None or last[0] != stamp or asyncio.get_running_loop().time() - last[1] > _RETRY


async def _try_reload(model: Model) -> None:
    try:
        await model.reload()
    except Refusal as refusal:
        event("reload_failed", level=logging.WARNING, model=model.name, error=refusal.sentence)


def _say_once(model: Model) -> None:
    if not model.problem:
        model.problem = f"the bundle changed: POST /v2/repository/models/{model.name}/load to take it up"
        event("reload_needed", level=logging.WARNING, model=model.name, error=model.problem)
