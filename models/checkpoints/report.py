"""Sentences about a file of weights: its errors, the report of what it is, warnings in its notes on the training."""

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mdps.runtime.errors import UsageError

# Predicting no noise at all errs by the noise's variance, 1. Returning the input, scaled as suits its timestep, knows
# nothing of the parts and errs by 0.49 to 0.72 in the first quarter of the timesteps, on bottles, circuits and tiles
# of 64 x 64. Networks that find defects came below 0.05.
LEARNED = 0.3
# What the loss over the last quarter of a run should keep of that over its second quarter. Runs on tiles and circuits
# keep 0.39 and 0.47 up to step 500, and 0.66 to 0.89 from step 800 on (docs/use/training.md).
FALLING = 0.5
_LONGEST = 400


class CheckpointError(UsageError):
    """A checkpoint that cannot be read, is of an unknown kind, or leaves something open."""


def shown(value: object) -> str:
    """Quote what a file says in a sentence: on one line and short, however large, deep or odd it is."""
    try:
        return " ".join(reprlib.repr(value).split())
    except (ValueError, RuntimeError):  # numbers of more than 4,300 digits; values that refer to themselves
        return f"some {type(value).__name__}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of any CheckpointError of the block, so that inner functions need not carry it."""
    try:
        yield
    except CheckpointError as error:
        sentence = " ".join(str(error).split())  # may quote names of the file, of any length
        if len(sentence) > _LONGEST:
            sentence = f"{sentence[: _LONGEST // 2]} ... {sentence[-_LONGEST // 2 :]}"
        raise CheckpointError(f"{path} {sentence}") from None


@dataclass(frozen=True)
class CheckpointReport:
    """`inferred` from tensor shapes; `given` as {name: {"value", "by"}}; `assumed` because the format publishes it.

    `needed` are the options without which the checkpoint cannot be loaded; `ignored` counts tensors of the file that
    do not belong to the denoiser. All values are JSON values.
    """

    format: str
    path: str
    sha256: str
    parameters: int
    inferred: dict[str, Any]
    given: dict[str, Any]
    assumed: dict[str, Any]
    needed: list[str]
    ignored: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)

    def assumptions(self) -> str:
        """Return `assumed` on one line, empty where nothing is."""
        return ", ".join(f"{name} = {_show(value)}" for name, value in self.assumed.items())

    def __str__(self) -> str:
        """Return a few lines for a terminal."""
        lines = [
            f"file        {self.path}",
            f"format      {self.format}",
            f"sha256      {self.sha256}",
            f"parameters  {self.parameters:,}",
        ]
        lines += _section("from the tensors", {name: _show(value) for name, value in self.inferred.items()})
        lines += _section("given", {name: f"{_show(v['value'])}  ({v['by']})" for name, v in self.given.items()})
        lines += _section("assumed (check these)", {name: _show(value) for name, value in self.assumed.items()})
        if self.needed:
            lines += ["still needed", *(f"  {item}" for item in self.needed)]
        if self.ignored:
            lines.append(f"{self.ignored} tensors do not belong to the denoiser and were ignored")
        return "\n".join(lines)


def _section(title: str, values: dict[str, str]) -> list[str]:
    return [title, *(f"  {name} = {value}" for name, value in values.items())] if values else []


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_show(item)}" for key, item in value.items() if key != "betas")
    if isinstance(value, list | tuple):
        return ", ".join(_show(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def run_warnings(notes: Mapping[str, Any]) -> list[str]:
    """Return sentences for the user; none where nothing is wrong, or the notes of a checkpoint do not say.

    Read are `steps` and `training.warmup` (int), `loss` (float), `first_quarter_loss` (float), the mean squared error
    of the noise in the first quarter of the timesteps, where detection works, and `late_fall` (float), the mean loss of
    the last quarter of the steps as a share of that of the second.
    """
    return [*_warm_up(notes), *(_error(notes) or _falling(notes))]


def crops_of(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `crop` and the `scale` of photographs that a denoiser learned from; nothing for whole ones."""
    training = notes.get("training")
    crop, scale = (training.get(name) if isinstance(training, Mapping) else None for name in ("crop", "scale"))
    right = isinstance(crop, int) and isinstance(scale, int | float) and 0 < scale <= 1
    return {"crop": crop, "scale": scale} if right else {}


def _warm_up(notes: Mapping[str, Any]) -> Iterator[str]:
    training = notes.get("training")
    warmup = training.get("warmup") if isinstance(training, Mapping) else None
    steps = notes.get("steps")
    if type(steps) is int and type(warmup) is int and 0 < steps <= warmup:
        yield (
            f"the training ended after {steps} steps, within the {warmup} of its warm-up (--set warmup=), in which the "
            "learning rate only rises: go on for longer"
        )


def _error(notes: Mapping[str, Any]) -> list[str]:
    loss = notes.get("first_quarter_loss")
    if not (isinstance(loss, float) and loss > LEARNED):
        return []
    return [
        f"the denoiser has learned next to nothing: at the timesteps of detection its error is {loss:.2f}, where "
        "predicting nothing gives 1 and a trained network less than 0.05; train for longer (--minutes, --steps) "
        "and look at the run's samples"
    ]


def _falling(notes: Mapping[str, Any]) -> list[str]:
    share, steps, loss = notes.get("late_fall"), notes.get("steps"), notes.get("loss")
    if not (isinstance(share, float) and isinstance(loss, float) and share < FALLING):
        return []
    return [
        f"the training ended too early: after {steps} steps its loss ({loss:.3f}) was still falling fast, over the "
        f"last quarter of the run to {share:.2f} of that over the second, where a run that is long enough keeps 0.6 "
        "or more; go on with `mdps train --resume` and more --minutes or --steps"
    ]
