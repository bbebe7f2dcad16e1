"""A path in any of the supported formats -> tensors under our keys, and what is said about them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mdps.models.checkpoints import diffusers, own
from mdps.models.checkpoints.files import check_plain, read_file
from mdps.models.checkpoints.layouts import AUTHORS, Found, Tensors, find_network
from mdps.models.checkpoints.report import CheckpointError, shown
from mdps.models.checkpoints.statements import Statement, network_fields, read_sidecar
from mdps.runtime.errors import UsageError
from mdps.runtime.schedule import NoiseSchedule

# What the public code of each layout does unless told otherwise.
_AUTHORS_PUBLISHED = Statement(
    "published defaults",
    {"image_size": 256, "num_heads": 4, "new_attention_order": False, "norm_groups": 32},
    NoiseSchedule.linear(),
    "eps",
)
_OPENAI_PUBLISHED = Statement(
    "published defaults", {"new_attention_order": False, "norm_groups": 32}, NoiseSchedule.linear(), "eps"
)
_DIFFUSERS_PUBLISHED = Statement("published defaults", {}, NoiseSchedule.linear(), "eps")

_MOST_BETAS = 1_000_000


@dataclass(frozen=True)
class Source:
    """A checkpoint under our keys. `statements` go from strongest to weakest; `published` is what is assumed."""

    format: str
    weights: Path
    tensors: Tensors
    statements: list[Statement]
    published: Statement
    ignored: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def open_source(path: Path) -> Source:
    """Recognise and read a checkpoint; CheckpointError as `load_denoiser`."""
    if path.is_dir():
        folder = diffusers.find_folder(path)
        return _diffusers(folder, diffusers.weights_file(folder))
    loaded, metadata = read_file(path)
    if own.METADATA_KEY in metadata:  # its header says everything, so a JSON beside it is not about that
        check_plain(loaded, path)
        statement, extra = own.read_description(metadata)
        return Source("mdps", path, loaded, [statement], Statement("defaults"), extra=extra)
    found = find_network(loaded)
    check_plain(found.tensors | ({} if found.betas is None else {"betas": found.betas}), path)
    if found.layout.convert is None:
        if not (path.parent / "config.json").is_file():
            raise CheckpointError(
                "is a diffusers network without its config.json: give the folder that holds both, as diffusers saves it"
            )
        return _diffusers(path.parent, path)
    told = (read_sidecar(path), _from_buffer(found.betas), _from_arguments(found.arguments))
    statements = [statement for statement in told if statement is not None]
    published = _AUTHORS_PUBLISHED if found.layout is AUTHORS else _OPENAI_PUBLISHED
    return Source(_format(found), path, found.layout.convert(found.tensors), statements, published, found.ignored)


def _diffusers(folder: Path, weights: Path) -> Source:
    config = diffusers.read_config(folder)
    found = find_network(read_file(weights)[0])
    check_plain(found.tensors, weights)
    if found.layout.name != "diffusers":
        raise CheckpointError(f"has a config.json of diffusers beside weights of the layout {found.layout.name}")
    tensors = diffusers.convert(found.tensors, config["layers_per_block"], config["flip_sin_to_cos"])
    return Source(
        "diffusers", weights, tensors, [diffusers.describe(config, folder)], _DIFFUSERS_PUBLISHED, found.ignored
    )


def _format(found: Found) -> str:
    """Return the name of the code that writes this layout in this wrapper."""
    if found.layout is AUTHORS:
        named = {"unet_model_state_dict": "diffusionad", "ema": "anoddpm", "model_state_dict": "anoddpm"}
        if found.wrapper in named:
            return named[found.wrapper]
    return f"{found.layout.name} in lightning" if found.wrapper == "state_dict" else found.layout.name


def _from_buffer(betas: Tensor | None) -> Statement | None:
    """Read the schedule that a diffusion object kept as a buffer beside its network."""
    if betas is None:
        return None
    wrong = "has a buffer 'betas' that is no noise schedule"
    if betas.dim() != 1 or len(betas) > _MOST_BETAS:
        raise CheckpointError(f"{wrong}, with the shape {list(betas.shape)}: remove it")
    try:
        return Statement("file", schedule=_unrounded(tuple(betas.double().tolist())))
    except UsageError as error:
        raise CheckpointError(f"{wrong} ({error}): it is damaged") from None


def _unrounded(betas: tuple[float, ...]) -> NoiseSchedule:
    """Return the known schedule that gives these betas in float32, as they are kept, or they themselves."""
    found, wanted = NoiseSchedule(betas), np.asarray(betas, np.float32)
    start, end = (float(f"{beta:.6g}") for beta in (betas[0], betas[-1]))
    known = (
        NoiseSchedule.linear(len(betas), start, end),
        NoiseSchedule.scaled_linear(len(betas), start, end),
        NoiseSchedule.cosine(len(betas)),
    )
    return next((one for one in known if np.array_equal(np.asarray(one.betas, np.float32), wanted)), found)


def _from_arguments(arguments: Mapping[str, Any]) -> Statement | None:
    """Read what AnoDDPM and DiffusionAD keep beside the weights; the structure itself is read from the tensors."""
    if not arguments:
        return None
    names = ("img_size", "num_heads", "num_head_channels", "n_heads", "n_head_channels")
    said = {name: arguments[name] for name in names if name in arguments}
    if not all(value is None or isinstance(value, int | float | str | list | tuple) for value in said.values()):
        raise CheckpointError("has a dictionary of arguments that holds more than numbers and texts: it is damaged")
    return Statement("file", network_fields(said, "dictionary of arguments"), _schedule(arguments))


def _schedule(arguments: Mapping[str, Any]) -> NoiseSchedule | None:
    kind, told = arguments.get("beta_schedule"), arguments.get("T")
    if not isinstance(kind, str | None) or not (isinstance(told, int | None) or told == ""):
        raise CheckpointError("was trained with arguments that give no noise schedule: it is damaged")
    steps = told or 1000
    if kind in (None, ""):
        return None
    try:
        if kind == "linear":  # both codes stretch the betas so that any number of steps ends in the same noise
            return NoiseSchedule.linear(steps, 0.1 / steps, 20 / steps)
        if kind == "cosine":
            return NoiseSchedule.cosine(steps)
    except (UsageError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"was trained with arguments that give no noise schedule ({error})") from None
    raise CheckpointError(
        f"was trained with beta_schedule = {shown(kind)}, which is not supported: use linear or cosine"
    )
