"""Pictures of results: what is drawn where."""

import io

import numpy as np
import pytest
from PIL import Image

from mdps.runtime.detector import Result
from mdps.runtime.overlay import HeatRange, own_range, png, strip, thumbnail
from mdps.runtime.regions import find

GREEN, BLUE = (0, 255, 80), (0, 200, 255)


def tiles(picture: Image.Image, width: int) -> list[np.ndarray]:
    pixels = np.asarray(picture)
    return [pixels[:, i * (width + 4) : i * (width + 4) + width].astype(int) for i in range(4)]


def draw(anomaly_map: np.ndarray, mask: np.ndarray, colour: float = 0.0) -> Image.Image:
    image = np.full((3, *anomaly_map.shape), colour, np.float32)
    return strip(image, image * 0.5, anomaly_map.astype(np.float32), mask, HeatRange(0.0, 1.0))


def test_a_small_picture_is_enlarged_by_a_whole_factor_and_its_shape_kept() -> None:
    picture = draw(np.zeros((64, 96)), np.zeros((64, 96), bool))
    assert picture.size == (4 * 96 * 4 + 3 * 4, 64 * 4)


def test_a_large_picture_keeps_its_size() -> None:
    picture = draw(np.zeros((300, 300)), np.zeros((300, 300), bool))
    assert picture.size == (4 * 300 + 3 * 4, 300)


def test_the_first_two_tiles_are_the_image_and_its_reconstruction() -> None:
    image, reconstruction, _, _ = tiles(draw(np.zeros((256, 256)), np.zeros((256, 256), bool), colour=1.0), 256)
    assert (image == 255).all()
    assert (reconstruction == 191).all()  # 0.5 lies at 0.75 * 255 = 191.25


def test_what_overshoots_the_range_is_cut_off_and_does_not_wrap_round() -> None:
    image = np.full((3, 256, 256), 7.5, np.float32)
    picture = strip(image, -image, np.zeros((256, 256), np.float32), np.zeros((256, 256), bool), HeatRange(0, 1))
    first, second, _, _ = tiles(picture, 256)
    assert (first == 255).all()
    assert (second == 0).all()


def test_no_heat_leaves_grey_and_full_heat_is_brighter_and_coloured_between() -> None:
    anomaly_map = np.zeros((256, 256))
    anomaly_map[:, 100:150], anomaly_map[:, 200:] = 0.5, 1.0
    heat = tiles(draw(anomaly_map, np.zeros((256, 256), bool)), 256)[2]
    cold, warm, hot = heat[:, :90], heat[:, 110:140], heat[:, 210:]
    assert (cold.max(axis=2) == cold.min(axis=2)).all()
    assert (warm[..., 0] > warm[..., 2] + 50).all()
    assert cold.mean() < warm.mean() < hot.mean()


def test_the_contour_is_the_rim_of_the_mask_and_nothing_else() -> None:
    mask = np.zeros((256, 256), bool)
    mask[50:100, 60:120] = True
    contour = tiles(draw(np.zeros((256, 256)), mask), 256)[3]
    drawn = (contour == GREEN).all(axis=2)
    rim = mask.copy()
    rim[51:99, 61:119] = False
    assert (drawn == rim).all()


def test_regions_are_framed_in_the_heat_where_they_lie() -> None:
    anomaly_map = np.zeros((64, 64), np.float32)
    anomaly_map[16:24, 8:40] = 1.0
    image, regions = np.zeros((3, 64, 64), np.float32), find(anomaly_map, 0.5, (100.0, 0.0, 740.0, 320.0))
    (region,) = regions
    assert region.box == (180, 80, 320, 40)
    mask = np.zeros((64, 64), bool)
    picture = strip(image, image, anomaly_map, mask, HeatRange(0, 1), regions, (100.0, 0.0, 740.0, 320.0))
    first, _, heat, _ = ((tile == BLUE).all(axis=2) for tile in tiles(picture, 256))
    inner = np.zeros((256, 256), bool)
    inner[64:96, 32:160] = True  # four pixels for one of the map
    outer = np.zeros((256, 256), bool)
    outer[63:97, 31:161] = True
    assert not first.any()
    np.testing.assert_array_equal(heat, outer & ~inner)


def test_the_photograph_itself_is_drawn_at_its_own_resolution() -> None:
    photograph = Image.new("RGB", (300, 200), (200, 100, 50))
    anomaly_map = np.zeros((4, 4), np.float32)
    anomaly_map[1, 2] = 1.0
    nothing = np.zeros((3, 4, 4), np.float32)
    result = Result(
        1.0,
        0.5,
        "fail",
        anomaly_map,
        anomaly_map > 1,
        None,
        nothing,
        {},
        heat_range=HeatRange(0, 1),
        pixel_limit=0.5,
        box=(100.0, 0.0, 300.0, 200.0),
    )
    pixels = np.asarray(result.heat_over(photograph))
    assert pixels.shape == (200, 300, 3)
    assert (pixels[:, :100] == (200, 100, 50)).all()  # what the map does not show
    assert (pixels[49, 200:250] == BLUE).all()
    assert (pixels[100, 200:250] == BLUE).all()
    assert pixels[75, 225].astype(int).sum() > pixels[150, 110].astype(int).sum()


def test_a_mask_of_everything_has_no_rim() -> None:
    contour = tiles(draw(np.zeros((256, 256)), np.ones((256, 256), bool)), 256)[3]
    assert not (contour == GREEN).all(axis=2).any()


def test_heat_follows_the_frozen_range_not_the_map() -> None:
    assert HeatRange(1.0, 3.0)(np.array([[0.0, 1.0, 2.0, 9.0]], np.float32)).tolist() == [[0.0, 0.0, 0.5, 1.0]]


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_a_flat_map_with_its_own_range_is_cold(value: float) -> None:
    flat = np.full((4, 4), value, np.float32)
    assert (own_range(flat)(flat) == 0).all()


def test_files_are_what_they_say() -> None:
    picture = draw(np.zeros((64, 64)), np.zeros((64, 64), bool))
    with Image.open(io.BytesIO(png(picture))) as image:
        assert (image.format, image.size) == ("PNG", picture.size)
    with Image.open(io.BytesIO(thumbnail(picture, 200))) as image:
        assert image.format == "JPEG"
        assert image.size[0] == 200
