"""ONNX Runtime: sessions on the processor and, through its providers, on a card."""

import contextlib
import ctypes
import importlib
import io
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.bundle import LoadOptions
from mdps.runtime.engines import DEFAULT, ENGINES, Engine
from mdps.runtime.engines.interface import TINY_MODEL, Check, GraphFile, tried
from mdps.runtime.errors import BackendError, BackendWarning, first_line
from mdps.runtime.machine import available_cpus
from mdps.runtime.session import Arrays, BoundRun, Port, check_feeds, check_into, check_outputs
from mdps.runtime.user_cache import cache_folder

CPU = "CPUExecutionProvider"
CACHE = "onnxruntime-tensorrt"
# What an engine that computes on a card leaves to the CPU all the same: the lengths of axes, a few integers.
_OF_SHAPES = {"Shape", "Size", "Gather", "Slice", "Squeeze", "Unsqueeze", "Concat", "Cast", "Constant"}
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


@dataclass(frozen=True)
class CardOptions:
    """How a session uses a card. `ordinal` is CUDA's number of it.

    `precision` is the graph's own: TensorRT may choose a half-precision kernel only where the graph is in it.
    `stream` is a CUDA stream of the caller's to compute on. A run that is `recorded` is replayed, for which all inputs
    and outputs have to stay where they are. `cache` is a folder for the engines TensorRT builds, for this graph with
    these weights alone: their names say nothing of the weights.
    """

    ordinal: int = 0
    precision: str = "fp32"
    stream: int | None = None
    recorded: bool = False
    cache: Path | None = None

    @classmethod
    def of(cls, graph: GraphFile, *, stream: int | None = None, recorded: bool = False) -> Self:
        """Those of a bundle's graph."""
        ordinal = (graph.card.ordinal if graph.card else None) or 0
        return cls(ordinal, graph.precision, stream, recorded, _cache(graph))

    def options(self, engine: Engine) -> dict[str, str]:
        """The provider's options; everything that a release could choose otherwise is said."""
        common = {"device_id": str(self.ordinal)}
        if self.stream is not None:
            common["user_compute_stream"] = str(self.stream)
        if engine.builds:
            return common | self._tensorrt()
        return common | {
            # The search for a convolution algorithm has cost fourfold when left to a default that changed.
            "cudnn_conv_algo_search": "EXHAUSTIVE",
            "use_tf32": "0",  # ten bits of mantissa are no float32, and parity was proved in float32
            "arena_extend_strategy": "kSameAsRequested",  # the other one doubles, and takes what nobody uses
            "do_copy_in_default_stream": "1",
            "enable_cuda_graph": str(int(self.recorded)),
        }

    def _tensorrt(self) -> dict[str, str]:
        chosen = {
            "trt_fp16_enable": str(int(self.precision == "fp16")),
            "trt_cuda_graph_enable": str(int(self.recorded)),
        }
        if self.precision == "bf16":
            chosen["trt_bf16_enable"] = "1"
        if self.cache is not None:
            folder = str(self.cache)
            chosen |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": folder}
            chosen |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": folder}
        return chosen


def open(engine: Engine, graph: GraphFile, options: LoadOptions) -> "OrtSession":
    return OrtSession(graph.file, engine, options.threads, CardOptions.of(graph) if engine.on_card else None)


def probe(engine: Engine) -> Check | None:
    """Try a session; one that silently took another provider does not count."""
    try:
        library = _library()
    except BackendError as error:
        return None if engine.on_card else Check(engine.name, False, str(error))
    if engine.provider not in library.get_available_providers():
        return None
    library.set_default_logger_severity(4)  # what it would print is in our sentences

    def double(x: NDArray[Any]) -> Any:
        return _session(library, TINY_MODEL, engine.provider).run(None, {"x": x})[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tried(engine, double)


class OrtSession:
    """One ONNX file on the provider of `engine`, never silently on another.

    `threads` defaults to the processors this process may use; `card` is for engines on a card. Raises BackendError
    where the library is missing, the file is damaged, or the provider is not active for all that computes.
    """

    def __init__(
        self, path: Path | str, engine: Engine, threads: int | None = None, card: CardOptions | None = None
    ) -> None:
        self._path = Path(path)
        self.threads = threads or available_cpus()
        self.card = (card or CardOptions()) if engine.on_card else None
        self.provider_options = self.card.options(engine) if self.card else {}
        if self.card and engine.builds:
            _prepare_tensorrt(self._path, self.card)
        self._session: Any = _open(self._path, engine.provider, self.threads, self.provider_options)
        self._ports = [_port(node, self._path) for node in self._session.get_inputs()]
        self.inputs = tuple(port.name for port in self._ports)
        self.outputs = tuple(node.name for node in self._session.get_outputs())
        self.name = str(self._path)
        self.provider: str = self._session.get_providers()[0]

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        session = self._open_session()
        check_feeds(self._ports, feeds, str(self._path))
        names = check_outputs(self.outputs, outputs, str(self._path))
        with self._failing():
            values = session.run(names, {port.name: np.asarray(feeds[port.name]) for port in self._ports})
        return dict(zip(names, values, strict=True))

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> BoundRun:
        return _Binding(self, feeds)

    @property
    def input_ports(self) -> list[Port]:
        return list(self._ports)

    @property
    def output_ports(self) -> list[Port]:
        return [_port(node, self._path) for node in self._open_session().get_outputs()]

    def binding(self) -> Any:
        """A new IOBinding, for places that the caller fixes."""
        return self._open_session().io_binding()

    def run_bound(self, binding: Any, number: int) -> None:
        """Run with a binding; its recording, where runs are recorded, goes by `number`. BackendError.

        On a stream of the caller's this asks for the work, and the caller waits for it.
        """
        options = None
        if self.card is not None and self.card.stream is not None:
            options = _library().RunOptions()
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            if self.card.recorded:
                options.add_run_config_entry("gpu_graph_id", str(number))
        with self._failing():
            self._open_session().run_with_iobinding(binding, options)

    def close(self) -> None:
        self._session = None

    def _open_session(self) -> Any:
        if self._session is None:
            raise BackendError(f"{self._path} was closed: open it again")
        return self._session

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # ONNX Runtime's exceptions share no base but Exception
            raise BackendError(f"{self._path} failed on {self.provider}: {_reason(error)}") from error


class _Binding:
    """Runs of a session through one IOBinding; an input is bound when it is given, not at every run.

    On a card, what is given once goes there once; what is given for a run goes there at that run.
    """

    def __init__(self, session: OrtSession, feeds: Mapping[str, NDArray[Any]]) -> None:
        self._owner, self._name = session, str(session._path)
        self._open_ports = [port for port in session._ports if port.name not in feeds]
        check_feeds([port for port in session._ports if port.name in feeds], feeds, self._name)
        self._binding = session._open_session().io_binding()
        self._on_card: list[Any] = []
        if session.card is None:
            self._bind(feeds)
        else:
            with session._failing():
                self._upload(feeds, session.card.ordinal)

    def run(self, feeds: Mapping[str, NDArray[Any]], into: Mapping[str, NDArray[Any]]) -> None:
        session = self._owner._open_session()
        check_feeds(self._open_ports, feeds, self._name)
        check_into(into, self._owner.outputs, self._name)
        with self._owner._failing():
            self._bind(feeds)
            self._binding.clear_binding_outputs()
            for name, array in into.items():
                self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            session.run_with_iobinding(self._binding)

    def _upload(self, feeds: Mapping[str, NDArray[Any]], ordinal: int) -> None:
        make = _library().OrtValue.ortvalue_from_numpy
        for name, array in feeds.items():
            value = make(np.asarray(array, order="C"), "cuda", ordinal)
            self._on_card.append(value)  # the binding holds its address only
            self._binding.bind_ortvalue_input(name, value)

    def _bind(self, feeds: Mapping[str, NDArray[Any]]) -> None:
        for name, array in feeds.items():
            self._binding.bind_cpu_input(name, np.asarray(array, order="C"))  # which it keeps alive


def _library() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            f'onnxruntime cannot be imported ({_reason(error)}): pip install "mdps[cpu]", or "mdps[gpu]" for a GPU'
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise BackendError(
            "onnxruntime is damaged, as when onnxruntime and onnxruntime-gpu overwrote each other: "
            'uninstall both, then pip install "mdps[cpu]" or "mdps[gpu]"'
        )
    return onnxruntime


def _open(path: Path, wanted: str, threads: int, provider_options: dict[str, str]) -> Any:
    library = _library()
    if not path.is_file():
        raise BackendError(f"{path} is no file: check the path")
    if wanted not in library.get_available_providers():
        raise BackendError(
            f'this onnxruntime has no {wanted}: pip uninstall onnxruntime, then pip install "mdps[gpu]", or ask for '
            f"the engine {DEFAULT}"
        )
    try:
        options = session_options(library, threads, wanted)
        session = _session(library, str(path), wanted, sess_options=options, provider_options=[provider_options])
    except Exception as error:  # ONNX Runtime's exceptions share no base but Exception
        raise BackendError(f"{path} cannot be loaded on {wanted}: {_reason(error)}") from error
    _refuse_strays(library, session, wanted, path)
    return session


def _session(library: Any, model: str | bytes, wanted: str, **how: Any) -> Any:
    """Return a session on this provider; an exception of the library's, or BackendError where it took another.

    Forbidden to fall back at its construction: it would do so with lines on stdout, and without the reason.
    """
    if wanted != CPU:
        _load_cuda(library)
    try:
        session = library.InferenceSession(model, providers=[wanted], enable_fallback=0, **how)
    except RuntimeError as error:  # of a provider that is missing a library, it tells where in its source it noticed
        if missing := _missing(library, wanted):
            raise BackendError(missing) from error
        raise
    # A provider that does not load is left out without raising, so only the session knows what runs.
    if (active := session.get_providers()[0]) != wanted:
        raise BackendError(f"it would run on {active}: {_missing(library, wanted) or 'the library gives no reason'}")
    return session


def _load_cuda(library: Any) -> None:
    """Load CUDA, cuDNN and TensorRT from NVIDIA's wheels, where no loader looks; what is missing, `_missing` says."""
    with contextlib.redirect_stdout(io.StringIO()):
        if hasattr(library, "preload_dlls"):
            library.preload_dlls()
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module("tensorrt")


def _missing(library: Any, provider: str) -> str:
    """Return which shared library a provider on a card lacks, by the loader's word, and what to do; or nothing."""
    row = next(one for one in ENGINES if one.provider == provider)
    kind = provider.removesuffix("ExecutionProvider").lower()
    folder = Path(getattr(library, "__file__", "")).parent / "capi"
    for file in folder.glob(f"*onnxruntime_providers_{kind}.*"):
        try:
            ctypes.CDLL(str(file))
        except OSError as error:
            driver = "install NVIDIA's driver" if "libcuda.so" in str(error) else f'pip install "mdps[{row.extra}]"'
            return f"{_reason(error)}: {driver}, or ask for the engine {DEFAULT}"
    return ""


def _refuse_strays(library: Any, session: Any, wanted: str, path: Path) -> None:
    """BackendError where the library gave to the CPU what `wanted` was asked to compute; lengths of axes may stay."""
    if wanted == CPU or not _tells_who_computes(library):
        return
    strays = [
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != wanted
        for node in part.get_nodes()
        if node.op_type not in _OF_SHAPES
    ]
    if strays:
        raise BackendError(
            f"{wanted} was asked for but would leave {len(strays)} nodes of {path} to the CPU "
            f"({', '.join(_first_of_each(strays))}), where each run would wait for them: use a release of "
            f"onnxruntime-gpu that has these, or ask for the engine {DEFAULT}"
        )


def _first_of_each(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))[:5]


def _tells_who_computes(library: Any) -> bool:
    return hasattr(library.InferenceSession, "get_provider_graph_assignment_info")


def _prepare_tensorrt(path: Path, card: CardOptions) -> None:
    if card.cache is not None:
        try:
            card.cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BackendError(f"TensorRT's engines cannot be kept in {card.cache}: {error}") from error
    if card.precision == "fp32" and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        warnings.warn(
            f"TensorRT computes {path.name} with TF32, which ONNX Runtime has no option against: set the environment "
            "variable NVIDIA_TF32_OVERRIDE=0 before this program starts to have float32",
            BackendWarning,
            stacklevel=4,
        )


def _cache(graph: GraphFile) -> Path | None:
    """A folder for one graph with its weights; None for a user without a home."""
    if graph.bundle is None:
        return None
    try:
        return cache_folder() / CACHE / graph.bundle.manifest.files_sha256[:16] / graph.role
    except OSError:
        return None


def session_options(library: Any, threads: int, wanted: str) -> Any:
    """How every session runs on the provider `wanted`, under ONNX Runtime's own name of it."""
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; warnings about constant folding help no operator
    # Threads may spin within a run, where the next node follows at once, but not between runs of several sessions.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if wanted == CPU:
        # A plan of all memory is held beside the memory that the first run took, and the default order of the nodes
        # keeps activations longer than the order in the file: with both a guided step takes twice as much.
        options.enable_mem_pattern = False
        options.execution_order = library.ExecutionOrder.PRIORITY_BASED
    else:
        # The library gives what a provider lacks to the CPU without a word: ask who computes what, or forbid it.
        tells = "record_ep_graph_assignment_info" if _tells_who_computes(library) else "disable_cpu_ep_fallback"
        options.add_session_config_entry(f"session.{tells}", "1")
    return options


def _port(node: Any, path: Path) -> Port:
    if node.type not in _DTYPES:
        raise BackendError(f"{path} has {node.name!r} of type {node.type}, which is not supported")
    shape = tuple(length if isinstance(length, int) else None for length in node.shape)
    return Port(node.name, np.dtype(_DTYPES[node.type]), shape)


def _reason(error: Exception) -> str:
    """The first line of an exception, without the library's own prefix."""
    return first_line(re.sub(r"^\[ONNXRuntimeError\] : \d+ : ", "", str(error)), type(error).__name__)
