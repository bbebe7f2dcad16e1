"""The state dict of a diffusers `UNet2DModel` under guided-diffusion's keys."""

import re

import torch

from mdps.models.checkpoints.errors import CheckpointError, shown
from mdps.models.checkpoints.layouts import Tensors, swap_embedding_halves

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_ATTENTION = {"group_norm": "norm", "to_out.0": "proj_out", "proj_attn": "proj_out", "qkv": "qkv"}
_TOP = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
# Names of the projections since 2023, and before.
_QKV = (("to_q", "to_k", "to_v"), ("query", "key", "value"))


def convert(tensors: Tensors, layers: int, flip_sin_to_cos: bool) -> Tensors:
    """Rename, join the three projections of each attention, and turn the embedding to [cos, sin].

    `layers` is `layers_per_block`. A key without a counterpart keeps its name, and is refused later by that name.
    """
    attends = {
        int(found.group(1)) for key in tensors if (found := re.match(r"up_blocks\.([0-9]{1,4})\.attentions\.", key))
    }
    converted: Tensors = {}
    for key, tensor in _join_projections(tensors).items():
        module, _, kind = key.rpartition(".")
        ours = _TOP.get(module) or _ours(module, layers, attends)
        linear = ours.endswith((".proj_out", ".qkv")) and tensor.dim() == 2
        converted[f"{ours}.{kind}"] = tensor[:, :, None] if linear else tensor
    return converted if flip_sin_to_cos else swap_embedding_halves(converted)


def _join_projections(tensors: Tensors) -> Tensors:
    joined: Tensors = {}
    for key, tensor in tensors.items():
        for names in _QKV:
            marked = [f".{name}." for name in names]
            if marked[0] in key:
                parts = [key.replace(marked[0], mark) for mark in marked]
                if missing := [part for part in parts if part not in tensors]:
                    raise CheckpointError(f"lacks the tensor {missing[0]}: it is cut off, or of another architecture")
                try:
                    joined[key.replace(marked[0], ".qkv.")] = torch.cat([tensors[part] for part in parts])
                except RuntimeError:
                    raise CheckpointError(
                        f"has {shown(key)} and its siblings of unlike shapes: it is damaged"
                    ) from None
                break
            if any(mark in key for mark in marked):
                break
        else:
            joined[key] = tensor
    return joined


def _ours(module: str, layers: int, attends: set[int]) -> str:
    """Return where a module of the three kinds of blocks stands in ours; its own name if it is no such module."""
    found = re.fullmatch(
        r"(?:(down|up)_blocks\.([0-9]{1,4})|mid_block)\.(resnets|attentions|\w+samplers)\.([0-9]{1,4})\.(.+)", module
    )
    if found is None:
        return module
    side, level, kind, index, rest = found.groups()
    leaf = _RESNET.get(rest) or _ATTENTION.get(rest)
    if kind.endswith("samplers"):
        leaf = leaf or {"downsamplers": "op", "upsamplers": "conv"}.get(kind)
    slot = {"resnets": 0, "attentions": 1, "downsamplers": 0}.get(kind, 2 if level and int(level) in attends else 1)
    if side is None:
        return f"middle_block.{2 * int(index) if kind == 'resnets' else 1}.{leaf}"
    if side == "down":
        block = int(level) * (layers + 1) + (layers + 1 if kind == "downsamplers" else 1 + int(index))
        return f"input_blocks.{block}.{slot}.{leaf}"
    block = int(level) * (layers + 1) + (layers if kind == "upsamplers" else int(index))
    return f"output_blocks.{block}.{slot}.{leaf}"
