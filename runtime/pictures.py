"""Reads a picture of any kind into upright 8-bit RGB, with one defined result for each mode.

Grey becomes three equal channels. Transparent pixels are laid on white: dropping alpha would show whatever colour a
program left under it, usually black, as a defect. 16-bit grey is divided by 257, so that 65535 becomes 255; in a TIFF
of 12 bits 4095 does. 32-bit integers are read as 16-bit values, floats as grey levels 0 to 255. Colour profiles are not
applied, here as in training. What can be meant in two ways (several pictures in a file, floats from 0 to 1) is refused.
"""

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import ImageError, UsageError, first_line
from mdps.runtime.image_files import open_file

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 178_956_970
"""Larger pictures are refused before they are decoded (Pillow's own limit for decompression bombs)."""
_DRAWINGS = ("EPS", "WMF")  # Pillow starts other programs to draw these
_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_AT_ONCE = 2**20  # pixels
# Of a bitmap: (mode Pillow chose, bits in the file): what they are.
_DEPTHS = {("L", 4): "P;4", ("1", 4): "P;4", ("1", 8): "P"}
_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0  # of a TIFF


def describe(image: object) -> str:
    """How a sentence calls this picture: its path where there is one."""
    if isinstance(image, str | Path):
        return str(image)
    if isinstance(image, bytes):
        return "the given file"
    return str(getattr(image, "filename", "") or f"the given {type(image).__name__}")


def read_image(image: Any) -> "Image.Image":
    """Upright PIL image of mode RGB from a path, file bytes, PIL image or uint8 array ([H, W], [H, W, 1 | 3 | 4]).

    ImageError naming the file where it is missing, empty, truncated, too large, or of a kind with no defined result;
    UsageError where this program made Pillow accept halves of pictures.
    """
    from PIL import ImageFile

    name = describe(image)
    if isinstance(image, np.ndarray):
        return _to_rgb(_from_array(image), name)
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise UsageError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on in this program, so that half a picture would be judged as a "
            "whole one: set it to False"
        )
    try:
        with _opened(image, name) as opened:
            _check_size(opened.size, name)
            _check_end(opened, name)
            picture = with_palette(opened)
            rgb, turn = _to_rgb(picture, name), turn_of(picture)
    except ImageError:
        raise
    except Exception as error:  # decoders raise nearly every type on a damaged file
        raise ImageError(f"{name} cannot be decoded, it may be truncated or damaged: {_reason(error)}") from error
    rgb.info.clear()  # what was read of the file is applied, and must not be a second time
    return rgb if turn is None else rgb.transpose(turn)


def turn_of(image: "Image.Image") -> "Image.Transpose | None":
    """Return the transposition that turns the image upright by its EXIF orientation; None for nothing. Loads it.

    Not `ImageOps.exif_transpose`, which writes the whole EXIF block anew and fails at one odd value of a camera.
    """
    from PIL import Image

    image.load()  # a PNG may have its EXIF block after its pixels, and this turns a TIFF by itself
    name = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    return None if name is None else Image.Transpose[name]


def check_single(image: "Image.Image", name: str) -> None:
    """ImageError for a file of several pictures, of which all but the first would pass unseen.

    Not for the previews and second lenses in a camera's JPEG (MPO): its first picture is the photograph.
    """
    try:
        several = image.format != "MPO" and getattr(image, "is_animated", False)
    except Exception as error:  # it looks for a second picture, and may find damage
        raise ImageError(f"{name} cannot be decoded, it may be truncated or damaged: {_reason(error)}") from error
    if several:
        raise ImageError(f"{name} holds several pictures, of which only the first would be judged: save each by itself")


@contextmanager
def _opened(image: object, name: str) -> Iterator["Image.Image"]:
    """The picture, not decoded yet; ImageError for what is none, or no single photograph."""
    from PIL import Image

    if isinstance(image, Image.Image):
        yield image
        return
    # Never by its path: Pillow would open it again, and map it into memory, where a file that shrinks ends the process.
    with _source(image, name) as file, _identify(file, name) as opened:
        if opened.format in _DRAWINGS:
            raise ImageError(f"{name} is a drawing ({opened.format}) and no photograph: save it as PNG")
        check_single(opened, name)
        yield opened


def _source(image: object, name: str) -> BinaryIO:
    if isinstance(image, bytes):
        return io.BytesIO(image)
    if not isinstance(image, str | Path):
        raise ImageError(f"{name} is no picture: give a path, the bytes of a file, a PIL image or a uint8 array")
    try:
        file = open_file(image)
    except (FileNotFoundError, ValueError):  # a name with a zero byte is a ValueError
        raise ImageError(f"{name} {_missing(image)}: check the path") from None
    except OSError as error:  # a name that is too long, a network drive that has gone, a pipe
        raise ImageError(f"{name} cannot be read: {error.strerror or error}") from error
    if os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise ImageError(f"{name} is empty (0 bytes)")
    return file


def _missing(path: str | Path) -> str:
    try:
        return f"is a link to {os.readlink(path)}, which does not exist"  # noqa: PTH115 - may be text
    except (OSError, ValueError):
        return "does not exist"


def _identify(source: BinaryIO, name: str) -> "Image.Image":
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(source)
    except Image.DecompressionBombError:
        raise ImageError(f"{name} has more than {MAX_PIXELS} pixels and is refused") from None
    except UnidentifiedImageError:  # says no more, and calls the file by a path or an address in memory
        raise ImageError(f"{name} is not a picture that can be read: its content is of no known kind") from None
    except Exception as error:
        raise ImageError(f"{name} is not a picture that can be read: {_reason(error)}") from error


def _check_size(size: tuple[int, int], name: str) -> None:
    if min(size) < 1:
        raise ImageError(f"{name} has no pixels ({size[0]} x {size[1]})")
    if size[0] * size[1] > MAX_PIXELS:
        raise ImageError(f"{name} has {size[0]} x {size[1]} pixels, more than {MAX_PIXELS}, and is refused")


def _check_end(image: "Image.Image", name: str) -> None:
    """ImageError for a JPEG file that was not written to its end: its decoder makes up what reads as zeros."""
    file = getattr(image, "fp", None)
    if image.format not in ("JPEG", "MPO") or file is None:  # loaded already
        return
    file.seek(0)
    content = file.read()
    start = _first_scan(content)
    if start is not None and content.find(b"\xff\xd9", start) < 0:
        raise ImageError(f"{name} was not written to its end, it may be truncated or still being written")


def _first_scan(jpeg: bytes) -> int | None:
    """Where the pixels begin, after the segments that may hold a preview with an end of its own."""
    at = 2
    while at + 4 <= len(jpeg) and jpeg[at] == 0xFF:
        if jpeg[at + 1] == 0xDA:
            return at
        at += 1 if jpeg[at + 1] == 0xFF else 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return None


def with_palette(image: "Image.Image") -> "Image.Image":
    """Return the image itself, or a decoded copy of a Windows bitmap with a palette of greys that Pillow dropped.

    It drops one that is 0, 1, 2, .. or black and white, and then reads 4 and 8 bits a pixel as 8 bits or 1: it fails,
    or gives other pixels without a word (seen in Pillow 13.0).
    """
    file: IO[bytes] | None = getattr(image, "fp", None)
    tiles: Sequence[Any] = getattr(image, "tile", ())
    if image.format != "BMP" or file is None or len(tiles) != 1 or tiles[0][0] != "raw":
        return image
    raw = _DEPTHS.get((image.mode, _depth(file)))
    if raw is None:
        return image
    _, _, offset, (_, stride, direction) = tiles[0]
    file.seek(offset)
    return _with_greys(image, file.read(stride * image.height), (raw, stride, direction))


def _depth(file: IO[bytes]) -> int:
    """Return the bits of a pixel, which the old header of 12 bytes has at another place."""
    file.seek(14)
    header = file.read(16)
    at = 10 if header[:4] == b"\x0c\0\0\0" else 14
    return int.from_bytes(header[at : at + 2], "little")


def _with_greys(image: "Image.Image", data: bytes, layout: tuple[str, int, int]) -> "Image.Image":
    from PIL import Image

    step = 255 if image.mode == "1" else 1
    copy = Image.frombytes("P", image.size, data, "raw", *layout)
    copy.putpalette([min(255, step * index) for index in range(256) for _ in range(3)])
    return copy


def _from_array(array: NDArray[Any]) -> "Image.Image":
    from PIL import Image

    if array.dtype != np.uint8:
        raise ImageError(f"an image array should be uint8 with levels 0 to 255, this one is {array.dtype}: convert it")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in (3, 4)):
        raise ImageError(f"an image array should be [H, W] or [H, W, 1 | 3 | 4], this one is {list(array.shape)}")
    _check_size((array.shape[1], array.shape[0]), "the given array")
    return Image.fromarray(np.ascontiguousarray(array))


def _to_rgb(image: "Image.Image", name: str) -> "Image.Image":
    mode = image.mode
    if mode == "F" or mode.startswith("I"):
        return _from_deep(image, name)
    if mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        return _on_white(image)
    if mode in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"):
        return image.convert("RGB")
    raise ImageError(f"{name} has the colour mode {mode}, which has no defined result here: convert it to RGB")


def _on_white(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode == "La":  # Pillow has no direct way from premultiplied grey
        image = image.convert("LA")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _from_deep(image: "Image.Image", name: str) -> "Image.Image":
    from PIL import Image

    stored = np.asarray(image)
    if not np.isfinite(stored).all():
        raise ImageError(f"{name} holds NaN or infinite values")
    tags = getattr(image, "tag_v2", {})
    top, kind = (255, "float") if image.mode == "F" else (2 ** min(16, tags.get(_BITS, (16,))[0]) - 1, "integer")
    low, high = float(stored.min()), float(stored.max())
    if low < 0 or high > top:
        raise ImageError(
            f"{name} holds {kind} values from {low:g} to {high:g}, outside 0 to {top}: convert it to 8 bit"
        )
    if kind == "float" and 0 < high <= 1:
        raise ImageError(f"{name} holds float values from 0 to 1, black on a scale to 255: convert it to 8 bit")
    grey = np.empty(stored.shape, np.uint8)
    rows = max(1, _AT_ONCE // stored.shape[1])
    for first in range(0, len(stored), rows):  # in float64, which of a whole picture is a gigabyte
        values = stored[first : first + rows].astype(np.float64)
        if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:  # Pillow turns these round at 8 bits only
            values = top - values
        grey[first : first + rows] = np.rint(values * (255 / top))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[stored == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"
