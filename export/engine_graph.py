"""Rewrite nodes that TensorRT's parser does not read as nodes that it does."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper


def parseable(path: Path) -> ModelProto:
    """Return the graph in `path`, large weights left in their file, without operators the parser refuses."""
    return without_layer_statistics(onnx.load(path, load_external_data=False))


def without_layer_statistics(model: ModelProto) -> ModelProto:
    """Replace layer norms over the last axis whose mean or deviation is read: the parser takes one output only."""
    read = {name for node in model.graph.node for name in node.input} | {o.name for o in model.graph.output}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "LayerNormalization" or len(node.output) == 1:
            nodes.append(node)
        elif read.isdisjoint(node.output[1:]):
            del node.output[1:]
            nodes.append(node)
        else:
            model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), f"{node.name}.axes"))
            epsilon = np.array(helper.get_node_attr_value(node, "epsilon"), dtype=np.float32)
            model.graph.initializer.append(numpy_helper.from_array(epsilon, f"{node.name}.epsilon"))
            nodes += _written_out(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _written_out(node: NodeProto) -> Iterator[NodeProto]:
    x, scale = node.input
    y, mean, rstd = node.output
    at = node.name
    for operator, inputs, output in (
        ("ReduceMean", [x, f"{at}.axes"], mean),
        ("Sub", [x, mean], f"{at}.centred"),
        ("Mul", [f"{at}.centred"] * 2, f"{at}.squares"),
        ("ReduceMean", [f"{at}.squares", f"{at}.axes"], f"{at}.variance"),
        ("Add", [f"{at}.variance", f"{at}.epsilon"], f"{at}.safe"),
        ("Sqrt", [f"{at}.safe"], f"{at}.deviation"),
        ("Reciprocal", [f"{at}.deviation"], rstd),
        ("Mul", [f"{at}.centred", rstd], f"{at}.normed"),
        ("Mul", [f"{at}.normed", scale], y),
    ):
        yield helper.make_node(operator, inputs, [output], name=f"{output}.node")
