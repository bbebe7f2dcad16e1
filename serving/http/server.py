"""Runs the server: opens the bundles, listens, watches for changes, and stops without losing a request."""

import asyncio
import errno
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from mdps.runtime import Detector, load
from mdps.runtime.errors import UsageError
from mdps.serving.http.endpoints import build
from mdps.serving.http.guard import bounded_protocol
from mdps.serving.http.model import Loaded, Model, stamp_of, watch
from mdps.serving.http.options import ServerOptions
from mdps.serving.http.service import Service
from mdps.serving.http.telemetry import Live, Metrics, event, logging_to_stderr

_DRAIN = 0.5  # seconds in which clients learn that their connections close, before they do
_DECODERS = 2


@dataclass(frozen=True)
class Served:
    """A bundle and the name it is served under."""

    name: str
    path: Path


def run(bundles: Sequence[Served], options: ServerOptions) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, which this process ignores afterwards: it should end.

    Raises UsageError before anything is served: bundles, port, certificates.
    """
    metrics = Metrics()
    listening = _bind(options.host, options.port)
    with listening, logging_to_stderr(metrics.dropped_logs.inc):
        opened = [_open(bundle, options) for bundle in bundles]
        asyncio.run(_serve(bundles, opened, options, metrics, listening))


def _bind(host: str, port: int) -> socket.socket:
    """A socket with the address, not listening yet: whoever connects before the models are ready is refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host} is no address of this machine: {error.strerror}") from error
    try:
        if hasattr(signal, "SIGKILL"):  # not on Windows, where it means something else
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        hint = "is in use: choose another with --port" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise UsageError(f"port {port} of {host} {hint}") from error
    return bound


def _loader(bundle: Served, options: ServerOptions) -> Callable[[], Detector]:
    samples_at_once = max(8, options.batch * (options.loading.samples or 1))
    return lambda: load(bundle.path, options.loading, max_batch=samples_at_once)


def _open(bundle: Served, options: ServerOptions) -> Loaded:
    stamp, started = stamp_of(bundle.path), time.perf_counter()
    detector = _loader(bundle, options)()
    event("loaded", model=bundle.name, bundle=str(bundle.path), seconds=round(time.perf_counter() - started, 3))
    return Loaded(detector, stamp, time.time())


async def _serve(
    bundles: Sequence[Served],
    opened: Sequence[Loaded],
    options: ServerOptions,
    metrics: Metrics,
    listening: socket.socket,
) -> None:
    with ThreadPoolExecutor(_DECODERS, "mdps-decode") as pool:
        service = Service(options, metrics, pool)
        for bundle, loaded in zip(bundles, opened, strict=True):
            service.live[bundle.name] = Live()
            service.models[bundle.name] = Model(
                bundle.name, bundle.path, loaded,
                load=_loader(bundle, options), options=options, metrics=metrics, pool=pool,
            )  # fmt: skip
        server = _Server(_config(service), service)
        watching = asyncio.create_task(watch(service.models.values(), options.watch_seconds))
        await server.serve(sockets=[listening])
        watching.cancel()
        for model in service.models.values():
            await asyncio.to_thread(model.close)
    event("stopped", requests=server.server_state.total_requests)


def _config(service: Service) -> uvicorn.Config:
    options, limits = service.options, service.options.limits
    config = uvicorn.Config(
        build(service),
        http=bounded_protocol(limits, lambda kind: service.metrics.errors.labels(kind).inc()),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(limits.idle_seconds),
        h11_max_incomplete_event_size=limits.head_bytes,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        ssl_keyfile_password="none is known",  # or an encrypted key would be asked for on the terminal
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-cert {options.tls_cert} or --tls-key {options.tls_key}: {error}") from error
    return config


class _Server(uvicorn.Server):
    """uvicorn's, which ends with exit code 0 when told to stop, and lets clients know before it closes connections."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where. UsageError where another program began to listen there meanwhile."""
        try:
            await super().startup(sockets)
        except OSError as error:
            options = self._service.options
            raise UsageError(f"port {options.port} of {options.host}: {error.strerror}") from error
        for bound in sockets or []:
            host, port = bound.getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            shown = f"[{host}]" if ":" in host else host
            event("ready", url=f"{scheme}://{shown}:{port}", models=list(self._service.models))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer for a moment more with `Connection: close`, then accept nothing and finish what was accepted."""
        self._service.draining = True
        event("stopping", waiting=sum(model.queue_length for model in self._service.models.values()))
        if not self.force_exit:
            await asyncio.sleep(_DRAIN)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal again at the end: a stop that was asked for is no failure."""
        caught = [signal.SIGINT, signal.SIGTERM]
        hang_up = getattr(signal, "SIGHUP", None)  # not on Windows
        if hang_up is not None and signal.getsignal(hang_up) == signal.SIG_DFL:  # nohup ignores it
            caught.append(hang_up)  # the terminal was closed: a stop like any other
        for number in caught:
            signal.signal(number, self.handle_exit)
        yield
        for number in caught:  # who asks again while the last lines are written should not turn it into one
            signal.signal(number, signal.SIG_IGN)
