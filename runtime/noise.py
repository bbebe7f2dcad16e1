"""Noise from a fixed bank, so that results repeat and depend on neither batch nor order."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.simplex import simplex_noise

INITIAL = -1
"""Step index of the noise that makes the first x_t (and, in the replace rule, the known part of every x_t)."""
KNOWN, JUMP = 2**30, 2**31
"""Added to a step index: the noise of the known part in the inpaint rule; that of the way back before a step again."""

_KEPT_BYTES = 256 * 2**20


class Noise(Protocol):
    """What a sampler draws from; tests put recorded noise here."""

    def draw(self, pass_index: int, step_index: int, samples: int) -> NDArray[np.float32]:
        """Noise of mean 0 and variance 1, [samples, 3, H, W]."""


@dataclass(frozen=True)
class NoiseBank:
    """Standard normal or simplex noise keyed by (seed, sample, pass, step, shape); the same for every image.

    NumPy promises that the stream of RandomState never changes, which its newer generators do not.
    """

    seed: int
    shape: tuple[int, int, int]
    kind: Literal["gaussian", "simplex"] = "gaussian"
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
        if self.kind == "simplex":
            return simplex_noise(stream, self.shape)
        return stream.standard_normal(self.shape).astype(np.float32)
