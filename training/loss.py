"""The denoiser's objective: predict the noise that was mixed into a good image (paper, the DDIM training loss)."""

import torch
from torch import Tensor, nn

from mdps.training.config import TrainingConfig


def to_unit(images: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] -> float32 [B, 3, H, W] in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def draw_timesteps(config: TrainingConfig, count: int, total: int, device: torch.device) -> Tensor:
    """[count] timesteps in 0..total-1: `low_share` of them below `low_limit`, the others from all."""
    anywhere = torch.randint(0, total, (count,), device=device)
    if config.low_share == 0:
        return anywhere
    low = torch.randint(0, min(config.low_limit, total), (count,), device=device)
    return torch.where(torch.rand(count, device=device) < config.low_share, low, anywhere)


def noise_loss(network: nn.Module, clean: Tensor, timesteps: Tensor, noise: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Mean squared error of eps(sqrt(a_t) x + sqrt(1 - a_t) noise, t) against `noise`; a_t = alphas_cumprod[t].

    clean, noise [B, 3, H, W]; timesteps [B] in 0..T-1; alphas_cumprod [T] float32; returns float32 [].
    """
    alpha = alphas_cumprod[timesteps][:, None, None, None]
    x_t = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
    return nn.functional.mse_loss(network(x_t, timesteps).float(), noise)
