"""Half-precision products as the matrix units of a GPU compute them, on any processor."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS = {"conv1d", "conv2d", "conv_transpose2d", "matmul"}


class FloatProducts(TorchFunctionMode):
    """Convolutions and matrix products of half-precision tensors are summed in float32 and rounded once.

    On processors without half-precision arithmetic this is also hundreds of times faster than torch's own kernels.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in PRODUCTS or args[0].dtype == torch.float32:
            return func(*args, **kwargs)
        named = {key: _wide(value) for key, value in kwargs.items()}
        return func(*map(_wide, args), **named).to(args[0].dtype)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
