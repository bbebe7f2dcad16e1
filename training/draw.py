"""The samples of a run and their loss. The chance in it: what each sample is, as a function of its number alone.

Sample g of a run (step * batch + its place in the batch) draws image, variation, timestep and noise from generators
seeded with (seed, g). So a run needs no generator's state to go on, and does not depend on how many processes share it.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mdps.runtime.noise import simplex_noise
from mdps.training.config import TrainingConfig
from mdps.training.sources import Images, Source

_ORDER, _DROPOUT = 1, 2  # keep the streams of one seed apart


class Batch(NamedTuple):
    """Training samples on the device: clean, noise [B, 3, H, W] float32; timesteps [B] int64."""

    clean: Tensor
    noise: Tensor
    timesteps: Tensor


def draw_batch(config: TrainingConfig, source: Source, samples: range, timesteps: int, device: torch.device) -> Batch:
    """Draw the samples of these numbers; timesteps lie in 0..`timesteps` - 1."""
    images, times, noises = [], [], []
    for number in samples:
        rng = np.random.default_rng((config.seed, number))
        times.append(draw_timestep(config, rng, timesteps))
        noise_seed = int(rng.integers(2**63))
        image = vary(source.image(image_index(config.seed, number, source.count), rng), rng, config)
        images.append(image)
        noises.append(draw_noise(config.noise, noise_seed, image.shape[:2], device))
    clean = torch.from_numpy(np.ascontiguousarray(np.stack(images)))
    if device.type == "cuda":
        clean = clean.pin_memory().to(device, non_blocking=True)  # so that the copy does not stop the queue
    layout = memory_format(device)
    return Batch(
        to_unit(clean).contiguous(memory_format=layout),
        torch.stack(noises).contiguous(memory_format=layout),
        torch.tensor(times).to(device),
    )


def image_index(seed: int, number: int, count: int | None) -> int:
    """Return which image sample `number` shows: every epoch goes through all `count` images in an order of its own."""
    if count is None:
        return 0
    epoch, place = divmod(number, count)
    return int(_order(seed, epoch, count)[place])


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch, _ORDER)).permutation(count)


def draw_timestep(config: TrainingConfig, rng: np.random.Generator, total: int) -> int:
    """Draw a timestep in 0..total-1: with probability `low_share` one below `low_limit`, else any."""
    low = config.low_share > 0 and rng.random() < config.low_share
    return int(rng.integers(min(config.low_limit, total) if low else total))


def draw_noise(kind: str, seed: int, size: tuple[int, ...], device: torch.device) -> Tensor:
    """Draw noise [3, H, W], mean 0, variance 1: gaussian, on the device, so that CPU and GPU differ; or simplex,
    AnoDDPM's, the same everywhere, but drawn by the CPU and slower."""
    if kind == "simplex":
        height, width = size
        field = simplex_noise(np.random.RandomState(seed % 2**32), (3, height, width))
        return torch.from_numpy(field).to(device)
    return torch.randn((3, *size), generator=torch.Generator(device).manual_seed(seed), device=device)


def seed_dropout(config: TrainingConfig, step: int, process: int) -> None:
    """Seed torch's own generators, which only dropout draws from."""
    if config.network.dropout:
        seeds = np.random.SeedSequence((config.seed, step, process, _DROPOUT))
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))


def vary(image: Images, rng: np.random.Generator, config: TrainingConfig) -> Images:
    """Vary uint8 [H, W, 3]: mirrored either way with probability one half, turned by 0 to 3 quarters (square
    images), and moved by up to `shift` pixels with mirrored edges; draws nothing for what is off."""
    if config.flip_horizontal and rng.random() < 0.5:
        image = image[:, ::-1]
    if config.flip_vertical and rng.random() < 0.5:
        image = image[::-1]
    if config.rotate:
        image = np.rot90(image, int(rng.integers(4)))
    return _shifted(image, rng, config.shift) if config.shift else image


def _shifted(image: Images, rng: np.random.Generator, shift: int) -> Images:
    height, width, _ = image.shape
    padded = np.pad(image, ((shift, shift), (shift, shift), (0, 0)), mode="reflect")
    y, x = rng.integers(0, 2 * shift + 1, 2)
    return padded[y : y + height, x : x + width]


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
