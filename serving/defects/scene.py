"""The photograph a defect is put into: where its part is, how much it is grained, and what lies around a place."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]
Pixels = NDArray[np.uint8]
Point = tuple[float, float]

GRID = 128
"""The most cells a side of the coarse picture that places are chosen on."""
_SURROUNDINGS, _CLEAR = 24.0, 100.0  # grey levels: what parts an object from its background; black from white
_PATIENCE = 2.0  # strength


@dataclass(frozen=True)
class Window:
    """Rows and columns of the image around a place, cut at the image's border."""

    rows: slice
    columns: slice
    place: Point

    @cached_property
    def grid(self) -> tuple[Floats, Floats]:
        """Rows and columns relative to the place, to be broadcast against each other."""
        rows, columns = (np.arange(s.start, s.stop, dtype=np.float32) for s in (self.rows, self.columns))
        return rows[:, None] - np.float32(self.place[0]), columns[None] - np.float32(self.place[1])

    def of(self, image: NDArray[np.uint8]) -> Floats:
        """Return the image's pixels in it."""
        return image[self.rows, self.columns].astype(np.float32)


@dataclass(frozen=True)
class Change:
    """New pixels [h, w, 3] for a window."""

    window: Window
    pixels: Floats


@dataclass(frozen=True)
class Ground:
    """An image [H, W, 3] and what is known of it."""

    image: Pixels

    @cached_property
    def side(self) -> float:
        """Return what sizes are relative to; of a strip, little more than its short side."""
        height, width = self.image.shape[:2]
        return min(math.sqrt(height * width), 2.0 * int(min(height, width)))

    @cached_property
    def few(self) -> Floats:
        """The pixels [n, 3] of a lattice over it."""
        step = max(1, max(self.image.shape[:2]) // GRID)
        return self.image[::step, ::step].reshape(-1, 3).astype(np.float32)

    @cached_property
    def grey(self) -> bool:
        """Whether there is no colour in it, so that a defect brings none."""
        return float(np.ptp(self.few, axis=1).max()) <= 2

    @cached_property
    def coarse(self) -> Floats:
        """The picture [h, w, 3] on a grid of at most `GRID` cells a side."""
        height, width = self.image.shape[:2]
        cell = max(1.0, max(height, width) / GRID)
        size = (max(1, round(width / cell)), max(1, round(height / cell)))
        return np.asarray(Image.fromarray(self.image).resize(size, Image.Resampling.BOX), dtype=np.float32)

    @cached_property
    def background(self) -> Floats | None:
        """The median colour of the border where it is even and the part stands out from it; None for a surface."""
        border = np.concatenate([self.coarse[0], self.coarse[-1], self.coarse[:, 0], self.coarse[:, -1]])
        tone = np.median(border, axis=0).astype(np.float32)
        even = np.median(np.abs(border - tone)) <= _SURROUNDINGS / 4
        share = float((np.abs(self.coarse - tone).max(axis=-1) > _SURROUNDINGS).mean())
        return tone if even and 0.01 <= share <= 0.9 else None

    @cached_property
    def part(self) -> Bools:
        """Cells of `coarse` which the part covers: all of a surface, else what differs from the background."""
        if self.background is None:
            return np.ones(self.coarse.shape[:2], dtype=np.bool_)
        return np.asarray(np.abs(self.coarse - self.background).max(axis=-1) > _SURROUNDINGS)

    @cached_property
    def outline(self) -> Bools:
        """The part's outermost cells; of a surface, those at the image's border."""
        wide = np.pad(self.part, 1)
        inside = wide[2:, 1:-1] & wide[:-2, 1:-1] & wide[1:-1, 2:] & wide[1:-1, :-2]
        return np.asarray(self.part & ~inside)

    @cached_property
    def nearby(self) -> Bools:
        """The part and what is close to it: a scratch may begin, and copper be spilt, beside it."""
        picture = Image.fromarray(self.part.astype(np.uint8) * 255)
        return np.asarray(picture.filter(ImageFilter.MaxFilter(7))) > 0

    @cached_property
    def edges(self) -> Bools:
        """Cells of the part with more of an edge than most."""
        grey = self.coarse.mean(axis=-1)
        wide = np.pad(grey, 1, mode="edge")
        steep = np.abs(wide[2:, 1:-1] - wide[:-2, 1:-1]) + np.abs(wide[1:-1, 2:] - wide[1:-1, :-2])
        return np.asarray(self.nearby & (steep >= max(6.0, float(np.quantile(steep[self.nearby], 0.7)))))

    @cached_property
    def levels(self) -> tuple[float, float] | None:
        """(dark, bright) of a picture that holds hardly anything else, as of a camera that parts black from white."""
        few = self.few.mean(axis=-1)
        limit = split(few)
        if limit is None:
            return None
        dark, bright = float(np.median(few[few <= limit])), float(np.median(few[few > limit]))
        near = np.minimum(np.abs(few - dark), np.abs(few - bright)) < 0.1 * (bright - dark)
        return (dark, bright) if bright - dark >= _CLEAR and float(near.mean()) >= 0.75 else None


@dataclass(frozen=True)
class Scene:
    """The image, another good one, and the size of the defect and how much stronger than usual it should be."""

    ground: Ground
    other: Pixels
    rng: np.random.Generator
    size: str
    strength: float = 1.0

    @property
    def image(self) -> Pixels:
        """The image [H, W, 3] a defect is put into."""
        return self.ground.image

    @property
    def side(self) -> float:
        """Return what sizes are relative to."""
        return self.ground.side

    def plainly(self, make: "Callable[[Scene], Change]") -> "Change | None":
        """Return nothing the first times, so that a pattern is looked for elsewhere; then what takes its place."""
        return make(replace(self, strength=self.strength / _PATIENCE)) if self.strength >= _PATIENCE else None

    def length(self, times: float = 1.0) -> float:
        """Draw the extent of a defect in pixels."""
        low, high = {"small": (0.01, 0.03), "medium": (0.04, 0.08), "large": (0.10, 0.33)}[self.size]
        return max(2.0, float(self.rng.uniform(low, high)) * times * self.side)

    def around(self, place: Point, reach: float) -> Window:
        """Return the window of `reach` pixels to each side of a place in the image."""
        far = math.ceil(reach)
        rows, columns = (
            slice(max(0, int(at) - far), min(length, int(at) + far + 1))
            for at, length in zip(place, self.image.shape, strict=False)
        )
        return Window(rows, columns, place)

    def somewhere(self, cells: Bools | None = None) -> Point:
        """Draw a place in the given cells; on or beside the part without them, or where there are none."""
        wanted = cells if cells is not None and cells.any() else self.ground.nearby
        chosen = np.flatnonzero(wanted)
        cell = divmod(int(chosen[self.rng.integers(len(chosen))]), wanted.shape[1])
        within = self.rng.uniform(0, 1, 2)
        row, column = (
            min(length - 1.0, math.floor((at + part) * length / cells))
            for at, part, length, cells in zip(cell, within, self.image.shape, wanted.shape, strict=False)
        )
        return row, column

    def tone(self, around: Floats, most: float = 110.0, least: float = 12.0) -> Floats:
        """Draw a change of colour [3] that can be told from the grain of these pixels [h, w, 3], some barely.

        Where there are but black and white it is from the one to the other, or nearly.
        """
        if self.ground.levels is None:
            return self.faint(around, most, least)
        dark, bright = self.ground.levels
        sign = -1.0 if self.rng.random() < (around.mean() - dark) / (bright - dark) else 1.0
        return np.full(3, sign * self.rng.uniform(0.7, 1.0) * (bright - dark), dtype=np.float32)

    def faint(self, around: Floats, most: float, least: float) -> Floats:
        """Draw it whatever the levels: the grain's part, and `least` to `most` grey levels more."""
        share = {"small": 2.5, "medium": 1.5, "large": 0.7}[self.size]
        drawn = math.exp(self.rng.uniform(math.log(least), math.log(most)))
        amount = (8.0 + share * grain(around) + drawn) * self.strength
        sign = self.rng.choice((-1.0, 1.0))
        if not 0 <= float(np.median(around)) + sign * min(amount, 120.0) <= 255:
            sign = -sign
        tint = np.ones(3) if self.ground.grey else self.rng.uniform(0.6, 1.2, 3)
        return np.asarray(sign * amount * tint, dtype=np.float32)


def grain(pixels: Floats) -> float:
    """Return the spread of neighbouring pixels' difference, edges hardly counted."""
    if pixels.shape[1] < 2:
        return 0.0
    return 1.05 * float(np.median(np.abs(np.diff(pixels.mean(axis=-1), axis=1))))


def split(values: Floats) -> float | None:
    """Return the level midway between dark and bright, parted as well as can be (Otsu); None where all are alike."""
    counts = np.bincount(np.rint(values).clip(0, 255).astype(np.intp).ravel(), minlength=256).astype(np.float64)
    below, sums = np.cumsum(counts), np.cumsum(counts * np.arange(256))
    above = below[-1] - below
    parted = np.flatnonzero((below > 0) & (above > 0))
    if not len(parted):
        return None
    dark, bright = sums[parted] / below[parted], (sums[-1] - sums[parted]) / above[parted]
    best = int(np.argmax(below[parted] * above[parted] * (bright - dark) ** 2))
    return float(dark[best] + bright[best]) / 2


def sample(image: Pixels, rows: Floats, columns: Floats) -> Floats:
    """Return the nearest pixels [..., 3] to these places; those beyond the border are the border's."""
    row = np.clip(np.rint(rows), 0, image.shape[0] - 1).astype(np.intp)
    column = np.clip(np.rint(columns), 0, image.shape[1] - 1).astype(np.intp)
    return image[row, column].astype(np.float32)


def blend(window: Window, image: Pixels, alpha: Floats, new: Floats) -> Change:
    """Lay new pixels over those of the image, as opaque as alpha [h, w] says."""
    old = window.of(image)
    return Change(window, old + alpha[..., None] * (new - old))
