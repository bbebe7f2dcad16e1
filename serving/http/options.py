"""Options of the server: where to listen, who may ask, and how much it takes on."""

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from mdps.runtime.bundle import LoadOptions
from mdps.runtime.errors import require
from mdps.runtime.option import Option


@dataclass(frozen=True)
class Limits:
    """Bounds on what one client, and all together, can cost; seconds, bytes and counts.

    `queue` counts the requests of one model that are accepted and not yet answered; `deadline` runs from the
    request's head to its answer and covers its body; `head_seconds` and `write_seconds` end connections that are slow
    to send a head or to take an answer.
    """

    body_bytes: Annotated[
        int, Option("Largest body of a request, in MiB.", low=0, above=True, unit=2**20, flag="--max-body-mib")
    ] = 16 * 2**20
    pixels: Annotated[
        int, Option("Largest image, in millions of pixels.", low=0, above=True, unit=1e6, flag="--max-megapixels")
    ] = 50_000_000
    head_bytes: int = 16 * 2**10
    headers: int = 64
    connections: Annotated[int, Option("Connections held at once, at most.", low=1, flag="--max-connections")] = 128
    queue: Annotated[int, Option("Requests accepted, a model.", low=1)] = 32
    deadline: Annotated[
        float,
        Option(
            "Longest time from a request to its answer; a client may ask for less.",
            low=1,
            unit=1e-3,
            flag="--deadline-ms",
        ),
    ] = 10.0
    head_seconds: float = 5.0
    idle_seconds: float = 30.0
    write_seconds: float = 10.0

    @property
    def all_bodies_bytes(self) -> int:
        """Bodies that may be held at once, of all requests together: as many of the largest as have a place."""
        return self.queue * self.body_bytes

    def __post_init__(self) -> None:
        require(self.deadline > 0, f"the deadline {self.deadline} s should be positive")
        require(self.queue >= 1, f"the queue {self.queue} should hold at least one request")


@dataclass(frozen=True)
class ServerOptions:
    """All of `mdps serve`. `token` None answers everybody; `open_health` answers health checks without it."""

    host: Annotated[str, Option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.", low=0, high=65535)] = 8080
    token: str | None = None
    open_health: Annotated[bool, Option("Answer /v2/health/* without the token.")] = False
    tls_cert: Annotated[Path | None, Option("Certificate chain (PEM); needs --tls-key.")] = None
    tls_key: Annotated[Path | None, Option("Its private key (PEM).")] = None
    batch: Annotated[int, Option("Images judged at once, at most.", low=1)] = 4
    batch_wait: Annotated[
        float,
        Option(
            "How long a batch waits for requests that are being read.",
            low=0,
            high=100,
            unit=1e-3,
            flag="--batch-wait-ms",
        ),
    ] = 0.002
    watch_seconds: float | None = 1.0
    loading: LoadOptions = field(default_factory=LoadOptions)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        require(self.token != "", "the token is empty: give one of at least 16 characters, or none at all")
        require(
            self.token is None or re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?", self.token) is not None,
            "the token should be of printable ASCII characters, for a header carries it",
        )
        require((self.tls_cert is None) == (self.tls_key is None), "--tls-cert and --tls-key belong together")
        require(self.batch >= 1, f"a batch of {self.batch} should be at least 1")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a name or address is the machine's own: `localhost`, 127.0.0.0/8 or ::1."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
