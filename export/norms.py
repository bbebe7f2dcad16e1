"""Two ways to write group normalisation and its pullback; they compute the same, engines differ in which is fast.

`Grouped` reshapes the image to its groups and keeps the normalisation one node, which ONNX Runtime runs in one kernel.
`ByChannel` takes means of channels and averages them over groups in a small matrix product, so that the image keeps its
shape: OpenVINO then needs no change of layout between convolutions and fuses the arithmetic.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

Pullback = Callable[[Tensor], Tensor]
Linear = tuple[Tensor, Pullback]


class NormForm(Protocol):
    """Writes one group norm: x [B, C, ...], gamma and beta broadcastable over it -> (gamma x_hat + beta, pullback)."""

    def __call__(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor) -> Linear: ...


class Grouped:
    """The normalisation over [B, groups, n] as one node."""

    def __call__(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor) -> Linear:
        grouped = x.reshape(x.shape[0], norm.num_groups, -1)
        x_hat, _, rstd = torch.native_layer_norm(grouped, [grouped.shape[-1]], None, None, norm.eps)

        def pull(g: Tensor) -> Tensor:
            # gamma / std by channel first, which is small, so that one pass over g does both
            by_group = gamma.reshape(1, norm.num_groups, -1) * rstd
            g_hat = (g * by_group.reshape(-1, *_per_channel(x)[1:])).reshape(x_hat.shape)
            inner = (g_hat * x_hat).mean(dim=-1, keepdim=True)
            return (g_hat - x_hat * inner - g_hat.mean(dim=-1, keepdim=True)).reshape(g.shape)

        return x_hat.reshape(x.shape) * gamma + beta, pull


class ByChannel:
    """Means of channels, averaged over their group; no reshape of the image."""

    def __call__(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor) -> Linear:
        axes = tuple(range(2, x.dim()))
        share = torch.full((x.shape[1] // norm.num_groups,) * 2, norm.num_groups / x.shape[1])
        averaging = torch.kron(torch.eye(norm.num_groups), share).to(x.dtype)

        def group_mean(image: Tensor, weight: Tensor | float = 1.0) -> Tensor:
            means = (image.mean(dim=axes, keepdim=True) * weight).reshape(image.shape[0], image.shape[1])
            averaged: Tensor = means @ averaging
            return averaged.reshape(-1, *_per_channel(x)[1:])

        centred = x - group_mean(x)
        rstd = torch.rsqrt(group_mean(centred * centred) + norm.eps)
        factor = gamma * rstd

        def pull(g: Tensor) -> Tensor:
            inner = group_mean(g * centred, gamma) * (rstd * rstd * rstd)
            return g * factor - centred * inner - group_mean(g, gamma) * rstd

        return centred * factor + beta, pull


def _per_channel(x: Tensor) -> list[int]:
    """Shape of one value a channel, over x [B, C, ...]."""
    return [1, x.shape[1], *[1] * (x.dim() - 2)]
