"""From a picture of any kind to the observation [3, H, W] the network sees, for training too; all views of pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.alignment import Pose
from mdps.runtime.errors import ImageError, require
from mdps.runtime.pictures import MAX_PIXELS, describe, read_image
from mdps.runtime.records import Record
from mdps.runtime.regions import Box

if TYPE_CHECKING:
    from PIL import Image

Picture: TypeAlias = Union[str, Path, bytes, "Image.Image", NDArray[np.uint8]]
"""A path, the bytes of a file, a PIL image, or a uint8 array [H, W] or [H, W, 1 | 3 | 4]."""

Array = NDArray[np.float32]
Align: TypeAlias = Callable[["Image.Image"], tuple["Image.Image", Pose]]
"""Takes an upright picture to one whose part lies as it should, and says how it lay."""

__all__ = [
    "Observations",
    "Picture",
    "Preprocessing",
    "Views",
    "images_of",
    "observe",
    "read_image",
    "to_uint8",
    "to_unit",
]


def to_unit(rgb: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [H, W, 3] to float32 [3, H, W] in [-1, 1]: x / 127.5 - 1."""
    return np.ascontiguousarray(rgb.transpose(2, 0, 1).astype(np.float32) / np.float32(127.5) - np.float32(1))


def to_uint8(chw: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 [3, H, W] to uint8 [H, W, 3]: the nearest level, clipped to [-1, 1]; undoes `to_unit` exactly."""
    levels = np.rint((np.clip(chw, -1, 1) + 1) * 127.5)
    return np.ascontiguousarray(levels.astype(np.uint8).transpose(1, 2, 0))


@dataclass(frozen=True)
class Preprocessing(Record):
    """Region of interest, resize, crop, scale to [-1, 1]; in that order, after the EXIF orientation.

    `image_size` (H, W) is what the picture (or its `roi`) is resized to, whatever its aspect. `crop` "input" then cuts
    a centred square of `crop_size` for the network; "metrics" leaves the input whole and is read by the evaluation.
    `roi` is (left, top, width, height) in pixels of the upright original.
    """

    image_size: tuple[int, int]
    crop: Literal["none", "input", "metrics"] = "none"
    crop_size: int | None = None
    resize: Literal["bilinear"] = "bilinear"
    roi: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        require(min(self.image_size) >= 1, f"image_size {self.image_size} should be at least 1 x 1")
        pixels = self.image_size[0] * self.image_size[1]
        require(pixels <= MAX_PIXELS, f"image_size {self.image_size} has more pixels than any picture that is read")
        require((self.crop == "none") == (self.crop_size is None), "crop_size belongs to crop input or metrics only")
        require(
            self.crop_size is None or 1 <= self.crop_size <= min(self.image_size),
            f"crop_size {self.crop_size} should lie between 1 and the image size {min(self.image_size)}",
        )
        if self.roi is not None:
            require(
                min(self.roi[:2]) >= 0 and min(self.roi[2:]) >= 1,
                f"region of interest {self.roi} should be left, top, width, height with a positive size",
            )

    @property
    def network_size(self) -> tuple[int, int]:
        """(H, W) of the observation."""
        if self.crop == "input" and self.crop_size is not None:
            return (self.crop_size, self.crop_size)
        return self.image_size

    def __call__(self, image: Picture) -> NDArray[np.float32]:
        """Observation float32 [3, H, W] in [-1, 1]. ImageError naming the file where it cannot be had."""
        return self.view(read_image(image), describe(image))

    def view(self, picture: "Image.Image", name: str) -> NDArray[np.float32]:
        """Observation of what `read_image` made of the picture `name`, which an ImageError names."""
        from PIL import Image

        height, width = self.image_size
        picture = self.region(picture, name)  # cut before it is resized: no pixels outside it bleed in
        # Two calls, because Pillow's releases differ in which axis goes first and it rounds in between.
        for size in ((width, picture.height), (width, height)):
            picture = picture.resize(size, Image.Resampling.BILINEAR)
        return to_unit(np.asarray(picture.crop(self._crop_box())))

    def region(self, picture: "Image.Image", name: str) -> "Image.Image":
        """Return the region of interest of the picture `name`, all of it where there is none."""
        return picture.crop(self._roi_box(picture.size, name)) if self.roi else picture

    def covered_box(self, size: tuple[int, int]) -> Box:
        """(left, top, right, bottom) in pixels of an upright original of `size` (W, H) that the observation shows.

        ImageError where the region of interest lies outside the picture.
        """
        left, top, right, bottom = self._roi_box(size, "the picture")
        height, width = self.image_size
        x, y = (right - left) / width, (bottom - top) / height
        crop = self._crop_box()
        return (left + crop[0] * x, top + crop[1] * y, left + crop[2] * x, top + crop[3] * y)

    def _roi_box(self, size: tuple[int, int], name: str) -> tuple[int, int, int, int]:
        if self.roi is None:
            return (0, 0, *size)
        left, top, width, height = self.roi
        if left + width > size[0] or top + height > size[1]:
            raise ImageError(
                f"{name} is {size[0]} x {size[1]} pixels and does not hold the region of interest {self.roi}: "
                "use pictures of the size the bundle was made for"
            )
        return (left, top, left + width, top + height)

    def _crop_box(self) -> tuple[int, int, int, int]:
        height, width = self.network_size
        left, top = (self.image_size[1] - width) // 2, (self.image_size[0] - height) // 2
        return (left, top, left + width, top + height)


@dataclass(frozen=True)
class Observations:
    """B pictures: `images` [B, 3, H, W] are the network's view, `photographs` [B, 3, h, w] that of a tuning's features.

    Both are float32 in [-1, 1]. `photographs` is None for a detector that reads none. `boxes` are what of each upright
    original the images show, in its pixels; None for arrays that were never pictures. `poses` say how each picture lay
    before it was aligned; there are none for a detector that aligns nothing. `corners` [B, 2] are the rows and columns
    at which tiles of a picture begin in it; None of whole pictures.
    """

    images: Array
    photographs: Array | None = None
    boxes: tuple[Box, ...] | None = None
    poses: tuple[Pose, ...] = ()
    corners: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: slice) -> Self:
        own = {name: view[rows] for name, view in vars(self).items() if view is not None}
        return replace(self, **own)

    def whole(self, index: int) -> Array:
        """Return all that is seen of one picture, [3, H, W], to be looked at."""
        view: Array = self.images[index]
        return view

    @classmethod
    def of(cls, given: "Self | Array") -> "Self":
        """Return what was given, images alone as observations without photographs."""
        return given if isinstance(given, cls) else cls(np.asarray(given))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All pictures of the parts, in order; of one detector, so that either all have photographs or none."""
        photographs = [part.photographs for part in parts if part.photographs is not None]
        boxes = [part.boxes for part in parts]
        return cls(
            np.concatenate([part.images for part in parts]),
            np.concatenate(photographs) if photographs else None,
            None if None in boxes else tuple(box for own in boxes for box in own or ()),
            tuple(pose for part in parts for pose in part.poses),
        )


Views: TypeAlias = Observations | Array
"""Observations, or where no photographs are needed the images alone."""


def images_of(given: Views) -> Array:
    """Return the network's views."""
    return given.images if isinstance(given, Observations) else given


def observe(
    pictures: Sequence[Picture],
    preprocessing: Preprocessing,
    photograph: Preprocessing | None = None,
    align: Align | None = None,
) -> Observations:
    """Decode each picture once and return its views; `photograph` makes that of the feature network.

    Before that `align` moves its part to where it should lie. Raises ImageError naming the first picture that cannot be
    read.
    """
    views, boxes, poses = zip(*(_views(picture, align, preprocessing, photograph) for picture in pictures), strict=True)
    photographs = None if photograph is None else np.stack([view[-1] for view in views])
    known = tuple(pose for pose in poses if pose is not None)
    return Observations(np.stack([view[0] for view in views]), photographs, boxes, known)


def _views(
    picture: Picture, align: Align | None, first: Preprocessing, second: Preprocessing | None
) -> tuple[list[Array], Box, Pose | None]:
    """Return what each makes of the picture once it is aligned, what of it the first shows, and how it lay."""
    name = describe(picture)
    try:
        rgb = read_image(picture)
        rgb, pose = align(rgb) if align else (rgb, None)
        return [one.view(rgb, name) for one in (first, second) if one is not None], first.covered_box(rgb.size), pose
    except MemoryError as error:
        raise ImageError(f"{name} does not fit into memory") from error
