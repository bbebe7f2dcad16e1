"""Windows bitmaps with a palette of greys, whose pixels Pillow takes for grey levels of another depth.

It drops a palette that is 0, 1, 2, .. or black and white, and then reads 4 and 8 bits a pixel as 8 bits or 1: it fails,
or gives other pixels without a word (seen in Pillow 13.0).
"""

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

_DEPTHS = {("L", 4): "P;4", ("1", 4): "P;4", ("1", 8): "P"}  # (mode Pillow chose, bits in the file): what they are


def with_palette(image: "Image.Image") -> "Image.Image":
    """Return the image itself, or a decoded copy with its palette where Pillow dropped one that it needs."""
    file: IO[bytes] | None = getattr(image, "fp", None)
    tiles: Sequence[Any] = getattr(image, "tile", ())
    if image.format != "BMP" or file is None or len(tiles) != 1 or tiles[0][0] != "raw":
        return image
    raw = _DEPTHS.get((image.mode, _bits(file)))
    if raw is None:
        return image
    _, _, offset, (_, stride, direction) = tiles[0]
    file.seek(offset)
    return _decoded(image, file.read(stride * image.height), (raw, stride, direction))


def _bits(file: IO[bytes]) -> int:
    """Return the bits of a pixel, which the old header of 12 bytes has at another place."""
    file.seek(14)
    header = file.read(16)
    at = 10 if header[:4] == b"\x0c\0\0\0" else 14
    return int.from_bytes(header[at : at + 2], "little")


def _decoded(image: "Image.Image", data: bytes, layout: tuple[str, int, int]) -> "Image.Image":
    from PIL import Image

    step = 255 if image.mode == "1" else 1
    copy = Image.frombytes("P", image.size, data, "raw", *layout)
    copy.putpalette([min(255, step * index) for index in range(256) for _ in range(3)])
    return copy
