"""The threshold and ranges of good parts, and what they promise."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mdps.runtime.calibration import (
    Calibration,
    CalibrationWarning,
    calibrate,
    exit_limit,
    first_quantiles,
    good_threshold,
)
from mdps.runtime.errors import BackendError, BundleError, CalibrationError, ImageError, UsageError
from mdps.runtime.preprocessing import Observations, Preprocessing, observe
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.scope import Scope
from mdps.runtime.settings import EXIT_SHARES, MaskSettings, paper_settings


class BrightnessDetector:
    """Scores an image by its mean level; its last map is half its first, or nothing where the mask range is odd."""

    def __init__(self, mask_range="per-image", noise="simplex"):  # of which nothing is said
        sampler = replace(paper_settings((2, 2)).sampler, noise=noise)
        self.settings = replace(paper_settings((2, 2)), sampler=sampler, mask=MaskSettings(0.1, mask_range))
        self.engine, self.tuned, self.aligned, self.denoises, self.tiles = "onnxruntime", "", "", True, None
        self.given, self.sizes, self.scope = [], [], Scope()
        self.schedule = NoiseSchedule.linear()

    def predicted_noise(self, noised, step):
        """None, which no trained denoiser says."""
        return 0 * noised

    def observe(self, images):
        return observe(images, Preprocessing((2, 2)))

    def first_maps(self, observations):
        return observations.images[:, :1]

    def inspect(self, observations, *, mask_range=None, early_exit=True):
        assert not early_exit  # good parts go through both passes
        self.given.append(mask_range)
        self.sizes.append(len(observations))
        maps = observations.images[:, :1]
        scores = maps.mean(axis=(1, 2, 3))
        return SimpleNamespace(anomaly_score=scores, first_map=maps, anomaly_map=maps / 2, first_score=2 * scores)


def pictures(levels):
    return [np.full((2, 2), level, np.uint8) for level in levels]


def unit(level):
    return level / 127.5 - 1


def test_the_threshold_is_the_conformal_quantile():
    scores = np.random.default_rng(0).permutation(np.arange(1.0, 100.0)).astype(np.float32)  # 99 scores
    assert good_threshold(scores, 0.01) == (99.0, pytest.approx(0.01))
    assert good_threshold(scores, 0.05) == (95.0, pytest.approx(0.05))
    assert good_threshold(scores, 0.5) == (50.0, pytest.approx(0.5))


def test_too_few_scores_give_the_largest_and_say_what_it_promises():
    assert good_threshold(np.array([3.0, 1.0, 2.0], np.float32), 0.01) == (3.0, pytest.approx(0.25))
    assert good_threshold(np.array([3.0], np.float32), 0.999)[0] == 3.0


@pytest.mark.parametrize(("count", "rate"), [(19, 0.05), (50, 0.1), (200, 0.02), (30, 0.3)])
def test_the_promised_rate_holds_on_new_images(count, rate):
    """Fresh good scores exceed the threshold as often as it promises, over 4,000 calibrations."""
    rng = np.random.default_rng(1)
    alarms, promised = [], 0.0
    for _ in range(4000):
        scores = rng.gamma(2.0, size=count + 1).astype(np.float32)
        threshold, promised = good_threshold(scores[:-1], rate)
        alarms.append(scores[-1] > threshold)
    assert promised <= rate + 1e-9
    assert np.mean(alarms) == pytest.approx(promised, abs=4 * np.sqrt(rate / 4000))


@pytest.mark.parametrize("scores", [[], [1.0, np.nan], [np.inf]])
def test_scores_that_are_no_numbers(scores):
    with pytest.raises(CalibrationError, match="finite"):
        good_threshold(np.array(scores, np.float32), 0.1)


def test_calibrate_measures_threshold_and_ranges():
    detector = BrightnessDetector()
    found = calibrate(detector, pictures(range(100, 119)), false_alarm_rate=0.1, batch=4)
    assert found.images == 19
    assert found.threshold == pytest.approx(unit(117), abs=1e-6)  # the 18th of 19
    assert found.expected_false_alarm_rate == pytest.approx(0.1)
    assert found.mask_range == pytest.approx((unit(100), unit(118)), abs=1e-6)
    assert (found.map_low, found.map_high) == pytest.approx((unit(100) / 2, unit(118) / 2), abs=1e-6)
    assert (found.samples, found.seed, found.note) == (1, 0, "")
    # Of 19 scores in the first pass (twice those of 100 to 118) the next one exceeds 95, 90, .., 5 %.
    np.testing.assert_allclose(found.first_quantiles, [2 * unit(level) for level in range(100, 119)], atol=1e-6)
    assert detector.sizes == [4, 4, 4, 4, 3]
    assert set(detector.given) == {None}


def test_a_frozen_range_is_measured_before_it_is_used():
    detector = BrightnessDetector("frozen")
    found = calibrate(detector, pictures(range(100, 119)), false_alarm_rate=0.1)
    assert set(detector.given) == {found.mask_range}
    assert found.mask_range == pytest.approx((unit(100), unit(118)), abs=1e-6)


def test_the_order_of_images_does_not_matter():
    levels = list(range(100, 119))
    assert calibrate(BrightnessDetector(), pictures(levels), false_alarm_rate=0.1) == calibrate(
        BrightnessDetector(), pictures(levels[::-1]), false_alarm_rate=0.1
    )


def test_too_few_images_warn_and_leave_a_note():
    with pytest.warns(CalibrationWarning, match=r"3 good images .* 0\.25 only, not 0\.01: calibrate on at least 99"):
        found = calibrate(BrightnessDetector(), pictures([100, 101, 102]))
    assert "at least 99" in found.note
    assert found.threshold == pytest.approx(unit(102), abs=1e-6)


def test_maps_of_one_value_are_said_to_tell_nothing():
    detector = BrightnessDetector()
    detector.observe = lambda images: Observations(np.zeros((len(images), 3, 2, 2), np.float32))
    with pytest.warns(CalibrationWarning, match=r"map of the good images is 0 throughout.* threshold 0 tells no"):
        found = calibrate(detector, pictures(range(100, 119)), false_alarm_rate=0.1)
    assert found.threshold == 0
    assert "0 throughout" in found.note


def test_a_denoiser_that_does_not_denoise_good_parts_is_told_beside_the_rest():
    with pytest.warns(CalibrationWarning) as warned:
        found = calibrate(BrightnessDetector(noise="gaussian"), pictures([100, 101, 102]))
    few, doubt = (str(warning.message) for warning in warned)
    assert "at least 99" in few
    assert "does not know these parts" in doubt
    assert found.note == f"{few}; {doubt}"


def test_the_named_number_of_images_is_enough(recwarn):
    calibrate(BrightnessDetector(), pictures(np.arange(99) + 50))
    calibrate(BrightnessDetector(), pictures(np.arange(19) + 50), false_alarm_rate=0.05)
    assert not [warning for warning in recwarn if warning.category is CalibrationWarning]


def test_the_arithmetic_of_the_engine_is_remembered():
    detector = BrightnessDetector()
    assert calibrate(detector, pictures(range(50, 60)), false_alarm_rate=0.5).arithmetic == ""
    detector.engine = "openvino-bf16"
    assert calibrate(detector, pictures(range(50, 60)), false_alarm_rate=0.5).arithmetic == "bf16"


def test_images_may_come_from_an_iterator():
    assert calibrate(BrightnessDetector("frozen"), iter(pictures(range(50, 150)))).images == 100


def test_what_cannot_be_calibrated(tmp_path):
    with pytest.raises(CalibrationError, match="no images"):
        calibrate(BrightnessDetector(), [])
    for rate in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="between 0 and 1"):
            calibrate(BrightnessDetector(), pictures([1]), false_alarm_rate=rate)
    with pytest.raises(ImageError, match=r"absent\.png"):
        calibrate(BrightnessDetector(), [*pictures([1]), tmp_path / "absent.png"])


def test_nan_maps_are_no_calibration():
    detector = BrightnessDetector("frozen")
    detector.first_maps = lambda observations: observations.images[:, :1] * np.nan
    with pytest.raises(BackendError, match="NaN"):
        calibrate(detector, pictures([1]))


def test_json_round_trip_and_checks():
    calibration = Calibration(0.5, 0.01, 0.01, 120, 0.0, 1.0, 0.0, 2.0, 1, 0)
    assert Calibration.from_json(calibration.to_json()) == calibration
    assert calibration.first_quantiles == ()
    recorded = replace(calibration, first_quantiles=tuple(0.01 * k for k in range(19)))
    assert Calibration.from_json(recorded.to_json()) == recorded
    for scores in ((0.1,), tuple(0.01 * (19 - k) for k in range(19))):
        with pytest.raises(UsageError, match="19 rising scores or none"):
            replace(calibration, first_quantiles=scores)
    for change in ({"images": 0}, {"false_alarm_rate": 0.0}, {"mask_low": 2.0}, {"map_low": 3.0}, {"threshold": "1"}):
        with pytest.raises(BundleError):
            Calibration.from_json({**calibration.to_json(), **change})


def test_an_early_exit_is_below_its_share_of_good_parts_and_below_the_threshold():
    scores = tuple(0.05 * k for k in range(1, 20))
    calibration = replace(Calibration(0.5, 0.01, 0.01, 120, 0.0, 1.0, 0.0, 2.0, 1, 0), first_quantiles=scores)
    assert exit_limit(calibration, 0.0, "b") is None
    assert exit_limit(None, 0.0, "b") is None
    assert exit_limit(calibration, 0.05, "b") == pytest.approx(0.05)
    assert exit_limit(calibration, 0.3, "b") == pytest.approx(0.3)
    assert exit_limit(calibration, 0.95, "b") == 0.5  # the threshold
    with pytest.raises(CalibrationError, match=r"b has no calibration for these settings.*mdps calibrate"):
        exit_limit(None, 0.3, "b")
    with pytest.raises(CalibrationError, match=r"b has no scores of the first pass.*mdps calibrate"):
        exit_limit(replace(calibration, first_quantiles=()), 0.3, "b")


@pytest.mark.parametrize("count", [19, 50, 7])
def test_so_many_of_the_next_good_parts_leave_early(count):
    rng = np.random.default_rng(1)
    left = np.zeros(19)
    for _ in range(4000):
        scores = rng.gamma(2.0, size=count + 1).astype(np.float32)
        left += scores[-1] <= np.array(first_quantiles(scores[:-1]))
    shares = np.maximum(np.floor(np.array(EXIT_SHARES) * (count + 1) + 1e-9), 1) / (count + 1)
    np.testing.assert_allclose(left / 4000, shares, atol=0.035)
    assert (shares <= np.maximum(EXIT_SHARES, 1 / (count + 1)) + 1e-9).all()
