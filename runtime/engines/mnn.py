"""MNN, on the processor: steps whose 3 x 3 convolutions take fewer operations (Winograd's algorithm)."""

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.bundle import LoadOptions
from mdps.runtime.engines import Engine
from mdps.runtime.engines.interface import Check, GraphFile, tried
from mdps.runtime.errors import BackendError
from mdps.runtime.machine import available_cpus
from mdps.runtime.session import Arrays, BoundRun, CopyingRun, Port, check_feeds, check_outputs

WEIGHTS = ".weight"
"""Added to a graph's name: the file beside it that holds its weights. MNN looks for it under this name."""
_RELEASE = 1  # MNN's Session_Release: no callbacks between the operations
_QUIET = threading.Lock()


def open(engine: Engine, graph: GraphFile, options: LoadOptions) -> "MnnSession":
    return MnnSession(graph.file, options.threads)


def probe(engine: Engine) -> Check:
    """Try an expression: MNN reads no ONNX file."""

    def double(x: NDArray[Any]) -> Any:
        with capture_output():
            import MNN.expr

            term = MNN.expr.const(x.tolist(), [len(x)])
            return (term + term).read()

    return tried(engine, double)


class MnnSession:
    """One `.mnn` file, as `mdps.export.mnn` writes it, on MNN's CPU backend, in float32.

    The graph takes one image: what has four dimensions is a batch, whose rows are run one after the other and give the
    same to the bit in any. `threads` defaults to the processors this process may use. Raises BackendError where the
    library is missing or the file is damaged. Runs from several threads follow one another.
    """

    def __init__(self, path: Path | str, threads: int | None = None) -> None:
        self._path = Path(path)
        self.threads = threads or available_cpus()
        self._library = load_library()
        self._lock = threading.Lock()
        with capture_output() as said:
            self._interpreter, self._session = _open(self._library, self._path, self.threads, said)
            self._tensors: dict[str, Any] = self._interpreter.getSessionInputAll(self._session)
            self._results: dict[str, Any] = self._interpreter.getSessionOutputAll(self._session)
        self._ports = [_port(name, tensor.getShape()) for name, tensor in self._tensors.items()]
        self.inputs = tuple(self._tensors)
        self.outputs = tuple(self._results)
        self.provider = f"MNN {self._library.version()} on CPU"

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        check_feeds(self._ports, feeds, str(self._path))
        names = check_outputs(self.outputs, outputs, str(self._path))
        rows = {len(array) for array in feeds.values() if array.ndim}
        if len(rows) > 1:
            raise BackendError(f"{self._path} was given batches of {' and '.join(map(str, sorted(rows)))} at once")
        with self._lock:
            if self._session is None:
                raise BackendError(f"{self._path} was closed: open it again")
            found: list[Arrays] = []
            for row in range(rows.pop() if rows else 1):  # each fills all: a run leaves its own values in the inputs
                self._fill({name: array[row : row + 1] if array.ndim else array for name, array in feeds.items()})
                found.append(self._compute(names))
        return {name: np.concatenate([one[name] for one in found]) for name in names}

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> BoundRun:
        """Bind; the engine keeps its own memory, which every run fills."""
        check_feeds([port for port in self._ports if port.name in feeds], feeds, str(self._path))
        return CopyingRun(self, feeds)

    def close(self) -> None:
        with self._lock:
            self._tensors, self._results = {}, {}
            self._session = self._interpreter = None

    def _fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, array in arrays.items():
            tensor = self._tensors[name]
            tensor.copyFrom(self._host(tensor, np.ascontiguousarray(array)))

    def _compute(self, names: Sequence[str]) -> Arrays:
        if code := self._interpreter.runSession(self._session):
            raise BackendError(f"{self._path} failed on {self.provider} with the code {code}")
        return {name: self._read(self._results[name]) for name in names}

    def _read(self, tensor: Any) -> NDArray[Any]:
        host = self._host(tensor, np.empty(tensor.getShape(), np.float32))
        tensor.copyToHostTensor(host)
        return np.array(host.getNumpyData(), dtype=np.float32).reshape(tensor.getShape())

    def _host(self, tensor: Any, array: NDArray[Any]) -> Any:
        """A tensor of MNN's with the array's values, in the array's layout."""
        return self._library.Tensor(
            tensor.getShape(), self._library.Halide_Type_Float, array, self._library.Tensor_DimensionType_Caffe
        )


def load_library() -> Any:
    """The module MNN; BackendError where it is not installed or does not load."""
    try:
        with capture_output():
            import MNN
    except ImportError as error:
        raise BackendError(f'MNN cannot be imported ({error}): pip install "mdps[mnn]"') from error
    return MNN


def _open(library: Any, path: Path, threads: int, said: "Said") -> tuple[Any, Any]:
    for file in (path, path.with_name(path.name + WEIGHTS)):
        if not file.is_file():  # MNN would read a graph without its weights, and crash on it
            raise BackendError(f"{path} cannot be loaded by MNN: there is no file {file}")
    try:
        interpreter = library.Interpreter(str(path))
        interpreter.setSessionMode(_RELEASE)
        session = interpreter.createSession({"backend": "CPU", "numThread": threads, "precision": "high"})
    except Exception as error:  # the bindings raise no type of their own
        raise BackendError(f"{path} cannot be loaded by MNN: {said() or error}") from error
    return interpreter, session


def _port(name: str, shape: Sequence[int]) -> Port:
    batched: tuple[int | None, ...] = (None, *shape[1:]) if len(shape) > 1 else tuple(shape)
    return Port(name, np.dtype(np.float32), batched)


class Said:
    """The last line that the library printed so far."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __call__(self) -> str:
        _flush()
        self._file.seek(0)
        lines = [line.strip() for line in self._file.read().decode("utf-8", "replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")


@contextlib.contextmanager
def capture_output() -> Iterator[Said]:
    """Keeps what the library prints off stdout, which is for results: it writes there by itself when it loads."""
    with _QUIET, tempfile.TemporaryFile() as file:
        _flush()
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield Said(file)
        finally:
            _flush()
            os.dup2(kept, 1)
            os.close(kept)


def _flush() -> None:
    """Flush what Python and C hold back for stdout, so that it goes where it was meant to go."""
    if sys.stdout is not None:
        sys.stdout.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("ucrtbase" if os.name == "nt" else None).fflush(None)
