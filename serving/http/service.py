"""Shared by all endpoints: the models, and the one way a request with a picture goes from its head to its answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mdps.serving.http.bodies import Bodies, Share, read_body
from mdps.serving.http.model import Model, Prediction
from mdps.serving.http.options import ServerOptions
from mdps.serving.http.refusals import Refusal, bad_request, too_late
from mdps.serving.http.telemetry import Live, Metrics

T = TypeVar("T")
DEADLINE_HEADER = "x-deadline-ms"
NOTES = "mdps.notes"  # key of the ASGI scope under which handlers leave what the log should say


@dataclass
class Service:
    """The running server's state. `draining` means that it was told to stop and answers what still comes."""

    options: ServerOptions
    metrics: Metrics
    pool: Executor
    models: dict[str, Model] = field(default_factory=dict)
    live: dict[str, Live] = field(default_factory=dict)
    draining: bool = False

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.options.limits.all_bodies_bytes)

    @property
    def ready(self) -> bool:
        """Whether every model answers, and will go on doing so."""
        return not self.draining and all(model.ready for model in self.models.values())

    def model(self, name: str, version: str | None = None) -> Model:
        """A model by name; Refusal 404 where there is none, or not in this version."""
        model = self.models.get(name)
        if model is None:
            raise Refusal(
                404, "not_found", f"there is no model {name[:100]!r}: this server has {', '.join(self.models)}"
            )
        if version not in (None, model.version):
            raise Refusal(404, "not_found", f"{name} has the version {model.version} only")
        return model

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Run what would hold up the event loop on the pool."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)


@dataclass
class Visit:
    """One request for one model. `started` is of `time.perf_counter`, `came` and `deadline` of the loop's clock.

    `notes` are sentences about a picture that was judged and is odd.
    """

    request: Request
    model: Model
    started: float
    came: float
    deadline: float
    read: float = 0.0
    notes: list[str] = field(default_factory=list)

    def finish(self, service: Service, predicted: Prediction, answer_seconds: float) -> dict[str, float]:
        """Report a judged request to the metrics and the log; its times in ms, as clients are told them."""
        total = time.perf_counter() - self.started
        stages = {"read": self.read, **predicted.stages, "answer": answer_seconds, "total": total}
        for name, seconds in stages.items():
            service.metrics.stage.labels(self.model.name, name).observe(seconds)
        times = milliseconds(stages)
        result = predicted.result
        self.request.scope[NOTES].update(
            model=self.model.name, score=result.score, verdict=result.verdict, images=predicted.images, times=times
        )
        if self.notes:
            self.request.scope[NOTES]["notes"] = self.notes
        return times


def milliseconds(stages: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage as ms with three decimals."""
    return {name: round(seconds * 1000, 3) for name, seconds in stages.items()}


async def visit(
    service: Service, request: Request, model: Model, work: Callable[[Visit, bytes], Coroutine[Any, Any, Response]]
) -> Response:
    """Admit a request, read its body, do `work` on it; all before its deadline and while its client is there.

    A request has its place in the queue from the moment its body is here: slow clients must not fill it.

    Raises Refusal 503 at once where the queue is full, 408 for a slow body, 504 at the deadline.
    """
    seconds = _deadline(request, service.options.limits.deadline)
    now = asyncio.get_running_loop().time()
    here = Visit(request, model, time.perf_counter(), now, now + seconds)
    model.check_room(here.deadline)
    with service.bodies.share() as share:
        body = await _body(service, here, share)
        with model.admitted(here.deadline):
            return await _before_deadline(here, work(here, body))


def _deadline(request: Request, longest: float) -> float:
    """Seconds from the header, if it asks for fewer than the server allows."""
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return longest
    try:
        seconds = float(text) / 1000
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise bad_request(f"{DEADLINE_HEADER} should be a positive number of milliseconds")
    return min(seconds, longest)


async def _body(service: Service, here: Visit, share: Share) -> bytes:
    try:
        async with asyncio.timeout_at(here.deadline):
            body = await read_body(here.request, service.options.limits.body_bytes, share)
    except TimeoutError:
        raise Refusal(408, "slow_client", "the body did not come before the deadline", close=True) from None
    here.read = time.perf_counter() - here.started
    return body


async def _before_deadline(here: Visit, work: Coroutine[Any, Any, Response]) -> Response:
    try:
        async with asyncio.timeout_at(here.deadline):
            return await _while_there(here.request, work)
    except TimeoutError:
        waited = (time.perf_counter() - here.started) * 1000
        raise too_late(f"there was no result within the deadline ({waited:.0f} ms): the server is busy") from None


async def _while_there(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """`work`, given up when its client has left; ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
