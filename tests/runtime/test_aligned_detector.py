"""A detector of aligned parts: it judges what was moved, tells how it lay, and its maps lie as the picture does."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import test_detector as tiny
from PIL import Image
from scipy import ndimage
from skimage.transform import AffineTransform, warp
from tuned_bundle import tuned_bundle

from mdps.runtime import CalibrationError, load
from mdps.runtime.errors import ImageError, UsageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Observations, Preprocessing, observe
from mdps.runtime.registration import Aligner, align
from mdps.runtime.tiles import Tiling

HEIGHT, WIDTH = 96, 128


def part(seed=0):
    """A texture, and noise by the seed."""
    smooth = ndimage.gaussian_filter(np.random.default_rng(3).normal(size=(HEIGHT, WIDTH, 3)), (4, 4, 0))
    noise = np.random.default_rng(seed).normal(0, 2, smooth.shape)
    return (128 + 45 * smooth / smooth.std() + noise).clip(0, 255).astype(np.uint8)


def shifted(image, x, y):
    moved = warp(image / 255, AffineTransform(translation=(x, y)).inverse, order=3, mode="edge")
    return np.rint(moved * 255).clip(0, 255).astype(np.uint8)


ALIGNMENT = align([part(seed) for seed in range(4)])


def aligned(folder, alignment=ALIGNMENT):
    Manifest.read(folder).with_alignment("default", alignment).write(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Bundles of the published method, of it in tiles and of a tuning, with and without an alignment."""
    root = tmp_path_factory.mktemp("aligned")
    makers = {"published": tiny.make_bundle, "tuned": tuned_bundle, "tiled": tiled_bundle}
    return {name: (make(root / name), aligned(make(root / f"{name}-aligned"))) for name, make in makers.items()}


def tiled_bundle(folder):
    one_pass = tiny.settings_of(masked=None)
    replace(Manifest.read(tiny.make_bundle(folder, one_pass)), tiles=Tiling(0.25)).write(folder)
    return folder


@pytest.fixture(params=["published", "tuned", "tiled"])
def detectors(request, folders):
    plain, other = folders[request.param]
    with load(plain, calibrated=False, threads=1) as one, load(other, calibrated=False, threads=1) as two:
        yield one, two


PICTURES = [shifted(part(8), 6, -4), part(9), np.full((HEIGHT, WIDTH, 3), 90, np.uint8), shifted(part(7), -5, 3)]


def test_what_is_judged_is_the_moved_picture_and_its_map_lies_as_the_picture_did(detectors):
    plain, detector = detectors
    aligner = Aligner(ALIGNMENT)
    straight, pose = aligner(Image.fromarray(PICTURES[0]))
    wanted, found, lying = plain(straight), detector(PICTURES[0]), plain(PICTURES[0])
    assert found.score == wanted.score != lying.score
    assert found.alignment == pose
    assert found.alignment.shift == pytest.approx((6, -4), abs=0.5)
    assert found.alignment.residual < ALIGNMENT.limit
    box = (0, 0, WIDTH, HEIGHT)
    np.testing.assert_array_equal(found.anomaly_map, aligner.back(wanted.anomaly_map, pose, box))
    np.testing.assert_array_equal(found.mask, aligner.back(wanted.mask, pose, box))
    assert found.anomaly_map.shape == lying.anomaly_map.shape
    off, before = (np.abs(one.observation - lying.observation) for one in (found, wanted))
    assert off[:, 1:-1, 1:-1].mean() < before.mean()
    assert (found.posterior_sample is None) == (wanted.posterior_sample is None)


def test_a_picture_gets_the_same_result_alone_and_in_a_batch(detectors):
    for detector in detectors:
        together = detector.batch(PICTURES)
        for picture, one in zip(PICTURES, together, strict=True):
            alone = detector(picture)
            assert (alone.score, alone.alignment) == (one.score, one.alignment)
            np.testing.assert_array_equal(alone.anomaly_map, one.anomaly_map)


def test_a_picture_that_cannot_be_aligned_is_judged_as_it_lies_and_says_so(detectors):
    plain, detector = detectors
    wanted, found = plain(PICTURES[2]), detector(PICTURES[2])
    assert (found.score, found.observation.tolist()) == (wanted.score, wanted.observation.tolist())
    assert "not aligned but judged as it lies: nothing in it" in found.alignment.fault
    assert wanted.alignment is None


def test_observations_that_were_not_aligned_are_refused(detectors):
    plain, detector = detectors
    given = plain.observe(PICTURES[:2])
    assert [result.alignment for result in plain.judge(given)] == [None, None]
    with pytest.raises(ImageError, match="parts are aligned: give what this detector's `observe` returns"):
        detector.judge(given)
    assert detector.judge(detector.observe(PICTURES[:2]))[1].alignment is not None


def test_observations_keep_the_poses_of_their_pictures():
    framing = Preprocessing((8, 8))
    seen = observe(PICTURES, framing, None, Aligner(ALIGNMENT))
    assert len(seen.poses) == 4
    parts = [seen[0:1], seen[1:4]]
    assert parts[1].poses == seen.poses[1:]
    assert Observations.joined(parts).poses == seen.poses
    assert observe(PICTURES, framing).poses == ()


def test_a_region_of_interest_is_of_the_reference_view(tmp_path):
    framing, x = Preprocessing((8, 8), roi=(40, 30, 32, 24)), Aligner(ALIGNMENT)
    moved = observe([PICTURES[0], PICTURES[0]], framing, None, x).images[0]
    still = observe([part(8)], framing).images[0]
    assert np.abs(moved - still).mean() < 0.03 < np.abs(observe([PICTURES[0]], framing).images[0] - still).mean()


def calibrated(folder):
    from mdps.runtime import calibrate

    with load(folder, calibrated=False, threads=1) as detector:
        calibration = calibrate(detector, [part(seed) for seed in range(20)], false_alarm_rate=0.1)
    Manifest.read(folder).with_calibration("default", calibration).write(folder)
    return calibration


@pytest.mark.filterwarnings("ignore::mdps.runtime.calibration.CalibrationWarning")
def test_a_calibration_holds_for_the_alignment_it_was_made_with(tmp_path):
    folder = aligned(tiny.make_bundle(tmp_path / "bundle"))
    assert calibrated(folder).aligned == ALIGNMENT.name
    with load(folder, threads=1) as detector:
        assert detector.provenance["aligned"] == ALIGNMENT.name
        assert detector(PICTURES[0]).verdict is not None
    told = r"calibrated with parts that lay otherwise, aligned or not.*GOOD_FOLDER`$"
    with pytest.raises(CalibrationError, match=told):
        load(aligned(folder, None), threads=1)
    calibrated(folder)
    with pytest.raises(CalibrationError, match=told.replace("`", " --align`")):
        load(aligned(folder), threads=1)


def test_a_manifest_without_an_alignment_is_as_before(tmp_path):
    folder = tiny.calibrated(tiny.make_bundle(tmp_path / "bundle"))
    before = Manifest.read(folder)
    assert "alignments" not in before.to_json()
    assert "aligned" not in before.to_json()["calibrations"]["default"]
    aligned(folder)
    assert Manifest.read(folder).alignments == {"default": ALIGNMENT}
    assert Manifest.read(folder).with_alignment("default", None) == before


def test_a_bundle_says_what_it_needs_where_opencv_is_missing(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    plain, other = folders["published"]
    with pytest.raises(UsageError, match=r"OpenCV, which is not installed: pip install 'mdps\[align\]'"):
        load(other, calibrated=False, threads=1)
    with load(plain, calibrated=False, threads=1) as detector:
        assert detector(PICTURES[0]).alignment is None
