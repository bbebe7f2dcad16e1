"""The narrow seams of the path on a card: `Driver` is the card, `DeviceEngine` one graph of a bundle loaded on it.

Everything on a stream is asynchronous: it is done in the order it was asked for, some time after the call returned.
Addresses are plain numbers, sizes bytes. A test puts numpy arrays and a list of work in the place of both.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from numpy.typing import NDArray

from mdps.runtime.cards import Card
from mdps.runtime.session import Port

Event = Any
"""A point of a stream, which another stream or the host waits for; whatever a `Driver` makes of it."""
Graph = Any
"""Recorded work that is launched with one call; whatever a `Driver` makes of it."""


@dataclass(frozen=True)
class Buffer:
    """Memory on the card that holds one C-contiguous float32 array; no inputs or outputs of a bundle are anything else.

    An address is a multiple of 256, as engines want it, where `Driver.allocate` gave it.
    """

    address: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return 4 * prod(self.shape)


class Stream(Protocol):
    """An order of work on the card."""

    @property
    def handle(self) -> int:
        """The `CUstream` or `cudaStream_t` (they are the same) as a number, which every engine library takes."""


class Driver(Protocol):
    """One card, through one process. Every method but `current` and `close` is called inside `current()`.

    Raises BackendError, one sentence with a remedy, where the card refuses; after `close` always. What `allocate` and
    `pinned` gave is freed by `close`, as are streams, events and graphs: they live as long as the driver.
    """

    @property
    def card(self) -> Card:
        """Which card it is."""

    @property
    def captures(self) -> bool:
        """Whether `begin_capture` can be had; without it the same work is enqueued again for every image."""

    def current(self) -> AbstractContextManager[None]:
        """Makes the card's primary context that of the calling thread, whichever it is, and undoes it at the end.

        It nests, and several threads may be inside at once.
        """

    def free_memory(self) -> int:
        """Return the free device memory in bytes."""

    def allocate(self, nbytes: int) -> int:
        """The address of so much memory of the card, a multiple of 256; what is in it is not known."""

    def pinned(self, nbytes: int) -> NDArray[Any]:
        """So much page-locked memory of the host, as uint8: what an upload or download needs to be asynchronous."""

    def stream(self) -> Stream:
        """A new stream, which does not wait for the default stream."""

    def event(self) -> Event:
        """A new event, that keeps the time. Before it is recorded it counts as having happened."""

    def upload(self, to: int, array: NDArray[Any], stream: Stream) -> None:
        """Copy a C-contiguous array to an address; its contents must stay until the stream is that far."""

    def download(self, into: NDArray[Any], source: int, stream: Stream) -> None:
        """Copy from an address over a C-contiguous array, which holds it once the stream is that far."""

    def copy(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy within the card; the two places do not overlap."""

    def record(self, event: Event, stream: Stream) -> None:
        """The event happens when the stream is that far. Recording it again replaces what it stood for."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let the stream's further work begin after the event, as it was recorded last."""

    def finish(self, event: Event) -> None:
        """The calling thread waits for the event, and meanwhile holds no lock of Python's."""

    def milliseconds(self, start: Event, end: Event) -> float:
        """Between two events, both of which have happened, on the card's own clock."""

    def begin_capture(self, stream: Stream) -> None:
        """From now on what this thread asks of the stream is recorded and not done."""

    def end_capture(self, stream: Stream) -> Graph:
        """Return what was recorded since, ready to be launched."""

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Do on the stream what was recorded, at the addresses it was recorded with."""

    def synchronise(self, stream: Stream) -> None:
        """The calling thread waits until all that the stream was asked for is done."""

    def close(self) -> None:
        """Free all that was given, and let the context go. May be called twice."""


class BoundEngine(Protocol):
    """An engine whose inputs and outputs lie at places that never change; their contents do."""

    def enqueue(self, stream: Stream) -> None:
        """Ask the stream for one run. BackendError where the library refuses."""


class DeviceEngine(Protocol):
    """One graph of a bundle, loaded on a card by some engine library."""

    @property
    def inputs(self) -> Sequence[Port]:
        """Names and shapes, None for an axis of any length, in the graph's order; float32 all."""

    @property
    def outputs(self) -> Sequence[Port]:
        """The same of what it gives."""

    @property
    def provider(self) -> str:
        """The provider that really computes, as the library itself reports it."""

    @property
    def largest(self) -> Mapping[str, tuple[int, ...]]:
        """The largest shape of each input it was built for; empty where it takes any."""

    @property
    def captures(self) -> bool:
        """Whether `BoundEngine.enqueue` may be recorded between `begin_capture` and `end_capture`.

        It may where it only asks the stream for work: it waits for nothing and allocates nothing after its first run.
        """

    def bind(self, buffers: Mapping[str, Buffer]) -> BoundEngine:
        """Fix where every input and output lies, and with it all shapes; BackendError where they do not fit.

        Called inside `Driver.current`, once a batch size: what a run needs beside the buffers is made here or in the
        first run, never later. Several bindings may exist; they run one after another on the one stream.
        """

    def close(self) -> None:
        """Free its bindings and then the engine, inside `Driver.current`. May be called twice.

        What holds a binding elsewhere, as the loop does, keeps nothing of the library's alive after this: the driver is
        closed next, and the memory under it goes.
        """
