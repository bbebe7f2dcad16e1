"""The ADM U-Net in all variants the supported checkpoints need.

Dhariwal & Nichol, "Diffusion Models Beat GANs on Image Synthesis", 2021.

Module names, and so state-dict keys, are those of guided-diffusion; the time embedding is [cos, sin]. Checkpoint
loaders convert other namings to these.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mdps.models.unet_config import UNetConfig as UNetConfig


def timestep_embedding(timestep: Tensor, width: int, shift: float = 0.0) -> Tensor:
    """Return sinusoids [cos, sin] of the timestep: [] or [B] -> [1 or B, width] (Vaswani et al., 2017)."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timestep.device) / (half - shift)
    angles = timestep.float().reshape(-1, 1) * torch.exp(-math.log(10000) * exponents)
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=1)


class Upsample(nn.Module):
    """Nearest, factor two; then a 3 x 3 convolution if `conv`."""

    def __init__(self, channels: int, conv: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if conv else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        out: Tensor = x if self.conv is None else self.conv(x)
        return out


class Downsample(nn.Module):
    """Factor two: a strided 3 x 3 convolution if `conv`, else the mean of 2 x 2 pixels."""

    def __init__(self, channels: int, conv: bool, asymmetric: bool = False) -> None:
        super().__init__()
        self.asymmetric = asymmetric
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=0 if asymmetric else 1) if conv else None

    def forward(self, x: Tensor) -> Tensor:
        if self.op is None:
            return F.avg_pool2d(x, 2)
        out: Tensor = self.op(F.pad(x, (0, 1, 0, 1)) if self.asymmetric else x)
        return out


class ResBlock(nn.Module):
    """Norm, SiLU, (change of resolution), convolution, time, norm, SiLU, convolution, plus the skip."""

    def __init__(self, config: UNetConfig, channels: int, out_channels: int, resample: nn.Module | None = None) -> None:
        super().__init__()
        emb_width = 4 * config.model_channels
        self.scale_shift_norm = config.scale_shift_norm
        self.resample = resample
        self.in_layers = nn.Sequential(
            _norm(config, channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(
            nn.SiLU(), nn.Linear(emb_width, 2 * out_channels if self.scale_shift_norm else out_channels)
        )
        self.out_layers = nn.Sequential(
            _norm(config, out_channels),
            nn.SiLU(),
            nn.Dropout(config.dropout),
            nn.Conv2d(out_channels, out_channels, 3, padding=1),
        )
        same = channels == out_channels
        self.skip_connection: nn.Module = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers[:2](x)
        if self.resample is not None:
            h, x = self.resample(h), self.resample(x)
        h = self.in_layers[2](h)
        time = self.emb_layers(emb)[:, :, None, None]
        if self.scale_shift_norm:
            scale, shift = time.chunk(2, dim=1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + time)
        out: Tensor = self.skip_connection(x) + h
        return out


class AttentionBlock(nn.Module):
    """Self-attention over all pixels. The legacy order splits heads before q, k, v; the new one after."""

    def __init__(self, config: UNetConfig, channels: int) -> None:
        super().__init__()
        self.heads = config.heads(channels)
        self.new_order = config.new_attention_order
        self.norm = _norm(config, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        flat = x.reshape(batch, channels, height * width)
        q, k, v = split_heads(self.qkv(self.norm(flat)), self.heads, self.new_order)
        scale = (channels // self.heads) ** -0.5
        weights = torch.softmax((q.transpose(-1, -2) @ k) * scale, dim=-1)
        attended = (v @ weights.transpose(-1, -2)).reshape(flat.shape)
        out: Tensor = (flat + self.proj_out(attended)).reshape(x.shape)
        return out


def split_heads(qkv: Tensor, heads: int, new_order: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split [B, 3C, L] into q, k, v, each [B, heads, C / heads, L]."""
    batch, triple, length = qkv.shape
    width = triple // (3 * heads)
    if new_order:
        q, k, v = (part.reshape(batch, heads, width, length) for part in qkv.chunk(3, dim=1))
    else:
        q, k, v = qkv.reshape(batch, heads, 3 * width, length).chunk(3, dim=2)
    return q, k, v


class TimestepSequential(nn.Sequential):
    """Runs its blocks in order and hands the time embedding to those that take it."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:  # type: ignore[override]
        for block in self:
            x = block(x, emb) if isinstance(block, ResBlock) else block(x)
        return x


class UNet(nn.Module):
    """eps-network: x_t [B, in, H, W], timestep [] or [B] -> [B, out, H, W]. H and W are multiples of 2^(levels - 1)."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        emb_width = 4 * config.model_channels
        self.time_embed = nn.Sequential(
            nn.Linear(config.model_channels, emb_width), nn.SiLU(), nn.Linear(emb_width, emb_width)
        )
        widths = [config.width(0)]
        first = TimestepSequential(nn.Conv2d(config.in_channels, widths[0], 3, padding=1))
        self.input_blocks = nn.ModuleList([first, *_encoder(config, widths)])
        middle = widths[-1]
        self.middle_block = TimestepSequential(
            ResBlock(config, middle, middle), AttentionBlock(config, middle), ResBlock(config, middle, middle)
        )
        self.output_blocks = nn.ModuleList(_decoder(config, middle, widths))
        last = config.width(0)
        self.out = nn.Sequential(_norm(config, last), nn.SiLU(), nn.Conv2d(last, config.out_channels, 3, padding=1))

    def embed(self, timestep: Tensor) -> Tensor:
        """Return the time embedding: [] or [B] -> [1 or B, 4 model_channels]."""
        weight: Tensor = self.time_embed[0].get_parameter("weight")
        sinusoids = timestep_embedding(timestep, self.config.model_channels, self.config.frequency_shift)
        embedding: Tensor = self.time_embed(sinusoids.to(weight.dtype))
        return embedding

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        emb = self.embed(timestep)
        skips: list[Tensor] = []
        for block in self.input_blocks:
            x = block(x, emb)
            skips.append(x)
        x = self.middle_block(x, emb)
        for block in self.output_blocks:
            x = block(torch.cat([x, skips.pop()], dim=1), emb)
        output: Tensor = self.out(x)
        return output


def _norm(config: UNetConfig, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(config.norm_groups, channels, eps=config.norm_eps)


def _encoder(config: UNetConfig, widths: list[int]) -> Iterator[TimestepSequential]:
    """Yield the blocks after the first convolution and append the width of each one's output to `widths`."""
    levels = len(config.channel_mult)
    for level in range(levels):
        for _ in range(config.num_res_blocks):
            blocks: list[nn.Module] = [ResBlock(config, widths[-1], config.width(level))]
            if 2**level in config.attention_factors:
                blocks.append(AttentionBlock(config, config.width(level)))
            widths.append(config.width(level))
            yield TimestepSequential(*blocks)
        if level < levels - 1:
            widths.append(widths[-1])
            yield TimestepSequential(_downsampler(config, widths[-1]))


def _decoder(config: UNetConfig, channels: int, widths: list[int]) -> Iterator[TimestepSequential]:
    skips = list(widths)
    for level in reversed(range(len(config.channel_mult))):
        for index in range(config.num_res_blocks + 1):
            blocks: list[nn.Module] = [ResBlock(config, channels + skips.pop(), config.width(level))]
            channels = config.width(level)
            if 2**level in config.attention_factors:
                blocks.append(AttentionBlock(config, channels))
            if level and index == config.num_res_blocks:
                blocks.append(_upsampler(config, channels))
            yield TimestepSequential(*blocks)


def _downsampler(config: UNetConfig, channels: int) -> nn.Module:
    if config.resblock_updown:
        return ResBlock(config, channels, channels, Downsample(channels, conv=False))
    return Downsample(channels, config.conv_resample, config.asymmetric_padding)


def _upsampler(config: UNetConfig, channels: int) -> nn.Module:
    if config.resblock_updown:
        return ResBlock(config, channels, channels, Upsample(channels, conv=False))
    return Upsample(channels, config.conv_resample)
