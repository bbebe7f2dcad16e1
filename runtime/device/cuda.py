"""The real drivers: cuda-bindings, which is a wheel and needs no compiler, and pycuda.

pycuda has no graphs: with it, recording goes through cuda-bindings on the same stream, where that is installed too.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.cards import Card
from mdps.runtime.device.seam import Driver, Event, Graph, Stream
from mdps.runtime.errors import BackendError, first_line, require

LIBRARIES = ("cuda-bindings", "pycuda")
CHOICE = "MDPS_CUDA"
_OUT_OF_MEMORY = 2
_NON_BLOCKING = 1  # the flag of a stream that does not wait for the default stream
_PORTABLE = 1  # page-locked for every context of the process
_MIB = 2**20
_NO_DRIVER = "install NVIDIA's driver, and start a container with --gpus all"


def open_driver(device: int = 0, library: str | None = None) -> Driver:
    """Card number `device`, as CUDA counts those that this process sees, through one of LIBRARIES.

    Without `library` the one that the environment's MDPS_CUDA names, or cuda-bindings, or pycuda where that is missing.
    Raises UsageError for another name, BackendError where library, driver or card is missing.
    """
    library = library or os.environ.get(CHOICE)
    require(
        library in (None, *LIBRARIES), f"there is no CUDA library {library!r}: choose one of {', '.join(LIBRARIES)}"
    )
    if library == "pycuda" or (library is None and not _has_bindings() and _has_pycuda()):
        return PyCudaDriver(device)
    return CudaDriver(device)


class CudaDriver:
    """A `Driver` on cuda-bindings."""

    captures = True

    def __init__(self, device: int = 0) -> None:
        self._cuda: Any = _bindings()
        self._closed = False
        self._memory: list[int] = []
        self._host: list[int] = []
        self._streams: list[_Stream] = []
        self._events: list[Any] = []
        self._recorder = _Recorder(self._cuda)
        _initialise(self._cuda)
        (count,) = self._call("cuDeviceGetCount")
        _check_index(device, count)
        (self._device,) = self._call("cuDeviceGet", device)
        self.card = self._describe(device)
        (self._context,) = self._call("cuDevicePrimaryCtxRetain", self._device)

    def _describe(self, device: int) -> Card:
        attribute = self._cuda.CUdevice_attribute
        (name,) = self._call("cuDeviceGetName", 128, self._device)
        parts = [
            self._call("cuDeviceGetAttribute", getattr(attribute, key), self._device)[0]
            for key in (
                "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
                "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
            )
        ]
        shown = bytes(name).split(b"\0")[0].decode()
        return Card(ordinal=device, name=shown, compute_capability=".".join(map(str, parts)))

    @contextmanager
    def current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            with suppress(BackendError):  # a card that is lost says so in what was asked of it
                _call(self._cuda, "cuCtxPopCurrent")

    def free_memory(self) -> int:
        return int(self._call("cuMemGetInfo")[0])

    def allocate(self, nbytes: int) -> int:
        try:
            (address,) = self._call("cuMemAlloc", nbytes)
        except _CudaError as error:
            raise _full(self, nbytes, error) if error.code == _OUT_OF_MEMORY else error from None
        self._memory.append(int(address))
        return int(address)

    def pinned(self, nbytes: int) -> NDArray[Any]:
        (address,) = self._call("cuMemHostAlloc", nbytes, _PORTABLE)
        self._host.append(int(address))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(address)))

    def stream(self) -> Stream:
        (stream,) = self._call("cuStreamCreate", _NON_BLOCKING)
        self._streams.append(_Stream(int(stream)))
        return self._streams[-1]

    def event(self) -> Event:
        (event,) = self._call("cuEventCreate", 0)
        self._events.append(event)
        return event

    def upload(self, to: int, array: NDArray[Any], stream: Stream) -> None:
        self._call("cuMemcpyHtoDAsync", to, array.ctypes.data, array.nbytes, stream.handle)

    def download(self, into: NDArray[Any], source: int, stream: Stream) -> None:
        self._call("cuMemcpyDtoHAsync", into.ctypes.data, source, into.nbytes, stream.handle)

    def copy(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        self._call("cuMemcpyDtoDAsync", to, source, nbytes, stream.handle)

    def record(self, event: Event, stream: Stream) -> None:
        self._call("cuEventRecord", event, stream.handle)

    def wait(self, stream: Stream, event: Event) -> None:
        self._call("cuStreamWaitEvent", stream.handle, event, 0)

    def finish(self, event: Event) -> None:
        self._call("cuEventSynchronize", event)

    def milliseconds(self, start: Event, end: Event) -> float:
        return float(self._call("cuEventElapsedTime", start, end)[0])

    def begin_capture(self, stream: Stream) -> None:
        self._check_open()
        self._recorder.begin(stream)

    def end_capture(self, stream: Stream) -> Graph:
        return self._recorder.end(stream)

    def launch(self, graph: Graph, stream: Stream) -> None:
        self._call("cuGraphLaunch", graph, stream.handle)

    def synchronise(self, stream: Stream) -> None:
        self._call("cuStreamSynchronize", stream.handle)

    def close(self) -> None:
        if self._closed:
            return
        with suppress(BackendError), self.current():
            self._recorder.close()
            _release(self._cuda, "cuEventDestroy", self._events)
            _release(self._cuda, "cuStreamDestroy", [stream.handle for stream in self._streams])
            _release(self._cuda, "cuMemFree", self._memory)
            _release(self._cuda, "cuMemFreeHost", self._host)
        self._closed = True
        _release(self._cuda, "cuDevicePrimaryCtxRelease", [self._device])

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        self._check_open()
        return _call(self._cuda, name, *arguments)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError(_CLOSED)


class PyCudaDriver:
    """A `Driver` on pycuda, with the recorder of cuda-bindings where that is installed."""

    def __init__(self, device: int = 0) -> None:
        self._drv: Any = _pycuda()
        self._closed = False
        self._memory: list[Any] = []
        self._host: list[Any] = []
        self._recorder = _Recorder(_bindings()) if _has_bindings() else None
        with self._refusing("initialising CUDA"):
            self._drv.init()
            count = self._drv.Device.count()
        _check_index(device, count)
        with self._refusing("opening the card"):
            card = self._drv.Device(device)
            capability = ".".join(map(str, card.compute_capability()))
            self.card = Card(ordinal=device, name=card.name(), compute_capability=capability)
            # pycuda's `detach` leaves the context current in the thread that calls it, so it is kept for the process.
            if device not in _PYCUDA_CONTEXTS:
                _PYCUDA_CONTEXTS[device] = card.retain_primary_context()
            self._context = _PYCUDA_CONTEXTS[device]

    @property
    def captures(self) -> bool:
        return self._recorder is not None

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._refusing("pushing the context"):
            self._context.push()
        try:
            yield
        finally:
            with suppress(self._drv.Error):  # a card that is lost says so in what was asked of it
                self._context.pop()

    def free_memory(self) -> int:
        return int(self._do("asking for free memory", self._drv.mem_get_info)[0])

    def allocate(self, nbytes: int) -> int:
        try:
            with self._refusing("allocating memory"):
                memory = self._drv.mem_alloc(nbytes)
        except _CudaError as error:
            raise _full(self, nbytes, error) if error.code == _OUT_OF_MEMORY else error from None
        self._memory.append(memory)
        return int(memory)

    def pinned(self, nbytes: int) -> NDArray[Any]:
        with self._refusing("page-locking memory"):
            array: NDArray[Any] = self._drv.pagelocked_empty(nbytes, np.uint8)
        self._host.append(array.base)
        return array

    def stream(self) -> Stream:
        return self._do("making a stream", self._drv.Stream, _NON_BLOCKING)  # type: ignore[no-any-return]

    def event(self) -> Event:
        return self._do("making an event", self._drv.Event)

    def upload(self, to: int, array: NDArray[Any], stream: Stream) -> None:
        self._do("an upload", self._drv.memcpy_htod_async, to, array, stream)

    def download(self, into: NDArray[Any], source: int, stream: Stream) -> None:
        self._do("a download", self._drv.memcpy_dtoh_async, into, source, stream)

    def copy(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        self._do("a copy", self._drv.memcpy_dtod_async, to, source, nbytes, stream)

    def record(self, event: Event, stream: Stream) -> None:
        self._do("recording an event", event.record, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._do("waiting for an event", stream.wait_for_event, event)  # type: ignore[attr-defined]

    def finish(self, event: Event) -> None:
        self._do("waiting for the card", event.synchronize)

    def milliseconds(self, start: Event, end: Event) -> float:
        return float(self._do("taking the time", start.time_till, end))

    def begin_capture(self, stream: Stream) -> None:
        self._graphs().begin(stream)

    def end_capture(self, stream: Stream) -> Graph:
        return self._graphs().end(stream)

    def launch(self, graph: Graph, stream: Stream) -> None:
        self._graphs().launch(graph, stream)

    def synchronise(self, stream: Stream) -> None:
        self._do("waiting for the card", stream.synchronize)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close; pycuda frees streams and events when nobody holds them any more, the context never."""
        if self._closed:
            return
        with suppress(BackendError), self.current():
            if self._recorder is not None:
                self._recorder.close()
            for memory in (*self._memory, *self._host):
                with suppress(self._drv.Error):
                    memory.free()
        self._closed = True

    def _graphs(self) -> "_Recorder":
        if self._closed:
            raise BackendError(_CLOSED)
        if self._recorder is None:
            raise BackendError("pycuda cannot record graphs: pip install cuda-bindings beside it")
        return self._recorder

    def _do(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        with self._refusing(what):
            return call(*arguments)

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        if self._closed:
            raise BackendError(_CLOSED)
        try:
            yield
        except self._drv.Error as error:
            code = _OUT_OF_MEMORY if isinstance(error, self._drv.MemoryError) else 0
            raise _CudaError(f"the card refused {what}: {_line(error)}", code) from error


class _Recorder:
    """Graphs by cuda-bindings, on a stream of whichever library."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._graphs: list[Any] = []

    def begin(self, stream: Stream) -> None:
        # Only this thread's work is recorded, so that other threads may allocate meanwhile.
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _call(self._cuda, "cuStreamBeginCapture", stream.handle, mode)

    def end(self, stream: Stream) -> Graph:
        (recorded,) = _call(self._cuda, "cuStreamEndCapture", stream.handle)
        try:
            (graph,) = _call(self._cuda, "cuGraphInstantiate", recorded, 0)
        finally:
            _release(self._cuda, "cuGraphDestroy", [recorded])
        self._graphs.append(graph)
        return graph

    def launch(self, graph: Graph, stream: Stream) -> None:
        _call(self._cuda, "cuGraphLaunch", graph, stream.handle)

    def close(self) -> None:
        _release(self._cuda, "cuGraphExecDestroy", self._graphs)
        self._graphs = []


class _Stream:
    """A stream by its handle."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


class _CudaError(BackendError):
    """A call that CUDA refused, with its code."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


_PYCUDA_CONTEXTS: dict[int, Any] = {}
_CLOSED = "this card was closed: load the bundle again"


def _call(cuda: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Return the result of a function of the driver without its status; _CudaError where that is not success."""
    status, *values = getattr(cuda, name)(*arguments)
    if int(status):
        _, text = cuda.cuGetErrorString(status)
        reason = bytes(text).decode() if text else str(status)
        raise _CudaError(
            f"the card refused {name}: {reason} (CUDA error {int(status)}){_remedy(int(status))}", int(status)
        )
    return tuple(values)


def _remedy(code: int) -> str:
    # 35: driver too old, 100: no device, 999 and 802: system not ready, 7xx: a kernel failed and the context is lost.
    if code == 35:
        return ": update NVIDIA's driver"
    if code == 100:
        return f": {_NO_DRIVER}, and look at CUDA_VISIBLE_DEVICES"
    if 700 <= code < 800:
        return ": the card's context is lost, start the process again"
    return ""


def _release(cuda: Any, name: str, handles: list[Any]) -> None:
    """Free all handles, ignoring errors."""
    for handle in handles:
        with suppress(BackendError):
            _call(cuda, name, handle)


def _full(driver: Driver, nbytes: int, error: Exception) -> BackendError:
    free = "it does not say how much it has"
    with suppress(BackendError):
        free = f"{driver.free_memory() / _MIB:.0f} MiB are free"
    sentence = BackendError(
        f"{driver.card} has no room for {nbytes / _MIB:.1f} MiB more, {free}: load with a smaller max_batch, or end "
        "what else uses the card"
    )
    sentence.__cause__ = error
    return sentence


def _check_index(device: int, count: int) -> None:
    if not 0 <= device < count:
        cards = "no card" if not count else f"{count} card{'s' * (count > 1)}"
        raise BackendError(f"there is no card {device}, this process sees {cards}: look at CUDA_VISIBLE_DEVICES")


def _initialise(cuda: Any) -> None:
    try:
        _call(cuda, "cuInit", 0)
    except BackendError:
        raise
    except (
        Exception
    ) as error:  # the bindings load the driver's library now and raise what they like where it is missing
        raise BackendError(f"CUDA cannot be used here ({_line(error)}): {_NO_DRIVER}") from error


def _has_bindings() -> bool:
    with suppress(BackendError):
        return bool(_bindings())
    return False


def _has_pycuda() -> bool:
    import importlib.util

    return importlib.util.find_spec("pycuda") is not None


def _bindings() -> ModuleType:
    try:
        from cuda.bindings import driver
    except (ImportError, OSError) as error:
        raise BackendError(
            f'cuda-bindings cannot be imported ({_line(error)}): pip install "mdps[tensorrt]"'
        ) from error
    return driver  # type: ignore[no-any-return]


def _pycuda() -> Any:
    try:
        import pycuda.driver
    except ImportError as error:
        if "libcuda" in str(error):
            raise BackendError(f"pycuda finds no driver ({_line(error)}): {_NO_DRIVER}") from error
        raise BackendError(
            f"pycuda cannot be imported ({_line(error)}): pip install pycuda, which needs a compiler and CUDA's "
            "toolkit, or pip install cuda-bindings, which needs neither"
        ) from error
    return pycuda.driver


def _line(error: Exception) -> str:
    return first_line(str(error), type(error).__name__)
