"""The demo's data: crops of a real photograph of a texture, half of the test crops with a defect put in.

The photographs (`brick`, `grass`, `gravel`; public domain, CC0) come inside the scikit-image wheel, so nothing is
downloaded. Each is reduced to two thirds and cut into three upright strips that share no pixel: the model learns from
the right one, the middle one calibrates, the left one is the test. Crops of one strip may overlap each other.

A defect is soft-edged and of low contrast: an *opacity* in [0, 1] (float64 [H, W]) and the *material* seen through it
(float64 [H, W], grey levels 0 to 255); the result is `picture + opacity * (material - picture)`, the mask is of what
changed. All shapes are drawn from the generator that is handed in, so one seed gives one set of defects.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from mdps.runtime.errors import UsageError

Plane = NDArray[np.float64]
Mask = NDArray[np.bool_]
Layer = tuple[Plane, Plane]
Maker = Callable[[Plane, Plane, np.random.Generator], Layer]

OPAQUE = 0.25  # a pixel belongs to the defect from this opacity on ..
VISIBLE = 6.0  # .. if the picture changed near it by this many grey levels
EVIDENT = 16.0  # the mean change that a whole defect must reach


def blob(shape: tuple[int, int], rng: np.random.Generator, radius: tuple[float, float], feather: float) -> Plane:
    """A lobed, slightly stretched spot with a soft edge, wholly or mostly inside the picture: opacity [H, W]."""
    height, width = shape
    size = rng.uniform(*radius)
    row, column = rng.uniform(size, height - size), rng.uniform(size, width - size)
    y, x = np.mgrid[:height, :width].astype(np.float64)
    stretch = rng.uniform(0.75, 1.3)
    dy, dx = (y - row) * stretch, (x - column) / stretch
    angle, edge = np.arctan2(dy, dx), np.ones(shape)
    for lobe in range(2, 6):
        edge += rng.normal(0, 0.35 / lobe) * np.cos(lobe * angle + rng.uniform(0, 2 * np.pi))
    inside = (size * edge - np.hypot(dy, dx)) / feather
    return np.asarray(1 / (1 + np.exp(-np.clip(4 * inside, -50, 50))))


def stroke(shape: tuple[int, int], points: Plane, widths: Plane) -> Plane:
    """A line through `points` [K, 2] (row, column), `widths` [K] wide, with edges half a pixel soft: opacity [H, W]."""
    y, x = np.mgrid[: shape[0], : shape[1]].astype(np.float64)
    opacity = np.zeros(shape)
    for (row, column), width in zip(points, widths, strict=True):
        opacity = np.maximum(opacity, np.clip(0.5 + width / 2 - np.hypot(y - row, x - column), 0, 1))
    return opacity


def scratch(picture: Plane, foreign: Plane, rng: np.random.Generator) -> Layer:
    """A thin bright or dark curve that fades towards its ends."""
    start = rng.uniform(10, np.subtract(picture.shape, 10))
    heading, length = rng.uniform(0, 2 * np.pi), rng.uniform(22, 42)
    along = np.stack([np.sin(heading), np.cos(heading)])
    across = np.stack([along[1], -along[0]])
    t = np.linspace(0, 1, 120)[:, None]
    points = start + length * t * along + rng.normal(0, 9) * t * (1 - t) * 4 * across
    fade = np.sin(np.pi * np.clip(t[:, 0], 0.02, 0.98)) ** 0.5
    opacity = stroke(picture.shape, points, rng.uniform(0.9, 1.5) * fade) * rng.uniform(0.75, 0.95)
    return opacity, picture + rng.choice([-1, 1]) * rng.uniform(45, 65)


def crack(picture: Plane, foreign: Plane, rng: np.random.Generator) -> Layer:
    """A dark, jagged line with one branch."""

    def walk(start: Plane, heading: float, steps: int) -> Plane:
        turns = heading + np.cumsum(rng.normal(0, 0.28, steps)) * 0.6 + rng.normal(0, 0.3, steps)
        return np.asarray(start + 0.6 * np.cumsum(np.stack([np.sin(turns), np.cos(turns)], axis=1), axis=0))

    heading = rng.uniform(0, 2 * np.pi)
    trunk = walk(rng.uniform(14, np.subtract(picture.shape, 14)), heading, int(rng.integers(45, 75)))
    branch = walk(trunk[len(trunk) // 2], heading + rng.choice([-1, 1]) * rng.uniform(0.6, 1.1), 25)
    points = np.concatenate([trunk, branch])
    widths = np.concatenate([np.linspace(1.7, 0.4, len(trunk)), np.linspace(1.0, 0.3, len(branch))])
    return stroke(picture.shape, points, widths) * 0.9, np.minimum(picture, picture * 0.3 + 15)


def stain(picture: Plane, foreign: Plane, rng: np.random.Generator) -> Layer:
    """A spot where the texture shows through darker, or lighter."""
    opacity = blob(picture.shape, rng, (8, 14), feather=4.5)
    darker, lighter = picture * rng.uniform(0.58, 0.72), picture + rng.uniform(28, 40)
    return opacity, darker if rng.random() < 0.6 else lighter


def missing(picture: Plane, foreign: Plane, rng: np.random.Generator) -> Layer:
    """A spot where the structure is gone: only its smoothed shade and a fine grain are left."""
    opacity = blob(picture.shape, rng, (7, 11), feather=2.0)
    level = float((picture * opacity).sum() / opacity.sum())
    return opacity, level + rng.uniform(-24, -10) + rng.normal(0, 1.5, picture.shape)


def foreign_material(picture: Plane, foreign: Plane, rng: np.random.Generator) -> Layer:
    """A spot of another photograph (`foreign` [H, W]), its shade drawn halfway to the place it lies on."""
    opacity = blob(picture.shape, rng, (7, 12), feather=1.5)
    here, there = ((plane * opacity).sum() / opacity.sum() for plane in (picture, foreign))
    return opacity, foreign + 0.5 * (here - there)


DEFECTS: Mapping[str, Maker] = {
    "crack": crack,
    "foreign": foreign_material,
    "missing": missing,
    "scratch": scratch,
    "stain": stain,
}


def changed(before: NDArray[np.uint8], after: NDArray[np.uint8], opacity: Plane) -> Mask:
    """Mask [H, W] of a defect: where it is opaque, unless nothing within three pixels differs from the good picture."""
    change = np.abs(after.astype(np.int16) - before).astype(np.uint8)
    near = np.asarray(Image.fromarray(change).filter(ImageFilter.MaxFilter(7)))
    return (opacity > OPAQUE) & (near >= VISIBLE)


def put(
    kind: str, picture: NDArray[np.uint8], foreign: NDArray[np.uint8], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], Mask]:
    """A copy of the grey `picture` [H, W] with one defect of `kind` in it, and the defect's mask [H, W].

    `foreign` [H, W] is a crop of another photograph. Defects that a person would hardly see (a missing spot on
    plain ground, say) are drawn anew, up to a hundred times; then UsageError.
    """
    for _ in range(100):
        opacity, material = DEFECTS[kind](picture.astype(np.float64), foreign.astype(np.float64), rng)
        blended = picture + opacity * (material - picture)
        after = np.clip(np.rint(blended), 0, 255).astype(np.uint8)
        mask = changed(picture, after, opacity)
        change = np.abs(after.astype(np.float64) - picture)
        whole = mask.sum() >= max(20, 0.7 * (opacity > OPAQUE).sum())
        if whole and change[mask].mean() >= EVIDENT:
            return after, mask
    raise UsageError(f"no visible defect of kind {kind!r} fits this picture; it may be uniformly black or white")


PHOTOS = ("brick", "grass", "gravel")
SIZE = 64  # crops are SIZE x SIZE
REDUCED = 341  # the 512-pixel photographs at two thirds: a crop shows some four bricks side by side
# Columns. The view narrows towards the middle: the right strip, mirrored, holds every slant of the left one.
TEST, CALIBRATION, TRAINING = slice(0, 105), slice(105, 177), slice(177, REDUCED)

Grey = NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """One test crop: image uint8 [64, 64, 3] (three equal channels), mask bool [64, 64], kind `good` or a defect's."""

    name: str
    kind: str
    image: NDArray[np.uint8]
    mask: NDArray[np.bool_]


def photograph(name: str) -> Grey:
    """A photograph reduced to uint8 [341, 341]; UsageError if the name is unknown or scikit-image is not installed."""
    if name not in PHOTOS:
        raise UsageError(f"there is no photograph {name!r}; choose one of {', '.join(PHOTOS)}")
    package = importlib.util.find_spec("skimage")  # its folder only: importing skimage takes a second
    if package is None or not package.submodule_search_locations:
        raise UsageError("the demo's photographs come with scikit-image, which is missing: pip install scikit-image")
    path = Path(package.submodule_search_locations[0]) / "data" / f"{name}.png"
    if not path.is_file():
        raise UsageError(f"scikit-image is installed without {path}: pip install --force-reinstall scikit-image")
    with Image.open(path) as image:
        return np.asarray(image.convert("L").resize((REDUCED, REDUCED), Image.Resampling.BILINEAR))


def as_rgb(grey: Grey) -> NDArray[np.uint8]:
    """Grey [.., H, W] as three equal channels [.., H, W, 3]."""
    return np.repeat(grey[..., None], 3, axis=-1)


class TextureSet:
    """Good and defective 64 x 64 crops of one photograph, the same for the same seed.

    Every method draws from a generator of its own, so the test set does not depend on how many crops were asked for
    before it.
    """

    def __init__(self, photo: str = "brick", seed: int = 0) -> None:
        self.photo, self.seed = photo, seed
        self._picture = photograph(photo)

    @cached_property
    def _others(self) -> list[Grey]:
        return [photograph(name) for name in PHOTOS if name != self.photo]

    def training(self, count: int) -> NDArray[np.uint8]:
        """`count` good crops of the training strip, uint8 [count, 64, 64, 3]."""
        return as_rgb(self._crops(self._picture[:, TRAINING], count, self._generator(0)))

    def calibration(self, count: int = 48) -> NDArray[np.uint8]:
        """`count` good crops of the calibration strip, uint8 [count, 64, 64, 3]."""
        return as_rgb(self._crops(self._picture[:, CALIBRATION], count, self._generator(1)))

    def test(self, good: int = 30, each: int = 10) -> list[Sample]:
        """`good` good crops of the test strip, then `each` crops with a defect of each of the five kinds."""
        rng = self._generator(2)
        area = self._picture[:, TEST]
        clean = np.zeros((SIZE, SIZE), dtype=bool)
        crops = self._crops(area, good, rng)
        samples = [Sample(f"{i:03d}", "good", as_rgb(crop), clean) for i, crop in enumerate(crops)]
        for kind in DEFECTS:
            samples += [self._defective(kind, i, area, rng) for i in range(each)]
        return samples

    def _defective(self, kind: str, index: int, area: Grey, rng: np.random.Generator) -> Sample:
        other = self._others[int(rng.integers(len(self._others)))]
        crop, foreign = self._crops(area, 1, rng)[0], self._crops(other, 1, rng)[0]
        image, mask = put(kind, crop, foreign, rng)
        return Sample(f"{index:03d}", kind, as_rgb(image), mask)

    def _crops(self, area: Grey, count: int, rng: np.random.Generator) -> Grey:
        rows = rng.integers(0, area.shape[0] - SIZE + 1, count)
        columns = rng.integers(0, area.shape[1] - SIZE + 1, count)
        windows = np.lib.stride_tricks.sliding_window_view(area, (SIZE, SIZE))
        return np.asarray(windows[rows, columns])

    def _generator(self, part: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, PHOTOS.index(self.photo), part])
