"""Photographs of any size in overlapping tiles of the network's size: which, what each shows, what it counts where."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.alignment import Pose
from mdps.runtime.errors import ImageError, require
from mdps.runtime.pictures import describe, read_image
from mdps.runtime.preprocessing import Align, Array, Observations, Picture, Preprocessing, to_unit
from mdps.runtime.records import Record
from mdps.runtime.regions import Box

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]
Size = tuple[int, int]
_BAND = 256  # rows that are turned into numbers together


@dataclass(frozen=True)
class Tiling(Record):
    """How photographs are cut: into tiles of the network's size, at a `scale` that does not depend on theirs.

    `scale`, in (0, 1], is how many pixels of the network's view make one pixel of the photograph, along a side;
    `overlap`, in [0, 0.9], the share of a tile's side that it has in common with the next, at least.
    """

    scale: float
    overlap: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.scale <= 1, f"scale {self.scale} should lie above 0 and be at most 1")
        require(0 <= self.overlap <= 0.9, f"overlap {self.overlap} should lie between 0 and 0.9")

    def scaled(self, size: Size) -> Size:
        """Return the size (H, W) of a photograph of `size` at this scale, at least 1 x 1."""
        height, width = (max(1, round(self.scale * side)) for side in size)
        return height, width

    def count(self, size: Size, tile: Size) -> int:
        """Return how many tiles a photograph of `size` takes."""
        return len(Plan.of(self.scaled(size), tile, self.overlap).corners)


def starts(length: int, tile: int, overlap: float) -> list[int]:
    """Return where tiles along a side begin; the last one ends with it, and a side shorter than a tile has one."""
    if length <= tile:
        return [0]
    return [*range(0, length - tile, max(1, round(tile * (1 - overlap)))), length - tile]


def shares(begins: Sequence[int], length: int, tile: int) -> Array:
    """Return the weights [n, tile] of tiles along a side, which add up to 1 in every pixel of it.

    Each rises from its border to its middle and falls again, as a raised cosine, so that no border shows; at the ends
    of the side it stays up.
    """
    each = np.tile(np.sin(np.pi * (np.arange(tile) + 0.5) / tile) ** 2, (len(begins), 1))
    each[0, : tile // 2] = each[-1, tile // 2 :] = 1
    total = np.zeros(max(length, tile))
    for begin, one in zip(begins, each, strict=True):
        total[begin : begin + tile] += one
    return np.stack([one / total[begin : begin + tile] for begin, one in zip(begins, each, strict=True)]).astype(
        np.float32
    )


@dataclass(frozen=True)
class Plan:
    """The tiles of `tile` (H, W) over a picture of `size`: in each of the `rows` one at each of the `columns`."""

    size: Size
    tile: Size
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, size: Size, tile: Size, overlap: float) -> Self:
        """Return tiles with at least this share of their sides in common with the next."""
        rows, columns = (tuple(starts(*side, overlap)) for side in zip(size, tile, strict=True))
        return cls(size, tile, rows, columns)

    @property
    def corners(self) -> NDArray[np.intp]:
        """The upper left corners [n, 2] of the tiles, row by row."""
        return np.array([(top, left) for top in self.rows for left in self.columns], dtype=np.intp)

    @property
    def weights(self) -> tuple[Array, Array]:
        """Those of the rows [n, H] and of the columns [m, W] of tiles; a tile's are their product."""
        (height, width), (high, wide) = self.size, self.tile
        return shares(self.rows, height, high), shares(self.columns, width, wide)


@dataclass(frozen=True)
class Sheet:
    """One picture that is judged in tiles: `pixels` [H, W, 3] at their scale, `photograph` [h, w, 3] as it was taken.

    `photograph` is None for a detector that reads none. `box` is what of the upright original is shown, in its pixels;
    `pose` says how its part lay before it was aligned.
    """

    pixels: Pixels
    photograph: Pixels | None = None
    box: Box | None = None
    pose: Pose | None = None

    @property
    def size(self) -> Size:
        """(H, W) at the tiles' scale."""
        height, width = self.pixels.shape[:2]
        return height, width

    @property
    def unit(self) -> Array:
        """The whole view [3, H, W] in [-1, 1], in half precision: it may be large, and is only looked at."""
        view = np.empty((3, *self.size), dtype=np.float16)
        for top in range(0, len(self.pixels), _BAND):
            view[:, top : top + _BAND] = to_unit(self.pixels[top : top + _BAND])
        return view  # type: ignore[return-value]

    def views(self, corners: NDArray[np.intp], tile: Size, photograph: Size | None) -> Observations:
        """Return tiles [B, 3, *tile] that begin in these corners [B, 2], and the same regions of the photograph."""
        images = np.stack([to_unit(_cut(self.pixels, (top, left), tile)) for top, left in corners])
        if photograph is None:
            return Observations(images, corners=corners)
        regions = np.stack([to_unit(self.region(top, left, tile, photograph)) for top, left in corners])
        return Observations(images, regions, corners=corners)

    def region(self, top: int, left: int, tile: Size, size: Size) -> Pixels:
        """Return what a tile shows, of the photograph, at `size` (H, W)."""
        from PIL import Image

        assert self.photograph is not None
        down, across = (own / seen for own, seen in zip(self.photograph.shape[:2], self.size, strict=True))
        edges = (left * across, top * down, (left + tile[1]) * across, (top + tile[0]) * down)
        x, y = math.floor(edges[0]), math.floor(edges[1])
        part = _cut(self.photograph, (y, x), (math.ceil(edges[3]) - y, math.ceil(edges[2]) - x))
        box = (edges[0] - x, edges[1] - y, edges[2] - x, edges[3] - y)
        return np.asarray(Image.fromarray(part).resize(size[::-1], Image.Resampling.BILINEAR, box=box))


@dataclass(frozen=True)
class Sheets(Observations):
    """Pictures that are judged in tiles; `images` and `photographs` are what the tile in the middle of each shows."""

    sheets: tuple[Sheet, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls.of_views(Observations.joined(parts), [one for part in parts for one in part.sheets])

    @classmethod
    def of_views(cls, views: Observations, found: Sequence[Sheet]) -> Self:
        """Return these pictures with what is seen of their middles."""
        boxes = tuple(one.box for one in found if one.box is not None)
        poses = tuple(one.pose for one in found if one.pose is not None)
        known = boxes if len(boxes) == len(found) else None
        return cls(views.images, views.photographs, known, poses, None, tuple(found))

    def whole(self, index: int) -> Array:
        return self.sheets[index].unit


def sheets(
    pictures: Sequence[Picture],
    preprocessing: Preprocessing,
    tiling: Tiling,
    photograph: Preprocessing | None = None,
    align: Align | None = None,
) -> Sheets:
    """Decode each picture once; `photograph` is what makes the feature network's view, where that is read.

    Before it is cut `align` moves its part to where it should lie.

    Raises ImageError naming the first picture that cannot be read.
    """
    found = tuple(_sheet(picture, preprocessing, tiling, photograph is not None, align) for picture in pictures)
    tile, size = preprocessing.network_size, photograph.network_size if photograph else None
    views = Observations.joined([one.views(_middle(one.size, tile), tile, size) for one in found])
    return Sheets.of_views(views, found)


def _sheet(
    picture: Picture, preprocessing: Preprocessing, tiling: Tiling, photograph: bool, align: Align | None
) -> Sheet:
    name = describe(picture)
    try:
        rgb, pose = read_image(picture), None
        if align:
            rgb, pose = align(rgb)
        shown, box = preprocessing.region(rgb, name), preprocessing.covered_box(rgb.size)
        return Sheet(resized(shown, tiling), np.asarray(shown) if photograph else None, box, pose)
    except MemoryError as error:
        raise ImageError(f"{name} does not fit into memory") from error


def resized(picture: "Image.Image", tiling: Tiling) -> Pixels:
    """Return the picture [h, w, 3] at the tiles' scale."""
    from PIL import Image

    height, width = tiling.scaled((picture.height, picture.width))
    for size in ((width, picture.height), (width, height)):  # one axis after the other, as `Preprocessing.view`
        if size != picture.size:
            picture = picture.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(picture)


def _middle(size: Size, tile: Size) -> NDArray[np.intp]:
    return np.array([[max(0, (length - side) // 2) for length, side in zip(size, tile, strict=True)]], dtype=np.intp)


def _cut(pixels: Pixels, corner: Size, size: Size) -> Pixels:
    """Return the part of `size` that begins in the corner; what lies beyond the picture is its mirror image."""
    part = pixels[corner[0] : corner[0] + size[0], corner[1] : corner[1] + size[1]]
    beyond = [(0, wanted - length) for wanted, length in zip(size, part.shape[:2], strict=True)]
    return np.pad(part, (*beyond, (0, 0)), mode="symmetric") if any(more for _, more in beyond) else part
