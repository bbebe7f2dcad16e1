"""Files as cameras, scanners and network drives really leave them: read rightly, or refused with a sentence."""

import errno
import io
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageCms, ImageFile

from mdps.runtime import pictures
from mdps.runtime.errors import ImageError, UsageError
from mdps.runtime.pictures import read_image
from mdps.runtime.preprocessing import Preprocessing, to_uint8

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8))
CORNER = np.zeros((16, 24, 3), np.uint8)
CORNER[:8, :8] = 255
EXACT = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(data):
    return np.asarray(read_image(data)).astype(int)


def white_corner(image):
    return tuple(np.argwhere(image[..., 0] > 127).mean(axis=0) // 8)


def tiff(width, height, bits, data, photometric=1, sample_format=1):
    """An uncompressed grey TIFF as a camera's library writes it, with the bits and meaning it states."""
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 134), (277, 1)]
    tags += [(278, height), (279, len(data)), (339, sample_format)]
    entries = b"".join(struct.pack("<HHII", tag, 4 if tag == 273 else 3, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0) + data


# Files that are not whole


@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=["baseline", "progressive"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_jpeg_whose_end_was_never_written_is_refused(options, share):
    """Its size is there and the rest reads as zeros, as after a power cut or while a network drive still copies."""
    preview = Image.Exif()
    preview[0x010E] = "preview \xff\xd9 inside"  # an end that is not the picture's
    whole = saved(NOISE, "JPEG", exif=preview.tobytes(), **options)
    kept = int(len(whole) * share)
    with pytest.raises(ImageError, match="not written to its end"):
        read_image(whole[:kept] + bytes(len(whole) - kept))


@pytest.mark.parametrize("behind", [b"\0" * 4096, b"maker's trailer"], ids=["zeros", "trailer"])
def test_what_follows_a_whole_jpeg_does_not_matter(behind):
    whole = saved(NOISE, "JPEG")
    np.testing.assert_array_equal(pixels(whole + behind), pixels(whole))


def test_a_program_that_made_pillow_fill_up_halves_of_pictures_is_told(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(UsageError, match="LOAD_TRUNCATED_IMAGES"):
        read_image(saved(NOISE, "PNG")[:3000])


def test_a_name_that_is_too_long_is_an_image_error():
    with pytest.raises(ImageError, match="cannot be read: File name too long"):
        read_image("a" * 300 + ".png")


def test_a_network_drive_that_has_gone_is_an_image_error(tmp_path, monkeypatch):
    def gone(self, **options):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))

    monkeypatch.setattr(Path, "stat", gone)
    with pytest.raises(ImageError, match=r"part\.png cannot be read: Stale file handle"):
        read_image(tmp_path / "part.png")


@pytest.fixture
def seemed(tmp_path, monkeypatch):
    """Lets every path seem to be a file of some bytes when it is asked about, whatever is there when it is opened."""
    (tmp_path / "file").write_bytes(b"some")
    found = (tmp_path / "file").stat()
    monkeypatch.setattr(Path, "stat", lambda self, **options: found)


@pytest.mark.usefixtures("seemed")
def test_a_file_deleted_while_it_is_looked_at_is_an_image_error(tmp_path):
    with pytest.raises(ImageError, match=r"part\.png does not exist"):
        read_image(tmp_path / "part.png")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.usefixtures("seemed")
def test_a_file_that_became_a_pipe_while_it_is_looked_at_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "part.png")
    with pytest.raises(ImageError, match=r"part\.png cannot be read: it is a named pipe, not a file"):
        read_image(tmp_path / "part.png")


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be cut there")
def test_a_bitmap_that_is_cut_while_it_is_read_ends_no_process(tmp_path, monkeypatch):
    """Pillow maps plain files that it is given by name into memory: reading behind the new end is a bus error."""
    path, to_rgb = tmp_path / "part.bmp", pictures._to_rgb
    Image.new("L", (512, 512), 99).save(path)

    def cut(image, name):
        image.load()
        os.truncate(path, 100)
        return to_rgb(image, name)

    monkeypatch.setattr(pictures, "_to_rgb", cut)
    assert read_image(path).getcolors() == [(512 * 512, (99, 99, 99))]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_no_file_stays_open(tmp_path):
    two = saved(NOISE, "TIFF", save_all=True, append_images=[NOISE])
    contents = {"good.png": saved(NOISE, "PNG"), "cut.png": saved(NOISE, "PNG")[:900], "no.png": b"no", "two.tif": two}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)

    def read_all():
        for name in contents:
            try:
                read_image(tmp_path / name)
            except ImageError as error:
                yield str(error)

    assert len(list(read_all())) == 3
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        list(read_all())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# Files of another kind than expected


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "PNG", "WEBP"])
def test_a_file_of_several_pictures_is_refused(kind):
    pages = saved(Image.new("RGB", (4, 4)), kind, save_all=True, append_images=[Image.new("RGB", (4, 4), "white")])
    with pytest.raises(ImageError, match="several pictures"):
        read_image(pages)


def test_the_preview_in_a_cameras_jpeg_is_passed_over():
    photograph = saved(NOISE, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    with Image.open(io.BytesIO(photograph)) as opened:
        assert (opened.format, opened.n_frames) == ("MPO", 2)
    assert read_image(photograph).size == (60, 60)


def test_a_page_that_the_caller_chose_is_read():
    pages = saved(Image.new("L", (4, 4)), "TIFF", save_all=True, append_images=[Image.new("L", (4, 4), 200)])
    with Image.open(io.BytesIO(pages)) as opened:
        opened.seek(1)
        assert np.asarray(read_image(opened)).min() == 200


def test_no_program_is_started_to_draw_a_picture(tmp_path, monkeypatch):
    def started(*_, **__):
        raise AssertionError("Ghostscript was called")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    path = tmp_path / "disguised.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(/etc/passwd) (r) file\n%%EOF\n")
    with pytest.raises(ImageError, match=r"disguised\.png is a drawing \(EPS\)"):
        read_image(path)


# Orientation and metadata


@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "WEBP", "PNG"])
@pytest.mark.parametrize(
    ("orientation", "corner"),
    [(1, (0, 0)), (2, (0, 2)), (3, (1, 2)), (4, (1, 0)), (5, (0, 0)), (6, (0, 1)), (7, (2, 1)), (8, (2, 0))],
)
def test_every_orientation_is_applied_once(kind, orientation, corner):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = read_image(saved(Image.fromarray(CORNER), kind, exif=exif, **EXACT.get(kind, {})))
    again = read_image(upright)  # as the detector does with what a folder's reader gives it
    assert white_corner(np.asarray(upright)) == white_corner(np.asarray(again)) == corner
    assert upright.size == ((24, 16) if orientation < 5 else (16, 24))


def exif_block(*entries):
    rows = b"".join(struct.pack("<HHI", *entry[:3]) + entry[3] for entry in entries)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + rows + struct.pack("<I", 0)


TURNED = (0x0112, 3, 1, struct.pack("<HH", 6, 0))


@pytest.mark.parametrize(
    "odd",
    [
        (0x0100, 9, 1, struct.pack("<i", -5)),  # a width below zero
        (0x011A, 2, 4, b"72\0\0"),  # a resolution as text
        (0x8825, 4, 1, struct.pack("<I", 9999)),  # GPS data beyond the end
    ],
    ids=["negative", "text", "dangling"],
)
def test_an_odd_value_in_the_exif_block_costs_neither_the_picture_nor_its_orientation(odd):
    data = saved(Image.fromarray(CORNER), "JPEG", exif=exif_block(TURNED, odd), **EXACT["JPEG"])
    assert white_corner(pixels(data)) == (0, 1)


@pytest.mark.parametrize(
    "block", [b"Exif\0\0garbage", exif_block((0x0112, 3, 1, b"\x09\0\0\0")), exif_block((0x0112, 2, 2, b"6\0\0\0"))]
)
def test_an_exif_block_that_says_nothing_turns_nothing(block):
    assert white_corner(pixels(saved(Image.fromarray(CORNER), "JPEG", exif=block, **EXACT["JPEG"]))) == (0, 0)


def test_colour_profiles_are_not_applied():
    """Training reads the same levels; a profile that one camera writes and another does not changes nothing."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    np.testing.assert_array_equal(pixels(saved(NOISE, "PNG", icc_profile=profile)), np.asarray(NOISE))


# Depth and meaning of levels


def test_a_twelve_bit_tiff_reaches_white():
    assert pixels(tiff(2, 1, 12, b"\xff\xf0\x00"))[0, :, 0].tolist() == [255, 0]


@pytest.mark.parametrize(
    ("bits", "data", "sample_format"),
    [(8, bytes([0, 255]), 1), (16, struct.pack("<HH", 0, 65535), 1), (32, struct.pack("<ff", 0, 255), 3)],
)
def test_white_is_zero_at_every_depth(bits, data, sample_format):
    levels = pixels(tiff(2, 1, bits, data, 0, sample_format))[0, :, 0]
    assert levels.tolist() == [255, 0]
    assert pixels(tiff(2, 1, bits, data, 1, sample_format))[0, :, 0].tolist() == [0, 255]


def bitmap(levels, indices, bits):
    """An uncompressed BMP of these indices into a palette of grey levels, the last row first."""
    height, width = indices.shape
    stride = (width * bits + 31) // 32 * 4
    digits = ["".join(f"{index:0{bits}b}" for index in row).ljust(8 * stride, "0") for row in indices[::-1]]
    data = b"".join(int(row, 2).to_bytes(stride, "big") for row in digits)
    palette = b"".join(bytes((level, level, level, 0)) for level in levels)
    start = 54 + len(palette)
    head = struct.pack("<IHHI", start + len(data), 0, 0, start)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, len(data), 2835, 2835, len(levels), 0)
    return b"BM" + head + info + palette + data


GREYS = [[0, 255], [0, 1], [0, 1, 2], list(range(16)), [17 * i for i in range(16)]]


@pytest.mark.parametrize("width", [1, 7, 16])
@pytest.mark.parametrize(
    ("bits", "levels"), [(1, greys) for greys in GREYS[:2]] + [(b, g) for b in (4, 8) for g in GREYS]
)
def test_a_bitmap_with_a_palette_of_greys_has_its_levels(bits, levels, width):
    indices = np.random.default_rng(0).integers(0, len(levels), (5, width))
    wanted = np.array(levels)[indices][..., None].repeat(3, axis=2)
    np.testing.assert_array_equal(pixels(bitmap(levels, indices, bits)), wanted)
    with Image.open(io.BytesIO(bitmap(levels, indices, bits))) as image:
        np.testing.assert_array_equal(pixels(image), wanted)


def test_half_a_bitmap_is_refused():
    whole = bitmap(range(16), np.zeros((5, 7), int), 4)
    with pytest.raises(ImageError, match="truncated or damaged"):
        read_image(whole[:-8])


def test_floats_from_0_to_1_are_refused_and_black_is_not():
    assert pixels(saved(Image.new("F", (2, 2), 0.0), "TIFF")).max() == 0
    with pytest.raises(ImageError, match="from 0 to 1, black on a scale to 255"):
        read_image(saved(Image.new("F", (2, 2), 0.8), "TIFF"))


def test_a_transparent_level_lies_on_white_at_16_bits_as_at_8():
    for mode, level in (("L", 7), ("I;16", 1799)):
        image = Image.fromarray(np.array([[level, 0]], np.uint8 if mode == "L" else np.uint16))
        assert pixels(saved(image, "PNG", transparency=level))[0, :, 0].tolist() == [255, 0]


def test_cmyk_jpegs_are_not_inverted():
    red = Image.new("RGB", (16, 16), (200, 10, 30)).convert("CMYK")
    np.testing.assert_allclose(pixels(saved(red, "JPEG", quality=100))[8, 8], (200, 10, 30), atol=4)


# Sizes and plain pictures


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 7), (16, 2000)])
def test_any_size_becomes_the_networks(size):
    height, width = size
    levels = to_uint8(Preprocessing((16, 24))(np.full((height, width, 3), (10, 200, 77), np.uint8)))
    assert levels.shape == (16, 24, 3)
    assert np.unique(levels.reshape(-1, 3), axis=0).tolist() == [[10, 200, 77]]


def test_a_grey_file_and_its_colour_copy_are_the_same_observation():
    grey = NOISE.convert("L")
    observe = Preprocessing((16, 16))
    np.testing.assert_array_equal(observe(saved(grey, "PNG")), observe(saved(grey.convert("RGB"), "PNG")))


def test_bytes_that_are_no_picture_are_said_to_be_none_without_an_address(tmp_path):
    said = []
    (tmp_path / "a.png").write_bytes(b"no picture")
    for given in (b"no picture", tmp_path / "a.png"):
        with pytest.raises(ImageError) as error:
            read_image(given)
        said.append(str(error.value))
    reason = "is not a picture that can be read: its content is of no known kind"
    assert said == [f"the given file {reason}", f"{tmp_path / 'a.png'} {reason}"]
