"""Who is believed: tensors decide what they show; for the rest the strongest statement wins."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mdps.models.checkpoints.errors import CheckpointError, shown
from mdps.models.checkpoints.statements import Prediction, Statement
from mdps.models.checkpoints.structure import possible_groups
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
    if result.schedule is None and statement.schedule is not None:
        result.schedule = statement.schedule
        taken |= {"schedule": statement.schedule.to_json()}
    if result.prediction is None and statement.prediction is not None:
        result.prediction = statement.prediction
        taken |= {"prediction": statement.prediction}
    if result.preprocessing is None and statement.preprocessing is not None:
        result.preprocessing = statement.preprocessing
        taken |= {"preprocessing": statement.preprocessing}
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
