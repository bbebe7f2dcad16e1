"""Photographs in tiles: all of them is covered, no grid shows, and no size is too small or too large."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import test_detector as tiny
from PIL import Image

from mdps.runtime import CalibrationError, ImageError, UsageError, calibrate, load, tiles
from mdps.runtime.inspected import image_score
from mdps.runtime.manifest import Manifest
from mdps.runtime.noise import NoiseBank
from mdps.runtime.preprocessing import Observations, Preprocessing
from mdps.runtime.settings import PassSettings, ScoreSettings, paper_settings
from mdps.runtime.tiled import AT_ONCE
from mdps.runtime.tiles import Plan, Sheet, Tiling, shares, sheets, starts

SIZE = tiny.SIZE
OVERLAPS = (0.0, 0.25, 0.5, 0.6, 0.9)


def tiled_bundle(folder, tiling=None, settings=None):
    """The tiny bundle, whose graphs judge each pixel by itself, in tiles."""
    tiny.make_bundle(folder, settings or tiny.settings_of(mask_range="frozen"))
    replace(Manifest.read(folder, verify=False), tiles=tiling or Tiling(1.0)).write(folder)
    return folder


def photograph(height=21, width=34, seed=0):
    """Good parts but for a spot."""
    level = (tiny.LEVEL + 1) * 127.5
    image = np.random.default_rng(seed).normal(level, 3, (height, width, 3))
    image[height // 2 : height // 2 + 3, width // 3 : width // 3 + 4] = 0
    return np.clip(image, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tiled_bundle(tmp_path_factory.mktemp("tiles") / "b")
    good = [image[:, :9] for image in (photograph(seed=seed) for seed in range(1, 21))]
    with load(folder, calibrated=False, threads=1) as detector:
        calibration = calibrate(detector, good, false_alarm_rate=0.05)
    Manifest.read(folder).with_calibration("default", calibration).write(folder)
    return folder


@pytest.fixture(scope="module")
def detector(bundle):
    with load(bundle, threads=1) as detector:
        yield detector


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 100, 4000])
def test_tiles_cover_a_side_and_their_weights_add_up_to_one(length, overlap):
    begins, total = starts(length, 8, overlap), np.zeros(max(length, 8))
    assert begins[0] == 0
    assert begins[-1] == max(0, length - 8)
    assert all(0 < after - before <= max(1, round(8 * (1 - overlap))) for before, after in pairwise(begins))
    for begin, weights in zip(begins, shares(begins, length, 8), strict=True):
        assert (weights > 0).all()
        total[begin : begin + 8] += weights
    np.testing.assert_allclose(total, 1, atol=1e-6)


def test_a_tile_counts_little_at_its_borders_but_at_those_of_the_picture():
    first, middle, *_, last = shares(starts(256, 64, 0.5), 256, 64)
    assert middle[[0, -1]].max() < 1e-3
    assert middle.max() > 0.99
    np.testing.assert_allclose((first[0], last[-1]), 1, atol=1e-6)
    assert first[-1] < 1e-3 > last[0]
    assert np.abs(np.diff(middle)).max() < 0.06  # one of its 64 pixels


def test_the_plan_goes_row_by_row():
    plan = Plan.of((10, 17), (8, 8), 0.5)
    assert (plan.rows, plan.columns) == ((0, 2), (0, 4, 8, 9))
    assert plan.corners.tolist() == [[0, 0], [0, 4], [0, 8], [0, 9], [2, 0], [2, 4], [2, 8], [2, 9]]


@pytest.mark.parametrize("kind", ["gaussian", "simplex"])
def test_a_pixel_meets_the_same_noise_in_every_tile(kind):
    bank = NoiseBank(3, (3, 8, 8), kind, antithetic=True)
    corners = np.array([[0, 0], [3, 5], [4, 4], [19, 8]])
    drawn = bank.placed(corners).draw(0, 2, samples=2, images=4).reshape(4, 2, 3, 8, 8)
    whole = {}
    for (top, left), tile in zip(corners, drawn, strict=True):
        for row, column in np.ndindex(8, 8):
            pixel = whole.setdefault((top + row, left + column), tile[..., row, column])
            np.testing.assert_array_equal(pixel, tile[..., row, column])
    assert len(whole) < 4 * 64
    np.testing.assert_array_equal(drawn[0], bank.draw(0, 2, samples=2))
    np.testing.assert_array_equal(drawn[:, 1], -drawn[:, 0])


def test_noise_of_simplex_goes_on_beyond_a_tile():
    bank = NoiseBank(3, (3, 16, 16), "simplex")
    left, right = bank.placed(np.array([[0, 0], [0, 16]])).draw(0, 0, 1, 2)
    rows = np.concatenate([left, right], axis=2)
    jumps = np.abs(np.diff(rows, axis=2)).mean(axis=(0, 1))
    assert jumps[15] < 2 * np.median(jumps)


def test_views_of_tiles_are_of_one_picture():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    views = Sheet(pixels, np.repeat(np.repeat(pixels, 2, 0), 2, 1)).views(
        np.array([[0, 0], [12, 22], [5, 3]]), (8, 8), (16, 16)
    )
    np.testing.assert_allclose((views.images[2] + 1) * 127.5, pixels[5:13, 3:11].transpose(2, 0, 1), atol=1e-4)
    np.testing.assert_allclose(views.photographs, np.repeat(np.repeat(views.images, 2, 2), 2, 3), atol=1e-6)
    assert views.corners.tolist() == [[0, 0], [12, 22], [5, 3]]


def test_what_lies_beyond_a_picture_is_its_mirror_image():
    pixels = np.arange(3 * 5 * 3, dtype=np.uint8).reshape(3, 5, 3)
    (view,) = Sheet(pixels).views(np.array([[0, 0]]), (8, 8), None).images
    wanted = pixels[[0, 1, 2, 2, 1, 0, 0, 1]][:, [0, 1, 2, 3, 4, 4, 3, 2]]
    np.testing.assert_allclose((view + 1) * 127.5, wanted.transpose(2, 0, 1), atol=1e-4)


def test_photographs_are_cut_where_the_tile_lies_at_a_scale_that_does_not_divide():
    """A ramp: every view shows the same of it, whatever the scale makes of the borders."""
    ramp = np.repeat(np.linspace(0, 255, 90)[None, :, None], 50, 0).repeat(3, 2).astype(np.uint8)
    found = sheets([ramp], Preprocessing((8, 8)), Tiling(0.37), Preprocessing((24, 24)))
    views = found.sheets[0].views(np.array([[4, 11]]), (8, 8), (24, 24))
    assert found.sheets[0].size == (18, 33)
    np.testing.assert_allclose(views.photographs[0, 0, 10, 1::3], views.images[0, 0, 4], atol=0.02)


def test_the_map_of_a_picture_is_that_of_its_pixels(detector):
    image = photograph()
    result = detector(image)
    assert result.anomaly_map.shape == result.mask.shape == image.shape[:2]
    assert result.posterior_sample.shape == result.observation.shape == (3, *image.shape[:2])
    assert result.verdict == "fail"
    spot = np.zeros(image.shape[:2], bool)
    spot[10:13, 11:15] = True
    assert result.anomaly_map[spot].min() > result.anomaly_map[~spot].max()
    assert result.mask[spot].all()
    np.testing.assert_allclose(result.observation, image.transpose(2, 0, 1) / 127.5 - 1, atol=1e-3)
    assert result.score == pytest.approx(result.anomaly_map.max())  # `top` is 8 pixels of 256 x 256: one


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_no_result_depends_on_where_the_grid_falls(detector, monkeypatch, shift):
    """The graphs judge each pixel by itself, so that noise and mask are all that could."""
    image, before = photograph(), starts
    here = detector(image)

    def shifted(length, tile, overlap):
        rest = before(length, tile, overlap)
        return sorted({0, rest[-1], *(begin + shift for begin in rest if begin + shift < rest[-1])})

    monkeypatch.setattr(tiles, "starts", shifted)
    there = detector(image)
    np.testing.assert_allclose(there.anomaly_map, here.anomaly_map, atol=1e-6)
    np.testing.assert_array_equal(there.mask, here.mask)
    assert there.score == pytest.approx(here.score, abs=1e-6)


def test_a_picture_of_one_tile_is_judged_as_without_tiles(bundle, detector, tmp_path):
    image = photograph(SIZE, SIZE)
    plain = tiny.make_bundle(tmp_path / "plain", tiny.settings_of(mask_range="frozen"))
    manifest = replace(Manifest.read(plain), calibrations=Manifest.read(bundle).calibrations)
    manifest.write(plain)
    with load(plain, threads=1) as whole:
        wanted = whole(image)
    found = detector(image)
    np.testing.assert_allclose(found.anomaly_map, wanted.anomaly_map, atol=1e-6)
    np.testing.assert_array_equal(found.mask, wanted.mask)
    assert found.score == pytest.approx(wanted.score)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (17, 4000), (SIZE, SIZE), (SIZE + 1, 2 * SIZE)])
def test_pictures_of_every_size_have_a_map_of_it(detector, height, width):
    result = detector(np.full((height, width, 3), 100, np.uint8))
    assert result.anomaly_map.shape == (height, width)
    assert np.isfinite(result.score)


def test_a_photograph_is_shrunk_by_the_scale_and_cut_by_the_region(tmp_path):
    folder = tiled_bundle(tmp_path / "b", Tiling(0.5))
    manifest = Manifest.read(folder)
    replace(manifest, preprocessing=Preprocessing((SIZE, SIZE), roi=(4, 2, 40, 30))).write(folder)
    with load(folder, calibrated=False, threads=1) as detector:
        found = detector.inspect(detector.observe([photograph(60, 61)]), mask_range=(0.0, 1.0))
        assert found.anomaly_map.shape == (1, 1, 15, 20)
        with pytest.raises(ImageError, match="does not hold the region"):
            detector(photograph(20, 20))


def test_several_pictures_are_judged_one_by_one(detector):
    images = [photograph(9, 30), photograph(20, 11, seed=3)]
    alone = [detector(image) for image in images]
    for results in (detector.batch(images), detector.judge(detector.observe(images))):
        for one, other in zip(results, alone, strict=True):
            np.testing.assert_array_equal(one.anomaly_map, other.anomaly_map)
    parts = [detector.observe([image]) for image in images]
    joined = type(parts[0]).joined(parts)
    np.testing.assert_array_equal(detector.judge(joined)[1].anomaly_map, alone[1].anomaly_map)
    with pytest.raises(ImageError, match="one by one, these are 2"):
        detector.inspect(detector.observe(images))
    assert detector.batch([]) == []


def test_tiles_as_arrays_are_judged_as_images(detector):
    assert detector.inspect(np.zeros((2, 3, SIZE, SIZE), np.float32)).anomaly_map.shape == (2, 1, SIZE, SIZE)
    with pytest.raises(ImageError, match="should be"):
        detector.inspect(np.zeros((1, 3, SIZE, SIZE + 1), np.float32))


def test_progress_tells_tiles(detector):
    told = []
    detector.watch_tiles(lambda done, of: told.append((done, of)))
    detector(photograph(20, 30))
    count = len(starts(20, SIZE, 0.5)) * len(starts(30, SIZE, 0.5))
    assert told == [(min(done, count), count) for done in range(AT_ONCE, count + AT_ONCE, AT_ONCE)]


def test_what_needs_a_whole_picture_is_refused(tmp_path):
    folder = tiled_bundle(tmp_path / "b", settings=tiny.settings_of(mask_range="per-image"))
    with pytest.raises(UsageError, match="--mask-range frozen"):
        load(folder, calibrated=False)
    folder = tiled_bundle(tmp_path / "c")
    with pytest.raises(CalibrationError, match="no calibration"):
        load(folder)
    settings = tiny.settings_of(mask_range="frozen")
    early = replace(settings, sampler=replace(settings.sampler, early_exit=0.5))
    with pytest.raises(UsageError, match="early exit is of whole pictures"):
        load(tiled_bundle(tmp_path / "d", settings=early), calibrated=False)


def test_one_pass_needs_no_frozen_range(tmp_path):
    settings = tiny.settings_of(masked=None)
    with load(tiled_bundle(tmp_path / "b", settings=settings), calibrated=False, threads=1) as detector:
        result = detector(photograph())
    assert result.mask[10:13, 11:15].all()
    assert result.mask.mean() < 0.1


@pytest.mark.parametrize("rule", ["top_mean", "softmax_top_sum"])
def test_the_score_is_the_score_graphs(rule):
    torch = pytest.importorskip("torch")
    from mdps.export.score import Score

    settings: ScoreSettings = replace(paper_settings((16, 16)).score, stages=(), image_score=rule, top=7)
    anomaly_map = np.random.default_rng(0).normal(size=(1, 1, 16, 16)).astype(np.float32)
    wanted = Score(None, settings)._image_score(torch.from_numpy(anomaly_map))
    assert image_score(anomaly_map.ravel(), settings) == pytest.approx(float(wanted), rel=1e-5)
    assert np.isfinite(image_score(anomaly_map[..., :2, :2].ravel(), settings))  # fewer pixels than are counted


LARGE = """
import sys
from dataclasses import replace
import numpy as np
from mdps.runtime.detector import Detector
from mdps.runtime.manifest import Manifest
from mdps.runtime.pipeline import Inspection
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.tiled import Tiled
from mdps.runtime.tiles import Tiling

class Darkness:
    def __init__(self, settings):
        self.settings, self.engines = settings, {}
    def inspect(self, views, mask_range, exit_limit=None):
        found = -views.images.mean(axis=1, keepdims=True)
        none = np.zeros(len(found), bool)
        return Inspection(found, found.max(axis=(1, 2, 3)), found, found, found, views.images, {}, none)

manifest = replace(Manifest.read(sys.argv[1]), tiles=Tiling(1.0), preprocessing=Preprocessing((256, 256)))
tiled = Tiled(Darkness(manifest.settings), manifest.tiles, (256, 256))
result = Detector(manifest, tiled, manifest.calibrations["default"])(sys.argv[2])
assert result.anomaly_map.shape == (4472, 4472), result.anomaly_map.shape
assert abs(result.anomaly_map + result.observation.mean(axis=0, dtype=np.float32)).max() < 2e-3
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))  # not the parent's
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a program took at most")
def test_twenty_megapixels_take_less_than_a_gigabyte(bundle, tmp_path):
    """With a masked pass, whose first map is kept too."""
    path = tmp_path / "large.png"
    Image.fromarray(np.tile(photograph(43, 43), (104, 104, 1))).save(path, compress_level=1)
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(bundle), str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 1e9


def test_a_batch_of_observations_keeps_its_corners():
    views = Observations(np.zeros((3, 3, 2, 2), np.float32), corners=np.array([[0, 0], [1, 2], [3, 4]]))
    assert views[1:].corners.tolist() == [[1, 2], [3, 4]]


def test_the_first_pass_keeps_its_own_map(tmp_path):
    settings = tiny.settings_of(mask_range="frozen")
    sampler = replace(settings.sampler, masked_pass=PassSettings(200, 100.0, steps=1))
    with load(tiled_bundle(tmp_path / "b", settings=replace(settings, sampler=sampler)), calibrated=False) as detector:
        views = detector.observe([photograph()])
        found = detector.inspect(views, mask_range=(0.0, 0.1))
        np.testing.assert_allclose(found.first_map, detector.first_maps(views), atol=1e-6)
        assert np.abs(found.first_map - found.anomaly_map).max() > 0.01
