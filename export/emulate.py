"""A bfloat16 graph in float32 arithmetic with every result rounded to bfloat16, for engines without such kernels.

ONNX Runtime's CPU provider computes float16 graphs in this way by itself and refuses bfloat16 ones. The parity gate
runs the emulation; the graph in the bundle stays bfloat16.
"""

import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from mdps.runtime.manifest import Manifest


def emulate(model: ModelProto) -> ModelProto:
    """Return the same graph with float32 for bfloat16; casts to bfloat16 and back stand where a value is rounded."""
    half = set()
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            half.add(tensor.name)
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        to = next((a.i for a in node.attribute if a.name == "to"), None)
        nodes.append(node)
        if to == TensorProto.BFLOAT16 or (to is None and not half.isdisjoint(node.input)):
            half.update(node.output)
            nodes += [cast for index in range(len(node.output)) for cast in _rounded(node, index)]
            for attribute in node.attribute:
                if attribute.name == "to":
                    attribute.i = TensorProto.FLOAT
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _rounded(node: NodeProto, index: int) -> list[NodeProto]:
    """Rename the output to its unrounded value, and return the nodes that give the rounded one its name."""
    name = node.output[index]
    node.output[index] = f"{name}.exact"
    return [
        helper.make_node("Cast", [f"{name}.exact"], [f"{name}.bfloat16"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", [f"{name}.bfloat16"], [name], to=TensorProto.FLOAT),
    ]


def emulated_bundle(folder: Path, manifest: Manifest, out: Path) -> None:
    """Fill folder `out` with the bundle's graphs under their names, emulated where they are bfloat16."""
    for name in manifest.files:
        if not name.endswith(".onnx"):
            shutil.copy(folder / name, out / name)
    for graph in manifest.graphs.values():
        for file in (graph.file, *graph.variants.values()):
            shutil.copy(folder / file, out / file)
            if "step" in file:
                onnx.save(emulate(onnx.load(folder / file)), out / file)  # its weights inside
