"""Guards the server: bounds on connections and slow clients, who may ask, how errors are answered and logged."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mdps.serving.http.bodies import Incoming
from mdps.serving.http.options import Limits, is_loopback
from mdps.serving.http.refusals import Refusal
from mdps.serving.http.service import NOTES, Service
from mdps.serving.http.telemetry import event

_LEAST = 4096  # bytes that a client takes of its answer in `write_seconds`, or it is let go
_HARD = 2  # so many times the bound, connections are dropped without a word
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# Other pages may not even show a picture of this one as an image of theirs.
_ALWAYS = {"x-content-type-options": "nosniff", "cross-origin-resource-policy": "same-origin"}
_HEALTH = ("/v2/health/live", "/v2/health/ready")
_ROUTING = {404: "there is nothing at this path", 405: "this path takes another method"}
_QUIET = {"live", "ready", "model_ready", "metrics", "recent", "picture"}  # asked every second: logged on failure only


def bounded_protocol(limits: Limits, refused: Callable[[str], None]) -> type[H11Protocol]:
    """Return a connection class for uvicorn that keeps to `limits`; `refused` is told the kind of each refusal."""

    class Bounded(_Connection):
        _limits, _refused = limits, staticmethod(refused)

    return Bounded


class _Connection(H11Protocol):
    """uvicorn's connection, which nobody can hold open for nothing."""

    _limits: Limits
    _refused: Callable[[str], None]
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refused("connections")
            self.app = cast(Any, _busy)
            if len(self.connections) > _HARD * self._limits.connections:
                transport.abort()
                return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:  # the first bytes of another request on this connection
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        """Answer the error that the parser raised, which is being handled."""
        if self.cycle is not None and not self.cycle.response_complete:  # its body went wrong half-way
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self._refused("bad_http")
        self._refuse(status, f"this is no HTTP request the server takes: {error}")

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # it failed and is closing already
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self._head_too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        self._refused("slow_client")
        if self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(408, f"the request's head did not come within {self._limits.head_seconds:g} s")
        self.transport.abort() if self.transport.get_write_buffer_size() else self.transport.close()

    def _watch_reader(self) -> None:
        if self._reader_timer is None:
            unsent = self.transport.get_write_buffer_size()
            self._reader_timer = self.loop.call_later(self._limits.write_seconds, self._abort_unread, unsent)

    def _abort_unread(self, unsent: int) -> None:
        """Drop a client that has taken next to nothing of its answers all this time; else look again later."""
        self._reader_timer = None
        left = self.transport.get_write_buffer_size()
        if not left:
            return
        if left > unsent - _LEAST:
            self._refused("slow_client")
            self.transport.abort()
        else:
            self._watch_reader()

    def _refuse(self, status: int, sentence: str) -> None:
        body = json.dumps({"error": sentence}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    refusal = Refusal(503, "connections", "too many connections: try again", retry_after=1, close=True)
    await Incoming(scope, receive).discard()
    await refusal.response()(scope, receive, send)


class Guard:
    """ASGI middleware around all routes. `sign_in` is what a browser gets that asks for the page without the token."""

    def __init__(self, app: ASGIApp, service: Service, sign_in: Response) -> None:
        self._app, self._service, self._sign_in = app, service, sign_in
        token = service.options.token
        self._digest = None if token is None else _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
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
        """Answer with one response, whatever happens behind the guard."""
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
            sentence = _ROUTING.get(error.status_code, str(error.detail))
            response = Refusal(error.status_code, "not_found", sentence).response()
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
            message.setdefault("headers", [])
            headers = MutableHeaders(scope=message)
            for name, value in self._headers.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
            if self._service.draining:  # clients that keep connections open should look for another server
                headers["connection"] = "close"
        await self._send(message)


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
