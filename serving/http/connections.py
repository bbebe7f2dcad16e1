"""HTTP connections that cannot be held open for nothing: uvicorn's, with bounds on their number and on slow clients."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, cast

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mdps.serving.http.bodies import Incoming
from mdps.serving.http.options import Limits
from mdps.serving.http.refusals import Refusal

_LEAST = 4096  # bytes that a client takes of its answer in `write_seconds`, or it is let go
_HARD = 2  # so many times the bound, connections are dropped without a word


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    refusal = Refusal(503, "connections", "too many connections: try again", retry_after=1, close=True)
    await Incoming(scope, receive).discard()
    await refusal.response()(scope, receive, send)


def bounded_protocol(limits: Limits, refused: Callable[[str], None]) -> type[H11Protocol]:
    """A connection class for uvicorn that keeps to `limits`."""

    class Bounded(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _reader_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                refused("connections")
                self.app = cast(Any, _busy)
                if len(self.connections) > _HARD * limits.connections:
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
            """Called while the parser's error is being handled; answers what that error says."""
            if self.cycle is not None and not self.cycle.response_complete:  # its body went wrong half-way
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.abort()
                return
            error = sys.exc_info()[1]
            status = getattr(error, "error_status_hint", 400)
            refused("bad_http")
            self._say(status, f"this is no HTTP request the server takes: {error}")

        def shutdown(self) -> None:
            try:
                super().shutdown()
            except h11.LocalProtocolError:  # it failed and is closing already
                self.transport.abort()

        def _await_head(self) -> None:
            self._head_timer = self.loop.call_later(limits.head_seconds, self._head_too_slow)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_too_slow(self) -> None:
            refused("slow_client")
            if self.conn.our_state is h11.IDLE and not self.transport.is_closing():
                self._say(408, f"the request's head did not come within {limits.head_seconds:g} s")
            self.transport.abort() if self.transport.get_write_buffer_size() else self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader()

        def _watch_reader(self) -> None:
            if self._reader_timer is None:
                unsent = self.transport.get_write_buffer_size()
                self._reader_timer = self.loop.call_later(limits.write_seconds, self._abort_unread, unsent)

        def _abort_unread(self, unsent: int) -> None:
            """Drop a client that has taken next to nothing of its answers all this time; else look again later."""
            self._reader_timer = None
            left = self.transport.get_write_buffer_size()
            if not left:
                return
            if left > unsent - _LEAST:
                refused("slow_client")
                self.transport.abort()
            else:
                self._watch_reader()

        def _say(self, status: int, sentence: str) -> None:
            body = json.dumps({"error": sentence}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            events = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
            self.transport.close()

    return Bounded
