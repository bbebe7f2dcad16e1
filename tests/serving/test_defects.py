"""Synthetic defects: seen where their mask says, on photographs of every set and on images nobody photographs."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from mdps.serving.defects import KINDS, SIZES, Defect, plan, put

Pixels = NDArray[np.uint8]
ALL = list(itertools.product(KINDS, SIZES))
SETS = ("deep_pcb", "magnetic_tile", "mvtec_bottle")


def noise(*shape: int) -> Pixels:
    return np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)


def tone(level: int, *shape: int) -> Pixels:
    return np.full((*shape, 3), level, dtype=np.uint8)


def stripes(height: int, width: int, every: int = 8) -> Pixels:
    """White, with black lines three pixels wide."""
    lines = np.where(np.arange(width) % every < 3, 0, 255).astype(np.uint8)
    return np.broadcast_to(lines[None, :, None], (height, width, 3)).copy()


HOSTILE = {
    "black": tone(0, 40, 40),
    "white": tone(255, 64, 48),
    "grey": tone(128, 32, 32),
    "strip": noise(17, 400),
    "column": stripes(400, 17),
    "noise": noise(64, 64),
    "one grey channel": np.repeat(noise(48, 48)[..., :1], 3, axis=-1),
    "one pixel": tone(200, 1, 1),
    "one row": noise(1, 90),
    "tiny": noise(3, 2),
    "faint noise": (noise(50, 50) // 128 + 127).astype(np.uint8),
}


def check(defect: Defect, image: Pixels) -> None:
    change = np.abs(defect.image.astype(int) - image)
    assert defect.image.dtype == np.uint8
    assert defect.image.shape == image.shape
    assert np.array_equal(change.any(axis=-1), defect.mask)
    assert defect.mask.any()
    assert change[defect.mask].mean() >= (4 if defect.kind == "shading" else 8)
    assert change.max(axis=-1)[defect.mask].min() >= (2 if defect.kind == "shading" else 3)


def good(shared: Path, name: str, count: int) -> list[Pixels]:
    files = sorted((shared / "data" / name / "train" / "good").iterdir())[:count]
    return [np.asarray(Image.open(file).convert("RGB").resize((256, 256))) for file in files]


@pytest.mark.parametrize("name", SETS)
def test_every_kind_is_seen_on_photographs(shared: Path, name: str) -> None:
    images = good(shared, name, 4)
    for index, (kind, size) in enumerate(ALL):
        image, other = images[index % 4], images[(index + 1) % 4]
        before = image.copy()
        defect = put(kind, size, image, other, np.random.default_rng(index))
        assert (defect.kind, defect.size) == (kind, size)
        assert np.array_equal(image, before)
        check(defect, image)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("error")
def test_every_kind_is_seen_on_anything(name: str) -> None:
    image = HOSTILE[name]
    for index, (kind, size) in enumerate(ALL):
        check(put(kind, size, image, noise(30, 70), np.random.default_rng(index)), image)


def test_the_same_seed_gives_the_same_defect() -> None:
    image = noise(64, 64)
    for kind, size in ALL:
        first, again, other = (put(kind, size, image, image, np.random.default_rng(seed)) for seed in (3, 3, 4))
        assert np.array_equal(first.image, again.image)
        assert not np.array_equal(first.image, other.image)


def test_kinds_differ() -> None:
    image = stripes(96, 96)
    pictures = {put(kind, "large", image, noise(96, 96), np.random.default_rng(0)).image.tobytes() for kind in KINDS}
    assert len(pictures) == len(KINDS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "shading"])
def test_sizes_are_of_the_image_s_side(kind: str) -> None:
    def extent(size: str) -> float:
        masks = [put(kind, size, stripes(256, 256), stripes(256, 256), np.random.default_rng(i)).mask for i in range(9)]
        return float(np.median([max(np.ptp(axis) for axis in np.nonzero(mask)) + 1 for mask in masks]))

    small, medium, large = map(extent, SIZES)
    assert 1 <= small <= medium < large  # a bridge is as long as the tracks are apart
    assert small <= 0.05 * 256
    assert large > 0.05 * 256


def test_defects_lie_on_the_part() -> None:
    """A dark disc on a white table, which is most of the picture."""
    rows, columns = np.mgrid[:128, :128]
    disc = np.hypot(rows - 40, columns - 80) < 20
    image = np.where(disc[..., None], noise(128, 128) // 4, 250).astype(np.uint8)
    near = np.hypot(rows - 40, columns - 80) < 32
    for index, (kind, size) in enumerate(ALL):
        mask = put(kind, size, image, image, np.random.default_rng(index)).mask
        assert (mask & near).any(), (kind, size)


def test_grey_stays_grey() -> None:
    image = np.repeat(noise(48, 48)[..., :1], 3, axis=-1)
    for kind, size in ALL:
        pixels = put(kind, size, image, image, np.random.default_rng(5)).image
        assert (pixels == pixels[..., :1]).all(), (kind, size)


def test_a_plan_is_even() -> None:
    rows = plan(10, 6, seed=0)
    assert rows == plan(10, 6, seed=0)
    assert rows != plan(10, 6, seed=1)
    assert Counter((kind, size) for kind, size, _, _ in rows) == dict.fromkeys(ALL, 2)
    used = Counter(image for _, _, image, _ in rows)
    assert set(used) == set(range(10))
    assert max(used.values()) - min(used.values()) <= 1
    assert all(image != other for _, _, image, other in rows)


def test_a_plan_of_one_image() -> None:
    assert {(image, other) for _, _, image, other in plan(1, 2, seed=0)} == {(0, 0)}


def lines_of(kind: str, size: str = "small") -> list[tuple[Defect, Pixels]]:
    """Put it into black lines three pixels wide, nine apart, with twenty seeds."""
    image = stripes(256, 256, 12)
    return [(put(kind, size, image, image, np.random.default_rng(seed)), image) for seed in range(20)]


def test_a_gap_interrupts_a_line_and_a_bridge_joins_two() -> None:
    """Mostly: what lies between the lines is a line as well, which is one time in four what is looked at."""
    for kind, before in (("gap", 0), ("bridge", 255)):
        across = 0
        for defect, image in lines_of(kind, "medium"):
            hit = defect.mask & (image[..., 0] == before) & (np.abs(defect.image[..., 0].astype(int) - before) > 128)
            whole = image[0, :, 0] == before
            runs = np.split(np.arange(256), np.flatnonzero(np.diff(whole)) + 1)
            across += any(hit[:, run].all(axis=1).any() for run in runs if whole[run[0]])
        assert across >= 10, kind


def test_a_spur_grows_on_an_edge() -> None:
    beside = 0
    for defect, image in lines_of("spur"):
        dark = image[..., 0] == 0
        edge = (dark != np.roll(dark, 1, axis=1)) | (dark != np.roll(dark, -1, axis=1))
        beside += bool((defect.mask & edge).any())
    assert beside == 20


def test_what_moves_is_gone_from_where_it_was() -> None:
    both = 0
    for defect, image in lines_of("moved", "medium"):
        steps = defect.image[..., 0].astype(int) - image[..., 0]
        both += bool((steps > 128).any() and (steps < -128).any())
    assert both >= 15


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("shading", "smear", "scratch")])
def test_black_and_white_stay_so(kind: str) -> None:
    tones = np.concatenate([defect.image[defect.mask][:, 0] for defect, _ in lines_of(kind, "medium")])
    assert ((tones < 64) | (tones > 191)).mean() > 0.55


def test_a_third_of_the_part_can_be_gone() -> None:
    rows, columns = np.mgrid[:96, :96]
    disc = np.hypot(rows - 48, columns - 48) < 36
    image = np.where(disc[..., None], 60, 240).repeat(3, axis=-1).astype(np.uint8)
    gone = [
        put("missing", "large", image, image, np.random.default_rng(seed)).mask.sum() / disc.sum() for seed in range(20)
    ]
    assert 0.2 < max(gone) < 0.4


def test_one_grain_in_the_place_of_another_is_no_defect() -> None:
    """The grain's deviation is 8: another piece of it would change a pixel by 9 in the mean."""
    grained = np.random.default_rng(0).normal(120, 8, (2, 96, 96, 1)).astype(np.uint8).repeat(3, axis=-1)
    for kind, size in ALL:
        defect = put(kind, size, *grained, np.random.default_rng(7))
        change = np.abs(defect.image.astype(int) - grained[0])[defect.mask].mean()
        assert change > 14 or kind == "shading", (kind, size)
