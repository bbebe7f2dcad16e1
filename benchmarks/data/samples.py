"""One category of a data set: its images and their ground truth, which may be brought to the grid of a map.

A mask belongs to the image of the same stem, with or without `_mask` (or `_mask_1`, `_mask_2`, ..) behind it and in any
image format; a folder named like the stem holds several. All masks of an image are united. A pixel is defective where
its mask is not black: VisA numbers the kinds of defects 1, 2, .., other sets write 255. In a JPEG mask, whose black is
noisy, it is where the level is above 127. What is transparent counts as black.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.runtime.errors import ImageError, first_line
from mdps.runtime.image_files import open_file
from mdps.runtime.pictures import turn_of, with_palette

T = TypeVar("T")
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
_LOSSY = frozenset({".jpg", ".jpeg"})
_LOSSY_LEVEL = 127


@dataclass(frozen=True)
class Sample:
    """One test image: its file, its `kind` ("good" or the defect's name), and its ground-truth files, () for good."""

    path: Path
    kind: str
    defective: bool
    masks: tuple[Path, ...] = ()

    def truth(self) -> NDArray[np.bool_]:
        """Which pixels are defective: [H, W] in the upright image's size, all False for a good image.

        Raises:
            ImageError: there is no truth for this image, and it is to be left out of pixel metrics: it is defective and
                has no mask, a mask differs from it in size, no mask has a defect pixel, or a file cannot be read. The
                sentence names the file.
        """
        united = np.zeros(_opened(self.path, _upright_shape), dtype=bool)
        if not self.defective:
            return united
        if not self.masks:
            raise ImageError(f"{self.path} is defective and has no mask: {_LEFT_OUT}")
        for mask in self.masks:
            marked = _read_mask(mask)
            if marked.shape != united.shape:
                raise ImageError(f"{mask} has {_size(marked)} pixels, its image {_size(united)}: {_LEFT_OUT}")
            united |= marked
        if not united.any():
            raise ImageError(f"{' and '.join(map(str, self.masks))} marks no defect pixel: {_LEFT_OUT}")
        return united


_LEFT_OUT = "draw the mask again, until then the image counts for image metrics only"


@dataclass(frozen=True)
class Category:
    """One kind of part: its training, validation and test images, each in natural order of the file names.

    `layout` is "mvtec-ad", "mvtec-ad-2", "btad", "visa", "mpdd" or "plain". `problems` are sentences that name a file
    or folder: images without a mask, masks without an image, and what lies in the folder and is not used.
    """

    name: str
    layout: str
    root: Path
    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    test: tuple[Sample, ...]
    problems: tuple[str, ...] = ()

    def check(self) -> tuple[str, ...]:
        """`problems`, and those found by opening every mask: no defect pixel, another size, not readable."""
        return self.problems + tuple(
            reason for sample in self.test if sample.masks and (reason := _truth_problem(sample)) is not None
        )


def _truth_problem(sample: Sample) -> str | None:
    try:
        sample.truth()
    except ImageError as error:
        return str(error)
    return None


def _read_mask(path: Path) -> NDArray[np.bool_]:
    """Which pixels of a mask file are marked, [H, W]."""
    return _opened(path, lambda image: _marked(image, _LOSSY_LEVEL if path.suffix.lower() in _LOSSY else 0))


def _marked(image: Image.Image, level: int) -> NDArray[np.bool_]:
    turn = turn_of(image)
    upright = image if turn is None else image.transpose(turn)
    if upright.mode == "F" or upright.mode.startswith("I"):
        return np.asarray(np.asarray(upright) > level)
    if "A" in upright.getbands() or "transparency" in upright.info:
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, (0, 0, 0, 255)), upright)
    return np.asarray(np.asarray(upright.convert("RGB")).max(axis=2) > level)


def _upright_shape(image: Image.Image) -> tuple[int, int]:
    """(H, W) once the EXIF orientation is applied, from the file's header alone."""
    turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    return image.size if turned else (image.size[1], image.size[0])


def _opened(path: Path, read: Callable[[Image.Image], T]) -> T:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with open_file(path) as file, Image.open(file) as image:
                return read(with_palette(image))
    except Exception as error:  # decoders raise nearly every type on a damaged file
        reason = f"{type(error).__name__}: {first_line(str(error))}"
        raise ImageError(f"{path} cannot be read as an image: {reason}") from error


def _size(marked: NDArray[np.bool_]) -> str:
    return f"{marked.shape[1]} x {marked.shape[0]}"


def truth_in_box(truth: NDArray[np.bool_], box: Box, largest: int | None) -> NDArray[np.bool_]:
    """The part `box` of `truth` [H, W], its longer side reduced to at most `largest` (None: never).

    Reduced by averaging (Pillow's box filter); a pixel is defective where at least half of what it covers is.
    """
    width, height = max(1, round(box[2] - box[0])), max(1, round(box[3] - box[1]))
    if largest is not None and max(width, height) > largest:
        share = largest / max(width, height)
        width, height = max(1, round(width * share)), max(1, round(height * share))
    return share_in_box(truth, box, (width, height)) >= 0.5


def share_in_box(truth: NDArray[np.bool_], box: Box, size: tuple[int, int]) -> NDArray[np.float32]:
    """Share of defective pixels float32 [H, W] in each cell when `box` of `truth` is resized to `size` (W, H)."""
    picture = Image.fromarray(truth.astype(np.float32))
    return np.asarray(picture.resize(size, Image.Resampling.BOX, box=box))


def scaled_to(hot: NDArray[np.bool_], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Return `hot` [h, w] on a grid of `shape` (H, W), each pixel that of the nearest."""
    return np.asarray(Image.fromarray(hot).resize((shape[1], shape[0]), Image.Resampling.NEAREST), dtype=bool)


def enlarged(anomaly_map: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    """`anomaly_map` [h, w] resized to `shape` (H, W), bilinear with half-pixel centres."""
    if anomaly_map.shape == shape:
        return anomaly_map
    picture = Image.fromarray(np.ascontiguousarray(anomaly_map, dtype=np.float32))
    return np.asarray(picture.resize((shape[1], shape[0]), Image.Resampling.BILINEAR))
