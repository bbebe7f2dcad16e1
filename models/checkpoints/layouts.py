"""Which public code wrote a state dict, told by its keys, and its keys in ours (guided-diffusion's)."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdps.models.checkpoints.report import CheckpointError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """`anchors` are keys every network of the layout has; `convert` renames; None where a config is needed too."""

    name: str
    anchors: tuple[str, ...]
    convert: Callable[[Tensors], Tensors] | None


@dataclass(frozen=True)
class Found:
    """A network inside a checkpoint: `wrapper` is the entry that held it, `tensors` are without `prefix`.

    `betas` is the buffer of that name of an object around the network, or of the network itself; None without one.
    """

    layout: Layout
    wrapper: str | None
    prefix: str
    tensors: Tensors
    ignored: int  # tensors that do not belong to the network
    arguments: Mapping[str, Any]
    betas: Tensor | None = None


# What objects around a network keep beside it (improved-diffusion's descendants, latent diffusion, Lightning modules):
# constants of the schedule, all of which follow from the betas.
_BUFFERS = frozenset(
    (
        "betas", "alphas", "alphas_cumprod", "alphas_cumprod_prev", "sqrt_alphas_cumprod", "logvar",
        "sqrt_one_minus_alphas_cumprod", "log_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod",
        "sqrt_recipm1_alphas_cumprod", "posterior_variance", "posterior_log_variance_clipped", "posterior_mean_coef1",
        "posterior_mean_coef2", "lvlb_weights", "loss_weight", "p2_loss_weight", "snr",
    )
)  # fmt: skip
# Networks averaged over training come before the last step's: they are what their authors sample with.
WRAPPERS = (
    "unet_model_state_dict",
    "ema",
    "ema_state_dict",
    "ema_model",
    "params_ema",
    "model_state_dict",
    "state_dict",
    "model",
    "network",
    "unet",
    "params",
)


_MAX_DEPTH = 4  # of wrappers in wrappers; a dictionary in a pickle may even hold itself


def find_network(loaded: Any) -> Found:
    """Find the denoiser in what a checkpoint file held; CheckpointError if there is none, or more than one."""
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"holds a {type(loaded).__name__}, not named tensors: give a state dict")
    wrapper: str | None = None
    state, arguments = loaded, _mapping(None)
    for _ in range(_MAX_DEPTH):
        inner = _wrapped(state)
        if inner is None:
            break
        wrapper = wrapper or inner
        arguments = arguments or _mapping(state.get("args"))
        state = state[inner]
    tensors = {_without_compile(str(key)): value for key, value in state.items() if isinstance(value, Tensor)}
    layout, prefix = _recognise(tensors)
    mine = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    mine = {key: value for key, value in mine.items() if key not in _BUFFERS}
    return Found(layout, wrapper, prefix, mine, len(tensors) - len(mine), arguments, _betas(tensors, prefix))


def _betas(tensors: Tensors, prefix: str) -> Tensor | None:
    """Return the betas of the network's own object, or of the nearest one around it."""
    owners = [key for key in tensors if key.rpartition(".")[2] == "betas" and prefix.startswith(key[: -len("betas")])]
    return tensors[max(owners, key=len)] if owners else None


def swap_embedding_halves(tensors: Tensors) -> Tensors:
    """Turn [sin, cos] to [cos, sin]: the columns that read the embedding's halves change places with them."""
    weight = tensors.get("time_embed.0.weight")
    if weight is None or weight.dim() != 2:  # reported, with its name, where the structure is inferred
        return tensors
    return tensors | {"time_embed.0.weight": torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)}


def _wrapped(state: Mapping[Any, Any], depth: int = 1) -> str | None:
    """Return the entry of `state` that is a dictionary of tensors itself, or holds one not far below."""
    for name in WRAPPERS:
        inner = state.get(name)
        if isinstance(inner, Mapping) and (
            any(isinstance(value, Tensor) for value in inner.values())
            or (depth < _MAX_DEPTH and _wrapped(inner, depth + 1) is not None)
        ):
            return name
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    return {}


def _without_compile(key: str) -> str:
    """Remove the `_orig_mod.` that `torch.compile` puts before the keys of a module it wrapped, at any depth."""
    return key.replace("_orig_mod.", "")


def _recognise(tensors: Tensors) -> tuple[Layout, str]:
    hits: dict[tuple[str, str], int] = {}
    for layout in LAYOUTS:
        for anchor in layout.anchors:
            for key in tensors:
                if key == anchor or key.endswith("." + anchor):
                    spot = (layout.name, key.removesuffix(anchor))
                    hits[spot] = hits.get(spot, 0) + 1
    # One anchor may be missing (the file is then damaged, and said to be); one alone proves nothing.
    spots = [spot for spot, count in hits.items() if count == max(hits.values()) and count > 1]
    averaged = [spot for spot in spots if "ema" in spot[1]]
    spots = averaged if len(averaged) == 1 else spots
    if not spots:
        example = ", ".join(list(tensors)[:3]) or "no tensors"
        raise CheckpointError(f"holds no denoiser of a known layout (it has {example}, ...): see the list of formats")
    if len(spots) > 1:
        places = " and ".join(repr(prefix) for _, prefix in spots)
        raise CheckpointError(f"holds several networks, under {places}: save the one to use alone and give that file")
    name, prefix = spots[0]
    return next(layout for layout in LAYOUTS if layout.name == name), prefix


_AUTHORS_RENAMES = (
    (r"^time_embedding\.1\.", "time_embed.0."),
    (r"^time_embedding\.3\.", "time_embed.2."),
    (r"^down\.", "input_blocks."),
    (r"^middle\.", "middle_block."),
    (r"^up\.", "output_blocks."),
    (r"\.embed_layers\.", ".emb_layers."),
    (r"\.to_qkv\.", ".qkv."),
    (r"\.downsample\.", ".op."),
)


def _from_authors(tensors: Tensors) -> Tensors:
    return swap_embedding_halves({_rename(key): value for key, value in tensors.items()})


def _rename(key: str) -> str:
    for pattern, replacement in _AUTHORS_RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


OPENAI = Layout("openai", ("time_embed.0.weight", "input_blocks.0.0.weight", "out.2.weight"), dict)
AUTHORS = Layout(
    "authors", ("time_embedding.1.weight", "down.0.0.weight", "middle.0.in_layers.0.weight"), _from_authors
)
DIFFUSERS = Layout("diffusers", ("time_embedding.linear_1.weight", "conv_in.weight", "conv_out.weight"), None)
LAYOUTS = (OPENAI, AUTHORS, DIFFUSERS)
