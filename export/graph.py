"""A torch module becomes an ONNX file: traced with a dynamic batch, slimmed, named, its weights in a shared file.

Also what a graph takes: nodes, memory, and what torch itself would perform in its place.
"""

import contextlib
import hashlib
import inspect
import io
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import onnx
import onnxslim
import torch
from onnx import ModelProto, TensorProto, ValueInfoProto, helper
from onnx.external_data_helper import ExternalDataInfo, set_external_data
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from mdps.models.oracle import Oracle, posterior_sampling
from mdps.models.unet import UNet

INLINE_BYTES = 1024  # smaller constants (shapes, scalars) stay inside the graph
ALIGNMENT = 4096  # lets an engine map weights instead of copying them
INLINE = 64  # elements: smaller constants are shapes and axes, whose values the inference of shapes needs
# Written over an input that nobody reads any more.
IN_PLACE = {"Add", "Sub", "Mul", "Div", "Sigmoid", "Relu", "Clip", "Sqrt", "Neg", "Abs", "Reciprocal", "Softmax"}
VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
_NOTED = ("alias", "detach", "getitem", "lift_fresh_copy")  # in a trace; no engine would compute them


Place = tuple[str, int, int]
"""File, offset and length of a tensor's bytes."""


class WeightStore:
    """One external-data file that graphs share; identical tensors, and those at `known` places, are stored once."""

    def __init__(self, path: Path, known: Mapping[str, Place] | None = None) -> None:
        self.path = path
        self._places: dict[str, Place] = dict(known or {})
        self._end = 0

    def place(self, data: bytes) -> Place:
        """Return where the bytes are, appended to the file if they are new."""
        key = hashlib.sha256(data).hexdigest()
        if key not in self._places:
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                _write_at(file, offset, data)
            self._places[key] = (self.path.name, offset, len(data))
            self._end = offset + len(data)
        return self._places[key]


def places(file: Path) -> dict[str, Place]:
    """Return where the large constants of a graph are, by the hash of their bytes: `known` to a store beside it."""
    found = {}
    for tensor in onnx.load(str(file), load_external_data=False).graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            info = ExternalDataInfo(tensor)
            with (file.parent / info.location).open("rb") as weights:
                weights.seek(info.offset or 0)
                data = weights.read(info.length)
            found[hashlib.sha256(data).hexdigest()] = (info.location, info.offset or 0, len(data))
    return found


def _write_at(file: IO[bytes], offset: int, data: bytes) -> None:
    file.seek(offset)
    file.write(data)


def trace(
    module: nn.Module, inputs: Mapping[str, Tensor], outputs: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> ModelProto:
    """Record a module as `tracer.record` does, by torch's own exporter: slower, for operators that one does not know.

    Example inputs need at least two along each dynamic axis, or the trace would take one for a constant.
    """
    dims = {name: torch.export.Dim(name, min=1) for names in axes.values() for name in names}
    dynamic = [{axis: dims[a] for axis, a in enumerate(axes.get(name, ()))} for name in inputs]
    parameters = list(inspect.signature(module.forward).parameters.values())
    if parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        count = len(parameters) - 1
        dynamic = [*dynamic[:count], tuple(dynamic[count:])]  # type: ignore[list-item]
    with torch.no_grad(), _quiet():
        program = torch.export.export(module, tuple(inputs.values()), dynamic_shapes=tuple(dynamic))
        onnx_program = torch.onnx.export(
            program, dynamo=True, input_names=list(inputs), output_names=list(outputs), optimize=True, verbose=False
        )
        assert onnx_program is not None
        return _tidy(onnxslim.slim(onnx_program.model_proto), axes)


def _tidy(model: ModelProto, axes: Mapping[str, Sequence[str]]) -> ModelProto:
    """Drop what the exporter notes for itself (source paths among it) and give dynamic axes readable names."""
    symbols = {}
    for value in model.graph.input:
        for index, name in enumerate(axes.get(value.name, ())):
            symbols[value.type.tensor_type.shape.dim[index].dim_param] = name
    del model.graph.value_info[:]
    for value in [*model.graph.input, *model.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_param = symbols[dim.dim_param]
    graph = model.graph
    for item in [model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer]:
        item.ClearField("doc_string")
        item.ClearField("metadata_props")
    model.producer_name, model.producer_version = "mdps", ""
    return model


def write(model: ModelProto, path: Path, weights: WeightStore) -> None:
    """Write the graph with its large constants moved to the weight store beside it, and check it."""
    for tensor in model.graph.initializer:
        data = onnx.numpy_helper.to_array(tensor).tobytes()
        if len(data) >= INLINE_BYTES:
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=data))
            set_external_data(tensor, *weights.place(data))
            tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString(deterministic=True))
    onnx.checker.check_model(str(path))


def count_nodes(model: ModelProto) -> dict[str, int]:
    """Count nodes by kind, most frequent first."""
    return dict(Counter(node.op_type for node in model.graph.node).most_common())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence an exporter's progress and warnings about its own internals: the terminal is for our messages."""
    level = logging.getLogger("torch.onnx").level
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        try:
            yield
        finally:
            logging.getLogger("torch.onnx").setLevel(level)


def live_bytes(model: ModelProto) -> int:
    """Return the most bytes that live at once between the nodes of `model`, in their order, for one image and sample.

    It is found from the graph alone; the runtime checks memory by it.
    """
    sizes = _sizes(model)
    uses = Counter(name for node in model.graph.node for name in node.input)
    uses.update(output.name for output in model.graph.output)
    held: dict[str, str] = {}  # a view's name -> whose memory it is
    left: Counter[str] = Counter()
    live = most = 0
    for node in model.graph.node:
        inputs = [held[name] for name in node.input if name in held]
        ends = [name for name in dict.fromkeys(inputs) if left[name] == inputs.count(name)]
        for output in filter(None, node.output):
            reused = inputs[:1] if node.op_type in VIEWS else []
            if node.op_type in IN_PLACE:
                reused = [name for name in ends if sizes.get(name) == sizes.get(output)][:1]
            owner = reused[0] if reused else output
            held[output] = owner
            left[owner] += uses[output]
            live += 0 if reused else sizes.get(output, 0)
        most = max(most, live)
        for name in inputs:
            left[name] -= 1
        live -= sum(sizes.get(name, 0) for name in {*inputs, *(held[o] for o in node.output if o)} if not left[name])
    return most


def _sizes(model: ModelProto) -> dict[str, int]:
    shaped = onnx.shape_inference.infer_shapes(_weightless(model), data_prop=True)
    values = [*shaped.graph.value_info, *shaped.graph.output]
    return {value.name: _bytes(value) for value in values if value.type.tensor_type.elem_type}


def _weightless(model: ModelProto) -> ModelProto:
    """Return a copy for one image with its weights as inputs: neither copied nor, beyond two gigabytes, refused."""
    graph = model.graph
    small = [w for w in graph.initializer if math.prod(w.dims) <= INLINE]
    large = [w for w in graph.initializer if math.prod(w.dims) > INLINE]
    weights = [helper.make_tensor_value_info(w.name, w.data_type, list(w.dims)) for w in large]
    copy = helper.make_graph(
        graph.node, graph.name, [*map(_single, graph.input), *weights], [*map(_single, graph.output)], small
    )
    return helper.make_model(copy, opset_imports=model.opset_import, ir_version=model.ir_version)


def _single(value: ValueInfoProto) -> ValueInfoProto:
    kind = value.type.tensor_type
    shape = [1 if dim.dim_param else dim.dim_value for dim in kind.shape.dim]
    return helper.make_tensor_value_info(value.name, kind.elem_type, shape)


def _bytes(value: ValueInfoProto) -> int:
    kind = value.type.tensor_type
    itemsize: int = helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    return math.prod(int(dim.dim_value) or 1 for dim in kind.shape.dim) * itemsize


def autograd_operations(network: UNet, oracle: Oracle, size: tuple[int, int]) -> dict[str, int]:
    """Count core ATen operations of one guided step with the gradient by autograd, by kind, most frequent first.

    The step is the oracle's, on one image of `size` (H, W), traced without computing anything; a network that predicts
    v or x0 is counted as if it predicted eps. These are what torch's exporter would turn into nodes, one or more each.
    """
    image, mask = torch.empty(1, 3, *size), torch.ones(1, 1, *size)

    def step(y: Tensor, m: Tensor, first: Tensor, noise: Tensor) -> Tensor:
        states = posterior_sampling(lambda x, t: network(x, t)[:, :3], y, m, first, [noise], oracle)
        return [next(states), next(states)][-1]

    tracer = make_fx(step, dict(core_aten_decompositions()), tracing_mode="fake", _allow_non_fake_inputs=True)
    names = Counter(_name(node) for node in tracer(image, mask, image, image).graph.nodes if node.op == "call_function")
    return {name: count for name, count in names.most_common() if name not in _NOTED}


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))
