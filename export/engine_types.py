"""The types an engine's layers compute in: asked for and not got is an error."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from mdps.runtime.errors import BackendError

Types = dict[str, int]
TRT_TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}
_INSPECTOR_TYPES = {"fp32": "Float", "fp16": "Half", "bf16": "BFloat16"}
_OLD_FORMATS = {"FP32": "Float", "FP16": "Half", "BF16": "BFloat16"}
PRODUCTS = ("convolution", "deconvolution")
IN_FLOAT = ("softmax", "normalization")
"""Kinds of layers that stay in float32 whatever the rest computes in."""


def check_network(library: Any, network: Any, precision: str, path: Path) -> Types:
    """Count layers of a parsed network by the type of their result; BackendError for one of a wrong type.

    A strongly typed network binds the builder, so what is right here cannot change in the engine.
    """
    counted: Counter[str] = Counter()
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        types = [t.dtype.name for t in _tensors(layer)]
        counted[layer.get_output(0).dtype.name] += 1
        kind = layer.type.name.lower()
        wanted = TRT_TYPES[precision] if kind in PRODUCTS else TRT_TYPES["fp32"] if kind in IN_FLOAT else None
        wrong = [found for found in types if wanted and found != wanted]
        if wrong:
            raise BackendError(_mismatch(path, layer.name, str(wanted), wrong[0]))
    return dict(counted.most_common())


def engine_types(library: Any, log: Any, plan: bytes, precision: str, path: Path) -> Types | None:
    """Count those of the built engine (see `inspected_types`); the card the plan is for must be there."""
    engine = library.Runtime(log).deserialize_cuda_engine(plan)
    if engine is None:
        reason = log.errors[-1] if log.errors else "the library gives no reason"
        raise BackendError(f"the engine of {path.name} was built but does not load on this card: {reason}")
    text = engine.create_engine_inspector().get_engine_information(library.LayerInformationFormat.JSON)
    return inspected_types(text, precision, path)


def inspected_types(text: str, precision: str, path: Path) -> Types | None:
    """Count the layers in an inspector's JSON by the type of their result; BackendError for a product of a wrong type.

    None where no convolution can be seen, as in engines that are one fused layer: then the network is what binds. The
    input of a convolution counts, for a cast may be fused into its result.
    """
    counted: Counter[str] = Counter()
    seen = False
    for layer in (one for one in json.loads(text)["Layers"] if isinstance(one, dict)):
        counted.update(_type(tensor) for tensor in layer.get("Outputs", [])[:1])
        inputs = [found for found in map(_type, layer.get("Inputs", [])) if found in _INSPECTOR_TYPES.values()]
        if "conv" in str(layer.get("LayerType", "")).lower() and inputs:
            seen = True
            if inputs[0] != _INSPECTOR_TYPES[precision]:
                raise BackendError(_mismatch(path, str(layer["Name"]), _INSPECTOR_TYPES[precision], inputs[0]))
    return dict(counted.most_common()) if seen else None


def _type(tensor: dict[str, Any]) -> str:
    """Return "Half" of {"Datatype": "Half"}, or of an older {"Format/Datatype": "Channel major FP16 format .."}."""
    text = str(tensor.get("Datatype") or tensor.get("Format/Datatype") or "unknown")
    return next((name for old, name in _OLD_FORMATS.items() if old in text), text)


def _tensors(layer: Any) -> list[Any]:
    """Return a layer's data input and its result."""
    return [tensor for tensor in (layer.get_input(0), layer.get_output(0)) if tensor is not None]


def _mismatch(path: Path, layer: str, wanted: str, found: str) -> str:
    return (
        f"the engine of {path.name} computes {layer} in {found} where {wanted} was asked for: report it with the graph"
    )
