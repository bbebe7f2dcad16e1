"""Gaussian noise from a fixed bank, so that results repeat and depend on neither batch nor order."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

INITIAL = -1
"""Step index of the noise that makes the first x_t (and, in the replace rule, the known part of every x_t)."""

_KEPT_BYTES = 256 * 2**20


class Noise(Protocol):
    """What a sampler draws from; tests put recorded noise here."""

    def draw(self, pass_index: int, step_index: int, samples: int) -> NDArray[np.float32]:
        """Standard normal [samples, 3, H, W]."""


@dataclass(frozen=True)
class NoiseBank:
    """Standard normal noise keyed by (seed, sample, pass, step, shape); the same for every image.

    NumPy promises that the stream of RandomState never changes, which its newer generators do not.
    """

    seed: int
    shape: tuple[int, int, int]
    _kept: dict[tuple[int, int, int], NDArray[np.float32]] = field(default_factory=dict, repr=False, compare=False)

    def draw(self, pass_index: int, step_index: int, samples: int) -> NDArray[np.float32]:
        """Read-only float32 [samples, 3, H, W]; the first k samples are those of `draw(.., k)`."""
        key = (pass_index, step_index, samples)
        if key not in self._kept:
            noise = np.stack([self._one(sample, pass_index, step_index) for sample in range(samples)])
            noise.setflags(write=False)
            if sum(kept.nbytes for kept in self._kept.values()) + noise.nbytes > _KEPT_BYTES:
                return noise
            self._kept[key] = noise
        return self._kept[key]

    def _one(self, sample: int, pass_index: int, step_index: int) -> NDArray[np.float32]:
        key = np.random.SeedSequence([self.seed, sample, pass_index, step_index + 1, *self.shape])
        stream = np.random.RandomState(np.random.MT19937(key))
        return stream.standard_normal(self.shape).astype(np.float32)
