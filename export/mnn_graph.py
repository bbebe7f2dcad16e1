"""A step's graph in the operations that MNN runs fast, for one image at a time.

What is rewritten computes the same: the batch becomes one; weights whose bias is computed become computed ones, as the
converter knows no mixture; products by a constant become the convolutions that they are, and stay in their layout;
other products of two matrices take the larger one first, as the second is packed; 3 x 3 convolutions of the smallest
images become transposed ones, whose weights are not kept as Winograd's algorithm wants them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from mdps.export.tracer import without_dead_ends

_NOUGHT = "mnn_nought"
_SMALL = 64  # pixels, up to which a transposed convolution takes about as long


def for_mnn(model: ModelProto) -> ModelProto:
    """Rewrite a copy of a graph from `tracer.record`, with the shapes inside: the converter asks for some."""
    graph = _Graph(model)
    graph.compute_weights()
    graph.convolve()
    graph.multiply()
    graph.transpose_small_convolutions()
    return graph.finished()


class _Graph:
    """The copy while it is rewritten: its nodes in their order, its constants, and the shapes of all values."""

    def __init__(self, model: ModelProto) -> None:
        self._model = ModelProto()
        self._model.CopyFrom(model)
        graph = self._model.graph
        for value in (*graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_value = 1
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._shapes = _shapes(self._model)
        self._matrices: dict[str, str] = {}
        self._producers = {name: node for node in graph.node for name in node.output}

    def finished(self) -> ModelProto:
        """Return the model, checked by inferring all shapes again."""
        del self._model.graph.initializer[:]
        self._model.graph.initializer.extend(self._constants.values())
        return onnx.shape_inference.infer_shapes(without_dead_ends(self._model), data_prop=True)

    def compute_weights(self) -> None:
        """Add nought times an input to constant weights, so that no optimiser takes them for constants."""
        computed: dict[tuple[tuple[int, ...], bytes], str] = {}
        before: list[NodeProto] = []
        for node in self._model.graph.node:
            weights, bias = [*node.input[1:], "", ""][:2]
            if node.op_type != "Conv" or weights not in self._constants or not bias or bias in self._constants:
                continue
            array = self._array(weights)
            key = (array.shape, array.tobytes())
            if key not in computed:
                computed[key] = f"{weights}_computed"
                before.append(helper.make_node("Add", [weights, _NOUGHT], [computed[key]], name=computed[key]))
            node.input[1] = computed[key]
        if before:
            scalar = next(value.name for value in self._model.graph.input if not value.type.tensor_type.shape.dim)
            factor = self._constant(f"{_NOUGHT}_factor", np.zeros((), np.float32))
            before.insert(0, helper.make_node("Mul", [scalar, factor], [_NOUGHT], name=_NOUGHT))
        for node in reversed(before):
            self._model.graph.node.insert(0, node)

    def convolve(self) -> None:
        """Turn products of a constant [M, K] and [1, K, L] into convolutions."""
        for node in self._model.graph.node:
            if node.op_type != "MatMul" or node.input[0] not in self._constants:
                continue
            weights = self._array(node.input[0])
            if weights.ndim == 2:
                filters = self._constant(f"{node.input[0]}_filters", weights[:, :, None])
                node.op_type, node.input[:] = "Conv", [node.input[1], filters]
                node.attribute.append(helper.make_attribute("kernel_shape", [1]))

    def multiply(self) -> None:
        """Put products of [1, .., M, K] and [1, .., K, N], and what follows up to the next, on matrices [M, N]."""
        nodes: list[NodeProto] = []
        for node in self._model.graph.node:
            if node.op_type == "MatMul" and all(self._is_matrix(name) for name in node.input):
                nodes += self._product(node)
            elif node.op_type == "Sub" and self._is_product_less_column(node):
                nodes += self._one_more_term(node)
            elif node.op_type in ("Mul", "Sub", "Softmax") and self._follows_product(node):
                nodes += self._on_matrices(node)
            else:
                nodes.append(node)
        del self._model.graph.node[:]
        self._model.graph.node.extend(nodes)

    def _is_matrix(self, name: str) -> bool:
        shape = self._shapes.get(name, ())
        return len(shape) > 2 and set(shape[:-2]) == {1}

    def _follows_product(self, node: NodeProto) -> bool:
        whole = all(self._is_matrix(name) for name in node.input)
        return whole and any(name in self._matrices for name in node.input)

    def _product(self, node: NodeProto) -> list[NodeProto]:
        first, second = (self._factor(factor) for factor in node.input)
        sizes = [np.prod(self._shapes[factor]) for factor in node.input]
        swapped = sizes[1] > sizes[0]
        if swapped:  # A B = (B^T A^T)^T
            first, second = ((source, not turned) for source, turned in (second, first))
        nodes: list[NodeProto] = []
        product = f"{node.name}_product"
        factors = [self._matrix(source, nodes) for source, _ in (first, second)]
        turns = {"transA": int(first[1]), "transB": int(second[1])}
        nodes.append(_node("Gemm", factors, product, **turns))
        if swapped:
            product, straight = f"{node.name}_turned", product
            nodes.append(_node("Transpose", [straight], product, perm=[1, 0]))
        return [*nodes, self._shaped(node.output[0], product)]

    def _is_product_less_column(self, node: NodeProto) -> bool:
        """Return whether it is A^T B - c, as in the rule of the softmax."""
        product = self._producers.get(node.input[0])
        if product is None or product.op_type != "MatMul" or node.input[0] not in self._matrices:
            return False
        (_, first), (_, second) = (self._factor(factor) for factor in product.input)
        rows = self._shapes[node.input[0]][-2]
        return first and not second and self._shapes.get(node.input[1], ())[-2:] == (rows, 1)

    def _one_more_term(self, node: NodeProto) -> list[NodeProto]:
        """Make c one more row of A, with a row of -1 in B: a product is cheaper than a pass over a large matrix."""
        (first, _), (second, _) = (self._factor(factor) for factor in self._producers[node.input[0]].input)
        nodes: list[NodeProto] = []
        rows, columns = self._shapes[node.output[0]][-2:]
        row, left, right, result = (f"{node.name}_{part}" for part in ("row", "left", "right", "product"))
        minus = self._constant(f"mnn_minus_{columns}", np.full((1, columns), -1, np.float32))
        factors = [self._matrix(source, nodes) for source in (first, second)]
        nodes.append(_node("Reshape", [node.input[1], self._shape((1, rows))], row))
        nodes.append(_node("Concat", [factors[0], row], left, axis=0))
        nodes.append(_node("Concat", [factors[1], minus], right, axis=0))
        nodes.append(_node("Gemm", [left, right], result, transA=1, transB=0))
        return [*nodes, self._shaped(node.output[0], result)]

    def _on_matrices(self, node: NodeProto) -> list[NodeProto]:
        nodes: list[NodeProto] = []
        result = f"{node.name}_matrix"
        inputs = [self._matrix(name, nodes) for name in node.input]
        nodes.append(_node(node.op_type, inputs, result, **({"axis": 1} if node.op_type == "Softmax" else {})))
        return [*nodes, self._shaped(node.output[0], result)]

    def _matrix(self, name: str, nodes: list[NodeProto]) -> str:
        """Return the value [1, .., M, N] as [M, N]."""
        if name not in self._matrices:
            self._matrices[name] = f"{name}_as_matrix"
            nodes.append(_node("Reshape", [name, self._shape(self._shapes[name][-2:])], self._matrices[name]))
        return self._matrices[name]

    def _shaped(self, name: str, matrix: str) -> NodeProto:
        self._matrices[name] = matrix
        return _node("Reshape", [matrix, self._shape(self._shapes[name])], name)

    def _shape(self, shape: tuple[int, ...]) -> str:
        return self._constant("mnn_shape_" + "_".join(map(str, shape)), np.array(shape, np.int64))

    def _factor(self, name: str) -> tuple[str, bool]:
        """Return what a factor is the transpose of, and whether it is one."""
        producer = self._producers.get(name)
        if producer is None or producer.op_type != "Transpose":
            return name, False
        order = list(next(a.ints for a in producer.attribute if a.name == "perm"))
        last = len(order) - 1
        return (producer.input[0], True) if order == [*range(last - 1), last, last - 1] else (name, False)

    def transpose_small_convolutions(self) -> None:
        """Turn convolutions [O, C, 3, 3] of stride and padding 1 over few pixels into transposed ones."""
        for node in self._model.graph.node:
            weights = self._constants.get(node.input[1]) if node.op_type == "Conv" else None
            if weights is None or list(weights.dims[2:]) != [3, 3]:
                continue
            how = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            height, width = self._shapes[node.output[0]][2:]
            if (
                how["strides"] == [1, 1]
                and how["pads"] == [1] * 4
                and how.get("group", 1) == 1
                and height * width <= _SMALL
            ):
                turned = np.ascontiguousarray(self._array(weights.name).transpose(1, 0, 2, 3)[:, :, ::-1, ::-1])
                node.op_type = "ConvTranspose"
                node.input[1] = self._constant(f"{weights.name}_turned", turned)

    def _constant(self, name: str, values: NDArray[np.generic]) -> str:
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(values, name)
        return name

    def _array(self, name: str) -> NDArray[np.generic]:
        return numpy_helper.to_array(self._constants[name])


def _node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(operator, list(inputs), [output], name=output, **attributes)


def _shapes(model: ModelProto) -> dict[str, tuple[int, ...]]:
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim) for value in values}
