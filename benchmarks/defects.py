"""Defects to put into a picture of a texture: soft-edged, of low contrast, with the mask of what they changed.

Every defect is an *opacity* in [0, 1] (float64 [H, W]) and the *material* seen through it (float64 [H, W], grey levels
0 to 255); the result is `picture + opacity * (material - picture)`. All shapes are drawn from the generator that is
handed in, so one seed gives one set of defects.
"""

from collections.abc import Callable, Mapping

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


KINDS: Mapping[str, Maker] = {
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
        opacity, material = KINDS[kind](picture.astype(np.float64), foreign.astype(np.float64), rng)
        blended = picture + opacity * (material - picture)
        after = np.clip(np.rint(blended), 0, 255).astype(np.uint8)
        mask = changed(picture, after, opacity)
        change = np.abs(after.astype(np.float64) - picture)
        whole = mask.sum() >= max(20, 0.7 * (opacity > OPAQUE).sum())
        if whole and change[mask].mean() >= EVIDENT:
            return after, mask
    raise UsageError(f"no visible defect of kind {kind!r} fits this picture; it may be uniformly black or white")
