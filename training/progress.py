"""The bar on a terminal: how far, how fast, how long still; silent in a pipe."""

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tqdm import tqdm

from mdps.training.config import TrainingConfig

BY_TIME = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
EVERY = 1.0  # seconds between readings of the loss, for which a GPU must be waited for


def progress_of(config: TrainingConfig, step: int, seconds: float) -> float:
    """Return the share of the run in [0, 1] that is over after `step` steps and `seconds`."""
    by_time = seconds / (60 * config.minutes) if config.minutes else 0.0
    return min(1.0, max(step / config.last_step, by_time))


def _screen() -> tuple[int | None, int | None]:
    """Return columns and rows where the terminal says 0, for tqdm would show nothing; None where it knows."""
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # no terminal, or no file at all
        return None, None
    return (None if columns else 100), (None if rows else 24)


class Progress:
    """Counts steps, or the minutes of a run that ends by the clock; begins at `step`, `share` of the run."""

    def __init__(self, config: TrainingConfig, step: int, share: float, shown: bool) -> None:
        by_time = config.minutes is not None
        columns, rows = _screen()
        # disable=None: a bar on a terminal, nothing in a pipe
        self._bar = tqdm(
            total=1.0 if by_time else config.last_step,
            initial=share if by_time else step,
            unit="step",
            bar_format=BY_TIME if by_time else None,
            disable=None if shown else True,
            ncols=columns,
            nrows=rows,
        )
        self._by_time = by_time
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.close()

    def update(self, step: int, share: float, read: Callable[[], tuple[float, float]]) -> None:
        """Show a step, after which `share` of the run is over.

        `read` gives the loss and the images a second that are shown beside the bar: from the first step on it is asked
        once a second, and never where no bar is shown.
        """
        self._bar.update(min(1.0, share) - self._bar.n if self._by_time else step - self._bar.n)
        if not self._bar.disable and time.monotonic() >= self._next:
            self.note(step, *read())

    def note(self, step: int, loss: float, images_per_second: float) -> None:
        """Show these numbers beside the bar."""
        self._next = time.monotonic() + EVERY
        self._bar.set_postfix_str(f"step {step}, loss {loss:.4f}, {images_per_second:.1f} images/s")
