"""Opens what clients call an image, within bounds that are checked before anything is decoded."""

import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.runtime.errors import ImageError
from mdps.runtime.image_files import odd_picture
from mdps.runtime.pictures import check_single
from mdps.runtime.preprocessing import Preprocessing
from mdps.serving.http.refusals import Refusal, too_large

FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM")
"""What cameras and browsers send. Pillow knows many more, some of which start other programs."""


# Each scan goes over all pixels again, and takes a few bytes where it says that there is nothing new in them.
_SCAN, _MOST_SCANS = b"\xff\xda", 64
# Pillow reads these number by number.
_WRITTEN_OUT, _MOST_DIGITS = (b"P1", b"P2", b"P3"), 2**20


def open_image(data: bytes, max_pixels: int) -> Image.Image:
    """An image that is not decoded yet. Refusal 413 for more than `max_pixels`, 400 for what is no one image."""
    if not data:
        raise _bad("the image is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _beyond(max_pixels) from None
    except Exception as error:  # decoders raise nearly every type on a damaged file
        raise _bad(f"this is no {', '.join(FORMATS)} image, or a damaged one") from error
    check_pixels(image.size, max_pixels)
    if image.format in ("JPEG", "MPO") and data.count(_SCAN) > _MOST_SCANS:
        raise _bad(f"the JPEG has more than {_MOST_SCANS} scans")
    if image.format == "PPM" and data[:2] in _WRITTEN_OUT and len(data) > _MOST_DIGITS:
        raise _bad(f"a PPM written out in digits should have at most {_MOST_DIGITS} bytes: save it as a binary one")
    try:
        check_single(image, "the image")
    except ImageError as error:
        raise _bad(str(error)) from error
    return image


def check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    """Refusal 413 for a (width, height) of more than `max_pixels`."""
    if size[0] * size[1] > max_pixels:
        raise _beyond(max_pixels)


def observe(
    picture: Image.Image | NDArray[np.uint8], preprocessing: Preprocessing, notes: list[str]
) -> NDArray[np.float32]:
    """The observation [3, H, W] of a picture; ImageError with a sentence that names no Python type.

    `notes` gets a sentence for whatever is odd about an image file: more than 8 bits, much smaller than the network's.
    """
    if isinstance(picture, Image.Image):
        notes += odd_picture(picture, preprocessing)
    try:
        return preprocessing(picture)
    except ImageError as error:
        raise ImageError(str(error).replace(f"the given {type(picture).__name__}", "the image")) from error


def _beyond(max_pixels: int) -> Refusal:
    return too_large(f"the image has more than {max_pixels} pixels")


def _bad(sentence: str) -> Refusal:
    return Refusal(400, "bad_image", sentence)
