"""The denoiser in half precision, and how far each of its layers is then from float32.

The module is made half before it is recorded, so every type is in the graph (strong typing) and nothing is converted
afterwards: convolutions and what lies between them in float16 or bfloat16; norms, softmax, the time embedding and the
arithmetic of a step in float32 (`linearize`, `step`).
"""

import copy
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mdps.export.linearize import linearize, prepare_input_gradients
from mdps.models.unet import UNet
from mdps.runtime.errors import BackendError
from mdps.runtime.manifest import Manifest

Precision = Literal["fp32", "fp16", "bf16"]
TYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LayerErrors = dict[str, dict[str, float]]
PRODUCTS = {"conv1d", "conv2d", "conv_transpose2d", "matmul"}


class PrecisionError(BackendError):
    """A layer leaves the range of the type it was asked to compute in."""


def in_precision(network: UNet, precision: str) -> UNet:
    """Return a copy whose convolutions hold weights of that type; norms and the time embedding stay float32.

    The network itself for "fp32". A half one runs through `linearize`, not through its own forward.
    """
    if precision == "fp32":
        return network
    copied = copy.deepcopy(network)
    for module in copied.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            module.to(TYPES[precision])
    return copied


def prepare(network: UNet, precision: str) -> nn.Module:
    """Run `prepare_input_gradients` as the engines take it: TensorRT-RTX has no transposed convolution in bfloat16."""
    return prepare_input_gradients(network, subpixel=precision == "bf16")


def layer_errors(network: UNet, precision: str, x: Tensor, timestep: Tensor) -> LayerErrors:
    """Return how far each layer's result is from float32's: {layer: {"forward": error, "gradient": error}}.

    Layers are the convolutions and the projections of attention; x [B, C, H, W] float32, timestep []. An error is the
    largest difference over the largest value; "gradient" is that of the layer's input in the pullback of a random
    vector. Raises PrecisionError, naming the first layer, where a value is not finite.
    """
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    runs = (_watched(one, x, timestep, cotangent) for one in (copy.deepcopy(network), in_precision(network, precision)))
    errors: LayerErrors = {}
    for (place, wanted), (_, found) in zip(*runs, strict=True):
        layer, way = place
        if not torch.isfinite(found).all():
            raise PrecisionError(_overflow(layer, precision))
        error = float((found.float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
        errors.setdefault(layer, {})[way] = error
    return errors


def _overflow(layer: str, precision: str) -> str:
    other = "bf16 or fp32" if precision == "fp16" else "fp32"
    return (
        f"in {precision} the layer {layer} gives values that are not finite, so no bundle was written: "
        f"export with --precision {other}"
    )


def _watched(network: UNet, x: Tensor, timestep: Tensor, cotangent: Tensor) -> list[tuple[tuple[str, str], Tensor]]:
    watch = _Watch(prepare_input_gradients(network, subpixel=True))  # both alike, or there is nothing to compare
    with torch.no_grad(), FloatProducts(), watch:
        _, pullback = linearize(network, x, timestep)
        pullback(cotangent)
    return watch.seen


class Watcher(TorchFunctionMode, ABC):
    """A mode under which every call of a torch function goes through `called`."""

    @abstractmethod
    def called(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the call gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.called(func, args, kwargs or {})


class FloatProducts(Watcher):
    """Convolutions and matrix products of half-precision tensors are summed in float32 and rounded once.

    So the matrix units of a GPU compute them. On processors without half-precision arithmetic this is also hundreds of
    times faster than torch's own kernels.
    """

    def called(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if getattr(function, "__name__", "") not in PRODUCTS or args[0].dtype == torch.float32:
            return function(*args, **kwargs)
        named = {key: _wide(value) for key, value in kwargs.items()}
        return function(*map(_wide, args), **named).to(args[0].dtype)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


class _Watch(Watcher):
    """Keeps the result of every product with a parameter, under the layer it is of and the way it goes through it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[str, str], Tensor]] = []
        self._kept: list[Tensor] = []  # an id means something only while its tensor lives
        self._places: dict[int, tuple[str, str]] = {}
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            layer, _, kind = name.rpartition(".")
            self._places[id(tensor)] = (layer, "gradient" if kind == "input_gradient_weight" else "forward")

    def called(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        place = next((self._places[id(a)] for a in args if id(a) in self._places), None)
        if place is None:
            return result
        if name in PRODUCTS:
            self.seen.append(((place[0], "gradient") if name == "conv_transpose2d" else place, result))
        elif name in ("__getitem__", "t"):  # the projections of attention are matrices, transposed on the way back
            self._kept.append(result)
            self._places[id(result)] = (place[0], "gradient") if name == "t" else place
        return result


def emulate(model: ModelProto) -> ModelProto:
    """Return a bfloat16 graph in float32, with casts to bfloat16 and back where a value is rounded.

    For engines without such kernels: ONNX Runtime's CPU provider computes float16 graphs in this way by itself and
    refuses bfloat16 ones. The parity gate runs the emulation; the graph in the bundle stays bfloat16.
    """
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
