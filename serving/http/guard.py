"""The door every request comes through: who may ask, how errors are said, what is logged and counted."""

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mdps.serving.http.bodies import Incoming
from mdps.serving.http.logs import event
from mdps.serving.http.options import is_loopback
from mdps.serving.http.refusals import Refusal
from mdps.serving.http.service import NOTES, Service

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# Other pages may not even show a picture of this one as an image of theirs.
_ALWAYS = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "same-origin"}
_HEALTH = ("/v2/health/live", "/v2/health/ready")
_ROUTING = {404: "there is nothing at this path", 405: "this path takes another method"}
_QUIET = {"live", "ready", "model_ready", "metrics", "recent", "picture"}  # asked every second: logged on failure only


class Guard:
    """ASGI middleware around all routes. `sign_in` is what a browser gets that asks for the page without the token."""

    def __init__(self, app: ASGIApp, service: Service, sign_in: Response) -> None:
        self._app, self._service, self._sign_in = app, service, sign_in
        token = service.options.token
        self._digest = None if token is None else _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16]
        started, scope[NOTES] = time.perf_counter(), {}
        scope["app"] = self  # what the router needs to see to raise HTTPException and not answer by itself
        answered = _Answered(send, {"x-request-id": name, **_ALWAYS}, self._service)
        await self._answer(scope, headers, Incoming(scope, receive), answered)
        self._report(scope, answered.status, name, time.perf_counter() - started)

    async def _answer(self, scope: Scope, headers: Headers, incoming: Incoming, answered: "_Answered") -> None:
        """Whatever happens behind the door, as one response."""
        try:
            self._check(scope, headers)
            await self._app(scope, incoming, answered)
        except _SignIn:
            scope[NOTES]["kind"] = "unauthorized"
            await self._sign_in(scope, incoming, answered)
        except Refusal as refusal:
            scope[NOTES].update(kind=refusal.kind, error=refusal.sentence)
            if refusal.kind != "slow_client":
                await incoming.discard()
            await refusal.response()(scope, incoming, answered)
        except HTTPException as error:
            scope[NOTES]["kind"] = "not_found"
            await incoming.discard()
            response = Refusal(error.status_code, "not_found", _said(error)).response()
            response.headers.update(error.headers or {})  # which methods there are
            await response(scope, incoming, answered)
        except ClientDisconnect:
            scope[NOTES]["kind"] = "client_left"
        except Exception as error:
            await self._fail(error, scope, incoming, answered)

    def _check(self, scope: Scope, headers: Headers) -> None:
        limits = self._service.options.limits
        # The parser bounds only a head that comes in pieces.
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        size += len(scope["raw_path"]) + len(scope["query_string"])
        if len(scope["headers"]) > limits.headers or size > limits.head_bytes:
            raise Refusal(431, "bad_request", "the request's head is too large", close=True)
        if scope["http_version"] not in ("1.0", "1.1"):
            raise Refusal(400, "bad_request", "this server speaks HTTP/1.1", close=True)
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy in front might believe the other one, and take a part of this body for the next request.
            raise Refusal(400, "bad_request", "a body has a length or comes in chunks, not both", close=True)
        self._check_token(scope, headers)
        self._check_browser(scope, headers)

    def _check_token(self, scope: Scope, headers: Headers) -> None:
        if self._digest is None or (self._service.options.open_health and scope["path"] in _HEALTH):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Digests are compared, so that neither the token's length nor its letters show in the time it takes.
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(given.strip().encode()), self._digest):
            return
        if scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            raise _SignIn
        raise Refusal(401, "unauthorized", "this server wants its token: send Authorization: Bearer TOKEN")

    def _check_browser(self, scope: Scope, headers: Headers) -> None:
        """Keep other web pages, open in a browser that reaches this server, from sending to it or reading of it."""
        host = headers.get("host")
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in ("GET", "HEAD") and _netloc(origin) != host:
            raise Refusal(403, "forbidden", "another web page may not send to this server")
        options = self._service.options
        if host is not None and options.is_local and options.token is None and not _is_here(host):
            raise Refusal(
                421, "forbidden", "without a token this server answers to localhost only: start it with --token-file"
            )

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, answered: "_Answered") -> None:
        scope[NOTES].update(kind="internal", error=f"{type(error).__name__}: {error}")
        event("internal_error", level=logging.ERROR, exc_info=error, path=scope["path"][:200])
        if answered.status is None:
            refusal = Refusal(500, "internal", "the server failed at this request; its log says why")
            await refusal.response()(scope, receive, answered)

    def _report(self, scope: Scope, status: int | None, name: str, seconds: float) -> None:
        notes: dict[str, Any] = scope[NOTES]
        route = getattr(scope.get("endpoint"), "__name__", "none")
        self._service.metrics.requests.labels(route, str(status or 0)).inc()
        if "kind" in notes:
            self._service.metrics.errors.labels(notes["kind"]).inc()
            live = self._service.live.get(scope.get("path_params", {}).get("name", ""))
            if live is not None:
                live.errors[notes["kind"]] += 1
        if route not in _QUIET or (status or 0) >= 400:
            where = {"method": scope["method"], "path": scope["path"][:200], "client": (scope["client"] or ["?"])[0]}
            event("request", id=name, status=status, ms=round(seconds * 1000, 2), **where, **notes)


class _SignIn(Exception):  # noqa: N818 - an answer, not a fault
    """The page was asked for without the token."""


class _Answered:
    """`send` that remembers the status, and adds headers to whatever is answered."""

    def __init__(self, send: Send, headers: dict[str, str], service: Service) -> None:
        self._send, self._headers, self._service = send, headers, service
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=_raw(message))
            for name, value in self._headers.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
            if self._service.draining:  # clients that keep connections open should look for another server
                headers["connection"] = "close"
        await self._send(message)


def _raw(message: Message) -> MutableMapping[str, Any]:
    message.setdefault("headers", [])
    return message


def _said(error: HTTPException) -> str:
    return _ROUTING.get(error.status_code, str(error.detail))


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_here(host: str) -> bool:
    """Whether a Host header names this machine itself, or an address: names can be made to point anywhere."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or bool(re.fullmatch(r"[0-9.]+|[0-9a-f:]+:[0-9a-f:.]*", name))
