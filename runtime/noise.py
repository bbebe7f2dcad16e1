"""Noise from a fixed bank, so that results repeat and depend on neither batch nor order."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.simplex import simplex_noise

if TYPE_CHECKING:
    from mdps.runtime.settings import SamplerSettings

INITIAL = -1
"""Step index of the noise that makes the first x_t (and, in the replace rule, the known part of every x_t)."""
KNOWN, JUMP = 2**30, 2**31
"""Added to a step index: the noise of the known part in the inpaint rule; that of the way back before a step again."""

KEPT_BYTES = 256 * 2**20


class Noise(Protocol):
    """The noise that a sampler draws; tests put recorded noise here."""

    def draw(self, pass_index: int, step_index: int, samples: int, images: int = 1) -> NDArray[np.float32]:
        """Noise of mean 0 and variance 1, [images * samples, 3, H, W], the same for every image, image-major."""


@dataclass(frozen=True)
class NoiseBank:
    """Standard normal or simplex noise keyed by (seed, sample, pass, step, shape); the same for every image.

    NumPy promises that the stream of RandomState never changes, which its newer generators do not.
    """

    seed: int
    shape: tuple[int, int, int]
    kind: Literal["gaussian", "simplex"] = "gaussian"
    _kept: dict[tuple[int, int, int], NDArray[np.float32]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, sampler: "SamplerSettings", size: tuple[int, int]) -> Self:
        """The bank of these settings for a network of images of `size` (H, W)."""
        return cls(sampler.seed, (3, *size), sampler.noise)

    def draw(self, pass_index: int, step_index: int, samples: int, images: int = 1) -> NDArray[np.float32]:
        """Read-only float32 [images * samples, 3, H, W]; the first k samples are those of `draw(.., k)`.

        What was drawn is kept, for the largest number of images so far: a smaller batch takes the front of it.
        """
        key, count = (pass_index, step_index, samples), images * samples
        noise = self._kept.get(key)
        if noise is None:
            noise = self._keep(key, np.stack([self._one(sample, *key[:2]) for sample in range(samples)]))
        if len(noise) < count:
            noise = self._keep(key, np.tile(noise[:samples], (images, 1, 1, 1)))
        return noise if len(noise) == count else noise[:count]

    def _keep(self, key: tuple[int, int, int], noise: NDArray[np.float32]) -> NDArray[np.float32]:
        noise.setflags(write=False)
        others = sum(kept.nbytes for other, kept in self._kept.items() if other != key)
        if others + noise.nbytes <= KEPT_BYTES:
            self._kept[key] = noise
        return noise

    def _one(self, sample: int, pass_index: int, step_index: int) -> NDArray[np.float32]:
        key = np.random.SeedSequence([self.seed, sample, pass_index, step_index + 1, *self.shape])
        stream = np.random.RandomState(np.random.MT19937(key))
        if self.kind == "simplex":
            return simplex_noise(stream, self.shape)
        return stream.standard_normal(self.shape).astype(np.float32)
