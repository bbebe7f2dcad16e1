"""Whether a detector sees defects on the parts it was calibrated on: puts some into images of good ones and looks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from mdps.runtime.detector import Result
from mdps.runtime.fitness import Fitness, Found
from mdps.runtime.preprocessing import Picture, Preprocessing, read_image
from mdps.runtime.scope import Scope, inspected
from mdps.runtime.tiles import Tiling
from mdps.serving.defects import SIZES, Defect, plan, put

MOST_SIDE = 1024
"""A photograph with a longer side is reduced to it first, so that defects are of sizes which are seen at all."""
_BATCH, _TURNS = 8, 30


class Judge(Protocol):
    """A detector, as far as it is needed here."""

    preprocessing: Preprocessing
    scope: Scope

    @property
    def tiles(self) -> Tiling | None:
        """How it cuts pictures into tiles, judging one at a time."""

    def batch(self, images: Sequence[Picture]) -> list[Result]:
        """Judge pictures."""


def measure(
    detector: Judge,
    threshold: float,
    good: Sequence[Picture],
    *,
    good_scores: ArrayLike,
    per_kind: int = 6,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Fitness:
    """Put `per_kind` defects of every kind into good images, and see how many score above the threshold.

    `good_scores` are the scores of good images as they are; `progress` is told how many of how many defects were
    judged. A defect lies in what the detector sees of the photograph.

    Raises ImageError for an image that cannot be read, and as `batch` does.
    """
    rows = plan(len(good), per_kind, seed)
    scores, pixels = list[float](), list[float]()
    batch = 1 if detector.tiles else _BATCH
    for start in range(0, len(rows), batch):
        some = range(start, min(start + batch, len(rows)))
        made = [_within_scope(detector, good, rows[index], [seed, index]) for index in some]
        found = detector.batch([one.image for one in made])
        scores += [result.score for result in found]
        maps = [result.anomaly_map for result in found]
        masks = [shown(one.mask, detector.preprocessing, m.shape) for one, m in zip(made, maps, strict=True)]
        pixels += map(of_pixels, maps, masks)
        progress(len(scores), len(rows))
    return told([(kind, size) for kind, size, _, _ in rows], scores, pixels, threshold, good_scores)


def _within_scope(detector: Judge, good: Sequence[Picture], row: tuple[str, str, int, int], seed: list[int]) -> Defect:
    """Return the photograph of a row with half of its defect or more in an inspected place, if it fits there."""
    made = defective(detector.preprocessing, good, row, seed, detector.tiles)
    for turn in range(_TURNS if detector.scope.restricts else 0):
        inside = made.mask & inspected(detector.scope, _whole, made.mask.shape)
        if 2 * inside.sum() >= made.mask.sum():
            break
        made = defective(detector.preprocessing, good, row, [*seed, turn], detector.tiles)
    return made


def _whole(size: tuple[int, int]) -> tuple[float, float, float, float]:
    return (0.0, 0.0, *size)


def defective(
    preprocessing: Preprocessing,
    good: Sequence[Picture],
    row: tuple[str, str, int, int],
    seed: Sequence[int],
    tiles: Tiling | None = None,
) -> Defect:
    """Return the photograph of a row of `plan`, with its defect in what the preprocessing shows of it.

    Of a picture that is judged in tiles that is a region as large as one, anywhere in it.
    """
    kind, size, at, other = row
    stream = np.random.default_rng(seed)
    image, second = (_photograph(preprocessing, good[index], tiles) for index in (at, other))
    rows, columns = _shown(preprocessing, image)
    others = _shown(preprocessing, second)
    if tiles:
        side = tuple(math.ceil(length / tiles.scale) for length in preprocessing.network_size)
        rows, columns = _within((rows, columns), side, stream)
        others = _within(others, side, stream)
    defect = put(kind, size, image[rows, columns], second[others], stream)
    mask = np.zeros(image.shape[:2], dtype=np.bool_)
    image[rows, columns], mask[rows, columns] = defect.image, defect.mask
    return Defect(kind, size, image, mask)


def _photograph(preprocessing: Preprocessing, picture: Picture, tiles: Tiling | None) -> NDArray[np.uint8]:
    """Return the pixels [H, W, 3], of at most `MOST_SIDE` a side; those a region or tiles are cut from stay as many."""
    image = read_image(picture)
    if preprocessing.roi is None and tiles is None:
        image.thumbnail((MOST_SIDE, MOST_SIDE), Image.Resampling.BOX)
    return np.array(image)


def _shown(preprocessing: Preprocessing, image: NDArray[Any]) -> tuple[slice, slice]:
    left, top, right, bottom = preprocessing.covered_box((image.shape[1], image.shape[0]))
    return slice(int(top), max(int(top) + 1, int(bottom))), slice(int(left), max(int(left) + 1, int(right)))


def _within(whole: tuple[slice, slice], side: Sequence[int], stream: np.random.Generator) -> tuple[slice, slice]:
    """Return a part of `side` (H, W) of a region, or all of it where it is smaller."""
    begins = [
        s.start + int(stream.integers(max(1, s.stop - s.start - n + 1))) for s, n in zip(whole, side, strict=True)
    ]
    rows, columns = (slice(b, min(b + n, s.stop)) for b, n, s in zip(begins, side, whole, strict=True))
    return rows, columns


def told(
    names: Sequence[tuple[str, str]], defective: ArrayLike, pixels: ArrayLike, threshold: float, good: ArrayLike
) -> Fitness:
    """Return the fitness by images with defects, each of a kind and a size: their scores and what `of_pixels` gives.

    `good` are scores of good images.
    """
    scores, seen = np.asarray(defective), np.asarray(pixels)

    def found(index: int, name: str) -> Found:
        rows = [of[index] == name for of in names]
        chosen = scores[rows]
        both = (auroc(good, chosen) + float(seen[rows].mean())) / 2
        return Found(len(chosen), int((chosen > threshold).sum()), both)

    kinds = {kind: found(0, kind) for kind in dict.fromkeys(kind for kind, _ in names)}
    sizes = {size: found(1, size) for size in SIZES if any(size == of for _, of in names)}
    return Fitness(float(np.mean([kind.auroc for kind in kinds.values()])), kinds, sizes)


def of_pixels(anomaly_map: NDArray[np.float32], mask: NDArray[np.bool_]) -> float:
    """Return the AUROC of the map's pixels in a mask [H, W] against its others; 0.5 where either are none."""
    return auroc(anomaly_map[~mask], anomaly_map[mask]) if 0 < mask.sum() < mask.size else 0.5


def shown(mask: NDArray[np.bool_], preprocessing: Preprocessing, size: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a photograph's mask [H, W] as far as the preprocessing shows it, at the `size` (h, w) of a map."""
    rows, columns = _shown(preprocessing, mask)
    return reduced(mask[rows, columns], size)


def reduced(mask: NDArray[np.bool_], size: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a mask [h, w] at another size: a pixel is set where any that it covers is."""
    rows, columns = (_covering(old, new) for old, new in zip(mask.shape, size, strict=True))
    return (rows @ mask.astype(np.float32) @ columns.T) > 0


def _covering(old: int, new: int) -> NDArray[np.float32]:
    """Return [new, old]: 1 where the pixel of the new row overlaps that of the old one."""
    at, start = np.arange(old) * new, np.arange(new)[:, None] * old
    return ((at < start + old) & (at + new > start)).astype(np.float32)


def auroc(good: ArrayLike, defective: ArrayLike) -> float:
    """Return the share of pairs in which the defective one scores higher, ties counted half."""
    ranked, scores = np.sort(good), np.asarray(defective)
    below, up_to = (np.searchsorted(ranked, scores, side=side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(ranked)))
