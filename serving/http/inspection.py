"""`POST /inspect`: an image file in, score, threshold, verdict, times and, if wanted, the map out."""

import base64
import io
import time
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mdps.runtime.detector import Result
from mdps.serving.http.bodies import file_of_form
from mdps.serving.http.images import observe, open_image
from mdps.serving.http.model import Model
from mdps.serving.http.refusals import bad_request
from mdps.serving.http.service import Service, Visit, visit
from mdps.serving.overlay import heat_picture, heat_range, own_range, png

_MAPS = ("none", "png", "npy")


class Inspecting:
    """The handler with its route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The one path; `/inspect/NAME` chooses among several models."""
        return [
            Route("/inspect", self.inspect, methods=["POST"]),
            Route("/inspect/{name}", self.inspect, methods=["POST"]),
        ]

    async def inspect(self, request: Request) -> Response:
        """Judge the image that is the body, or the one file of a multipart form.

        `?map=png` adds the heat over the image, `?map=npy` the float32 [H, W] map, in base64; `?record=no` keeps the
        result out of the page's counts and scores.
        """
        service = self._service
        model = service.model(request.path_params.get("name") or next(iter(service.models)))
        self._map(request), self._is_recorded(request)  # before any work
        return await visit(service, request, model, self._inspect)

    async def _inspect(self, here: Visit, body: bytes) -> Response:
        service, request = self._service, here.request
        pixels = service.options.limits.pixels

        def picture() -> Any:
            is_form = request.headers.get("content-type", "").lower().startswith("multipart/")
            return open_image(file_of_form(request.headers, body) if is_form else body, pixels)

        judged = await here.model.judge(
            lambda preprocessing: observe(picture(), preprocessing, here.notes), here.deadline
        )
        begun, kind = time.perf_counter(), self._map(request)
        shown = None if kind == "none" else await service.on_thread(lambda: _encoded(here.model, judged.result, kind))
        times = here.finish(service, judged, time.perf_counter() - begun)
        if self._is_recorded(request):
            service.live[here.model.name].add(judged.result, times["total"])
        result = judged.result
        answer: dict[str, Any] = {"model": here.model.name, "score": result.score, "threshold": result.threshold}
        answer |= {"verdict": result.verdict, "early_exit": result.early_exit, "times_ms": times}
        if here.notes:
            answer["notes"] = here.notes
        if shown is not None:
            answer["map"] = {"encoding": kind, "base64": shown}
        return JSONResponse(answer)

    def _map(self, request: Request) -> str:
        kind = request.query_params.get("map", "none")
        if kind not in _MAPS:
            raise bad_request(f"map should be one of {', '.join(_MAPS)}")
        return kind

    def _is_recorded(self, request: Request) -> bool:
        record = request.query_params.get("record", "yes")
        if record not in ("yes", "no"):
            raise bad_request("record should be yes or no")
        return record == "yes"


def _encoded(model: Model, result: Result, kind: str) -> str:
    return base64.b64encode(_png(model, result) if kind == "png" else _npy(result)).decode("ascii")


def _png(model: Model, result: Result) -> bytes:
    drawn_as = heat_range(model.detector.calibration) or own_range(result.anomaly_map)
    return png(heat_picture(result.observation, result.anomaly_map, drawn_as))


def _npy(result: Result) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, result.anomaly_map.astype(np.float32), allow_pickle=False)
    return buffer.getvalue()
