"""OpenVINO, on the processor: sessions in float32, and in bfloat16 where the processor has it."""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.bundle import LoadOptions
from mdps.runtime.engines import Engine
from mdps.runtime.engines.interface import TINY_MODEL, Check, GraphFile, tried
from mdps.runtime.errors import BackendError
from mdps.runtime.graphs import STEPS
from mdps.runtime.machine import available_cpus
from mdps.runtime.session import Arrays, BoundRun, Port, check_feeds, check_into, check_outputs

COMPILED_AT_ONCE = 3
"""A batch, the rest of a folder, and the single image of a warm-up."""

Shapes = tuple[tuple[int, ...], ...]


def open(engine: Engine, graph: GraphFile, options: LoadOptions) -> "OpenVinoSession":
    """Open a graph; features and score are in float32 whatever the steps are in."""
    return OpenVinoSession(graph.file, options.threads, _precision(engine) if graph.role in STEPS else "f32")


def probe(engine: Engine) -> Check | None:
    """Try a session; None of bfloat16 where the processor has none."""
    try:
        core = _library().Core()
        if engine.arithmetic and not has_bfloat16(core):
            return None
    except Exception as error:  # an import that fails, or anything the library raises
        return Check(engine.name, False, _reason(error))
    options = compile_options(1, _precision(engine))
    return tried(engine, lambda x: core.compile_model(core.read_model(TINY_MODEL), "CPU", options)({"x": x})[0])


def _precision(engine: Engine) -> str:
    return engine.arithmetic or "f32"


class OpenVinoSession:
    """One ONNX file on OpenVINO's CPU plugin, in float32 ("f32") or bfloat16 ("bf16").

    In bfloat16 products and what follows them are rounded to eight bits of mantissa; inputs and outputs stay float32.
    Static shapes are a fifth faster than a free batch, so each set of input shapes is compiled when first run, and
    the `COMPILED_AT_ONCE` last used are kept. `threads` defaults to the processors this process may use. Raises
    BackendError where the library is missing, the file is damaged or the processor has no bfloat16. Runs from several
    threads follow one another.
    """

    def __init__(self, path: Path | str, threads: int | None = None, precision: str = "f32") -> None:
        self._path = Path(path)
        self.threads = threads or available_cpus()
        library = _library()
        self._core: Any = library.Core()
        if precision == "bf16" and not has_bfloat16(self._core):
            raise BackendError(
                "this processor computes no bfloat16 (it lacks AMX and AVX512_BF16), so openvino-bf16 would gain "
                "nothing: choose --engine openvino"
            )
        self._precision = precision
        self._model: Any = _read(self._core, self._path)
        self._ports = [_port(node, self._path) for node in self._model.inputs]
        self._requests: OrderedDict[Shapes, Any] = OrderedDict()
        self._lock = threading.Lock()
        self.inputs = tuple(port.name for port in self._ports)
        self.outputs = tuple(_output_name(node) for node in self._model.outputs)
        _keep_reductions_apart(self._model)
        _keep_weights_apart(self._model, library.op.Constant)
        how = " in bf16" if precision == "bf16" else ""
        self.provider = f"OpenVINO {library.__version__.partition('-')[0]} on CPU{how}"

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        with self._lock:
            self._check_open()
            check_feeds(self._ports, feeds, str(self._path))
            names = check_outputs(self.outputs, outputs, str(self._path))
            arrays = [np.asarray(feeds[port.name]) for port in self._ports]
            with self._failing():
                request = self._request(tuple(array.shape for array in arrays))
                request.infer(dict(enumerate(arrays)), share_inputs=True, share_outputs=True)
                # The tensors belong to the request and the next run overwrites them.
                return {name: request.get_output_tensor(self.outputs.index(name)).data.copy() for name in names}

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> BoundRun:
        return _Binding(self, feeds)

    def close(self) -> None:
        with self._lock:
            self._requests.clear()
            self._model = self._core = None

    def _check_open(self) -> None:
        if self._model is None:
            raise BackendError(f"{self._path} was closed: open it again")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise BackendError(f"{self._path} failed on {self.provider}: {_reason(error)}") from error

    def _request(self, shapes: Shapes) -> Any:
        """A request of the model compiled for these shapes of all inputs."""
        if shapes not in self._requests:
            while len(self._requests) >= COMPILED_AT_ONCE:  # before the next one takes its memory
                self._requests.popitem(last=False)
            self._model.reshape(dict(zip(self.inputs, map(list, shapes), strict=True)))
            compiled = self._core.compile_model(self._model, "CPU", compile_options(self.threads, self._precision))
            self._requests[shapes] = compiled.create_infer_request()
        self._requests.move_to_end(shapes)
        return self._requests[shapes]


class _Binding:
    """Runs of a session on the callers' memory.

    The request belongs to all that run these shapes, so every run sets all tensors (their memory, not their contents)
    and gives the request its own outputs back: what the next one writes must not land in a result somebody holds.
    """

    def __init__(self, session: OpenVinoSession, feeds: Mapping[str, NDArray[Any]]) -> None:
        self._owner, self._name = session, str(session._path)
        self._open_ports = [port for port in session._ports if port.name not in feeds]
        check_feeds([port for port in session._ports if port.name in feeds], feeds, self._name)
        self._tensor = _library().Tensor
        self._feeds = {name: np.asarray(array, order="C") for name, array in feeds.items()}
        self._tensors = {name: self._shared(array) for name, array in self._feeds.items()}

    def run(self, feeds: Mapping[str, NDArray[Any]], into: Mapping[str, NDArray[Any]]) -> None:
        owner = self._owner
        check_feeds(self._open_ports, feeds, self._name)
        check_into(into, owner.outputs, self._name)
        given = {name: np.asarray(array, order="C") for name, array in feeds.items()}  # alive until the end
        tensors = self._tensors | {name: self._shared(array) for name, array in given.items()}
        arrays = self._feeds | given
        with owner._lock, owner._failing():
            owner._check_open()
            request = owner._request(tuple(arrays[name].shape for name in owner.inputs))
            for index, name in enumerate(owner.inputs):
                request.set_input_tensor(index, tensors[name])
            places = {owner.outputs.index(name): self._shared(array) for name, array in into.items()}
            with _written_to(request, places):
                request.infer(share_outputs=True)  # or it copies every output for its return value

    def _shared(self, array: NDArray[Any]) -> Any:
        """A tensor on the array's memory. OpenVINO shares none that is read-only, though it only reads its inputs."""
        if not array.flags.writeable:
            array = np.asarray(_Writeable(array))
        return self._tensor(array, shared_memory=True)


class _Writeable:
    """An array's memory, said to be writeable."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


@contextmanager
def _written_to(request: Any, places: Mapping[int, Any]) -> Iterator[None]:
    own = {index: request.get_output_tensor(index) for index in places}
    for index, tensor in places.items():
        request.set_output_tensor(index, tensor)
    try:
        yield
    finally:
        for index, tensor in own.items():
            request.set_output_tensor(index, tensor)


def _library() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise BackendError(f'openvino cannot be imported ({error}): pip install "mdps[openvino]"') from error
    return openvino


def has_bfloat16(core: Any) -> bool:
    """Whether the processor has instructions for it, as the `openvino.Core` given says."""
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def compile_options(threads: int, precision: str = "f32") -> dict[str, Any]:
    """How every model is compiled."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        # Without a hint a processor that has bfloat16 computes in it, and the scores move.
        "INFERENCE_PRECISION_HINT": precision,
        # Every process would take the same first processors, and two of them would share one.
        "ENABLE_CPU_PINNING": False,
    }


def _read(core: Any, path: Path) -> Any:
    if not path.is_file():
        raise BackendError(f"{path} is no file: check the path")
    try:
        # Weights beside a mounted link are refused as lying elsewhere; beside the real file they are not.
        return core.read_model(path.resolve())
    except RuntimeError as error:
        raise BackendError(f"{path} cannot be loaded by OpenVINO: {_reason(error)}") from error


def _keep_reductions_apart(model: Any) -> None:
    """Make every reduction over three dimensions an output too, after the graph's own ones.

    OpenVINO (2026.4) computes a product or sum that follows such a reduction of the last dimension in the same kernel,
    and then with the wrong channels for a batch above 1: off by more than all of its size. What is also an output it
    does not join, and the outputs are small. A test has the smallest such graph.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name().startswith("Reduce") and node.input(0).get_partial_shape().rank == 3:
            model.add_outputs([node.output(0)])


def _keep_weights_apart(model: Any, constant: Any) -> None:
    """Give every transposed convolution a copy of its weights; `constant` is OpenVINO's class.

    OpenVINO (2026.4) keeps weights laid out for a kernel under their address, size and layout, so a convolution and a
    transposed one of as many input as output channels take each other's where they share memory, as they do in the
    pullback of a strided convolution. The copies are of the few strided ones.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ConvolutionBackpropData":
            weights = node.input_value(1).get_node()
            if weights.get_type_name() == "Constant":
                copied = constant(weights.get_tensor_view(), shared_memory=False)
                node.input(1).replace_source_output(copied.output(0))


def _port(node: Any, path: Path) -> Port:
    try:
        dtype = np.dtype(node.element_type.to_dtype())
    except (RuntimeError, TypeError) as error:
        kind = node.element_type.get_type_name()
        raise BackendError(f"{path} has an input of type {kind}, which is not supported") from error
    shape = tuple(None if length.is_dynamic else length.get_length() for length in node.partial_shape)
    return Port(node.get_node().get_friendly_name(), dtype, shape)


def _output_name(node: Any) -> str:
    """The graph's own name: a tensor may have several where nodes were merged, but its result is called after one."""
    name = str(node.get_node().get_friendly_name()).removesuffix("/sink_port_0")
    return name if name in node.get_names() else str(node.get_any_name())


def _reason(error: Exception) -> str:
    """Return an exception's message, without where in the library it was raised."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not re.match(r"Exception from |Check '.*' failed at ", line)]
    return (": ".join(said) or type(error).__name__)[:300]
