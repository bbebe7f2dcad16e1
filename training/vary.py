"""How a training image is varied: only in ways that leave a good part good."""

import numpy as np

from mdps.training.config import TrainingConfig
from mdps.training.sources import Images


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
