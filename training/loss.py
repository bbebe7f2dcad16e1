"""The denoiser's objective: predict the noise that was mixed into a good image (paper, the DDIM training loss)."""

import torch
from torch import Tensor, nn

from mdps.training.config import TrainingConfig


def to_unit(images: Tensor) -> Tensor:
    """Turn uint8 [B, H, W, 3] to float32 [B, 3, H, W] in [-1, 1], contiguous."""
    return images.permute(0, 3, 1, 2).float().contiguous() / 127.5 - 1


def memory_format(device: torch.device) -> torch.memory_format:
    """Return how images and weights lie in memory: where the two differ, torch's convolutions on a CPU crawl.

    A GPU's half precision wants the channels last; a CPU trains faster without.
    """
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def noise_losses(network: nn.Module, clean: Tensor, timesteps: Tensor, noise: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Return each image's mean squared error of eps(sqrt(a_t) x + sqrt(1 - a_t) noise, t): float32 [B].

    clean, noise [B, 3, H, W]; timesteps [B] in 0..T-1; alphas_cumprod [T] float32, a_t = alphas_cumprod[t].
    """
    alpha = alphas_cumprod[timesteps][:, None, None, None]
    x_t = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
    eps: Tensor = network(x_t, timesteps)
    return (eps.float() - noise).square().mean(dim=(1, 2, 3))


def loss_weights(config: TrainingConfig, timesteps: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Return [B]: ones, or min(SNR, limit) / SNR with SNR = a_t / (1 - a_t) (Hang et al. 2023, "Min-SNR", for eps)."""
    if config.weighting == "uniform":
        return torch.ones(len(timesteps), device=timesteps.device)
    alpha = alphas_cumprod[timesteps]
    return (config.snr_limit * (1 - alpha) / alpha).clamp(max=1)
