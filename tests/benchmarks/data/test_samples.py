"""Which masks are a truth, and what they mark."""

import numpy as np
import pytest
from PIL import Image

from mdps.benchmarks.data.samples import Sample
from mdps.runtime.errors import ImageError


def draw(path, size=(6, 4)):
    """A picture of `size` (W, H)."""
    Image.new("RGB", size, (90, 80, 70)).save(path)


@pytest.mark.parametrize(
    ("mode", "suffix", "level", "found"),
    [
        ("L", ".png", 255, True),
        ("L", ".png", 1, True),
        ("1", ".png", 1, True),
        ("I;16", ".png", 300, True),
        ("P", ".png", 1, True),
        ("RGB", ".png", (0, 0, 200), True),
        ("RGBA", ".png", (200, 0, 0, 255), True),
        ("RGBA", ".png", (200, 0, 0, 0), False),
        ("L", ".jpg", 255, True),
        ("L", ".jpg", 60, False),
        ("L", ".bmp", 255, True),
        ("P", ".bmp", 1, True),
    ],
)
def test_what_a_mask_marks(tmp_path, mode, suffix, level, found):
    draw(tmp_path / "a.png", size=(32, 32))
    picture = Image.new(mode, (32, 32), 0)
    if mode == "P":
        picture.putpalette([0, 0, 0, 255, 255, 255])
    picture.paste(level, (8, 8, 16, 24))
    picture.save(tmp_path / f"mask{suffix}")
    sample = Sample(tmp_path / "a.png", "dent", True, (tmp_path / f"mask{suffix}",))
    if not found:
        with pytest.raises(ImageError, match="marks no defect pixel"):
            sample.truth()
        return
    expected = np.zeros((32, 32), dtype=bool)
    expected[8:24, 8:16] = True
    assert (sample.truth() == expected).all()


def test_a_good_image_has_an_empty_truth_of_its_upright_size(tmp_path):
    turned = Image.new("RGB", (6, 4))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    truth = Sample(tmp_path / "turned.jpg", "good", False).truth()
    assert (truth.shape, truth.any()) == ((6, 4), False)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"broken\.png cannot be read"):
        Sample(tmp_path / "broken.png", "good", False).truth()
