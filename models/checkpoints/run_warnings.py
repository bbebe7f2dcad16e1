"""Warnings in a denoiser's notes on its training."""

from collections.abc import Iterator, Mapping
from typing import Any

# Predicting no noise at all errs by the noise's variance, 1. Returning the input, scaled as suits its timestep, knows
# nothing of the parts and errs by 0.49 to 0.72 in the first quarter of the timesteps, on bottles, circuits and tiles
# of 64 x 64. Networks that find defects came below 0.05.
LEARNED = 0.3


def run_warnings(notes: Mapping[str, Any]) -> list[str]:
    """Return sentences for the user; none where nothing is wrong, or the notes of a checkpoint do not say.

    Read are `steps` and `training.warmup` (int), and `first_quarter_loss` (float): the mean squared error of the noise
    in the first quarter of the timesteps, where detection works.
    """
    return [*_warm_up(notes), *_error(notes)]


def _warm_up(notes: Mapping[str, Any]) -> Iterator[str]:
    training = notes.get("training")
    warmup = training.get("warmup") if isinstance(training, Mapping) else None
    steps = notes.get("steps")
    if type(steps) is int and type(warmup) is int and 0 < steps <= warmup:
        yield (
            f"the training ended after {steps} steps, within the {warmup} of its warm-up (--warmup), in which the "
            "learning rate only rises: go on for longer"
        )


def _error(notes: Mapping[str, Any]) -> Iterator[str]:
    loss = notes.get("first_quarter_loss")
    if isinstance(loss, float) and loss > LEARNED:
        yield (
            f"the denoiser has learned next to nothing: at the timesteps of detection its error is {loss:.2f}, where "
            "predicting nothing gives 1 and a trained network less than 0.05; train for longer (--minutes, --steps) "
            "and look at the run's samples"
        )
