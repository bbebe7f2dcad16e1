"""Weights that half precision holds exactly, in half the bytes; graphs cast them back and compute the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from mdps.export.graph import WeightStore, write
from mdps.runtime.graphs import DDAD, STEPS
from mdps.runtime.manifest import Manifest, hash_files

_SUFFIX = ".half"


def make_small(bundle: Path) -> None:
    """Rewrite a bundle of ONNX graphs so that it takes least room: one form of each graph, and weights in half.

    Only matrices and kernels that lose nothing are stored in half. DDAD's step goes, which the published method does
    not run, and with it tuned samplers of few calls.
    """
    manifest = Manifest.read(bundle)
    graphs = {role: replace(graph, variants={}) for role, graph in manifest.graphs.items() if role != DDAD}
    models = {role: onnx.load(bundle / graph.file) for role, graph in graphs.items()}
    for name in manifest.files:
        if name.endswith((".onnx", ".weights")):
            (bundle / name).unlink()
    stores = {True: WeightStore(bundle / "denoiser.weights"), False: WeightStore(bundle / "features.weights")}
    for role, model in models.items():
        _halve(model)
        write(model, bundle / graphs[role].file, stores[role in STEPS])
    replace(manifest, graphs=graphs, files=hash_files(bundle)).write(bundle)


def _halve(model: ModelProto) -> None:
    casts = []
    for tensor in model.graph.initializer:
        name, weights = tensor.name, numpy_helper.to_array(tensor)
        if _is_half(weights):
            tensor.CopyFrom(numpy_helper.from_array(weights.astype(np.float16), name + _SUFFIX))
            casts.append(helper.make_node("Cast", [name + _SUFFIX], [name], name=name + ".cast", to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _is_half(weights: NDArray[Any]) -> bool:
    """Whether these are float32 kernels or matrices that float16 holds exactly."""
    if weights.dtype != np.float32 or weights.ndim < 2:
        return False
    with np.errstate(over="ignore"):
        return bool((weights.astype(np.float16).astype(np.float32) == weights).all())
