"""The loop on a card with ONNX Runtime's graphs, whose guided step may be torch's: all read and write the same memory.

Each binding has the addresses the pipeline gave it. The CUDA provider records its first run at them as a CUDA graph of
its own and launches that from then on, so the pipeline records nothing around it.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from mdps.runtime.device.pipeline import DevicePipeline, check_settings
from mdps.runtime.device.program import Engines
from mdps.runtime.device.seam import Buffer, DeviceEngine, Driver, Stream
from mdps.runtime.errors import BackendError, UsageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.noise import NoiseBank
from mdps.runtime.ort import OnCard, OrtSession
from mdps.runtime.session import Port
from mdps.runtime.settings import Settings
from mdps.runtime.user_cache import cache_folder

CACHE = "onnxruntime-tensorrt"


def can_stay(settings: Settings) -> bool:
    """Whether the loop on a card does what these settings ask for; otherwise the host steps and the card computes."""
    try:
        check_settings(settings)
    except UsageError:
        return False
    return True


def open_on_card(
    path: Path,
    manifest: Manifest,
    settings: Settings,
    driver: Driver,
    *,
    provider: str = "cuda",
    threads: int | None = None,
    max_batch: int = 8,
    compiled: str | None = None,
) -> DevicePipeline:
    """The bundle in `path` on the driver's card, which is closed with the pipeline, or here where this fails.

    `provider` is ONNX Runtime's, or "cpu" for a driver whose memory is the host's; `compiled` as of `TracedSession`.
    Raises UsageError for settings that are not for a card, BundleError for a graph that is missing, BackendError.
    """
    engines: dict[str, DeviceEngine] = {}
    try:
        check_settings(settings)
        with driver.current():
            stream = driver.stream()
            for role in settings.roles:
                card = role_card(manifest, role, driver.card.ordinal, stream=stream.handle, graph=provider == "cuda")
                engines[role] = _open(path, manifest, settings, role, provider, threads, card, compiled)
        noise = NoiseBank.of(settings.sampler, manifest.preprocessing.network_size)
        return DevicePipeline(driver, stream, Engines.of(engines), manifest.schedule, settings, noise, max_batch)
    except BaseException:
        for engine in engines.values():
            engine.close()
        driver.close()
        raise


def role_card(
    manifest: Manifest, role: str, ordinal: int, *, stream: int | None = None, graph: bool = False
) -> OnCard:  # fmt: skip
    """How the session of a graph uses the card: features and score are in float32 whatever the denoiser is in."""
    precision = str(manifest.network.get("precision", "fp32")) if role.endswith("_step") else "fp32"
    return OnCard(ordinal, precision, stream, graph, _cache(manifest, role))


def _cache(manifest: Manifest, role: str) -> Path | None:
    """A folder for one graph with its weights; None for a user without a home."""
    try:
        return cache_folder() / CACHE / manifest.files_sha256[:16] / role
    except OSError:
        return None


def _open(
    path: Path,
    manifest: Manifest,
    settings: Settings,
    role: str,
    provider: str,
    threads: int | None,
    card: OnCard,
    compiled: str | None,
) -> DeviceEngine:
    graph = manifest.graph(role, path)
    if graph.session == "traced":
        from mdps.runtime.traced import TracedEngine, TracedSession

        session = TracedSession(
            path / graph.file, settings.sampler, manifest.prediction, "cpu" if provider == "cpu" else "cuda", threads,
            card.ordinal, compiled,
        )  # fmt: skip
        return TracedEngine(session, manifest.preprocessing.network_size)
    return OrtEngine(OrtSession(path / graph.file, provider, threads, card))


class OrtEngine:
    """A `DeviceEngine`: one graph of ONNX Runtime, on the stream its session was made for."""

    captures = False  # the library frees what a run took when the run ends, which a recording would repeat

    def __init__(self, session: OrtSession) -> None:
        self._session = session
        self.provider = session.provider
        self.inputs: Sequence[Port] = session.input_ports
        self.outputs: Sequence[Port] = session.output_ports
        self.largest: Mapping[str, tuple[int, ...]] = {}
        self._numbers = count(1)
        for port in (*self.inputs, *self.outputs):
            if port.dtype != np.float32:
                raise BackendError(f"{session.name} has {port.name!r} in {port.dtype}, not float32: export it again")

    def bind(self, buffers: Mapping[str, Buffer]) -> "BoundOrt":
        """As `DeviceEngine.bind`."""
        kind, ordinal = ("cuda", self._session.card.ordinal) if self._session.card else ("cpu", 0)
        binding = self._session.binding()
        for ports, bind in ((self.inputs, binding.bind_input), (self.outputs, binding.bind_output)):
            for port in ports:
                buffer = self._fitting(port, buffers)
                bind(port.name, kind, ordinal, np.float32, list(buffer.shape), buffer.address)
        return BoundOrt(self._session, binding, next(self._numbers))

    def close(self) -> None:
        """As `DeviceEngine.close`."""
        self._session.close()

    def _fitting(self, port: Port, buffers: Mapping[str, Buffer]) -> Buffer:
        buffer = buffers.get(port.name)
        shape = None if buffer is None else buffer.shape
        if buffer is None or len(buffer.shape) != len(port.shape) or not all(
            want in (None, have) for want, have in zip(port.shape, buffer.shape, strict=True)
        ):  # fmt: skip
            raise BackendError(f"{self._session.name} takes {port.name!r} as {list(port.shape)}, not {shape}")
        return buffer


class BoundOrt:
    """A `BoundEngine`: an IOBinding, and the number its CUDA graph goes by."""

    def __init__(self, session: OrtSession, binding: Any, number: int) -> None:
        self._session, self._binding, self._number = session, binding, number

    def enqueue(self, stream: Stream) -> None:
        """As `BoundEngine.enqueue`; on the session's stream, which is the one the pipeline computes on."""
        self._session.run_bound(self._binding, self._number)
