"""Registration: known moves come back, what is something else is said, and no result depends on the batch."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from skimage.transform import EuclideanTransform, warp

from mdps.runtime.alignment import Alignment, Pose
from mdps.runtime.calibration import CalibrationWarning
from mdps.runtime.errors import BundleError, CalibrationError, ImageError, UsageError
from mdps.runtime.registration import Aligner, align, reference_size

Pixels = NDArray[np.uint8]


def part(seed: int = 0, grain: int | None = None) -> Pixels:
    """A smooth texture [240, 320, 3] of three colours, with noise by the seed `grain`."""
    smooth = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(240, 320, 3)), (4, 4, 0))
    pixels = 128 + 45 * smooth / smooth.std()
    if grain is not None:
        pixels += np.random.default_rng(grain).normal(0, 2, pixels.shape)
    return pixels.clip(0, 255).astype(np.uint8)


def ring(seed: int = 0, side: int = 200) -> Pixels:
    """A round part of no turn: rings, and noise that differs by `seed`."""
    rows, columns = np.mgrid[:side, :side] - (side - 1) / 2
    radius = np.hypot(rows, columns)
    pixels = np.where(radius < 0.4 * side, 120 + 60 * np.sin(radius / 4), 230)
    pixels = ndimage.gaussian_filter(pixels, 1) + np.random.default_rng(seed).normal(0, 4, radius.shape)
    return np.repeat(pixels.clip(0, 255).astype(np.uint8)[..., None], 3, axis=-1)


def moved(image: Pixels, shift: tuple[float, float], turn: float) -> Pixels:
    """Return it as scikit-image moves it: turned clockwise about its centre, then shifted."""
    centre = np.array([image.shape[1] - 1, image.shape[0] - 1]) / 2
    to_origin, back = EuclideanTransform(translation=-centre), EuclideanTransform(translation=centre + shift)
    there = to_origin + EuclideanTransform(rotation=math.radians(turn)) + back
    return np.rint(warp(image / 255, there.inverse, order=3, mode="edge") * 255).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def aligner() -> Aligner:
    return Aligner(align([part(grain=grain) for grain in range(4)]))


MOVES = [
    *[((16.0, -12.0), 5.0), ((-16.0, 12.0), -5.0), ((25.0, 3.0), -9.0)],
    *[((0.7, 0.0), 0.0), ((0.0, 0.0), 3.3), ((-9.3, 11.1), 0.8)],
]


@pytest.mark.parametrize(("shift", "turn"), MOVES)
def test_a_known_move_comes_back(aligner: Aligner, shift: tuple[float, float], turn: float) -> None:
    seen = moved(part(grain=9), shift, turn)
    straight, pose = aligner(Image.fromarray(seen))
    assert pose.ok
    assert pose.shift == pytest.approx(shift, abs=0.5)
    assert pose.turn == pytest.approx(turn, abs=0.2)
    assert np.abs(np.asarray(straight).astype(int) - part()).mean() < 3


@pytest.mark.parametrize("name", ["deep_pcb", "magnetic_tile", "mvtec_bottle"])
def test_a_known_move_of_a_photograph_comes_back(shared: Path, name: str) -> None:
    photograph = np.array(Image.open(sorted((shared / "data" / name / "train" / "good").iterdir())[0]).convert("RGB"))
    across, down = 0.05 * photograph.shape[1], -0.05 * photograph.shape[0]
    aligner = Aligner(align([photograph]))
    pose = aligner.pose(Image.fromarray(moved(photograph, (across, down), 4.5)))
    assert pose.shift == pytest.approx((across, down), abs=0.5)
    assert pose.turn == pytest.approx(4.5, abs=0.2)


def test_a_round_part_is_shifted_and_not_turned() -> None:
    aligner = Aligner(align([ring(seed) for seed in range(4)]))
    for seed in range(10, 14):
        pose = aligner.pose(Image.fromarray(moved(ring(seed), (6.0, -4.0), 4.0)))
        assert (pose.ok, pose.turn) == (True, 0)
        assert pose.shift == pytest.approx((6, -4), abs=0.5)


def test_what_comes_into_view_is_the_references_as_bright_as_the_picture(aligner: Aligner) -> None:
    dark = (0.8 * part()).astype(np.uint8)
    straight, pose = aligner(Image.fromarray(moved(dark, (20.0, 10.0), 0.0)))
    assert pose.shift == pytest.approx((20, 10), abs=0.5)
    new = np.asarray(straight)[:, -19:].astype(int)
    assert abs((new - dark[:, -19:]).mean()) < 4
    assert np.abs(new - dark[:, -19:]).mean() < 10 < np.abs(part()[:, -20:-19] - dark[:, -19:].astype(int)).mean()
    step = np.abs(np.diff(np.asarray(straight).astype(int), axis=1)).mean(axis=(0, 2))
    assert step[-23:-16].max() < 1.5 * np.median(step)


def test_a_picture_that_lies_right_is_left_as_it_is(aligner: Aligner) -> None:
    image = Image.fromarray(aligner._view)
    straight, pose = aligner(image)
    assert not pose.moved
    assert straight is image


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (np.full((240, 320, 3), 99, np.uint8), "nothing in it is like the reference view"),
        (part(seed=7), r"moved it still differs by \d\.\d+, where good parts do by 0\.\d+ at most"),
        (moved(part(), (48.0, 0.0), 0.0), r"it is shifted by 15%, more than 10%"),
        (moved(part(), (0.0, 0.0), 11.5), r"it is turned by 1[12] degrees, more than 10"),
        (part()[:, :240], "it has 240 x 240 pixels, another aspect than the reference view"),
        (np.zeros((1, 1, 3), np.uint8), "another aspect"),
    ],
)
def test_what_cannot_be_aligned_is_said_and_left_as_it_lies(aligner: Aligner, seen: Pixels, reason: str) -> None:
    image = Image.fromarray(seen)
    straight, pose = aligner(image)
    assert straight is image
    assert not pose.moved
    assert not pose.ok
    with pytest.raises(AssertionError, match=f"not aligned but judged as it lies: .*{reason}"):
        raise AssertionError(pose.fault)


def test_a_map_goes_back_to_where_its_picture_lay(aligner: Aligner) -> None:
    spot = np.zeros((240, 320), np.float32)
    spot[100:112, 200:215] = 1
    pose = Pose((320, 240), (14.0, -9.0), 4.0)
    there = moved(np.repeat((spot * 255).astype(np.uint8)[..., None], 3, axis=-1), pose.shift, pose.turn)
    wanted = ndimage.center_of_mass(there[..., 0].astype(float))
    small = np.asarray(Image.fromarray(spot).resize((64, 60), Image.Resampling.BOX))  # of another aspect, as maps are
    for values in (small, small[None], small > 0.3):
        found = aligner.back(values, pose, (0, 0, 320, 240))
        assert (found.shape, found.dtype) == (values.shape, values.dtype)
        place = ndimage.center_of_mass(found.reshape(60, 64).astype(float))
        assert (np.add(place, 0.5) * (240 / 60, 320 / 64)) == pytest.approx(np.add(wanted, 0.5), abs=2.5)


def test_a_map_of_a_region_goes_back_by_the_same_move(aligner: Aligner) -> None:
    pose = Pose((320, 240), (16.0, 8.0))
    values = np.zeros((20, 40), np.float32)  # of pixels (80, 40) to (240, 120), four a side
    values[5, 10] = 1
    assert np.argwhere(aligner.back(values, pose, (80, 40, 240, 120)) > 0.5).tolist() == [[7, 14]]


def test_the_reference_lies_in_the_midst_and_odd_images_do_not_become_it() -> None:
    shifts = [(12.0, 0.0), (-12.0, 0.0), (0.0, 10.0), (0.0, -10.0), (1.0, 1.0)]
    images = [moved(part(grain=index), shift, 0.0) for index, shift in enumerate(shifts)]
    unlike = (0.5 * part() + 0.5 * part(7)).astype(np.uint8)  # lies best of all
    alignment = align([*images, unlike])
    assert alignment.images == 6
    at = Aligner(alignment).pose(Image.fromarray(moved(part(), (1.0, 1.0), 0.0)))
    assert at.shift == pytest.approx((0, 0), abs=0.5)
    assert 0 < alignment.typical < alignment.limit <= 0.5


def test_good_images_that_lie_too_far_off_are_counted() -> None:
    images = [*(part(grain=index) for index in range(7)), moved(part(), (50.0, 0.0), 0.0)]
    with pytest.warns(CalibrationWarning, match="1 of 8 good images cannot be aligned, and are judged as they lie"):
        align(images)


def test_images_that_show_nothing_in_common_are_refused() -> None:
    with pytest.raises(CalibrationError, match=r"\d of 6 good images cannot be aligned with the others.*leave out"):
        align([part(seed) for seed in range(6)])
    with pytest.raises(CalibrationError, match="1 of 1 good images cannot be aligned"):
        align([np.full((64, 64, 3), 7, np.uint8)])
    with pytest.raises(CalibrationError, match="17 x 4000 pixels are too narrow to be aligned"):
        reference_size((17, 4000))
    with pytest.raises(ImageError, match=r"1 of 2 images cannot be read, and an alignment uses all"):
        align([part(), b"no picture"])


def test_without_opencv_a_sentence_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    alignment = align([part()])
    monkeypatch.setitem(sys.modules, "cv2", None)
    for work in (lambda: Aligner(alignment), lambda: align([part()])):
        with pytest.raises(UsageError, match=r"OpenCV, which is not installed: pip install 'mdps\[align\]'"):
            work()


@pytest.mark.parametrize("view", ["", "no base64!", "AAAA"])
def test_a_damaged_view_is_a_bundles_fault(view: str) -> None:
    with pytest.raises(BundleError, match="reference view of an alignment"):
        Aligner(Alignment(view, 0.1, 0.2, 3))


def test_a_view_of_another_size_is_refused() -> None:
    import mdps.runtime.registration as registration

    big = registration._encoded(np.zeros((300, 300, 3), np.uint8))
    with pytest.raises(BundleError, match="has 300 x 300 pixels"):
        Aligner(Alignment(big, 0.1, 0.2, 3))


def test_another_view_or_limit_has_another_name() -> None:
    one = align([part()])
    assert one.name == replace(one, images=9).name
    assert one.name != replace(one, limit=0.3).name
    assert one.name != align([part(1)]).name
