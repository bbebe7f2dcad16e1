"""The noise bank: fixed for ever, one key a draw, standard normal."""

import numpy as np
import pytest

from mdps.runtime.noise import INITIAL, NoiseBank

SHAPE = (3, 8, 8)


def test_the_stream_is_pinned():
    """These numbers are in the calibration of every bundle out there: if this fails, the bank broke, not the test."""
    noise = NoiseBank(0, (3, 2, 2)).draw(0, INITIAL, 1)
    expected = [-0.607147396, -1.439206, 0.858455002, -0.0636677891]
    np.testing.assert_array_equal(noise.ravel()[:4], np.array(expected, dtype=np.float32))


def test_equal_keys_give_equal_noise_and_others_do_not():
    seen = {}
    for seed in (0, 1):
        for pass_index in (0, 1):
            for step in (INITIAL, 0, 1):
                draw = NoiseBank(seed, SHAPE).draw(pass_index, step, 2)
                np.testing.assert_array_equal(draw, NoiseBank(seed, SHAPE).draw(pass_index, step, 2))
                for sample in range(2):
                    seen[seed, pass_index, step, sample] = draw[sample].tobytes()
    assert len(set(seen.values())) == len(seen) == 24


@pytest.mark.parametrize("kind", ["gaussian", "simplex"])
def test_an_antithetic_bank_negates_every_second_sample(kind):
    bank, plain = NoiseBank(3, SHAPE, kind, antithetic=True), NoiseBank(3, SHAPE, kind)
    for pass_index, step in ((0, INITIAL), (1, 0)):
        drawn = bank.draw(pass_index, step, 4)
        np.testing.assert_array_equal(drawn[::2], plain.draw(pass_index, step, 4)[::2])
        np.testing.assert_array_equal(drawn[1::2], -drawn[::2])


def test_order_of_drawing_does_not_matter():
    bank, other = NoiseBank(3, SHAPE), NoiseBank(3, SHAPE)
    first = bank.draw(0, 0, 2), bank.draw(1, 4, 2)
    second = other.draw(1, 4, 2), other.draw(0, 0, 2)
    np.testing.assert_array_equal(first[0], second[1])
    np.testing.assert_array_equal(first[1], second[0])


def test_more_samples_begin_with_the_fewer():
    bank = NoiseBank(0, SHAPE)
    np.testing.assert_array_equal(bank.draw(0, 3, 16)[:5], bank.draw(0, 3, 5))


def test_it_is_standard_normal_float32_and_read_only():
    noise = NoiseBank(0, (3, 64, 64)).draw(0, 0, 4)
    assert noise.dtype == np.float32
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    correlation = np.corrcoef(noise.reshape(4, -1))
    assert np.abs(correlation - np.eye(4)).max() < 0.04
    with pytest.raises(ValueError, match="read-only"):
        noise[0, 0, 0, 0] = 1


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr("mdps.runtime.noise.KEPT_BYTES", 2 * 3 * 8 * 8 * 4)
    bank = NoiseBank(0, SHAPE)
    assert bank.draw(0, 0, 2) is bank.draw(0, 0, 2)
    extra = bank.draw(0, 1, 2)
    assert bank.draw(0, 1, 2) is not extra
    np.testing.assert_array_equal(bank.draw(0, 1, 2), extra)
