"""Defects of many kinds, put into photographs of good parts: what a detector is chosen by where no bad part is known.

Each is drawn with a seed, at the photograph's own resolution, on or beside the part. Its extent is a share of the
image's side ("small" 1 to 3 %, "medium" 4 to 8 %, "large" 10 to 33 %; lines are longer, shading is broader), its
contrast ranges from barely visible upwards. A picture of only black and white keeps to these, as its camera does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import require
from mdps.serving.defects import pattern, surface
from mdps.serving.defects.scene import Change, Floats, Ground, Scene, grain

_MAKERS: dict[str, Callable[[Scene], Change | None]] = {
    "cut-paste": surface.cut_paste,
    "texture": surface.texture,
    "scratch": surface.scratch,
    "crack": surface.crack,
    "stain": surface.stain,
    "missing": surface.missing,
    "shading": surface.shading,
    "speck": surface.speck,
    "smear": surface.smear,
    "shift": surface.shift,
    **pattern.MAKERS,
}
KINDS: tuple[str, ...] = tuple(_MAKERS)
SIZES = ("small", "medium", "large")
_TRIES = 8


@dataclass(frozen=True)
class Defect:
    """An image [H, W, 3] with a defect, and the pixels [H, W] that it changed; all others are as they were."""

    kind: str
    size: str
    image: NDArray[np.uint8]
    mask: NDArray[np.bool_]


def put(kind: str, size: str, image: NDArray[np.uint8], other: NDArray[np.uint8], rng: np.random.Generator) -> Defect:
    """Put a defect into a copy of an image [H, W, 3]; `other` is another good one, which pieces may come from.

    What cannot be seen is drawn again, stronger, and at last is a plain mark of that size, so that the mask is never
    empty. The same generator's state gives the same defect.
    """
    scene = Scene(Ground(image), other, rng, size)
    for index in range(_TRIES):
        stronger = replace(scene, strength=1.4**index)
        change = _MAKERS[kind](stronger)
        defect = _made(kind, scene, change, keep=index < _TRIES - 2) if change else None
        if defect is not None:
            return defect
    return _marked(kind, scene)


def _made(kind: str, scene: Scene, change: Change, *, keep: bool) -> Defect | None:
    """Return the defect if it can be seen; `keep` holds a picture of two levels to them, and counts no less."""
    new, old = change.pixels, change.window.of(scene.image)
    # One grain in the place of another is no defect.
    visible, mean = (2.0, 4.0) if kind == "shading" else (3.0, min(max(8.0, 2 * grain(old)), 24.0))
    if keep and scene.ground.levels is not None and kind != "shading":
        dark, bright = scene.ground.levels
        new = old + _parted(new, dark, bright) - _parted(old, dark, bright)
        visible, mean = 0.2 * (bright - dark), 0.4 * (bright - dark)
    return _finished(kind, scene, Change(change.window, new), visible, mean)


def _parted(pixels: Floats, dark: float, bright: float) -> Floats:
    """Drive tones to the nearer of two levels, those amid them less."""
    return np.asarray(np.clip(2 * pixels - (dark + bright) / 2, dark, bright))


def _finished(kind: str, scene: Scene, change: Change, visible: float, mean: float) -> Defect | None:
    """Return the defect: pixels that change by `visible` grey levels; None where their mean change is below `mean`."""
    window = change.window
    old = scene.image[window.rows, window.columns]
    new = np.rint(np.clip(change.pixels, 0, 255)).astype(np.uint8)
    steps = np.abs(new.astype(np.int16) - old)
    seen = steps.max(axis=-1) >= visible
    if not seen.any() or steps[seen].mean() < mean:
        return None
    image, mask = scene.image.copy(), np.zeros(scene.image.shape[:2], dtype=np.bool_)
    image[window.rows, window.columns] = np.where(seen[..., None], new, old)
    mask[window.rows, window.columns] = seen
    return Defect(kind, scene.size, image, mask)


def _marked(kind: str, scene: Scene) -> Defect:
    """Make every pixel of a square brighter, or darker where it is bright; black white, where there is nothing else."""
    window = scene.around(scene.somewhere(), scene.length() / 2)
    old = window.of(scene.image)
    step = 255 if scene.ground.levels else 60
    made = _finished(kind, scene, Change(window, old + np.where(old < 128, step, -step)), 1, 1)
    assert made is not None, "a square of 60 grey levels is visible"
    return made


def plan(images: int, per_kind: int, seed: int) -> list[tuple[str, str, int, int]]:
    """Return (kind, size, index of the image, index of the other one): each kind `per_kind` times.

    Sizes and images are spread evenly over all and over each kind. UsageError without images.
    """
    require(images >= 1, "there are no good images to put defects into")
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < per_kind * len(KINDS):
        order += rng.permutation(images).tolist()
    pairs = [(kind, index + turn) for turn, kind in enumerate(KINDS) for index in range(per_kind)]
    others = [(at + int(rng.integers(1, max(2, images)))) % images for at in order]
    return [
        (kind, SIZES[turn % len(SIZES)], at, other)
        for (kind, turn), at, other in zip(pairs, order, others, strict=False)
    ]
