"""Noise from a fixed bank, so that results repeat and depend on neither batch nor order."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mdps.runtime.settings import SamplerSettings

INITIAL = -1
"""Step index of the noise that makes the first x_t (and, in the replace rule, the known part of every x_t)."""
KNOWN, JUMP = 2**30, 2**31
"""Added to a step index: the noise of the known part in the inpaint rule; that of the way back before a step again."""

KEPT_BYTES = 256 * 2**20

OCTAVES, PERSISTENCE, PERIOD = 6, 0.8, 64.0
"""Of the publication: each octave has 0.8 of the amplitude and half the period, in pixels, of the one before."""

_SKEW, _UNSKEW = (math.sqrt(3) - 1) / 2, (3 - math.sqrt(3)) / 6
_DIAGONAL = math.sqrt(0.5)
_GRADIENTS = np.array(
    [[1, 0], [0, 1], [-1, 0], [0, -1], *([a * _DIAGONAL, b * _DIAGONAL] for a in (-1, 1) for b in (-1, 1))]
)
# Mean square of one octave: sqrt(3) vertices a unit of area, each adding (1/2 - r^2)^8 r^2 / 2, integrated over a disk.
_ONE_OCTAVE = math.sqrt(3) * math.pi / (180 * 2**10)
_VARIANCE = _ONE_OCTAVE * sum(PERSISTENCE ** (2 * octave) for octave in range(OCTAVES))


class Noise(Protocol):
    """The noise that a sampler draws; tests put recorded noise here."""

    def draw(self, pass_index: int, step_index: int, samples: int, images: int = 1) -> NDArray[np.float32]:
        """Noise of mean 0 and variance 1, [images * samples, 3, H, W], the same for every image, image-major."""

    def placed(self, corners: NDArray[np.intp]) -> "Noise":
        """Return that of tiles with these upper left corners [B, 2] in their pictures; see `NoiseBank.placed`."""


@dataclass(frozen=True)
class NoiseBank:
    """Standard normal or simplex noise keyed by (seed, sample, pass, step, shape); the same for every image.

    `antithetic`: each odd sample has the negative of the noise of the one before it.
    NumPy promises that the stream of RandomState never changes, which its newer generators do not.
    """

    seed: int
    shape: tuple[int, int, int]
    kind: Literal["gaussian", "simplex"] = "gaussian"
    antithetic: bool = False
    _kept: dict[tuple[int, int, int], NDArray[np.float32]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, sampler: "SamplerSettings", size: tuple[int, int]) -> Self:
        """The bank of these settings for a network of images of `size` (H, W)."""
        return cls(sampler.seed, (3, *size), sampler.noise, sampler.antithetic)

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

    def placed(self, corners: NDArray[np.intp]) -> "Placed":
        """Return that of tiles: a pixel of a picture meets the same noise in whatever tile it lies.

        The noise of a picture is this one's field repeated, which does not show where every pixel is drawn by itself;
        fields of simplex noise go on without an edge. `corners` [B, 2] are rows and columns of the picture.
        """
        return Placed(self, tuple((int(top), int(left)) for top, left in corners))

    def tile(self, corner: tuple[int, int], pass_index: int, step_index: int, samples: int) -> NDArray[np.float32]:
        """Return float32 [samples, 3, H, W] for the tile in this corner."""
        if self.kind == "simplex":
            return np.stack([self._one(sample, pass_index, step_index, corner) for sample in range(samples)])
        return np.roll(self.draw(pass_index, step_index, samples), (-corner[0], -corner[1]), axis=(2, 3))

    def _keep(self, key: tuple[int, int, int], noise: NDArray[np.float32]) -> NDArray[np.float32]:
        noise.setflags(write=False)
        others = sum(kept.nbytes for other, kept in self._kept.items() if other != key)
        if others + noise.nbytes <= KEPT_BYTES:
            self._kept[key] = noise
        return noise

    def _one(
        self, sample: int, pass_index: int, step_index: int, corner: tuple[int, int] = (0, 0)
    ) -> NDArray[np.float32]:
        if self.antithetic and sample % 2:
            return -self._one(sample - 1, pass_index, step_index, corner)
        key = np.random.SeedSequence([self.seed, sample, pass_index, step_index + 1, *self.shape])
        stream = np.random.RandomState(np.random.MT19937(key))
        if self.kind == "simplex":
            return simplex_noise(stream, self.shape, corner)
        return stream.standard_normal(self.shape).astype(np.float32)


@dataclass(frozen=True)
class Placed:
    """The noise of a bank for tiles with these corners, an image each."""

    bank: NoiseBank
    corners: tuple[tuple[int, int], ...]

    def draw(self, pass_index: int, step_index: int, samples: int, images: int = 1) -> NDArray[np.float32]:
        """Float32 [images * samples, 3, H, W] for the first so many tiles."""
        return np.concatenate(
            [self.bank.tile(corner, pass_index, step_index, samples) for corner in self.corners[:images]]
        )

    def placed(self, corners: NDArray[np.intp]) -> "Placed":
        """Return that of tiles in other corners."""
        return self.bank.placed(corners)


def simplex_noise(
    stream: "np.random.RandomState", shape: tuple[int, int, int], corner: tuple[int, int] = (0, 0)
) -> NDArray[np.float32]:
    """Return float32 [C, H, W], each channel a field of its own; mean 0, variance 1 over draws, not within one of them.

    `corner` is the row and column at which the fields are entered.

    Ken Perlin's two-dimensional simplex noise in several octaves (AnoDDPM, Wyatt et al. 2022), in NumPy alone: packages
    on PyPI need a compiler at run time to be of use here, and their streams may change. After the frozen stream of
    RandomState there are only additions, multiplications, square roots and lookups in double precision, which IEEE 754
    rounds in one way; nothing is summed: the same numbers on every machine and for ever.
    """
    return np.stack([_field(stream, *shape[1:], *corner) for _ in range(shape[0])])


def _field(stream: "np.random.RandomState", height: int, width: int, top: int, left: int) -> NDArray[np.float32]:
    rows = np.arange(top, top + height, dtype=np.float64)[:, None]
    columns = np.arange(left, left + width, dtype=np.float64)[None]
    total = np.zeros((height, width))
    for octave in range(OCTAVES):
        hashes = stream.permutation(256)
        frequency = 2.0**octave / PERIOD
        # The noise is 0 at every vertex, so a lattice that began in the corner of each image would show there.
        x0, y0 = 256 * stream.random_sample(2)
        total = total + PERSISTENCE**octave * _octave(columns * frequency + x0, rows * frequency + y0, hashes)
    return (total / math.sqrt(_VARIANCE)).astype(np.float32)


def _octave(x: NDArray[np.float64], y: NDArray[np.float64], hashes: NDArray[np.int_]) -> NDArray[np.float64]:
    """Simplex noise at the points (x, y), broadcast together: a sum over the three corners of each point's triangle."""
    skewed = (x + y) * _SKEW
    i, j = np.floor(x + skewed), np.floor(y + skewed)
    unskewed = (i + j) * _UNSKEW
    dx, dy = x - (i - unskewed), y - (j - unskewed)
    lower = dx > dy  # which of the cell's two triangles
    total = np.zeros(np.broadcast_shapes(x.shape, y.shape))
    for along, up in ((0, 0), (lower, ~lower), (1, 1)):
        offset = (np.add(along, up, dtype=np.float64)) * _UNSKEW
        rx, ry = dx - along + offset, dy - up + offset
        gradient = _GRADIENTS[_hash(i + along, j + up, hashes)]
        near = np.maximum(0.5 - rx * rx - ry * ry, 0.0)
        near = near * near
        total = total + near * near * (gradient[..., 0] * rx + gradient[..., 1] * ry)
    return total


def _hash(i: NDArray[np.float64], j: NDArray[np.float64], hashes: NDArray[np.int_]) -> NDArray[np.int_]:
    inner = hashes[j.astype(np.int64) & 255]
    outer: NDArray[np.int_] = hashes[(i.astype(np.int64) + inner) & 255]
    return outer % len(_GRADIENTS)
