"""How each torch operator that a step uses is written in ONNX (opset 20).

An entry takes the graph, the tensors torch returned and the call's arguments, and returns the names of the outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Graph(Protocol):
    """The graph under construction, as the entries see it; `Tracer` is one."""

    def name(self, value: Any, like: Tensor | None = None) -> str:
        """Return the name of a tensor, or of a constant, which is added; a number takes the type of `like`."""

    def batch(self) -> str:
        """Return the name of the number of images, an int64 vector of one."""

    def integers(self, values: Sequence[int]) -> str:
        """Return the name of an int64 constant vector (shapes, axes)."""

    def emit(self, operator: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> list[str]:
        """Add a node and return the names of its outputs."""


class UnsupportedOperatorError(TypeError):
    """A torch operator that has no entry here."""


Operator = Callable[..., list[str]]
OPERATORS: dict[str, Operator] = {}


def _operator(*names: str) -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def _binary(onnx_name: str, swap: bool = False) -> Operator:
    def operator(g: Graph, out: Sequence[Tensor], a: Any, b: Any) -> list[str]:
        like = a if isinstance(a, Tensor) else b
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype:  # torch would promote, ONNX not
            raise TypeError(f"{onnx_name} of {a.dtype} and {b.dtype}: say in the module which type is meant")
        names = [g.name(a, like=like), g.name(b, like=like)]
        return g.emit(onnx_name, names[::-1] if swap else names)

    return operator


def _unary(onnx_name: str) -> Operator:
    return lambda g, out, x, inplace=False: g.emit(onnx_name, [g.name(x)])


_BINARY = {"add": "Add", "mul": "Mul", "sub": "Sub", "div": "Div", "gt": "Greater", "matmul": "MatMul"}
_UNARY = {"sigmoid": "Sigmoid", "sqrt": "Sqrt", "cos": "Cos", "sin": "Sin", "exp": "Exp", "abs": "Abs", "relu": "Relu"}
_UNARY["neg"] = "Neg"
OPERATORS |= {name: _binary(onnx_name) for name, onnx_name in _BINARY.items()}
OPERATORS |= {name: _unary(onnx_name) for name, onnx_name in _UNARY.items()}
OPERATORS |= {"__rsub__": _binary("Sub", swap=True), "relu_": _unary("Relu")}


@_operator("rsqrt")
def _rsqrt(g: Graph, out: Sequence[Tensor], x: Tensor) -> list[str]:
    return g.emit("Reciprocal", g.emit("Sqrt", [g.name(x)]))


@_operator("silu")
def _silu(g: Graph, out: Sequence[Tensor], x: Tensor, inplace: bool = False) -> list[str]:
    return g.emit("Mul", [g.name(x), *g.emit("Sigmoid", [g.name(x)])])


@_operator("dropout")
def _same(g: Graph, out: Sequence[Tensor], x: Tensor, *_: Any, **__: Any) -> list[str]:
    return [g.name(x)]


@_operator("float", "to")
def _cast(g: Graph, out: Sequence[Tensor], x: Tensor, *_: Any, **__: Any) -> list[str]:
    if out[0].dtype == x.dtype:
        return [g.name(x)]
    kinds = {torch.float32: 1, torch.float16: 10, torch.bfloat16: 16}
    return g.emit("Cast", [g.name(x)], to=kinds[out[0].dtype])


@_operator("clamp")
def _clamp(g: Graph, out: Sequence[Tensor], x: Tensor, *, min: float) -> list[str]:
    return g.emit("Max", [g.name(x), g.name(min, like=x)])


@_operator("reshape", "unsqueeze", "flatten")
def _reshape(g: Graph, out: Sequence[Tensor], x: Tensor, *_: Any) -> list[str]:
    return g.emit("Reshape", [g.name(x), _shape(g, list(x.shape), list(out[0].shape))])


def _shape(g: Graph, old: list[int], new: list[int]) -> str:
    """Return the shape of a reshape whose leading axes are dynamic: copied, joined, or taken apart again."""
    if old and new and old[0] == new[0]:
        return g.integers([0, *new[1:]])
    if len(old) > 1 and new[0] == old[0] * old[1]:  # samples of all images in one row
        return g.integers([-1, *new[1:]])
    if len(new) > 1 and old and old[0] == new[0] * new[1]:
        return g.emit("Concat", [g.batch(), g.integers([-1, *new[2:]])], axis=0)[0]
    return g.integers(new)


@_operator("__getitem__")
def _getitem(g: Graph, out: Sequence[Tensor], x: Tensor, index: Any) -> list[str]:
    index = index if isinstance(index, tuple) else (index,)
    if None in index:
        return _reshape(g, out, x)
    cuts = [(axis, cut.indices(x.shape[axis])) for axis, cut in enumerate(index) if cut != slice(None)]
    ends = [(cut[0], cut[1], axis) for axis, cut in cuts]
    starts, stops, axes = (g.integers(column) for column in zip(*ends, strict=True))
    return g.emit("Slice", [g.name(x), starts, stops, axes]) if cuts else [g.name(x)]


@_operator("chunk", "split")
def _split(g: Graph, out: Sequence[Tensor], x: Tensor, _: Any, dim: int = 0) -> list[str]:
    sizes = g.integers([part.shape[dim] for part in out])
    return g.emit("Split", [g.name(x), sizes], outputs=len(out), axis=dim)


@_operator("cat")
def _cat(g: Graph, out: Sequence[Tensor], tensors: Sequence[Tensor], dim: int = 0) -> list[str]:
    return g.emit("Concat", [g.name(t) for t in tensors], axis=dim)


@_operator("transpose", "t")
def _transpose(g: Graph, out: Sequence[Tensor], x: Tensor, a: int = 0, b: int = 1) -> list[str]:
    order = list(range(x.dim()))
    order[a], order[b] = order[b], order[a]
    return g.emit("Transpose", [g.name(x)], perm=order)


def _reduce(onnx_name: str) -> Operator:
    def operator(g: Graph, out: Sequence[Tensor], x: Tensor, dim: Any, keepdim: bool = False) -> list[str]:
        axes = g.integers([dim] if isinstance(dim, int) else dim)
        return g.emit(onnx_name, [g.name(x), axes], keepdims=int(keepdim))

    return operator


_REDUCTIONS = {"mean": "ReduceMean", "sum": "ReduceSum", "amin": "ReduceMin", "amax": "ReduceMax"}
OPERATORS |= {name: _reduce(onnx_name) for name, onnx_name in _REDUCTIONS.items()}


@_operator("where")
def _where(g: Graph, out: Sequence[Tensor], condition: Tensor, a: Any, b: Any) -> list[str]:
    return g.emit("Where", [g.name(condition), g.name(a, like=out[0]), g.name(b, like=out[0])])


@_operator("topk")
def _topk(g: Graph, out: Sequence[Tensor], x: Tensor, k: int) -> list[str]:
    return g.emit("TopK", [g.name(x), g.integers([k])], outputs=2, axis=-1)


@_operator("hardtanh", "hardtanh_", "relu6")
def _hardtanh(
    g: Graph, out: Sequence[Tensor], x: Tensor, min_val: float = 0.0, max_val: float = 6.0, inplace: bool = False
) -> list[str]:
    return g.emit("Clip", [g.name(x), g.name(min_val, like=x), g.name(max_val, like=x)])


@_operator("batch_norm")
def _batch_norm(
    g: Graph, out: Sequence[Tensor], x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor,
    training: bool, momentum: float, eps: float,
) -> list[str]:  # fmt: skip
    inputs = [g.name(tensor) for tensor in (x, weight, bias, mean, variance)]
    return g.emit("BatchNormalization", inputs, epsilon=eps)


@_operator("max_pool2d", "boolean_dispatch")
def _max_pool(
    g: Graph, out: Sequence[Tensor], x: Tensor, kernel: Any, stride: Any, padding: Any = 0, *_: Any, **__: Any
) -> list[str]:
    how: dict[str, Any] = {"kernel_shape": _each(kernel, 2), "strides": _each(stride, 2), "pads": _each(padding, 2) * 2}
    return g.emit("MaxPool", [g.name(x)], **how)


@_operator("softmax")
def _softmax(g: Graph, out: Sequence[Tensor], x: Tensor, dim: int) -> list[str]:
    return g.emit("Softmax", [g.name(x)], axis=dim)


@_operator("linear")
def _linear(g: Graph, out: Sequence[Tensor], x: Tensor, weight: Tensor, bias: Tensor) -> list[str]:
    return g.emit("Gemm", [g.name(x), g.name(weight), g.name(bias)], transB=1)


@_operator("conv2d", "conv1d")
def _conv(
    g: Graph, out: Sequence[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> list[str]:  # fmt: skip
    axes = x.dim() - 2
    inputs = [g.name(x), g.name(weight), *([] if bias is None else [g.name(bias)])]
    return g.emit(
        "Conv", inputs, kernel_shape=list(weight.shape[2:]), strides=_each(stride, axes), pads=_each(padding, axes) * 2,
        dilations=_each(dilation, axes), group=groups,
    )  # fmt: skip


@_operator("conv_transpose2d")
def _conv_transpose(
    g: Graph, out: Sequence[Tensor], x: Tensor, weight: Tensor, *, stride: int, padding: int, output_padding: int
) -> list[str]:  # fmt: skip
    return g.emit(
        "ConvTranspose", [g.name(x), g.name(weight)], kernel_shape=list(weight.shape[2:]), strides=[stride] * 2,
        pads=[padding] * 4, output_padding=[output_padding] * 2,
    )  # fmt: skip


def _each(value: Any, axes: int) -> list[int]:
    return [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)] * axes


@_operator("pixel_shuffle")
def _pixel_shuffle(g: Graph, out: Sequence[Tensor], x: Tensor, factor: int) -> list[str]:
    return g.emit("DepthToSpace", [g.name(x)], blocksize=factor, mode="CRD")


@_operator("pad")
def _pad(
    g: Graph,
    out: Sequence[Tensor],
    x: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> list[str]:
    """Reorder: torch lists (before, after) from the last axis backwards, ONNX all befores, then all afters."""
    pairs = [(0, 0)] * (x.dim() - len(pad) // 2) + list(zip(pad[-2::-2], pad[::-2], strict=True))
    fill = [] if not value else [g.name(value, like=x)]
    return g.emit("Pad", [g.name(x), g.integers([b for b, _ in pairs] + [a for _, a in pairs]), *fill], mode=mode)


def _scale(old: int, new: int) -> float:
    """Return new / old in float32, rounded up where the inference of shapes, which cuts down, would lose a pixel."""
    scale = np.float32(new / old)
    return float(scale if int(old * float(scale)) == new else np.nextafter(scale, np.float32(np.inf)))


@_operator("interpolate")
def _resize(
    g: Graph, out: Sequence[Tensor], x: Tensor, *, mode: str, align_corners: bool | None, antialias: bool, **_: Any
) -> list[str]:
    if antialias or mode not in ("nearest", "bilinear"):
        raise UnsupportedOperatorError(
            f"the exporter has no ONNX form of interpolation by {mode!r}, antialias {antialias}"
        )
    scale = [_scale(old, new) for new, old in zip(out[0].shape[2:], x.shape[2:], strict=True)]
    how: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if mode == "bilinear":
        how = {"mode": "linear", "coordinate_transformation_mode": "align_corners" if align_corners else "half_pixel"}
    return g.emit("Resize", [g.name(x), "", g.name(torch.tensor([1.0, 1.0, *scale]))], **how)


@_operator("avg_pool2d")
def _avg_pool(
    g: Graph, out: Sequence[Tensor], x: Tensor, kernel: int, stride: int | None = None, padding: int = 0
) -> list[str]:
    how: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride or kernel] * 2, "pads": [padding] * 4}
    return g.emit("AveragePool", [g.name(x)], count_include_pad=1, **how)


@_operator("adaptive_avg_pool2d")
def _global_average_pool(g: Graph, out: Sequence[Tensor], x: Tensor, size: int) -> list[str]:
    if size != 1:
        raise UnsupportedOperatorError(f"the exporter has no ONNX form of adaptive pooling to {size}")
    return g.emit("GlobalAveragePool", [g.name(x)])


@_operator("native_layer_norm")
def _layer_norm(
    g: Graph, out: Sequence[Tensor], x: Tensor, shape: Sequence[int], weight: None, bias: None, eps: float
) -> list[str]:  # fmt: skip
    scale = g.name(torch.ones(shape, dtype=x.dtype))
    return g.emit("LayerNormalization", [g.name(x), scale], outputs=3, axis=-1, epsilon=eps)


@_operator("group_norm")
def _group_norm(
    g: Graph, out: Sequence[Tensor], x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float
) -> list[str]:  # fmt: skip
    """Write it whole, as an instance norm over groups; the affine part has the channels back."""
    grouped = g.emit("Reshape", [g.name(x), g.integers([0, groups, -1])])
    ones, zeros = (g.name(torch.full((groups,), value, dtype=x.dtype)) for value in (1.0, 0.0))
    normed = g.emit("InstanceNormalization", [*grouped, ones, zeros], epsilon=eps)
    normed = g.emit("Reshape", [*normed, g.integers([0, *x.shape[1:]])])
    gamma, beta = (g.name(v.reshape(-1, *[1] * (x.dim() - 2))) for v in (weight, bias))
    return g.emit("Add", [*g.emit("Mul", [*normed, gamma]), beta])
