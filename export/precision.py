"""The denoiser in half precision, and how far each of its layers is then from float32.

The module is made half before it is recorded, so every type is in the graph (strong typing) and nothing is converted
afterwards: convolutions and what lies between them in float16 or bfloat16; norms, softmax, the time embedding and the
arithmetic of a step in float32 (`linearize`, `step`).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mdps.export.linearize import linearize, prepare_input_gradients
from mdps.export.products import PRODUCTS, FloatProducts
from mdps.models.unet import UNet
from mdps.runtime.errors import BackendError

Precision = Literal["fp32", "fp16", "bf16"]
TYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LayerErrors = dict[str, dict[str, float]]


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


class _Watch(TorchFunctionMode):
    """Keeps the result of every product with a parameter, under the layer it is of and the way it goes through it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[str, str], Tensor]] = []
        self._kept: list[Tensor] = []  # an id means something only while its tensor lives
        self._places: dict[int, tuple[str, str]] = {}
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            layer, _, kind = name.rpartition(".")
            self._places[id(tensor)] = (layer, "gradient" if kind == "input_gradient_weight" else "forward")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        place = next((self._places[id(a)] for a in args if id(a) in self._places), None)
        if place is None:
            return result
        if name in PRODUCTS:
            self.seen.append(((place[0], "gradient") if name == "conv_transpose2d" else place, result))
        elif name in ("__getitem__", "t"):  # the projections of attention are matrices, transposed on the way back
            self._kept.append(result)
            self._places[id(result)] = (place[0], "gradient") if name == "t" else place
        return result
