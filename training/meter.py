"""Measurements between two lines of the log."""

import time
from typing import Any

import torch
from torch import Tensor

from mdps.training.engine import Engine

QUARTERS = 4  # of the timesteps: the first is where sampling works


class Meter:
    """Sums losses on the device, so that a step waits for none of them."""

    def __init__(self, engine: Engine, timesteps: int) -> None:
        self._engine, self._timesteps = engine, timesteps
        self._restart()

    def _restart(self) -> None:
        self._sums = torch.zeros(2 + 2 * QUARTERS, device=self._engine.device)  # loss, count; losses, counts
        self._steps, self._since = 0, time.monotonic()

    def add(self, loss: Tensor, losses: Tensor, timesteps: Tensor) -> None:
        """Add the step's objective [] and each image's unweighted loss [B] with its timestep [B]."""
        quarter = timesteps * QUARTERS // self._timesteps
        self._sums[0] += loss.detach()
        self._sums[1] += 1
        self._sums.index_add_(0, 2 + quarter, losses.detach())
        self._sums.index_add_(0, 2 + QUARTERS + quarter, torch.ones_like(losses))
        self._steps += 1

    def so_far(self) -> tuple[float, float]:
        """Return mean loss and images a second since the last reading, a step or more ago; of this process alone."""
        images = self._steps * self._engine.share * self._engine.processes
        return float(self._sums[0] / self._sums[1]), images / max(time.monotonic() - self._since, 1e-9)

    def read(self) -> dict[str, Any]:
        """Return means since the last reading, of all processes: loss, loss_by_quarter (None: none), images_per_s."""
        sums = self._engine.sum(self._sums).tolist()
        parts, counts = sums[2 : 2 + QUARTERS], sums[2 + QUARTERS :]
        images = self._steps * self._engine.share * self._engine.processes
        seconds = max(time.monotonic() - self._since, 1e-9)
        self._restart()
        return {
            "loss": sums[0] / sums[1],
            "loss_by_quarter": [part / n if n else None for part, n in zip(parts, counts, strict=True)],
            "images_per_s": round(images / seconds, 2),
        }
