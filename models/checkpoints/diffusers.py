"""A diffusers `UNet2DModel`: config.json and weights in a folder, or in `unet/` of a pipeline's folder.

Nothing of diffusers is imported. Constructor arguments that change what the network computes and have no counterpart
here are refused by name.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mdps.models.checkpoints.layouts import Tensors, swap_embedding_halves
from mdps.models.checkpoints.report import CheckpointError, shown
from mdps.models.checkpoints.statements import Statement, parse_prediction
from mdps.runtime.errors import UsageError
from mdps.runtime.schedule import NoiseSchedule

_WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")

# The defaults of UNet2DModel's constructor: a config.json of an older version leaves out what was added since.
_DEFAULTS: dict[str, Any] = {
    "sample_size": None,
    "in_channels": 3,
    "out_channels": 3,
    "center_input_sample": False,
    "time_embedding_type": "positional",
    "time_embedding_dim": None,
    "freq_shift": 0,
    "flip_sin_to_cos": True,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"],
    "mid_block_type": "UNetMidBlock2D",
    "up_block_types": ["AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [224, 448, 672, 896],
    "layers_per_block": 2,
    "mid_block_scale_factor": 1,
    "downsample_padding": 1,
    "downsample_type": "conv",
    "upsample_type": "conv",
    "dropout": 0.0,
    "act_fn": "silu",
    "attention_head_dim": 8,
    "norm_num_groups": 32,
    "attn_norm_num_groups": None,
    "norm_eps": 1e-5,
    "resnet_time_scale_shift": "default",
    "add_attention": True,
    "class_embed_type": None,
    "num_class_embeds": None,
    "num_train_timesteps": None,
}
_ONLY: dict[str, tuple[Any, ...]] = {
    "center_input_sample": (False,),
    "time_embedding_type": ("positional",),
    "mid_block_type": ("UNetMidBlock2D",),
    "mid_block_scale_factor": (1,),
    "downsample_padding": (0, 1),
    "act_fn": ("silu", "swish"),
    "resnet_time_scale_shift": ("default", "scale_shift"),
    "add_attention": (True,),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def _is_list(value: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(kind(item) for item in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "sample_size": lambda value: value is None or _is_count(value) or _is_list(value, _is_count),
    "block_out_channels": lambda value: _is_list(value, _is_count),
    "down_block_types": lambda value: _is_list(value, _is_text),
    "up_block_types": lambda value: _is_list(value, _is_text),
    "layers_per_block": _is_count,
    "norm_num_groups": _is_count,
    "attention_head_dim": lambda value: value is None or _is_count(value),
    "norm_eps": _is_number,
    "freq_shift": _is_number,
    "dropout": _is_number,
    "flip_sin_to_cos": lambda value: isinstance(value, bool),
}
_DOWN = {"DownBlock2D": (False, False), "AttnDownBlock2D": (True, None), "ResnetDownsampleBlock2D": (False, True)}
_UP = {"UpBlock2D": (False, False), "AttnUpBlock2D": (True, None), "ResnetUpsampleBlock2D": (False, True)}

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


def find_folder(path: Path) -> Path:
    """Return the folder with config.json: `path` or its `unet/`; CheckpointError without one."""
    for folder in (path, path / "unet"):
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError("is a folder without config.json: give a checkpoint file, or a folder saved by diffusers")


def weights_file(folder: Path) -> Path:
    """Return the file of weights beside config.json."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"has no weights: {_WEIGHTS[0]} or {_WEIGHTS[1]} should stand beside its config.json")


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json with the constructor's defaults; CheckpointError for variants this project does not have."""
    stated = _json(folder / "config.json")
    if stated.get("_class_name", "UNet2DModel") != "UNet2DModel":
        raise CheckpointError(f"is a diffusers {shown(stated['_class_name'])}; only UNet2DModel is supported")
    config = _DEFAULTS | stated
    unknown = {key for key in stated if not key.startswith("_")} - set(_DEFAULTS)
    for name in sorted(unknown):
        raise CheckpointError(f"has {shown(name)} in its config.json, which no supported UNet2DModel has")
    for name, allowed in _ONLY.items():
        if config[name] not in allowed:
            raise CheckpointError(f"has {name} = {shown(config[name])} in its config.json, which is not supported")
    for name, is_right in _TYPES.items():
        if not is_right(config[name]):
            raise CheckpointError(f"has {name} = {shown(config[name])} in its config.json, which is no value for it")
    if config["time_embedding_dim"] not in (None, 4 * config["block_out_channels"][0]):
        raise CheckpointError(f"has time_embedding_dim = {shown(config['time_embedding_dim'])}, which is not supported")
    if config["attn_norm_num_groups"] not in (None, config["norm_num_groups"]):
        raise CheckpointError("has an attn_norm_num_groups that differs from norm_num_groups, which is not supported")
    if config["resnet_time_scale_shift"] == "scale_shift" and config["attn_norm_num_groups"] is None:
        raise CheckpointError(
            "has scale_shift and no attn_norm_num_groups, so its middle attention is not normalised: not supported"
        )
    return config


def describe(config: dict[str, Any], folder: Path) -> Statement:
    """Read config.json and a scheduler's config beside it."""
    attention, resampling = _levels(config)
    widths = config["block_out_channels"]
    size = config["sample_size"]
    head = config["attention_head_dim"]
    network = {
        "attention_factors": tuple(2**level for level, attends in enumerate(attention) if attends),
        "num_res_blocks": config["layers_per_block"],
        "model_channels": widths[0],
        "resblock_updown": resampling,
        "scale_shift_norm": config["resnet_time_scale_shift"] == "scale_shift",
        "new_attention_order": True,
        "norm_groups": config["norm_num_groups"],
        "norm_eps": float(config["norm_eps"]),
        "frequency_shift": float(config["freq_shift"]),
        "asymmetric_padding": config["downsample_padding"] == 0,
        "dropout": float(config["dropout"]),
        # Without a head width diffusers makes one head of each block's whole width.
        **({"num_heads": 1} if head is None else {"num_head_channels": head}),
    }
    if isinstance(size, list) and len(set(size)) == 1:
        size = size[0]
    if isinstance(size, int):
        network["image_size"] = size
    schedule = _scheduler(folder)
    return Statement("config.json", network, *(schedule or (None, None)))


def _levels(config: dict[str, Any]) -> tuple[list[bool], bool]:
    """Return which levels attend, and whether residual blocks change the resolution, if all blocks agree on it."""
    down, up = config["down_block_types"], config["up_block_types"]
    for names, known, way in ((down, _DOWN, "down"), (up, _UP, "up")):
        for name in names:
            if name not in known:
                raise CheckpointError(f"has blocks of type {shown(name)} on its way {way}, which is not supported")
    if not len(down) == len(up) == len(config["block_out_channels"]):
        raise CheckpointError("has a config.json whose lists of blocks and channels differ in length: it is damaged")
    attention = [_DOWN[name][0] for name in down]
    if attention != [_UP[name][0] for name in reversed(up)]:
        raise CheckpointError("attends at different levels on its way down and up, which is not supported")
    # The last down block and the last up block change no resolution, so their kind does not matter.
    kinds = {_resnet(_DOWN[name][1], config["downsample_type"]) for name in down[:-1]}
    kinds |= {_resnet(_UP[name][1], config["upsample_type"]) for name in up[:-1]}
    if len(kinds) > 1:
        raise CheckpointError("changes resolution by convolutions here and residual blocks there: not supported")
    return attention, kinds == {True}


def _resnet(fixed: bool | None, chosen: str) -> bool:
    if fixed is None and chosen not in ("conv", "resnet"):
        raise CheckpointError(f"changes resolution by {shown(chosen)}, which is not supported")
    return chosen == "resnet" if fixed is None else fixed


def _scheduler(folder: Path) -> tuple[NoiseSchedule, Any] | None:
    """Return the noise schedule and prediction of the scheduler saved beside the network, if one was."""
    for place in (folder, folder / "scheduler", folder.parent / "scheduler"):
        if (place / "scheduler_config.json").is_file():
            config = _json(place / "scheduler_config.json")
            return _betas(config), parse_prediction(config.get("prediction_type", "epsilon"), "scheduler_config.json")
    return None


def _betas(config: dict[str, Any]) -> NoiseSchedule:
    kind, steps = config.get("beta_schedule", "linear"), config.get("num_train_timesteps", 1000)
    if config.get("rescale_betas_zero_snr"):
        raise CheckpointError("has a scheduler with rescale_betas_zero_snr, which is not supported")
    try:
        if config.get("trained_betas") is not None:
            return NoiseSchedule(tuple(float(beta) for beta in config["trained_betas"]))
        ends = (steps, config.get("beta_start", 1e-4), config.get("beta_end", 0.02))
        if kind == "linear":
            return NoiseSchedule.linear(*ends)
        if kind == "scaled_linear":
            return NoiseSchedule.scaled_linear(*ends)
        if kind == "squaredcos_cap_v2":
            return NoiseSchedule.cosine(steps)
    except (UsageError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"has a scheduler_config.json with wrong betas ({error}): mend it") from None
    raise CheckpointError(f"has a scheduler with beta_schedule = {shown(kind)}, which is not supported")


def _json(path: Path) -> dict[str, Any]:
    try:
        obj = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"has a {path.name} that cannot be read as JSON ({error})") from None
    if not isinstance(obj, dict):
        raise CheckpointError(f"has a {path.name} that is no JSON object")
    return obj


def convert(tensors: Tensors, layers: int, flip_sin_to_cos: bool) -> Tensors:
    """Put a state dict under our keys: join the projections of each attention, turn the embedding to [cos, sin].

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
