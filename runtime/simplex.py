"""Simplex noise in several octaves (AnoDDPM, Wyatt et al. 2022), the same numbers on every machine and for ever.

Ken Perlin's two-dimensional simplex noise, in NumPy alone: the packages on PyPI need a compiler at run time to be of
use here, and their streams may change. After the frozen stream of RandomState there are only additions,
multiplications, square roots and lookups in double precision, which IEEE 754 rounds in one way; nothing is summed.
"""

import math

import numpy as np
from numpy.typing import NDArray

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


def simplex_noise(stream: "np.random.RandomState", shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Float32 [C, H, W], each channel a field of its own; mean 0 and variance 1 over draws, not within one of them."""
    return np.stack([_field(stream, *shape[1:]) for _ in range(shape[0])])


def _field(stream: "np.random.RandomState", height: int, width: int) -> NDArray[np.float32]:
    rows, columns = np.arange(height, dtype=np.float64)[:, None], np.arange(width, dtype=np.float64)[None]
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
