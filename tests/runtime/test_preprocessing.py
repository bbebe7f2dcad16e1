"""One defined result for every kind of picture, and a sentence for everything that is none."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from mdps.runtime.errors import BundleError, ImageError, UsageError
from mdps.runtime.preprocessing import Preprocessing, read_image, to_uint8, to_unit

GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)


def pixels(image):
    return np.asarray(read_image(image))


def grey3(values):
    return np.repeat(np.asarray(values, dtype=np.uint8)[..., None], 3, axis=2)


def png(image, tmp_path, name="a.png", **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.fromarray(GREY), grey3(GREY)),
        (Image.fromarray(GREY > 100), grey3((GREY > 100) * 255)),
        (Image.fromarray(grey3(GREY)), grey3(GREY)),
        (Image.fromarray(GREY.astype(np.uint16) * 257), grey3(GREY)),
        (Image.fromarray(GREY.astype(np.int32) * 257), grey3(GREY)),
        (Image.fromarray(GREY.astype(np.float32)), grey3(GREY)),
        (Image.fromarray(grey3(GREY)).convert("YCbCr"), grey3(GREY)),
        (Image.fromarray(grey3(GREY)).convert("CMYK"), grey3(GREY)),
        (Image.fromarray(GREY).convert("P"), grey3(GREY)),
        (Image.fromarray(GREY).convert("LA"), grey3(GREY)),
        (Image.fromarray(GREY).convert("RGBA"), grey3(GREY)),
    ],
    ids=["L", "1", "RGB", "I;16", "I", "F", "YCbCr", "CMYK", "P", "LA", "RGBA"],
)
def test_every_mode_has_its_one_result(image, expected):
    before = image.copy()
    found = read_image(image)
    assert found.mode == "RGB"
    np.testing.assert_allclose(np.asarray(found).astype(int), expected.astype(int), atol=1)
    assert image.mode == before.mode
    assert image.tobytes() == before.tobytes()


def test_colours_stay_in_order():
    red = Image.new("RGB", (2, 2), (200, 10, 30))
    for mode in ("RGB", "RGBA", "CMYK", "YCbCr", "HSV"):
        np.testing.assert_allclose(pixels(red.convert(mode))[0, 0], (200, 10, 30), atol=3)


@pytest.mark.parametrize("mode", ["LA", "RGBA", "La", "RGBa"])
def test_transparent_pixels_lie_on_white(mode):
    image = Image.new("RGBA", (3, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (40, 40, 40, 255))
    image.putpixel((2, 0), (0, 0, 0, 128))
    if mode in ("LA", "La"):
        image = image.convert("LA")
    found = pixels(image.convert(mode))
    np.testing.assert_allclose(found[0, :, 0].astype(int), [255, 40, 127], atol=1)


def test_a_palette_with_a_transparent_colour_lies_on_white(tmp_path):
    image = Image.new("P", (2, 1), 0)
    image.putpalette([10, 20, 30, 70, 80, 90])
    image.putpixel((1, 0), 1)
    opened = Image.open(png(image, tmp_path, transparency=0))
    assert opened.mode == "P"
    np.testing.assert_array_equal(pixels(opened), [[[255, 255, 255], [70, 80, 90]]])
    pa = Image.new("PA", (1, 1))
    assert pixels(pa).tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bit_files(tmp_path, name):
    values = np.array([[0, 128, 257, 32896, 65535]], dtype=np.uint16)
    path = png(Image.fromarray(values), tmp_path, name)
    np.testing.assert_array_equal(pixels(path)[0, :, 0], [0, 0, 1, 128, 255])


def test_big_endian_sixteen_bit():
    image = Image.frombytes("I;16B", (2, 1), struct.pack(">HH", 257, 65535))
    np.testing.assert_array_equal(pixels(image)[0, :, 0], [1, 255])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (np.array([[0.0, np.nan]], np.float32), "NaN"),
        (np.array([[0.0, np.inf]], np.float32), "NaN or infinite"),
        (np.array([[-1.0, 3.0]], np.float32), "outside 0 to 255"),
        (np.array([[0, 70000]], np.int32), "outside 0 to 65535"),
    ],
)
def test_values_without_a_meaning_are_refused(tmp_path, values, sentence):
    path = png(Image.fromarray(values), tmp_path, "odd.tif")
    with pytest.raises(ImageError, match=rf"odd\.tif.*{sentence}"):
        read_image(path)


def test_lab_is_refused_and_not_misread():
    with pytest.raises(ImageError, match="colour mode LAB"):
        read_image(Image.new("LAB", (2, 2)))


def test_the_exif_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise
    image = Image.fromarray(grey3(GREY[:4, :8]))
    path = png(image, tmp_path, exif=exif)
    np.testing.assert_array_equal(pixels(path), np.rot90(grey3(GREY[:4, :8]), -1))


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3)])
def test_arrays(shape):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    expected = array if array.ndim == 3 and array.shape[2] == 3 else grey3(array.reshape(4, 5))
    np.testing.assert_array_equal(pixels(array), expected)
    np.testing.assert_array_equal(pixels(array[::-1]), expected[::-1])


def test_an_array_with_alpha_lies_on_white():
    assert pixels(np.zeros((1, 1, 4), np.uint8)).tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.zeros((4, 4), np.float32), "uint8.*float32"),
        (np.zeros((4, 4), np.uint16), "uint8.*uint16"),
        (np.full((4, 4, 3), np.nan), "uint8.*float64"),
        (np.zeros((4, 4), bool), "uint8.*bool"),
        (np.zeros((3, 4, 5), np.uint8), r"\[3, 4, 5\]"),
        (np.zeros((4, 4, 2), np.uint8), r"\[4, 4, 2\]"),
        (np.zeros((0, 4), np.uint8), "no pixels"),
        (np.zeros(4, np.uint8), r"\[4\]"),
    ],
)
def test_wrong_arrays_are_named(array, sentence):
    with pytest.raises(ImageError, match=sentence):
        read_image(array)


@pytest.mark.parametrize("picture", [None, 3, [1, 2]])
def test_things_that_are_no_picture(picture):
    with pytest.raises(ImageError, match="no picture"):
        read_image(picture)


@pytest.mark.parametrize("kind", ["png", "jpg", "bmp", "tif", "gif", "webp"])
def test_a_file_cut_anywhere_is_an_image_error_that_names_it(tmp_path, kind):
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    content = png(Image.fromarray(noise), tmp_path, f"whole.{kind}").read_bytes()
    path = tmp_path / f"cut.{kind}"
    for length in np.linspace(1, len(content) * 0.9, 25).astype(int):
        path.write_bytes(content[:length])
        with pytest.raises(ImageError, match=r"cut\."):
            read_image(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"hello", b"\x89PNG\r\n\x1a\n"])
def test_files_that_are_no_picture(tmp_path, content):
    path = tmp_path / "no.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=r"no\.png"):
        read_image(path)


def test_missing_files_and_folders(tmp_path):
    (tmp_path / "link.png").symlink_to(tmp_path / "nowhere")
    for path, said in (("absent.png", "not exist"), ("link.png", "is a link to .*nowhere, which"), ("", "a folder")):
        with pytest.raises(ImageError, match=said):
            read_image(tmp_path / path)


def bomb(width, height):
    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(13_378, 13_378), (60_000, 60_000)])
def test_decompression_bombs_are_refused_before_they_are_decoded(tmp_path, size):
    path = tmp_path / "bomb.png"
    path.write_bytes(bomb(*size))
    with pytest.raises(ImageError, match=r"bomb\.png.*refused"):
        read_image(path)


def test_bytes_of_a_file_are_a_picture():
    buffer = io.BytesIO()
    Image.fromarray(GREY).save(buffer, "PNG")
    np.testing.assert_array_equal(pixels(buffer.getvalue()), grey3(GREY))
    with pytest.raises(ImageError, match="the given file is not a picture"):
        read_image(b"nothing")


def test_names_with_any_character(tmp_path):
    path = png(Image.fromarray(GREY), tmp_path, "tëst #1 検査 %20.png")
    np.testing.assert_array_equal(pixels(path), grey3(GREY))
    np.testing.assert_array_equal(pixels(str(path)), grey3(GREY))


def test_units_are_exact_and_reversible():
    levels = grey3(GREY)
    unit = to_unit(levels)
    assert unit.dtype == np.float32
    assert (unit.min(), unit.max(), unit.shape) == (-1, 1, (3, 16, 16))
    np.testing.assert_allclose(unit[0], GREY / 127.5 - 1, atol=1e-6)
    np.testing.assert_array_equal(to_uint8(unit), levels)
    np.testing.assert_array_equal(to_uint8(np.full((3, 1, 1), 7, np.float32)), [[[255] * 3]])


def test_resize_is_the_antialiased_bilinear_of_torch():
    """Within 1 of 255 of what torch calls bilinear with antialias: a resize of another kind is off by up to 76."""
    picture = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    found = to_uint8(Preprocessing((32, 24))(picture)).astype(int)
    theirs = torch.nn.functional.interpolate(
        torch.tensor(picture).permute(2, 0, 1)[None].float(), size=(32, 24), mode="bilinear", antialias=True
    )
    assert np.abs(found - theirs[0].permute(1, 2, 0).numpy()).max() <= 1.0


def test_a_picture_of_the_right_size_is_not_changed():
    observation = Preprocessing((16, 16))(GREY)
    assert observation.shape == (3, 16, 16)
    assert observation.flags.c_contiguous
    np.testing.assert_array_equal(to_uint8(observation), grey3(GREY))


def test_crops():
    whole = Preprocessing((16, 16))
    cut = Preprocessing((16, 16), crop="input", crop_size=12)
    kept = Preprocessing((16, 16), crop="metrics", crop_size=12)
    assert (cut.network_size, kept.network_size) == ((12, 12), (16, 16))
    np.testing.assert_array_equal(cut(GREY), whole(GREY)[:, 2:14, 2:14])
    np.testing.assert_array_equal(kept(GREY), whole(GREY))


def test_a_region_of_interest_is_cut_first():
    roi = Preprocessing((8, 4), roi=(3, 5, 4, 8))
    np.testing.assert_array_equal(to_uint8(roi(GREY))[..., 0], GREY[5:13, 3:7])
    assert roi.covered_box((16, 16)) == (3, 5, 7, 13)
    image = Image.fromarray(GREY[:5, :5])
    image.filename = "small.png"
    with pytest.raises(ImageError, match=r"small\.png is 5 x 5 .*region of interest"):
        roi(image)


def test_the_covered_box_follows_the_crop():
    cut = Preprocessing((16, 16), crop="input", crop_size=8, roi=(10, 20, 32, 64))
    assert cut.covered_box((100, 100)) == (18, 36, 34, 68)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"image_size": (0, 4)}, "at least 1 x 1"),
        ({"crop": "input"}, "crop_size"),
        ({"crop_size": 3}, "crop_size"),
        ({"crop": "input", "crop_size": 9}, "between 1 and the image size"),
        ({"roi": (-1, 0, 3, 3)}, "region of interest"),
        ({"roi": (0, 0, 0, 3)}, "region of interest"),
    ],
)
def test_settings_are_checked(fields, sentence):
    with pytest.raises(UsageError, match=sentence):
        Preprocessing(**{"image_size": (8, 8), **fields})


def test_json_round_trip():
    settings = Preprocessing((16, 24), crop="metrics", crop_size=12, roi=(1, 2, 3, 4))
    assert Preprocessing.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    with pytest.raises(BundleError, match=r"\.resize should be one of bilinear"):
        Preprocessing.from_json({**settings.to_json(), "resize": "nearest"})
    with pytest.raises(BundleError, match=r"\.roi should have 4 entries"):
        Preprocessing.from_json({**settings.to_json(), "roi": [1, 2]})


def test_training_pictures_are_read_alike(shared):
    """The bottles of the shared data: what the runtime sees is what a plain Pillow pipeline sees."""
    path = next((shared / "data" / "mvtec_bottle" / "train").rglob("*.png"))
    with Image.open(path) as opened:
        plain = np.asarray(opened.convert("RGB").resize((48, 48), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(to_uint8(Preprocessing((48, 48))(path)), plain)
