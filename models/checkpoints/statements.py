"""Statements about a network beside its tensors: by the file, a sidecar, the user, or what its code publishes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from mdps.models.checkpoints.report import CheckpointError, shown
from mdps.models.unet_config import UNetConfig
from mdps.runtime.errors import UsageError, require
from mdps.runtime.option import Option, check_ranges
from mdps.runtime.records import decode
from mdps.runtime.schedule import NoiseSchedule

Prediction = Literal["eps", "v", "x0"]
SCHEDULES: dict[str, Callable[[], NoiseSchedule]] = {
    "linear": NoiseSchedule.linear,
    "scaled_linear": NoiseSchedule.scaled_linear,
    "cosine": NoiseSchedule.cosine,
}


@dataclass(frozen=True)
class Statement:
    """UNetConfig fields, schedule, prediction and preprocessing as `origin` states them; the rest is absent."""

    origin: str
    network: dict[str, Any] = field(default_factory=dict)
    schedule: NoiseSchedule | None = None
    prediction: Prediction | None = None
    preprocessing: dict[str, Any] | None = None


NETWORK_OPTIONS = ("image_size", "num_heads", "num_head_channels", "new_attention_order", "norm_groups")
"""The fields of `CheckpointOptions` that are fields of `UNetConfig` too."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Facts about a checkpoint that the user states; they win over the file and its sidecar, None states nothing.

    `image_size` is the side of the training images; attention heads are so many (`num_heads`) or of so many channels
    (`num_head_channels`); `norm_groups` is the number of groups of each group norm. UsageError for numbers below 1, for
    both kinds of heads, or for another `prediction`.
    """

    image_size: Annotated[int | None, Option("Side of the images the network was trained on.", low=8)] = None
    num_heads: Annotated[int | None, Option("Attention heads, where the checkpoint does not say.", low=1)] = None
    num_head_channels: Annotated[int | None, Option("Channels of a head, instead of --num-heads.", low=1)] = None
    new_attention_order: Annotated[
        bool | None,
        Option("Order of queries, keys, values.", flag="--new-attention-order/--legacy-attention-order", seldom=True),
    ] = None
    schedule: Annotated[NoiseSchedule | None, Option("Noise schedule of training.", choices=SCHEDULES)] = None
    prediction: Annotated[Prediction | None, Option("What the network predicts.")] = None
    norm_groups: Annotated[int | None, Option("Groups of each group norm, usually 32.", low=1)] = None

    def __post_init__(self) -> None:
        check_ranges(self)
        both = self.num_heads is not None and self.num_head_channels is not None
        require(not both, "give --num-heads or --num-head-channels, not both")
        require(
            self.prediction is None or self.prediction in get_args(Prediction),
            f"--prediction must be one of {', '.join(get_args(Prediction))}, not {self.prediction}",
        )

    def statement(self) -> Statement:
        """Return the same as a Statement."""
        network = {name: getattr(self, name) for name in NETWORK_OPTIONS if getattr(self, name) is not None}
        return Statement("options", network, self.schedule, self.prediction)


def read_sidecar(path: Path) -> Statement | None:
    """Read the JSON beside a checkpoint (`name.ext.json`, else `name.json`), or None if there is none."""
    for sidecar in (path.with_name(path.name + ".json"), path.with_suffix(".json")):
        if sidecar.is_file():
            try:
                return parse_description(json.loads(sidecar.read_text(encoding="utf-8-sig")), f"sidecar {sidecar.name}")
            except (ValueError, OSError, RecursionError) as error:
                raise CheckpointError(f"has a sidecar {sidecar.name} that is no JSON ({error}): mend it") from None
    return None


def parse_description(obj: Any, origin: str) -> Statement:
    """Build a Statement from {"network", "schedule", "prediction", "preprocessing", ...}; other keys are for people."""
    if not isinstance(obj, dict) or not obj.keys() & {"network", "schedule", "prediction", "preprocessing"}:
        raise CheckpointError(
            f'has a {origin} that describes no denoiser: it needs "network", "schedule" or "prediction"; '
            "mend it, or rename it if it belongs to something else"
        )
    try:
        schedule = NoiseSchedule.from_json(obj["schedule"]) if "schedule" in obj else None
    except UsageError as error:
        raise CheckpointError(f"has a {origin} with a wrong schedule: {error}") from None
    preprocessing = obj.get("preprocessing")
    if preprocessing is not None and not isinstance(preprocessing, dict):
        raise CheckpointError(f"has a {origin} whose preprocessing is no object: give names and values")
    return Statement(
        origin,
        network_fields(obj.get("network", {}), origin),
        schedule,
        parse_prediction(obj["prediction"], origin) if "prediction" in obj else None,
        preprocessing,
    )


def parse_prediction(name: Any, origin: str) -> Prediction:
    """Return our name for what a network predicts, from ours or diffusers' names."""
    theirs: dict[str, Prediction] = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}
    names = theirs | {ours: ours for ours in theirs.values()}
    if not isinstance(name, str) or name not in names:
        raise CheckpointError(f"has a {origin} with prediction {shown(name)}: use one of eps, v, x0")
    return names[name]


_ALIASES = {
    "img_size": "image_size",
    "num_channels": "model_channels",
    "base_channels": "model_channels",
    "channel_mults": "channel_mult",
    "n_heads": "num_heads",
    "n_head_channels": "num_head_channels",
    "biggan_updown": "resblock_updown",
    "use_scale_shift_norm": "scale_shift_norm",
    "use_new_attention_order": "new_attention_order",
    "attention_resolutions_as_downsample_factors": "attention_factors",
}
# Switches of training code, or sizes that the tensors show; they do not change what the network computes.
_NO_EFFECT = {"use_checkpoint", "use_fp16", "learn_sigma"}
# Variants this project does not have: the values that mean "not used".
_ABSENT: dict[str, tuple[Any, ...]] = {
    "num_classes": (None,),
    "class_cond": (None, False),
    "dims": (2,),
    "num_heads_upsample": (None, -1),
    "use_spatial_transformer": (None, False),
}


def network_fields(obj: Any, origin: str) -> dict[str, Any]:
    """Translate to UNetConfig fields the constructor arguments under guided-diffusion's, the authors' or our names.

    "" and None, and -1 for the channels of a head, mean "not said". Unknown names and wrong types: CheckpointError.
    """
    if not isinstance(obj, dict):
        raise CheckpointError(f"has a {origin} whose network is no object: give names and values")
    found: dict[str, Any] = {}
    for name, value in obj.items():
        if name in _ABSENT and value not in _ABSENT[name]:
            raise CheckpointError(f"has a {origin} with {name} = {shown(value)}, which is not supported")
        if name in _NO_EFFECT or name in _ABSENT or value is None or value == "":
            continue
        if name == "attention_resolutions":
            found["attention_factors"] = _factors(value, obj, origin)
            continue
        ours = _ALIASES.get(name, name)
        if ours not in _PARSERS:
            raise CheckpointError(f"has a {origin} with the unknown network field {shown(name)}")
        try:
            found[ours] = _PARSERS[ours](value)
        except (UsageError, TypeError, ValueError, OverflowError):
            raise CheckpointError(f"has a {origin} with {name} = {shown(value)}, which is no value for it") from None
    if found.get("num_head_channels") == -1:
        del found["num_head_channels"]
    return found


def _square(value: Any) -> int:
    """Read 64, or the [64, 64] of AnoDDPM's arguments."""
    sides = {decode(int, side, "") for side in (value if isinstance(value, list | tuple) else [value])}
    if len(sides) != 1:
        raise ValueError
    return int(sides.pop())


def _numbers(value: Any) -> tuple[float, ...]:
    """Read [1, 2], or guided-diffusion's "1,2"."""
    items = map(float, value.split(",")) if isinstance(value, str) else (decode(float, item, "") for item in value)
    return tuple(int(item) if item.is_integer() else item for item in items)


def _of_type(kind: Any) -> Callable[[Any], Any]:
    return _numbers if get_origin(kind) is tuple else lambda value: decode(kind, value, "")


_PARSERS: dict[str, Callable[[Any], Any]] = {one.name: _of_type(one.type) for one in fields(UNetConfig)}
_PARSERS["image_size"] = _square


def _factors(value: Any, obj: Mapping[str, Any], origin: str) -> tuple[float, ...]:
    """Read downsampling factors: the constructor takes them as a list; a string ("32,16") holds resolutions instead."""
    try:
        numbers = _numbers(value)
        if not isinstance(value, str):
            return numbers
        size = _square(obj.get("image_size", obj.get("img_size")))
        return tuple(size // int(number) for number in numbers)
    except (UsageError, TypeError, ValueError, ArithmeticError):
        raise CheckpointError(
            f"has a {origin} with attention_resolutions = {shown(value)}, which is no value for it"
        ) from None
