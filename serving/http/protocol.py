"""Endpoints of the Open Inference Protocol v2, with the extensions `binary_tensor_data` and `model_repository`."""

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mdps import __version__
from mdps.serving.http import tensors
from mdps.serving.http.images import observe
from mdps.serving.http.refusals import bad_request
from mdps.serving.http.service import Service, Visit, milliseconds, visit

_HEADER_LENGTH = "Inference-Header-Content-Length"
_EXTENSIONS = ["binary_tensor_data", "model_repository"]


class Protocol:
    """Handlers by the protocol's names."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All paths below /v2."""
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
        """Server metadata."""
        return JSONResponse({"name": "mdps", "version": __version__, "extensions": _EXTENSIONS})

    async def live(self, _: Request) -> Response:
        """200 while the process can answer."""
        alive = all(model.ready for model in self._service.models.values())
        return JSONResponse({"live": alive}, 200 if alive else 503)

    async def ready(self, _: Request) -> Response:
        """200 while every model answers; 503 from the moment the server is told to stop."""
        return JSONResponse({"ready": self._service.ready}, 200 if self._service.ready else 503)

    async def model(self, request: Request) -> Response:
        """Model metadata."""
        model = self._service.model(**request.path_params)
        detector = model.detector
        body: dict[str, Any] = {"name": model.name, "versions": [model.version], "platform": f"mdps_{detector.engine}"}
        return JSONResponse(body | tensors.metadata(detector.calibration is not None))

    async def model_ready(self, request: Request) -> Response:
        """200 while the model answers."""
        is_ready = self._service.model(**request.path_params).ready and not self._service.draining
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

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
            judged = await here.model.judge(
                lambda preprocessing: observe(asked.picture, preprocessing, here.notes), deadline
            )
        judged.stages["prepare"] += parsing
        begun = time.perf_counter()
        name, version = here.model.name, here.model.version
        said = {**milliseconds(judged.stages), "early_exit": judged.result.early_exit}
        content, head = await service.on_thread(lambda: tensors.answer(name, version, asked, judged.result, said))
        times = here.finish(service, judged, time.perf_counter() - begun)
        service.live[name].add(judged.result, times["total"])
        headers = {} if head is None else {_HEADER_LENGTH: str(head)}
        return Response(content, 200, headers, "application/json" if head is None else "application/octet-stream")

    async def index(self, _: Request) -> Response:
        """The models and whether they are ready; the reason holds what went wrong at a reload."""
        models = self._service.models.values()
        rows = [
            {
                "name": model.name,
                "version": model.version,
                "state": "READY" if model.ready else "UNAVAILABLE",
                "reason": model.problem,
            }
            for model in models
        ]
        return JSONResponse(rows)

    async def load(self, request: Request) -> Response:
        """Load a model's bundle again; requests go on meanwhile."""
        await self._service.model(request.path_params["name"]).reload()
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        """Refused: which bundles are served is said at the start."""
        self._service.model(request.path_params["name"])
        raise bad_request("this server does not unload models: start it without the bundle")
