"""Simplex noise against a scalar implementation written from Perlin's description, and against its own statistics."""

import math

import numpy as np
import pytest

from mdps.runtime import noise as simplex
from mdps.runtime.noise import INITIAL, NoiseBank, simplex_noise

GRADIENTS = [(1, 0), (0, 1), (-1, 0), (0, -1)] + [(a * 0.5**0.5, b * 0.5**0.5) for a in (-1, 1) for b in (-1, 1)]
PINNED = [-0.845066726, 0.0309395995, 0.415575415, 0.276566446]


def stream(seed=0):
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed])))


def one_point(x, y, hashes):
    """Every vertex of the lattice near the point adds to it, whichever triangle the point lies in."""
    skew, unskew = (math.sqrt(3) - 1) / 2, (3 - math.sqrt(3)) / 6
    i0, j0 = (math.floor(c + (x + y) * skew) for c in (x, y))
    total = 0.0
    for i in range(i0 - 2, i0 + 4):
        for j in range(j0 - 2, j0 + 4):
            rx, ry = x - (i - (i + j) * unskew), y - (j - (i + j) * unskew)
            near = 0.5 - rx**2 - ry**2
            if near > 0:
                g = GRADIENTS[hashes[(i + hashes[j % 256]) % 256] % 8]
                total += near**4 * (g[0] * rx + g[1] * ry)
    return total


def test_an_octave_is_the_sum_over_all_near_vertices():
    hashes = stream().permutation(256)
    points = np.random.default_rng(0).uniform(-5, 600, (300, 2))
    found = simplex._octave(points[:, 0], points[:, 1], hashes)
    np.testing.assert_allclose(found, [one_point(x, y, hashes) for x, y in points], atol=1e-12)


def test_the_octaves_are_those_of_the_publication():
    """Six octaves, persistence 0.8, from a period of 64 pixels down by halves."""
    draws, expected = stream(3), np.zeros((2, 3))
    for octave in range(6):
        hashes, (x0, y0) = draws.permutation(256), 256 * draws.random_sample(2)
        for row in range(2):
            for column in range(3):
                point = (column * 2**octave / 64 + x0, row * 2**octave / 64 + y0)
                expected[row, column] += 0.8**octave * one_point(*point, hashes)
    np.testing.assert_allclose(
        simplex_noise(stream(3), (1, 2, 3))[0], expected / math.sqrt(simplex._VARIANCE), rtol=1e-5
    )


def test_mean_zero_and_variance_one_over_draws_and_everywhere_in_the_image():
    draws = stream(1)
    noise = np.stack([simplex_noise(draws, (3, 16, 16)) for _ in range(500)]).reshape(-1, 16, 16)
    assert noise.dtype == np.float32
    assert abs(noise.mean()) < 0.03
    assert abs(noise.var() - 1) < 0.05
    assert abs(noise[:, 0, 0].var() - 1) < 0.15, "the lattice must not begin in the corner"


def test_it_is_coarser_than_gaussian_noise_and_channels_differ():
    noise = simplex_noise(stream(2), (3, 64, 64)).astype(float)
    neighbours = np.corrcoef(noise[:, :, 1:].ravel(), noise[:, :, :-1].ravel())[0, 1]
    assert neighbours > 0.6
    assert np.abs(np.corrcoef(noise.reshape(3, -1)) - np.eye(3)).max() < 0.8
    assert np.abs(noise[0] - noise[1]).max() > 0.5


def test_the_stream_is_pinned():
    """Bundles are calibrated and checkpoints trained on these numbers: if this fails, the noise broke, not the test."""
    noise = NoiseBank(0, (3, 2, 2), "simplex").draw(0, INITIAL, 1)
    np.testing.assert_array_equal(noise.ravel()[:4], np.array(PINNED, dtype=np.float32))


def test_the_bank_repeats_and_differs_by_key():
    bank = NoiseBank(0, (3, 8, 8), "simplex")
    first = bank.draw(0, INITIAL, 2)
    np.testing.assert_array_equal(first, NoiseBank(0, (3, 8, 8), "simplex").draw(0, INITIAL, 2))
    others = [bank.draw(1, INITIAL, 1), bank.draw(0, 0, 1), NoiseBank(1, (3, 8, 8), "simplex").draw(0, INITIAL, 1)]
    assert all(np.abs(first[:1] - other).max() > 0.1 for other in others)
    assert np.abs(first[0] - first[1]).max() > 0.1


@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 5, 9)])
def test_any_shape(shape):
    assert simplex_noise(stream(), shape).shape == shape
