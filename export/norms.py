"""Three ways to write group normalisation and its pullback; they compute the same, engines differ in which is fast.

`Grouped` reshapes the image to its groups and keeps the normalisation one node, which ONNX Runtime runs in one kernel.
`ByChannel` takes means of channels and averages these over groups in small products, so that the image keeps its shape:
OpenVINO then needs no change of layout between convolutions and fuses the arithmetic. `ByDepthwise` writes what scales
and shifts a channel as a depthwise convolution of one tap: MNN runs that in the layout of its convolutions, where plain
arithmetic of an image and one value a channel would leave it. Such a graph takes one image at a time.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pullback = Callable[[Tensor], Tensor]
Linear = tuple[Tensor, Pullback]
_FEW_CHANNELS = 128  # up to which one product of a channels x channels matrix costs less than two small ones
Norm = Callable[[nn.GroupNorm, Tensor, Tensor, Tensor], Linear]


class NormForm(Protocol):
    """Writes one group norm of x [B, C, ...], with gamma, beta and shift broadcastable over it."""

    heads_apart: bool
    """Whether attention's heads are products of their own and not a batch of products."""

    def __call__(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor) -> Linear:
        """Return h = gamma x_hat + beta, and its pullback."""

    def silu(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor, shift: Tensor | None = None) -> Linear:
        """Return h sigmoid(h) of the same h, or of that of x + shift, and its pullback to x."""


class Grouped:
    """The normalisation over [B, groups, n] as one node."""

    heads_apart = False

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

    def silu(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor, shift: Tensor | None = None) -> Linear:
        h, norm_pullback = self(norm, x if shift is None else x + shift, gamma, beta)
        s = torch.sigmoid(h)
        y = h * s
        # d silu / dh = s (1 + h (1 - s)) = s + y (1 - s); here, so that one image waits for the pullback and not two
        slope = s + y * (1 - s)
        return y, lambda g: norm_pullback(g * slope)


class ByChannel:
    """Means of channels, averaged over their group; no reshape of the image.

    Of each normalisation the pullback needs its input alone. What it computes again it writes in another way (with
    signs turned), so that an engine does not keep the forward pass's values for it: a chain of arithmetic is one kernel
    there, and reading one image is cheaper than storing and reading three.
    """

    heads_apart = False

    def __call__(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor) -> Linear:
        stats = _Statistics(norm, x, gamma)
        return (x - stats.mean) * stats.factor + beta, stats.pull

    def silu(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor, shift: Tensor | None = None) -> Linear:
        x = x if shift is None else x + shift
        stats = _Statistics(norm, x, gamma)
        h = (x - stats.mean) * stats.factor + beta

        def pull(g: Tensor) -> Tensor:
            opposite = (stats.mean - x) * stats.factor - beta  # -h
            q = torch.sigmoid(opposite)
            # d silu / dh = s (1 + h (1 - s)) with s = 1 - q
            return stats.pull(g * ((1 - q) * (1 - opposite * q)))

        return h * torch.sigmoid(h), pull


class _Statistics:
    """Of one group norm: the mean and gamma / std of each channel, and the pullback of the normalisation."""

    def __init__(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor) -> None:
        self.groups, self.x, self.gamma = norm.num_groups, x, gamma
        self.axes = tuple(range(2, x.dim()))
        self.mean = self._by_group(x.mean(dim=self.axes, keepdim=True))
        centred = x - self.mean
        self.rstd = torch.rsqrt(self._by_group((centred * centred).mean(dim=self.axes, keepdim=True)) + norm.eps)
        self.factor = gamma * self.rstd

    def _by_group(self, means: Tensor) -> Tensor:
        """Return [B, C, 1, ..] with every value the mean of its group: two small products, no reduction."""
        channels = means.shape[1]
        member = torch.kron(torch.eye(self.groups), torch.ones(1, channels // self.groups)).to(means.dtype)
        averaging = member.t() * (self.groups / channels)
        return (means.reshape(means.shape[0], channels) @ averaging @ member).reshape(means.shape)

    def pull(self, g: Tensor) -> Tensor:
        mean_g = g.mean(dim=self.axes, keepdim=True)
        slope = (g * self.x).mean(dim=self.axes, keepdim=True) - mean_g * self.mean
        inner = self._by_group(slope * self.gamma) * (self.rstd * self.rstd * self.rstd)
        shift = self.mean * inner - self._by_group(mean_g * self.gamma) * self.rstd
        return g * self.factor - self.x * inner + shift


class ByDepthwise:
    """Means by global pooling, scales and shifts as depthwise convolutions; for one image, B = 1.

    Of each normalisation the pullback keeps the centred input; x itself is not touched again. A shift of the channels
    goes into the one that centres.
    """

    heads_apart = True

    def __call__(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor) -> Linear:
        if x.dim() == 3:  # attention's [1, C, L]
            y, pullback = self(norm, x.unsqueeze(-1), gamma.unsqueeze(-1), beta.unsqueeze(-1))
            return y.reshape(x.shape), lambda g: pullback(g.unsqueeze(-1)).reshape(x.shape)
        centred = _Centred(norm, x, gamma)
        return _scaled(centred.values, centred.factor, beta), centred.pull

    def silu(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, beta: Tensor, shift: Tensor | None = None) -> Linear:
        # of -h, as the engine would take h sigmoid(h) for one operation and compute the sigmoid once more
        centred = _Centred(norm, x, -gamma, shift)
        n = _scaled(centred.values, centred.factor, -beta)
        q = torch.sigmoid(n)
        minus_s = q - 1
        y = n * minus_s
        slope = minus_s - y * q  # as in Grouped.silu, of n
        return y, lambda g: centred.pull(g * slope)


class _Centred:
    """Of one group norm: x + shift without the mean of its group, gamma / std of each channel, and the pullback.

    What is done to one value a channel costs an engine as much as a small image would, so signs and epsilon are in the
    constants that average.
    """

    def __init__(self, norm: nn.GroupNorm, x: Tensor, gamma: Tensor, shift: Tensor | None = None) -> None:
        self.groups, self.gamma = norm.num_groups, gamma
        means = F.adaptive_avg_pool2d(x, 1)
        minus_mean = self._by_group(means if shift is None else means + shift, -1.0)
        self.values = _scaled(x, torch.ones(x.shape[1]), minus_mean if shift is None else shift + minus_mean)
        self.variance = self._by_group(F.adaptive_avg_pool2d(self.values * self.values, 1), 1.0, norm.eps)
        self.std = torch.sqrt(self.variance)
        self.factor = gamma / self.std

    def pull(self, g: Tensor) -> Tensor:
        minus_slope = self._by_group(F.adaptive_avg_pool2d(g * self.values, 1) * self.gamma, -1.0)
        minus_mean = self._by_group(F.adaptive_avg_pool2d(g, 1) * self.gamma, -1.0)
        inner = minus_slope / (self.variance * self.std)
        return _scaled(g, self.factor, minus_mean / self.std) + _scaled(self.values, inner)

    def _by_group(self, means: Tensor, factor: float, added: float = 0.0) -> Tensor:
        """Return [1, C, 1, 1] with every value the mean of its group, times `factor`, and something added."""
        member = torch.kron(torch.eye(self.groups), torch.ones(means.shape[1] // self.groups, 1)).to(means.dtype)
        averaging = member.t() * (factor * self.groups / len(member))
        bias = torch.full((len(member),), added) if added else None
        if len(member) <= _FEW_CHANNELS:
            return F.conv2d(means, (member @ averaging)[:, :, None, None], bias)
        return F.conv2d(F.conv2d(means, averaging[:, :, None, None]), member[:, :, None, None], bias)


def _scaled(x: Tensor, factor: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return x [1, C, H, W] * factor + shift, both with one value a channel."""
    channels = x.shape[1]
    weight = factor.reshape(channels, 1, 1, 1)
    return F.conv2d(x, weight, None if shift is None else shift.reshape(channels), groups=channels)


def _per_channel(x: Tensor) -> list[int]:
    """Return the shape of one value a channel, over x [B, C, ...]."""
    return [1, x.shape[1], *[1] * (x.dim() - 2)]
