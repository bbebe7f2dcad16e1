"""Log lines as JSON objects on stderr, written by a thread, so that no slow reader of them holds up an answer."""

import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

LOGGER = logging.getLogger("mdps.serve")
_WAITING = 10_000  # lines; more are dropped and counted
_LAST_LINES = 2.0  # seconds that a reader has for them at the end


def event(name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event; `fields` become keys of its object, those that are None are left out."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, name, extra={"fields": {key: value for key, value in fields.items() if value is not None}})


class JsonLines(logging.Formatter):
    """A record as one line: time (UTC), level, event, then its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without an end."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Dropping(logging.handlers.QueueHandler):
    """Never waits: where the reader is too slow, lines are lost and counted."""

    def __init__(self, lines: "queue.Queue[logging.LogRecord]", on_drop: Callable[[], None]) -> None:
        super().__init__(lines)
        self._on_drop = on_drop

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record itself: the writing thread formats it."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue the record, or drop it."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._on_drop()


class _Descriptor:
    """Writes past Python's buffers, whose locks would keep a process from ending while its reader stands still.

    So would the lock of a `logging.Handler`, which `logging` takes at exit.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lines = descriptor, JsonLines()

    def handle(self, record: logging.LogRecord) -> None:
        """Write the line; a reader that has left is no reason to stop serving."""
        with suppress(OSError):
            os.write(self._descriptor, (self._lines.format(record) + "\n").encode())


class _Listener(logging.handlers.QueueListener):
    """Its end waits its turn, where the queue is full."""

    def enqueue_sentinel(self) -> None:
        """Called by `stop`."""
        cast("queue.Queue[logging.LogRecord | None]", self.queue).put(None)


@contextmanager
def logging_to_stderr(on_drop: Callable[[], None]) -> Iterator[None]:
    """Log this server's events, and what uvicorn warns of, as JSON lines until the block ends."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING)
    listener = _Listener(lines, cast(logging.Handler, _Descriptor(sys.stderr.fileno())))
    handler = _Dropping(lines, on_drop)
    loggers = {LOGGER: logging.INFO} | {logging.getLogger(name): logging.ERROR for name in ("uvicorn.error", "asyncio")}
    for logger, level in loggers.items():
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        last = threading.Thread(target=listener.stop, daemon=True)
        last.start()
        last.join(timeout=_LAST_LINES)
