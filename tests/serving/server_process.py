"""`mdps serve` as a process of its own, for tests and measurements."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mdps.runtime.errors import MdpsError

_WHOLE = 10_000  # events
_PATIENCE = 120.0  # seconds for a server to be ready, or to stop


def processor_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class ServerProcess:
    """A running server: where it listens, what it logged so far (of requests, after the first ones, only their ids).

    Events for which `keep` says False are not kept in `events`: a long run has millions.
    """

    process: "subprocess.Popen[bytes]"
    events: list[dict[str, Any]] = field(default_factory=list)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=2000))
    keep: Callable[[dict[str, Any]], bool] = lambda event: True

    @property
    def url(self) -> str:
        """Such as http://127.0.0.1:41234."""
        return str(self.wait_for("ready")["url"])

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(urlsplit(self.url).port or 0)

    def named(self, name: str) -> list[dict[str, Any]]:
        """All events of a name."""
        return [found for found in self.events if found["event"] == name]

    def wait_for(self, name: str, count: int = 1) -> dict[str, Any]:
        """The `count`-th event of a name; MdpsError with the log where it does not come."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            if len(found := self.named(name)) >= count:
                return found[count - 1]
            if self.process.poll() is not None and not self.reader.is_alive():
                break
            time.sleep(0.01)
        raise MdpsError(f"the server did not say {name!r}; it said:\n" + "\n".join(list(self.lines)[-20:]))

    def memory(self) -> int:
        """Resident bytes (Linux)."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def processor_seconds(self) -> float:
        """Processor time of all its threads so far (Linux)."""
        return processor_seconds(self.process.pid)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        code = self.process.wait(_PATIENCE)
        self.reader.join(_PATIENCE)
        return code

    def read(self) -> None:
        """Collect the log until it ends."""
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self.lines.append(line)
            if line.startswith("{"):
                event = json.loads(line)
                if not self.keep(event):
                    continue
                is_short = event["event"] == "request" and len(self.events) > _WHOLE
                self.events.append(
                    {"event": "request", "id": event["id"], "level": event["level"]} if is_short else event
                )

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()


@contextmanager
def serving(
    bundles: Sequence[Path | str], *options: str, environment: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server on a free port of this machine, ready; killed when the block ends if it still runs.

    Raises MdpsError with what it said where it does not start.
    """
    command = [sys.executable, "-m", "mdps.cli", "serve", *map(str, bundles), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **(environment or {})})
    server = ServerProcess(process)
    try:
        server.wait_for("ready")
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        server.reader.join(_PATIENCE)
        assert process.stderr is not None
        process.stderr.close()
