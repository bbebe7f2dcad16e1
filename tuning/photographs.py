"""Photographs of good parts, read once: some are fitted to, some held out, and of these some get synthetic defects."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import CalibrationError, ImageError, refuse_unreadable
from mdps.runtime.image_files import known_headers
from mdps.runtime.pictures import describe, read_image
from mdps.runtime.preprocessing import Align, Picture, Preprocessing, to_uint8, to_unit
from mdps.serving.defects import plan
from mdps.serving.fitness import defective, shown

SEED = 17
SIDE = 256  # of the largest photographs that are kept
FEWEST, FEW = 5, 40
MOST_FITTED, MOST_HELD = 400, 150  # images: more take memory and time, and change little
HELD, FEWEST_HELD = 0.2, 20  # share of the images that is held out, and how many at least, up to 2/5 of them
PER_KIND = 9

Images = NDArray[np.uint8]
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Split:
    """Which of the files are fitted to, and which are held out: for the scale of the terms, and for defects.

    Of very many files some are in none.
    """

    fit: tuple[int, ...]
    scale: tuple[int, ...]
    bearing: tuple[int, ...]

    @property
    def held(self) -> tuple[int, ...]:
        """All that took no part in the fit."""
        return (*self.scale, *self.bearing)


def split(count: int, seed: int = SEED) -> Split:
    """Part `count` images at random: about 80 % to fit, 10 % for the scale, 10 % for defects; of few less to fit.

    CalibrationError below FEWEST, where no part of them says anything of the others.
    """
    if count < FEWEST:
        raise CalibrationError(f"{count} good images are too few to tune on: give at least {FEWEST}, better 100")
    order = np.random.default_rng(seed).permutation(count).tolist()
    held = max(2, round(min(0.4 * count, max(FEWEST_HELD, HELD * count))))
    scale, bearing, fit = order[: held // 2], order[held // 2 : held], order[held:]
    return Split(*(tuple(sorted(one)) for one in (fit[:MOST_FITTED], scale[:MOST_HELD], bearing[:MOST_HELD])))


def doubt_of(count: int) -> str:
    """Return a sentence where the choice rests on few images; empty where it does not."""
    if count >= FEW:
        return ""
    held = len(split(count).held)
    return (
        f"{count} good images are few: the choice among candidates rests on {held} of them that were held out, and the "
        f"threshold on all; with {FEW} or more both are steadier"
    )


def photograph(bundle: Preprocessing, size: int) -> Preprocessing:
    """Return what shows a picture as the bundle's preprocessing does, but at `size` x `size` pixels."""
    if bundle.crop != "input" or bundle.crop_size is None:
        return Preprocessing((size, size), roi=bundle.roi)
    height, width = (max(size, round(side * size / bundle.crop_size)) for side in bundle.image_size)
    return replace(bundle, image_size=(height, width), crop_size=size)


def side_of(paths: Sequence[Path], bundle: Preprocessing) -> int:
    """Return the usual side of the photographs as far as the bundle shows them, at most SIDE.

    It is a multiple of 16, so that maps of features have whole pixels, at half the side too.
    """
    sides = []
    for header in known_headers(paths)[1]:
        with suppress(ImageError):  # said with all others that cannot be read
            left, top, right, bottom = bundle.covered_box(header.size)
            sides.append(min(right - left, bottom - top))
    return max(16, int(min(SIDE, np.median(sides) if sides else SIDE)) // 16 * 16)


@dataclass(frozen=True)
class Seen:
    """Pictures as the network sees them, uint8 [n, H, W, 3], and as their features do, [n, side, side, 3]."""

    images: Images
    photographs: Images

    def pick(self, rows: Sequence[int]) -> "Seen":
        """Return these of the pictures."""
        chosen = list(rows)
        return Seen(self.images[chosen], self.photographs[chosen])

    def joined(self, other: "Seen") -> "Seen":
        """Return these pictures and then those of another."""
        pairs = (self.images, other.images), (self.photographs, other.photographs)
        return Seen(*(np.concatenate(pair) for pair in pairs))

    @property
    def observations(self) -> Array:
        """Float32 [n, 3, H, W] in [-1, 1]."""
        return unit(self.images)


def unit(images: Images) -> Array:
    """Return pictures uint8 [n, H, W, 3] as float32 [n, 3, H, W] in [-1, 1]."""
    return np.stack([to_unit(image) for image in images])


def see(pictures: Iterable[Picture], bundle: Preprocessing, side: int, align: Align | None = None) -> Seen:
    """Decode each picture once, align it and keep both views of it; ImageError names up to five that cannot be read."""
    views = bundle, photograph(bundle, side)
    kept: list[list[Images]] = [[] for _ in views]
    faults: list[str] = []
    for picture in pictures:
        try:
            rgb, name = read_image(picture), describe(picture)
            rgb = align(rgb)[0] if align else rgb
            found = [view.view(rgb, name) for view in views]
        except ImageError as error:
            faults.append(str(error))
            continue
        for one, array in zip(kept, found, strict=True):
            one.append(to_uint8(array))
    refuse_unreadable(faults, len(faults) + len(kept[0]), "a tuning")
    images, photographs = (np.stack(one) for one in kept)
    return Seen(images, photographs)


@dataclass(frozen=True)
class Defects:
    """Photographs with a synthetic defect each, as they are seen, and where it is: masks [m, H, W] of the network's."""

    kinds: tuple[str, ...]
    sizes: tuple[str, ...]
    seen: Seen
    masks: NDArray[np.bool_]


def defects(
    paths: Sequence[Path],
    bundle: Preprocessing,
    side: int,
    per_kind: int = PER_KIND,
    seed: int = SEED,
    align: Align | None = None,
) -> Defects:
    """Align these photographs, and put every kind of defect into them `per_kind` times, all by one seed."""
    rows = plan(len(paths), per_kind, seed)
    masks: list[NDArray[np.bool_]] = []

    def drawn() -> Iterator[Images]:
        for index, row in enumerate(rows):
            kind, size, *pair = row
            both = [align(read_image(paths[at]))[0] if align else paths[at] for at in pair]
            one = defective(bundle, both, (kind, size, 0, 1), [seed, index])
            masks.append(shown(one.mask, bundle, bundle.network_size))
            yield one.image

    seen = see(drawn(), bundle, side)
    return Defects(tuple(kind for kind, *_ in rows), tuple(size for _, size, *_ in rows), seen, np.stack(masks))
