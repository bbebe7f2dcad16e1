"""From a path to a denoiser that is ready to run, or to a report of what it is.

Tensors are believed about what they show; for the rest the strongest statement wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mdps.models.checkpoints.files import sha256_of
from mdps.models.checkpoints.layouts import Tensors
from mdps.models.checkpoints.report import CheckpointError, CheckpointReport, crops_of, naming, shown
from mdps.models.checkpoints.sources import Source, open_source
from mdps.models.checkpoints.statements import CheckpointOptions, Prediction, Statement
from mdps.models.checkpoints.structure import check_fit, infer_structure, possible_groups
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.schedule import NoiseSchedule

_HEADS = {"num_heads", "num_head_channels"}


@dataclass
class Resolved:
    """UNetConfig `fields` and the rest, with where each came from (see CheckpointReport)."""

    fields: dict[str, Any]
    schedule: NoiseSchedule | None = None
    prediction: Prediction | None = None
    preprocessing: dict[str, Any] | None = None
    given: dict[str, Any] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    needed: list[str] = field(default_factory=list)


def resolve(inferred: dict[str, Any], statements: Sequence[Statement], published: Statement) -> Resolved:
    """Join `statements`, strongest first, then what the format publishes, under what the tensors show.

    Raises CheckpointError where a statement contradicts the tensors.
    """
    result = Resolved(dict(inferred))
    for statement in statements:
        _check_against_tensors(statement, inferred)
        for name, value in _take(result, statement).items():
            result.given[name] = {"value": value, "by": statement.origin}
    result.assumed = _take(result, published)
    widths = [int(multiplier * inferred["model_channels"]) for multiplier in inferred["channel_mult"]]
    if any(width % result.assumed.get("norm_groups", 1) for width in widths):
        del result.assumed["norm_groups"], result.fields["norm_groups"]
        result.needed.append(f"--norm-groups ({possible_groups(widths)})")
    if not _HEADS & result.fields.keys():
        result.needed.append("--num-heads or --num-head-channels")
    if "image_size" not in result.fields:
        result.needed.append("--image-size")
    return result


def _take(result: Resolved, statement: Statement) -> dict[str, Any]:
    """Fill what is still open from `statement`; returns what was taken, as JSON values."""
    # A head count and a head width are two answers to one question.
    closed = set(result.fields) | (_HEADS if _HEADS & result.fields.keys() else set())
    taken = {name: value for name, value in statement.network.items() if name not in closed}
    result.fields |= taken
    for name in ("schedule", "prediction", "preprocessing"):
        stated = getattr(statement, name)
        if getattr(result, name) is None and stated is not None:
            setattr(result, name, stated)
            taken[name] = stated.to_json() if name == "schedule" else stated
    return taken


def _check_against_tensors(statement: Statement, inferred: dict[str, Any]) -> None:
    seen = _comparable(inferred, inferred)
    for name, value in _comparable(statement.network, inferred).items():
        if name in seen and value != seen[name]:
            raise CheckpointError(
                f"contradicts its {statement.origin}, which says {name} = {shown(value)}, while the tensors show "
                f"{seen[name]}: give the description that belongs to it"
            )


def _comparable(fields: dict[str, Any], inferred: dict[str, Any]) -> dict[str, Any]:
    """Leave out what has no effect on this network, so that only real contradictions are left."""
    deepest = 2 ** (len(inferred["channel_mult"]) - 1)
    fields = {name: value for name, value in fields.items() if name != "learned_variance"}
    if "attention_factors" in fields:
        fields["attention_factors"] = sorted(n for n in fields["attention_factors"] if n <= deepest)
    if "channel_mult" in fields:
        fields["channel_mult"] = [round(float(n), 6) for n in fields["channel_mult"]]
    if inferred["resblock_updown"] or deepest == 1:
        fields.pop("conv_resample", None)
    if deepest == 1:
        fields.pop("resblock_updown", None)
    if inferred.get("learned_variance"):
        fields.pop("out_channels", None)
    return fields


@dataclass(frozen=True)
class Denoiser:
    """A frozen network in eval mode and all that is needed to call it.

    `network` takes x_t [B, 3, H, W] float32 and a timestep [] or [B], and gives `prediction` ("eps", "v" or "x0") in
    the shape of x_t. `preprocessing` is that of training as `Preprocessing.to_json` writes it, None where the file does
    not say; `extra` are the file's notes on its training.
    """

    network: UNet
    config: UNetConfig
    schedule: NoiseSchedule
    prediction: Prediction
    preprocessing: dict[str, Any] | None
    report: CheckpointReport
    extra: dict[str, Any] = field(default_factory=dict)


def load_denoiser(path: Path | str, options: CheckpointOptions | None = None) -> Denoiser:
    """Read a checkpoint of any supported format; float32, on the CPU, in eval mode, without gradients of weights.

    `options` win over a sidecar JSON, that over what the file says, and that over what its format publishes.
    Raises CheckpointError, one sentence, for a file that is unreadable, needs code, is of another architecture, is
    damaged, or leaves open what only an option can say.
    """
    path = Path(path)
    with naming(path):
        source, resolved = _open(path, options or CheckpointOptions())
        config, schedule, prediction = _complete(resolved)
        check_fit(config, source.tensors)
    with torch.device("meta"):
        network = UNet(config)
    network.load_state_dict(source.tensors, assign=True)
    network.requires_grad_(False).eval()
    report = _report(path, source, resolved)
    return Denoiser(network, config, schedule, prediction, resolved.preprocessing, report, source.extra)


def describe_checkpoint(path: Path | str, options: CheckpointOptions | None = None) -> CheckpointReport:
    """Describe a checkpoint without building it; `needed` names the missing options. Errors as `load_denoiser`."""
    path = Path(path)
    with naming(path):
        return _report(path, *_open(path, options or CheckpointOptions()))


def _open(path: Path, options: CheckpointOptions) -> tuple[Source, Resolved]:
    source = open_source(path)
    tensors = {key: value.to(torch.float32) for key, value in source.tensors.items()}
    inferred = infer_structure(tensors)
    tensors, inferred = _drop_variance(tensors, inferred)
    resolved = resolve(inferred, [options.statement(), *source.statements], source.published)
    return replace(source, tensors=tensors), resolved


def _complete(resolved: Resolved) -> tuple[UNetConfig, NoiseSchedule, Prediction]:
    """Return what `resolved` settles, if nothing is left open."""
    if resolved.needed:
        raise CheckpointError(f"does not say all that is needed: give {', and '.join(resolved.needed)}")
    if resolved.schedule is None or resolved.prediction is None:
        raise CheckpointError("says neither noise schedule nor prediction: write both into a JSON beside it")
    fields = {name: value for name, value in resolved.fields.items() if name != "learned_variance"}
    config = UNetConfig(**fields)
    if (config.in_channels, config.out_channels) != (3, 3):
        raise CheckpointError(
            f"takes {config.in_channels} and gives {config.out_channels} channels, but images here have 3: "
            "train on RGB (grey images become three equal channels)"
        )
    return config, resolved.schedule, resolved.prediction


def _drop_variance(tensors: Tensors, inferred: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Keep eps alone, the first half of the channels, of a learned variance (Nichol & Dhariwal 2021)."""
    channels = inferred["in_channels"]
    if inferred["out_channels"] != 2 * channels:
        return tensors, inferred
    last = {key: tensors[key][:channels].clone() for key in ("out.2.weight", "out.2.bias") if key in tensors}
    return tensors | last, inferred | {"out_channels": channels, "learned_variance": True}


def _report(path: Path, source: Source, resolved: Resolved) -> CheckpointReport:
    shown = resolved.fields.keys() - resolved.given.keys() - resolved.assumed.keys()
    crops = {
        name: {"value": value, "by": "the notes on its training"} for name, value in crops_of(source.extra).items()
    }
    return CheckpointReport(
        format=source.format,
        path=str(path),
        sha256=sha256_of(source.weights),
        parameters=sum(tensor.numel() for tensor in source.tensors.values()),
        inferred={name: _plain(value) for name, value in resolved.fields.items() if name in shown},
        given={name: entry | {"value": _plain(entry["value"])} for name, entry in resolved.given.items()} | crops,
        assumed={name: _plain(value) for name, value in resolved.assumed.items()},
        needed=resolved.needed,
        ignored=source.ignored,
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
