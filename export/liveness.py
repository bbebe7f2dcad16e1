"""How much memory the tensors of a graph take at once, found from the graph alone; the runtime checks memory by it."""

import math
from collections import Counter

import onnx
from onnx import ModelProto, ValueInfoProto, helper

INLINE = 64  # elements: smaller constants are shapes and axes, whose values the inference of shapes needs
# Written over an input that nobody reads any more.
IN_PLACE = {"Add", "Sub", "Mul", "Div", "Sigmoid", "Relu", "Clip", "Sqrt", "Neg", "Abs", "Reciprocal", "Softmax"}
VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}


def live_bytes(model: ModelProto) -> int:
    """The most bytes that live at once between the nodes of `model`, in their order, for one image of one sample."""
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
    """A copy for one image with its weights as inputs: neither copied nor, beyond two gigabytes, refused."""
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
