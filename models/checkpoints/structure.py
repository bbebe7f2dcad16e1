"""The structure of a U-Net, read from the shapes of its tensors (keys are guided-diffusion's)."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdps.models.checkpoints.report import CheckpointError, shown
from mdps.models.unet import UNet, UNetConfig


def infer_structure(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Infer the UNetConfig fields that shapes decide: all but head count, attention order, image size and constants.

    Raises CheckpointError where a tensor is missing or the blocks do not make a U-Net.
    """
    blocks = _indices(tensors, r"input_blocks\.([0-9]{1,4})\.")
    count = 1 + max(blocks, default=0)
    upsamplers = _indices(tensors, r"output_blocks\.([0-9]{1,4})\.[12]\.(?:conv|in_layers)\.")
    pooled = len(set(range(count)) - blocks)  # a level change without parameters leaves no key
    levels = 1 + max(len(upsamplers), pooled)
    per_level = count // levels
    if (
        count % levels
        or per_level < 2
        or 1 + max(_indices(tensors, r"output_blocks\.([0-9]{1,4})\."), default=0) != count
    ):
        raise CheckpointError("lacks whole blocks of its U-Net: it is cut off, or of another architecture")
    firsts = [f"input_blocks.{1 + level * per_level}" for level in range(levels)]
    widths = [_size(tensors, f"{first}.0.in_layers.2.weight", 0) for first in firsts]
    model_channels = _size(tensors, "time_embed.0.weight", 1)
    return {
        "in_channels": _size(tensors, "input_blocks.0.0.weight", 1),
        "out_channels": _size(tensors, "out.2.weight", 0),
        "model_channels": model_channels,
        "channel_mult": tuple(_multiplier(width, model_channels) for width in widths),
        "num_res_blocks": per_level - 1,
        "attention_factors": tuple(2**n for n, first in enumerate(firsts) if f"{first}.1.qkv.weight" in tensors),
        "scale_shift_norm": _size(tensors, "input_blocks.1.0.emb_layers.1.weight", 0) == 2 * widths[0],
        "resblock_updown": any(re.match(r"output_blocks\.\d+\.[12]\.in_layers\.", key) for key in tensors),
        "conv_resample": pooled == 0,
    }


def check_fit(config: UNetConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise a CheckpointError that names the first missing, surplus, misshapen or non-finite tensor."""
    _check_values(config)
    _check_divisions(config)
    with torch.device("meta"):
        wanted = UNet(config).state_dict()
    for key in wanted:
        if key not in tensors:
            raise CheckpointError(f"lacks the tensor {key}: it is cut off, or of another architecture")
    for key, tensor in tensors.items():
        if key not in wanted:
            raise CheckpointError(_surplus(key))
        if tensor.shape != wanted[key].shape:
            raise CheckpointError(
                f"has {key} of shape {list(tensor.shape)}, but {list(wanted[key].shape)} is needed: "
                "it is damaged, or of another architecture"
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"has values that are not numbers in {key}: training diverged, take an earlier one")


def _check_values(config: UNetConfig) -> None:
    """Check what no tensor shows and a description may have wrong."""
    possible = {
        "image_size": 1 <= config.image_size <= 2**14,
        "num_head_channels": config.num_head_channels is None or config.num_head_channels >= 1,
        "norm_groups": config.norm_groups >= 1,
        "norm_eps": 0 < config.norm_eps < 1,
        "frequency_shift": 0 <= config.frequency_shift <= 1,
        "dropout": 0 <= config.dropout < 1,
    }
    for name, is_possible in possible.items():
        if not is_possible:
            raise CheckpointError(f"is said to have {name} = {shown(getattr(config, name))}, which no network has")


def _check_divisions(config: UNetConfig) -> None:
    levels = len(config.channel_mult)
    if config.image_size % 2 ** (levels - 1):
        raise CheckpointError(
            f"has {levels} levels, so the image size must be a multiple of {2 ** (levels - 1)}, not "
            f"{config.image_size}: give another --image-size"
        )
    attended = {levels - 1} | {n for n in range(levels) if 2**n in config.attention_factors}
    widths = [config.width(level) for level in range(levels)]
    for width in widths:
        if width % config.norm_groups:
            raise CheckpointError(
                f"has {width} channels, which {config.norm_groups} normalisation groups do not divide: give "
                f"--norm-groups ({possible_groups(widths)})"
            )
    for width in (config.width(level) for level in attended):
        heads = config.heads(width)
        if heads < 1 or width % heads or (config.num_head_channels and width % config.num_head_channels):
            raise CheckpointError(
                f"has attention over {width} channels, which the given heads do not divide: "
                "give another --num-heads or --num-head-channels"
            )


def possible_groups(widths: Sequence[int]) -> str:
    """Name the numbers of normalisation groups that divide all these channels."""
    common = math.gcd(*widths)
    return " or ".join(str(n) for n in range(1, common + 1) if common % n == 0)


def _surplus(key: str) -> str:
    if key.startswith("label_emb."):
        return "is a class-conditional network, which is not supported: give an unconditional one"
    return f"has the tensor {key}, which the U-Net of this project does not: it is of another architecture"


def _multiplier(width: int, base: int) -> float:
    ratio = width / base
    if ratio.is_integer():
        return int(ratio)
    # int(ratio * base) must give the width back, whichever way the division was rounded.
    return ratio if int(ratio * base) == width else math.nextafter(ratio, math.inf)


def _indices(tensors: Mapping[str, Tensor], pattern: str) -> set[int]:
    return {int(found.group(1)) for key in tensors if (found := re.match(pattern, key))}


def _size(tensors: Mapping[str, Tensor], key: str, axis: int) -> int:
    if key not in tensors:
        raise CheckpointError(f"lacks the tensor {key}: it is cut off, or of another architecture")
    shape = tensors[key].shape
    if len(shape) <= axis or 0 in shape:
        raise CheckpointError(f"has {key} of shape {list(shape)}, which is no U-Net's: it is damaged")
    return int(shape[axis])
