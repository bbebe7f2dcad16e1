"""Ways to see how a run goes: the bar on a terminal, the means of its log, and reconstructions to look at."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from mdps.runtime.schedule import NoiseSchedule, plan_steps
from mdps.runtime.settings import PassSettings
from mdps.training.config import TrainingConfig
from mdps.training.draw import draw_noise, to_unit
from mdps.training.engine import Engine
from mdps.training.sources import Source

BY_TIME = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
EVERY = 1.0  # seconds between readings of the loss, for which a GPU must be waited for
QUARTERS = 4  # of the timesteps: the first is where sampling works
LEVEL, STEPS = 200, 10  # the paper's T and N
_SEED = 0


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
    """The bar: counts steps, or the minutes of a run that ends by the clock; begins at `step`, `share` of the run.

    It is silent in a pipe.
    """

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

    def __exit__(self, *_: object) -> None:
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
        return float(self._sums[0] / self._sums[1]), self._images_per_second()

    def _images_per_second(self) -> float:
        images: int = self._steps * self._engine.share * self._engine.processes
        return images / max(time.monotonic() - self._since, 1e-9)

    def read(self) -> dict[str, Any]:
        """Return means since the last reading, of all processes: loss, loss_by_quarter (None: none), images_per_s."""
        sums = self._engine.sum(self._sums).tolist()
        parts, counts = sums[2 : 2 + QUARTERS], sums[2 + QUARTERS :]
        rate = self._images_per_second()
        self._restart()
        return {
            "loss": sums[0] / sums[1],
            "loss_by_quarter": [part / n if n else None for part, n in zip(parts, counts, strict=True)],
            "images_per_s": round(rate, 2),
        }


class Reconstructions:
    """Training images, noised to where sampling starts and denoised again, to look at.

    They are a fixed choice of `config.samples`, one or more, and fixed noise: one picture compares with the next.
    """

    def __init__(self, config: TrainingConfig, source: Source, schedule: NoiseSchedule, device: torch.device) -> None:
        count = config.samples
        rng = np.random.default_rng(_SEED)
        which = np.linspace(0, (source.count or 1) - 1, count).round().astype(int)
        images = np.stack([source.image(int(index), rng) for index in which])
        self.clean = to_unit(torch.from_numpy(images)).to(device)
        self.noise = torch.stack([draw_noise(config.noise, n, images.shape[1:3], device) for n in range(count)])
        self._schedule = schedule

    def picture(self, network: nn.Module) -> NDArray[np.uint8]:
        """Return uint8 [3 H, count W, 3]: the images, below them what was made of them, then the difference x 4."""
        made = reconstruct(network, self.clean, self.noise, self._schedule)
        rows = (self.clean, made, 4 * (made - self.clean).abs() - 1)
        return np.concatenate([_row(images) for images in rows])


@torch.inference_mode()
def reconstruct(
    network: nn.Module, clean: Tensor, noise: Tensor, schedule: NoiseSchedule, level: int = LEVEL, calls: int = STEPS
) -> Tensor:
    """Noise [B, 3, H, W] to t = `level` and denoise it in so many DDIM steps (Song et al. 2021, eq. 12, eta 0)."""
    first, steps = plan_steps(schedule, "paper", PassSettings(level, 0.0, steps=calls), 0.0)
    x: Tensor = first**0.5 * clean + (1 - first) ** 0.5 * noise
    for step in steps:
        eps = network(x, torch.tensor(step.timestep, device=x.device)).float()
        x0 = (x - (1 - step.alpha_t) ** 0.5 * eps) / step.alpha_t**0.5
        x = step.alpha_s**0.5 * x0 + (1 - step.alpha_s) ** 0.5 * eps
    return x


def _row(images: Tensor) -> NDArray[np.uint8]:
    levels: Any = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()
    return np.concatenate([image.transpose(1, 2, 0) for image in levels], axis=1)
