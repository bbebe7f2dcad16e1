"""All routes behind the guard: the Open Inference Protocol v2, `/inspect`, the page for the line, and metrics."""

import asyncio
import base64
import hashlib
import time
from importlib.resources import files
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from mdps import __version__
from mdps.runtime.detector import Result
from mdps.runtime.overlay import Unit, heat_picture, heat_range, npy, own_range, plain_picture, png
from mdps.runtime.preprocessing import to_unit
from mdps.serving.http import tensors
from mdps.serving.http.bodies import file_of_form, observe, open_image
from mdps.serving.http.guard import Guard
from mdps.serving.http.model import Model
from mdps.serving.http.refusals import Refusal, bad_request
from mdps.serving.http.service import Service, Visit, milliseconds, visit
from mdps.serving.http.telemetry import Seen

_HEADER_LENGTH = "Inference-Header-Content-Length"
_EXTENSIONS = ["binary_tensor_data", "model_repository"]
_MAPS, _RECORD = ("none", "png", "npy"), ("yes", "no")  # of the query, the default first
_SCRIPTS = ("talk.js", "chart.js", "pictures.js")  # one script in this order: the last one starts it


def build(service: Service) -> ASGIApp:
    """Return the application for uvicorn, which answers failures as JSON with the key `error`."""

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    parts = (Protocol(service), Inspecting(service), Screen(service))
    routes = [route for part in parts for route in part.routes()]
    # The router alone, without Starlette's own handling of errors, which would answer before the guard can.
    # No redirects either: they would name whatever host the client claimed.
    return Guard(Router([*routes, Route("/metrics", metrics)], redirect_slashes=False), service, page(401))


class Protocol:
    """The Open Inference Protocol v2 with the extensions `binary_tensor_data` and `model_repository`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return all paths below /v2."""
        routes = [
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2/repository/index", self.index, methods=["POST"]),
            Route("/v2/repository/models/{name}/load", self.load, methods=["POST"]),
            Route("/v2/repository/models/{name}/unload", self.unload, methods=["POST"]),
        ]
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            routes += [
                Route(model, self.model),
                Route(f"{model}/ready", self.model_ready),
                Route(f"{model}/infer", self.infer, methods=["POST"]),
            ]
        return routes

    async def server(self, _: Request) -> Response:
        """Answer the server's metadata."""
        return JSONResponse({"name": "mdps", "version": __version__, "extensions": _EXTENSIONS})

    async def live(self, _: Request) -> Response:
        """Answer 200 while the process can answer."""
        alive = all(model.ready for model in self._service.models.values())
        return JSONResponse({"live": alive}, 200 if alive else 503)

    async def ready(self, _: Request) -> Response:
        """Answer 200 while every model answers; 503 from the moment the server is told to stop."""
        doubts = {name: model.detector.doubt for name, model in self._service.models.items() if model.doubt}
        said = {"ready": self._service.ready} | ({"doubts": doubts} if doubts else {})
        return JSONResponse(said, 200 if self._service.ready else 503)

    async def model(self, request: Request) -> Response:
        """Answer a model's metadata."""
        model = self._service.model(**request.path_params)
        detector = model.detector
        body: dict[str, Any] = {"name": model.name, "versions": [model.version], "platform": f"mdps_{detector.engine}"}
        return JSONResponse(body | tensors.metadata(detector.calibration is not None) | model.doubt)

    async def model_ready(self, request: Request) -> Response:
        """Answer 200 while the model answers."""
        model = self._service.model(**request.path_params)
        is_ready = model.ready and not self._service.draining
        return JSONResponse({"ready": is_ready} | model.doubt, 200 if is_ready else 503)

    async def infer(self, request: Request) -> Response:
        """Judge one image."""
        return await visit(self._service, request, self._service.model(**request.path_params), self._infer)

    async def _infer(self, here: Visit, body: bytes) -> Response:
        service, begun = self._service, time.perf_counter()
        known = tensors.output_names(here.model.detector.calibration is not None)
        length, pixels = here.request.headers.get(_HEADER_LENGTH), service.options.limits.pixels
        asked = await service.on_thread(lambda: tensors.parse(body, length, max_pixels=pixels, outputs=known))
        parsing = time.perf_counter() - begun
        deadline = here.deadline if asked.timeout is None else min(here.deadline, here.came + asked.timeout)
        async with asyncio.timeout_at(deadline):
            predicted = await here.model.predict(
                lambda detector: observe(asked.picture, detector, here.notes), deadline
            )
        predicted.stages["prepare"] += parsing
        begun = time.perf_counter()
        name, version, result = here.model.name, here.model.version, predicted.result
        await service.on_thread(lambda: result.regions)  # for the page: of a large map they take a while
        parameters = {**milliseconds(predicted.stages), **_how(result), **here.model.doubt}
        content, head = await service.on_thread(lambda: tensors.answer(name, version, asked, result, parameters))
        times = here.finish(service, predicted, time.perf_counter() - begun)
        service.live[name].add(result, times["total"])
        headers = {} if head is None else {_HEADER_LENGTH: str(head)}
        return Response(content, 200, headers, "application/json" if head is None else "application/octet-stream")

    async def index(self, _: Request) -> Response:
        """List the models and whether they are ready; the reason holds what went wrong at a reload, or a doubt."""
        models = self._service.models.values()
        rows = [
            {
                "name": model.name,
                "version": model.version,
                "state": "READY" if model.ready else "UNAVAILABLE",
                "reason": model.problem or model.detector.doubt,
            }
            for model in models
        ]
        return JSONResponse(rows)

    async def load(self, request: Request) -> Response:
        """Load a model's bundle again; requests go on meanwhile."""
        await self._service.model(request.path_params["name"]).reload()
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        """Refuse: which bundles are served is said at the start."""
        self._service.model(request.path_params["name"])
        raise bad_request("this server does not unload models: start it without the bundle")


class Inspecting:
    """`POST /inspect`: an image file in, score, threshold, verdict, times and, if wanted, the map out."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return the one path; `/inspect/NAME` chooses among several models."""
        return [Route(path, self.inspect, methods=["POST"]) for path in ("/inspect", "/inspect/{name}")]

    async def inspect(self, request: Request) -> Response:
        """Judge the image that is the body, or the one file of a multipart form.

        `?map=png` adds the heat over the image, `?map=npy` the float32 [H, W] map, in base64; `?record=no` keeps the
        result out of the page's counts and scores.
        """
        service = self._service
        model = service.model(request.path_params.get("name") or next(iter(service.models)))
        _choice(request, "map", _MAPS), _choice(request, "record", _RECORD)  # before any work
        return await visit(service, request, model, self._inspect)

    async def _inspect(self, here: Visit, body: bytes) -> Response:
        service, request, model = self._service, here.request, here.model
        pixels = service.options.limits.pixels

        def picture() -> Any:
            is_form = request.headers.get("content-type", "").lower().startswith("multipart/")
            return open_image(file_of_form(request.headers, body) if is_form else body, pixels)

        predicted = await model.predict(lambda detector: observe(picture(), detector, here.notes), here.deadline)
        result, begun, encoding = predicted.result, time.perf_counter(), _choice(request, "map", _MAPS)
        answer: dict[str, Any] = {"model": model.name, "score": result.score, "threshold": result.threshold}
        answer |= {"verdict": result.verdict, **_how(result), **model.doubt}
        regions = await service.on_thread(lambda: result.regions)
        if result.pixel_limit is not None:
            answer["regions"] = [region.to_json() for region in regions]
        shown = None if encoding == "none" else await service.on_thread(lambda: _encoded(model, result, encoding))
        answer["times_ms"] = times = here.finish(service, predicted, time.perf_counter() - begun)
        if _choice(request, "record", _RECORD) == "yes":
            service.live[model.name].add(result, times["total"])
        if here.notes:
            answer["notes"] = here.notes
        if shown is not None:
            answer["map"] = {"encoding": encoding, "base64": shown}
        return JSONResponse(answer)


def _how(result: Result) -> dict[str, Any]:
    """Tell how an image came to its score."""
    told = {"early_exit": result.early_exit, "judged_by": result.judged_by}
    lay = result.alignment.told() if result.alignment else {}
    return told | {name: value for name, value in lay.items() if value is not None}


def _choice(request: Request, name: str, values: tuple[str, ...]) -> str:
    """Return a parameter of the query, the first of `values` where it is absent; Refusal 400 for any other value."""
    value = request.query_params.get(name, values[0])
    if value not in values:
        raise bad_request(f"{name} should be one of {', '.join(values)}")
    return value


def _encoded(model: Model, result: Result, encoding: str) -> str:
    data = npy(result.anomaly_map) if encoding == "npy" else _heat(model, result.observation, result)
    return base64.b64encode(data).decode("ascii")


def _heat(model: Model, observation: Unit, found: Result | Seen) -> bytes:
    drawn_as = heat_range(model.detector.calibration) or own_range(found.anomaly_map)
    return png(heat_picture(observation, found.anomaly_map, drawn_as, found.regions, found.box))


def page(status: int = 200) -> Response:
    """Return the page as one document that loads nothing else; without data, so that it can also ask for the token."""
    folder = files("mdps.serving.http") / "page"
    style, body = ((folder / name).read_text("utf-8") for name in ("page.css", "page.html"))
    script = "\n".join((folder / name).read_text("utf-8") for name in _SCRIPTS)
    html = body.replace("/* page.css */", style).replace("/* scripts */", script)
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return HTMLResponse(html, status, headers)


def _source(text: str) -> str:
    """Return the name under which a content security policy lets an inline text run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


class Screen:
    """The page at `/` and what it asks for: recent results and pictures of a model."""

    def __init__(self, service: Service) -> None:
        self._service, self._page = service, page()

    def routes(self) -> list[Route]:
        """Return `/` and all paths below `/live`."""
        return [
            Route("/", self.index),
            Route("/live", self.models),
            Route("/live/{name}", self.recent),
            Route("/live/{name}/{number:int}/{layer}.png", self.picture),
        ]

    async def index(self, _: Request) -> Response:
        """Answer the page."""
        return self._page

    async def models(self, _: Request) -> Response:
        """Answer the names of the models."""
        return JSONResponse({"models": list(self._service.models)})

    async def recent(self, request: Request) -> Response:
        """Answer the state and counts of a model, and its results after the id `?since=`."""
        model = self._service.model(request.path_params["name"])
        since = request.query_params.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 17):
            raise bad_request("since should be the id of a result")
        live = self._service.live[model.name]
        return JSONResponse(
            {
                "model": self._state(model),
                "counts": dict(live.counts),
                "errors": dict(live.errors),
                "failures": live.failures,
                "results": [entry.to_json() for entry in live.since(int(since))],
                "now": round(time.time(), 3),
            }
        )

    async def picture(self, request: Request) -> Response:
        """Answer the image of a result, or the heat over it."""
        model = self._service.model(request.path_params["name"])
        seen = self._service.live[model.name].seen(request.path_params["number"])
        layer = request.path_params["layer"]
        if seen is None or layer not in ("image", "heat"):
            raise Refusal(404, "not_found", "this picture is not kept any more")
        return Response(await self._service.on_thread(lambda: _draw(model, seen, layer)), media_type="image/png")

    def _state(self, model: Model) -> dict[str, Any]:
        detector, service = model.detector, self._service
        calibration = detector.calibration
        return {
            "name": model.name,
            "state": "stopping" if service.draining else "ready" if model.ready else "failed",
            "problem": model.problem,
            "doubt": detector.doubt,
            "threshold": None if calibration is None else calibration.threshold,
            "false_alarm_rate": None if calibration is None else calibration.false_alarm_rate,
            "product": detector.product,
            "engine": detector.engine,
            "engines": sorted(set(model.engines.values())),
            "since": model.current.since,
            "queue": model.queue_length,
            "queue_limit": service.options.limits.queue,
        }


def _draw(model: Model, seen: Seen, layer: str) -> bytes:
    observation = to_unit(seen.pixels)
    return png(plain_picture(observation)) if layer == "image" else _heat(model, observation, seen)
