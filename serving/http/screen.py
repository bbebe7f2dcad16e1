"""The page at `/` and what it asks for: recent results and pictures of a model."""

import base64
import hashlib
import time
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from mdps.runtime.preprocessing import to_unit
from mdps.serving.http.live import Seen
from mdps.serving.http.model import Model
from mdps.serving.http.refusals import Refusal, bad_request
from mdps.serving.http.service import Service
from mdps.serving.overlay import heat_picture, heat_range, own_range, plain_picture, png

_SCRIPTS = ("talk.js", "chart.js", "pictures.js")  # one script in this order: the last one starts it


def page(status: int = 200) -> Response:
    """The page as one document that loads nothing else; it holds no data, so that it can also ask for the token."""
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
    """The name under which a content security policy lets an inline text run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


class Screen:
    """Handlers with their routes."""

    def __init__(self, service: Service) -> None:
        self._service, self._page = service, page()

    def routes(self) -> list[Route]:
        """`/` and all below `/live`."""
        return [
            Route("/", self.index),
            Route("/live", self.models),
            Route("/live/{name}", self.recent),
            Route("/live/{name}/{number:int}/{layer}.png", self.picture),
        ]

    async def index(self, _: Request) -> Response:
        """The page."""
        return self._page

    async def models(self, _: Request) -> Response:
        """Names of the models."""
        return JSONResponse({"models": list(self._service.models)})

    async def recent(self, request: Request) -> Response:
        """State and counts of a model, and its results after the id `?since=`."""
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
        """The image of a result, or the heat over it."""
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
            "threshold": None if calibration is None else calibration.threshold,
            "false_alarm_rate": None if calibration is None else calibration.false_alarm_rate,
            "product": detector.product,
            "engine": detector.engine,
            "engines": sorted(set(model.engines.values())),
            "since": model.since,
            "queue": model.queue_length,
            "queue_limit": service.options.limits.queue,
        }


def _draw(model: Model, seen: Seen, layer: str) -> bytes:
    observation = to_unit(seen.pixels)
    if layer == "image":
        return png(plain_picture(observation))
    drawn_as = heat_range(model.detector.calibration) or own_range(seen.anomaly_map)
    return png(heat_picture(observation, seen.anomaly_map, drawn_as))
