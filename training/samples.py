"""Reconstructions to look at: training images, noised to where sampling starts, and denoised again."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mdps.runtime.schedule import NoiseSchedule, plan_steps
from mdps.runtime.settings import PassSettings
from mdps.training.config import TrainingConfig
from mdps.training.draw import draw_noise
from mdps.training.loss import to_unit
from mdps.training.sources import Source

LEVEL, STEPS = 200, 10  # the paper's T and N
_SEED = 0


class Reconstructions:
    """A fixed choice of `config.samples` images, one or more, and fixed noise: one picture compares with the next."""

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
def reconstruct(network: nn.Module, clean: Tensor, noise: Tensor, schedule: NoiseSchedule) -> Tensor:
    """Noise [B, 3, H, W] to t = 200 and denoise it in ten DDIM steps (Song et al. 2021, eq. 12, eta 0)."""
    first, steps = plan_steps(schedule, "paper", PassSettings(LEVEL, 0.0, steps=STEPS), 0.0)
    x: Tensor = first**0.5 * clean + (1 - first) ** 0.5 * noise
    for step in steps:
        eps = network(x, torch.tensor(step.timestep, device=x.device)).float()
        x0 = (x - (1 - step.alpha_t) ** 0.5 * eps) / step.alpha_t**0.5
        x = step.alpha_s**0.5 * x0 + (1 - step.alpha_s) ** 0.5 * eps
    return x


def _row(images: Tensor) -> NDArray[np.uint8]:
    levels: Any = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()
    return np.concatenate([image.transpose(1, 2, 0) for image in levels], axis=1)
