"""Records a torch module as an ONNX graph while it runs once.

Every torch call on a tensor that depends on an input becomes the nodes its entry in `operators.py` emits; everything
else is computed on the spot and becomes a constant. Compared with a general exporter the graph is what was written: no
casts, no shape arithmetic, equal expressions once. The batch stays dynamic because every reshape copies its first axis.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mdps.export.graph import trace
from mdps.export.operators import OPERATORS, UnsupportedOperatorError
from mdps.export.precision import FloatProducts, Watcher

Say = Callable[[str], None]
OPSET, IR_VERSION = 20, 9
BFLOAT16_OPSET, BFLOAT16_IR_VERSION = 22, 10  # the first in which a convolution may be bfloat16
_TYPES = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}


class Tracer(Watcher):
    """A mode that records what it sees: the `operators.Graph` that the operators' entries write to."""

    def __init__(self, module: nn.Module, batch_input: str) -> None:
        super().__init__()
        self.batch_input = batch_input
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self._names: Any = WeakTensorKeyDictionary()
        self._emitted: dict[tuple[Any, ...], list[str]] = {}
        self._by_content: dict[tuple[Any, ...], str] = {}
        self._parameters: Any = WeakTensorKeyDictionary()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self._parameters[tensor] = name

    def called(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = function(*args, **kwargs)
        outputs = [result] if isinstance(result, Tensor) else list(result) if _tensors(result) else []
        if outputs and any(tensor in self._names for tensor in _tensors([*args, *kwargs.values()])):
            operator = getattr(function, "__name__", str(function))
            if operator not in OPERATORS:
                raise UnsupportedOperatorError(f"the exporter has no ONNX form of the torch operator {operator!r}")
            for tensor, name in zip(outputs, OPERATORS[operator](self, outputs, *args, **kwargs), strict=False):
                self._names[tensor] = name
        return result

    def input(self, tensor: Tensor, name: str) -> None:
        self._names[tensor] = name

    def name(self, value: Any, like: Tensor | None = None) -> str:
        """Name of a tensor; a constant (a number takes the type of `like`) becomes an initializer."""
        if isinstance(value, Tensor) and value in self._names:
            return str(self._names[value])
        if isinstance(value, Tensor) and value in self._parameters:
            return self._constant(value, str(self._parameters[value]))
        dtype = like.dtype if like is not None and not isinstance(value, Tensor) else None
        return self._constant(torch.as_tensor(value, dtype=dtype), None)

    def batch(self) -> str:
        """Return the number of images as an int64 vector of one, for shapes that must be taken apart."""
        return self.emit("Shape", [self.batch_input], start=0, end=1)[0]

    def integers(self, values: Sequence[int]) -> str:
        """Return an int64 constant vector (shapes, axes)."""
        return self._constant(torch.tensor(list(values), dtype=torch.int64), None)

    def emit(self, operator: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> list[str]:
        """Add a node and return its outputs' names; an expression that was there before is not computed twice."""
        key = (operator, tuple(inputs), outputs, tuple(sorted((k, str(v)) for k, v in attributes.items())))
        if key not in self._emitted:
            stem = f"{operator}_{len(self.nodes)}"
            names = [stem, *(f"{stem}_{i}" for i in range(1, outputs))]
            self.nodes.append(helper.make_node(operator, list(inputs), names, name=stem, **attributes))
            self._emitted[key] = names
        return self._emitted[key]

    def _constant(self, tensor: Tensor, wanted: str | None) -> str:
        data = tensor.detach().contiguous().cpu()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        key = (data.dtype, tuple(data.shape), hashlib.sha256(raw).digest())
        if key not in self._by_content:
            name = wanted or f"constant_{len(self.constants)}"
            self._by_content[key] = name
            self.constants[name] = _tensor_proto(data, raw, name)
        return self._by_content[key]


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among values, lists and tuples in them included."""
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in _tensors(v)] if isinstance(values, list | tuple) else []


def _tensor_proto(data: Tensor, raw: bytes, name: str) -> TensorProto:
    if data.dtype == torch.bfloat16:
        return helper.make_tensor(name, TensorProto.BFLOAT16, list(data.shape), raw, raw=True)
    return numpy_helper.from_array(np.asarray(data.numpy()), name)


def record(
    module: nn.Module, inputs: Mapping[str, Tensor | None], outputs: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> ModelProto:
    """Run `module` once on the inputs in their order and return it as an ONNX model.

    None is an argument the graph does not have. `axes` names the dynamic leading axes of inputs, for example
    {"x_t": ("batch",)}; the first axis of every output is the batch. UnsupportedOperatorError else.
    """
    tracer = Tracer(module, batch_input=next(name for name, names in axes.items() if names[:1] == ("batch",)))
    present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    for name, tensor in present.items():
        tracer.input(tensor, name)
    with torch.no_grad(), FloatProducts(), tracer:
        results = module(*inputs.values())
    nodes = list(tracer.nodes)
    for result, name in zip(results, outputs, strict=True):
        nodes.append(helper.make_node("Identity", [tracer.name(result)], [name], name=name))
    graph = helper.make_graph(
        nodes,
        type(module).__name__,
        [_value(name, tensor, axes.get(name, ())) for name, tensor in present.items()],
        [_value(name, tensor, ("batch",)) for name, tensor in zip(outputs, results, strict=True)],
        initializer=list(tracer.constants.values()),
    )
    wide = all(constant.data_type != TensorProto.BFLOAT16 for constant in tracer.constants.values())
    opset, ir_version = (OPSET, IR_VERSION) if wide else (BFLOAT16_OPSET, BFLOAT16_IR_VERSION)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    model.producer_name = "mdps"
    return without_dead_ends(_without_identities(model))


def recorded(
    module: nn.Module, inputs: dict[str, Tensor], outputs: Sequence[str], axes: Mapping[str, Sequence[str]], say: Say
) -> ModelProto:
    """Return what `record` does; where it does not know an operator, say so and take torch's own exporter."""
    try:
        return record(module, inputs, outputs, axes)
    except UnsupportedOperatorError as reason:
        say(f"{reason}: using torch's exporter")
        return trace(module, inputs, outputs, axes)


def _value(name: str, tensor: Tensor, axes: Sequence[str]) -> onnx.ValueInfoProto:
    shape: list[Any] = [*axes, *tensor.shape[len(axes) :]]
    return helper.make_tensor_value_info(name, _TYPES[tensor.dtype], shape)


def without_dead_ends(model: ModelProto) -> ModelProto:
    """Drop nodes and constants that no output needs, such as the stages of a backbone past the last one used."""
    graph, needed = model.graph, {output.name for output in model.graph.output}
    for node in reversed(list(graph.node)):
        if needed.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            needed.update(node.input)
    for constant in [c for c in graph.initializer if c.name not in needed]:
        graph.initializer.remove(constant)
    return model


def _without_identities(model: ModelProto) -> ModelProto:
    """Let the node that computes an output carry the output's name, where no other output does already."""
    nodes = model.graph.node
    producer = {output: (node, index) for node in nodes for index, output in enumerate(node.output)}
    taken: dict[str, str] = {}
    for node in [n for n in nodes if n.op_type == "Identity" and n.input[0] in producer and n.input[0] not in taken]:
        taken[node.input[0]] = node.output[0]
        source, index = producer[node.input[0]]
        source.output[index] = node.output[0]
        nodes.remove(node)
    for node in nodes:
        for index, name in enumerate(node.input):
            if name in taken:
                node.input[index] = taken[name]
    return model
