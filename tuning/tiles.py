"""Tiles of photographs as the images of a tuning: what a detector in tiles judges is what its terms are fitted to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from mdps.runtime.errors import CalibrationError
from mdps.runtime.image_files import known_headers
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Align, Preprocessing
from mdps.runtime.tiles import Plan, Tiling, sheets
from mdps.tuning.photographs import FEWEST, SEED, Split, split

MOST = 600
"""Tiles of all photographs together: more take time, and change little."""


@dataclass(frozen=True)
class Cut:
    """Tiles as files, with the photographs that they are of, in these photographs' parts; and those that none is of.

    `each` says how many tiles a photograph takes when it is judged.
    """

    tiles: list[Path]
    owners: list[Path]
    parts: Split
    apart: list[Path]
    each: int


def framing(manifest: Manifest) -> Preprocessing:
    """Return what shows the images of a tuning: a region of interest was cut out before a photograph was."""
    return replace(manifest.preprocessing, roi=None) if manifest.tiles else manifest.preprocessing


def cut(
    paths: Sequence[Path], preprocessing: Preprocessing, tiling: Tiling, folder: Path, align: Align | None = None
) -> Cut:
    """Cut one half of the photographs into tiles that have nothing in common, at most MOST, as files in a folder.

    The other half is left for the threshold: of these no tile was seen. CalibrationError for too few photographs.
    """
    if len(paths) < 2 * FEWEST:
        raise CalibrationError(
            f"{len(paths)} good photographs are too few to tune on in tiles: give at least {2 * FEWEST}, better 100"
        )
    stream = np.random.default_rng(SEED)
    order = stream.permutation(len(paths)).tolist()
    chosen = sorted(order[: len(paths) // 2])
    tiles, owners = list[Path](), list[int]()
    for index, row in enumerate(chosen):
        for tile in _tiles(paths[row], preprocessing, tiling, align, max(1, MOST // len(chosen)), stream):
            tiles.append(folder / f"{len(tiles):04}.png")
            owners.append(index)
            tile.save(tiles[-1], compress_level=1)
    of = split(len(chosen))
    parts = (tuple(i for i, owner in enumerate(owners) if owner in part) for part in (of.fit, of.scale, of.bearing))
    sizes = [found.size for found in known_headers(paths)[1]]
    each = median(tiling.count((height, width), preprocessing.network_size) for width, height in sizes)
    apart = [paths[row] for row in sorted(order[len(chosen) :])]
    return Cut(tiles, [paths[chosen[owner]] for owner in owners], Split(*parts), apart, max(1, int(each)))


def _tiles(
    path: Path,
    preprocessing: Preprocessing,
    tiling: Tiling,
    align: Align | None,
    most: int,
    stream: np.random.Generator,
) -> list[Image.Image]:
    """Return tiles of a photograph in its own resolution, drawn where there are too many."""
    (sheet,) = sheets([path], preprocessing, tiling, preprocessing, align).sheets
    tile = preprocessing.network_size
    corners = Plan.of(sheet.size, tile, 0.0).corners
    drawn = stream.permutation(len(corners))[:most]
    side = tuple(max(length, round(length / tiling.scale)) for length in tile)
    shown = [(int(top), int(left)) for top, left in corners[np.sort(drawn)]]
    return [Image.fromarray(sheet.region(top, left, tile, (side[0], side[1]))) for top, left in shown]
