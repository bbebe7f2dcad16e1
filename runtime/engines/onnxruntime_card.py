"""The loop on a card with ONNX Runtime's graphs, whose guided step may be torch's: all read and write the same memory.

Each binding has the addresses the pipeline gave it. The CUDA provider records its first run at them as a CUDA graph of
its own and launches that from then on, so the pipeline records nothing around it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.cards import Card
from mdps.runtime.device import cuda
from mdps.runtime.device.pipeline import DevicePipeline, check_settings, open_loop
from mdps.runtime.device.seam import Buffer, DeviceEngine, Driver, Stream
from mdps.runtime.engines import Engine
from mdps.runtime.engines.interface import GraphFile
from mdps.runtime.engines.onnxruntime import CardOptions, OrtSession
from mdps.runtime.engines.onnxruntime import open as open
from mdps.runtime.engines.onnxruntime import probe as probe
from mdps.runtime.errors import BackendError, UsageError
from mdps.runtime.session import Port
from mdps.runtime.settings import Settings


def open_bundle(engine: Engine, bundle: Bundle, options: LoadOptions, card: Card) -> DevicePipeline | None:
    if not can_stay(bundle.settings):
        return None
    return open_on_card(engine, bundle, options, cuda.open_driver(card.ordinal or 0))


def can_stay(settings: Settings) -> bool:
    """Whether the loop on a card does what these settings ask for; otherwise the host steps and the card computes."""
    try:
        check_settings(settings)
    except UsageError:
        return False
    return True


def open_on_card(engine: Engine, bundle: Bundle, options: LoadOptions, driver: Driver) -> DevicePipeline:
    """Open a bundle on the driver's card, see `open_loop`.

    `engine` is a row of ONNX Runtime's, the one on the processor for a driver whose memory is the host's. Raises
    UsageError for settings that are not for a card, BundleError for a graph that is missing, BackendError.
    """

    def open_one(role: str, stream: Stream) -> DeviceEngine:
        entry = bundle.manifest.graph(role, bundle.path)
        graph = GraphFile(bundle.path / entry.file, role, bundle, driver.card if engine.on_card else None)
        if entry.session == "traced":
            from mdps.runtime.engines import torch

            session = torch.open(engine, graph, options)
            return torch.TracedEngine(session, bundle.manifest.preprocessing.network_size)
        recorded = engine.on_card and not engine.builds
        card = CardOptions.of(graph, stream=stream.handle, recorded=recorded)
        return OrtEngine(OrtSession(graph.file, engine, options.threads, card))

    return open_loop(driver, bundle, options, open_one)


class OrtEngine:
    """A `DeviceEngine`: one graph of ONNX Runtime, on the stream its session was made for."""

    captures = False  # the library frees what a run took when the run ends, which a recording would repeat

    def __init__(self, session: OrtSession) -> None:
        self._session = session
        self.provider = session.provider
        self.inputs: Sequence[Port] = session.input_ports
        self.outputs: Sequence[Port] = session.output_ports
        self.largest: Mapping[str, tuple[int, ...]] = {}
        self._bound: list[BoundOrt] = []
        for port in (*self.inputs, *self.outputs):
            if port.dtype != np.float32:
                raise BackendError(f"{session.name} has {port.name!r} in {port.dtype}, not float32: export it again")

    def bind(self, buffers: Mapping[str, Buffer]) -> "BoundOrt":
        kind, ordinal = ("cuda", self._session.card.ordinal) if self._session.card else ("cpu", 0)
        binding = self._session.binding()
        for ports, bind in ((self.inputs, binding.bind_input), (self.outputs, binding.bind_output)):
            for port in ports:
                buffer = self._fitting(port, buffers)
                bind(port.name, kind, ordinal, np.float32, list(buffer.shape), buffer.address)
        self._bound.append(BoundOrt(self._session, binding, len(self._bound) + 1))
        return self._bound[-1]

    def close(self) -> None:
        for bound in self._bound:
            bound.close()
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
        self._session, self._number = session, number
        self._binding: Any = binding

    def enqueue(self, stream: Stream) -> None:
        """Enqueue on the session's stream, which is the one the pipeline computes on."""
        self._session.run_bound(self._binding, self._number)

    def close(self) -> None:
        """Free the binding, which holds its session; one of an engine that was closed is never run again."""
        self._binding = None
