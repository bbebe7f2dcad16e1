"""Reads a picture of any kind into upright 8-bit RGB, with one defined result for each mode.

Grey becomes three equal channels. Transparent pixels are laid on white: dropping alpha would show whatever colour a
program left under it, usually black, as a defect. 16-bit grey is divided by 257, so that 65535 becomes 255.
32-bit integers are read as 16-bit values, floats as grey levels 0 to 255.
"""

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import ImageError

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 178_956_970
"""Larger pictures are refused before they are decoded (Pillow's own limit for decompression bombs)."""


def describe(image: object) -> str:
    """How a sentence calls this picture: its path where there is one."""
    if isinstance(image, str | Path):
        return str(image)
    return str(getattr(image, "filename", "") or f"the given {type(image).__name__}")


def read_image(image: Any) -> "Image.Image":
    """Upright PIL image of mode RGB from a path, file bytes, PIL image or uint8 array ([H, W], [H, W, 1 | 3 | 4]).

    ImageError naming the file where it is missing, empty, truncated, too large, or of a kind with no defined result.
    """
    from PIL import Image, ImageOps

    name = describe(image)
    if isinstance(image, np.ndarray):
        return _to_rgb(_from_array(image), name)
    opened = image if isinstance(image, Image.Image) else _open(image, name)
    try:
        _check_size(opened.size, name)
        # Orientation 1 returns a copy, so the caller's image is never changed.
        return _to_rgb(ImageOps.exif_transpose(opened), name)
    except ImageError:
        raise
    except Exception as error:  # decoders raise nearly every type on a damaged file
        raise ImageError(f"{name} cannot be decoded, it may be truncated or damaged: {_reason(error)}") from error
    finally:
        if opened is not image:
            opened.close()


def _open(image: object, name: str) -> "Image.Image":
    from PIL import Image

    if isinstance(image, bytes):
        source: Any = io.BytesIO(image)
    elif isinstance(image, str | Path):
        source = Path(image)
        if not source.is_file():
            raise ImageError(f"{name} is no file: check the path")
        if source.stat().st_size == 0:
            raise ImageError(f"{name} is empty (0 bytes)")
    else:
        raise ImageError(f"{name} is no picture: give a path, the bytes of a file, a PIL image or a uint8 array")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(source)
    except Image.DecompressionBombError:
        raise ImageError(f"{name} has more than {MAX_PIXELS} pixels and is refused") from None
    except Exception as error:
        raise ImageError(f"{name} is not a picture that can be read: {_reason(error)}") from error


def _check_size(size: tuple[int, int], name: str) -> None:
    if min(size) < 1:
        raise ImageError(f"{name} has no pixels ({size[0]} x {size[1]})")
    if size[0] * size[1] > MAX_PIXELS:
        raise ImageError(f"{name} has {size[0]} x {size[1]} pixels, more than {MAX_PIXELS}, and is refused")


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

    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ImageError(f"{name} holds NaN or infinite values")
    top, kind = (255, "float") if image.mode == "F" else (65535, "integer")
    if values.min() < 0 or values.max() > top:
        raise ImageError(
            f"{name} holds {kind} values from {values.min():g} to {values.max():g}, outside 0 to {top}: "
            "convert it to 8 bit"
        )
    return Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8)).convert("RGB")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
