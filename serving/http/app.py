"""All routes behind the guard, as one ASGI application."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from mdps.serving.http.guard import Guard
from mdps.serving.http.inspection import Inspecting
from mdps.serving.http.metrics import CONTENT_TYPE_LATEST
from mdps.serving.http.protocol import Protocol
from mdps.serving.http.screen import Screen, page
from mdps.serving.http.service import Service


def build(service: Service) -> ASGIApp:
    """The application for uvicorn; what fails in it is said as JSON with the key `error`."""

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    parts = (Protocol(service), Inspecting(service), Screen(service))
    routes = [route for part in parts for route in part.routes()]
    # The router alone, without Starlette's own handling of errors, which would answer before the guard can.
    # No redirects either: they would name whatever host the client claimed.
    return Guard(Router([*routes, Route("/metrics", metrics)], redirect_slashes=False), service, page(401))
