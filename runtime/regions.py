"""Regions of an anomaly map: its connected parts above a limit, where on the photograph they are, and how large."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right, bottom."""
MOST = 100
"""As many regions of an image are listed, those with the highest peaks."""
_Indices = NDArray[np.intp]
_Box = tuple[int, int, int, int]
_EXACT = 1e-6  # of a pixel: less is an error of rounding


@dataclass(frozen=True)
class Region:
    """A connected part of a map (corners connect), in pixels of the upright photograph.

    `box` is (left, top, width, height) and holds all of every pixel of the map, `area` what these cover, `peak` the
    map's largest value, `at` the (x, y) where it is. `mm_per_pixel` is None where nobody has said it.
    """

    box: tuple[int, int, int, int]
    area: int
    peak: float
    at: tuple[int, int]
    mm_per_pixel: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Its fields, and with a scale `box_mm` and `area_mm2` in the place of that."""
        found: dict[str, Any] = {"box": list(self.box), "area": self.area, "peak": self.peak, "at": list(self.at)}
        if self.mm_per_pixel is None:
            return found
        box = [round(side * self.mm_per_pixel, 4) for side in self.box]
        return found | {"box_mm": box, "area_mm2": round(self.area * self.mm_per_pixel**2, 4)}


def find(
    anomaly_map: NDArray[np.float32],
    limit: float,
    box: Box | None = None,
    mm_per_pixel: float | None = None,
) -> tuple[Region, ...]:
    """Return the regions of a map [H, W] above the limit, the highest peak first; no more than MOST.

    `box` is what of the photograph the map shows; without one a region is in pixels of the map.
    """
    hot = anomaly_map > limit
    runs = _Runs.of(hot)
    if not len(runs.rows):
        return ()
    height, width = anomaly_map.shape
    left, top, right, bottom = box or (0.0, 0.0, float(width), float(height))
    across, down = (right - left) / width, (bottom - top) / height
    regions = []
    for (near, high, far, low), cells, peak, (x, y) in runs.components(anomaly_map[hot]):
        corner = floor(left + near * across + _EXACT), floor(top + high * down + _EXACT)
        other = ceil(left + far * across - _EXACT), ceil(top + low * down - _EXACT)
        on_photograph = (*corner, other[0] - corner[0], other[1] - corner[1])
        at = int(left + (x + 0.5) * across), int(top + (y + 0.5) * down)
        regions.append(Region(on_photograph, max(1, round(cells * across * down)), peak, at, mm_per_pixel))
    return tuple(regions)


@dataclass(frozen=True)
class _Runs:
    """Runs of hot pixels of an image [H, width], row by row: [n] rows, first columns, and columns behind the last."""

    rows: _Indices
    starts: _Indices
    ends: _Indices
    width: int

    @classmethod
    def of(cls, hot: NDArray[np.bool_]) -> "_Runs":
        edges = np.diff(hot.astype(np.int8), axis=1, prepend=0, append=0)
        rows, starts = np.nonzero(edges == 1)
        return cls(rows, starts, np.nonzero(edges == -1)[1], hot.shape[1])

    def components(self, values: NDArray[np.float32]) -> Iterator[tuple[_Box, int, float, tuple[int, int]]]:
        """Yield box, area, peak and its place of the components, the highest first; `values` are of all hot pixels."""
        lengths = self.ends - self.starts
        offsets = np.cumsum(lengths) - lengths
        highest = np.maximum.reduceat(values, offsets)
        owners = self.owners()
        order = np.argsort(owners, kind="stable")
        firsts = np.flatnonzero(np.diff(owners[order], prepend=-1))
        peaks = np.maximum.reduceat(highest[order], firsts)
        ends = np.append(firsts[1:], len(order))
        for one in np.argsort(-peaks, kind="stable")[:MOST]:
            own = order[firsts[one] : ends[one]]
            rows, run = self.rows[own], own[np.argmax(highest[own])]
            box = (self.starts[own].min(), rows.min(), self.ends[own].max(), rows.max() + 1)
            x = self.starts[run] + np.argmax(values[offsets[run] : offsets[run] + lengths[run]])
            yield box, int(lengths[own].sum()), float(peaks[one]), (x, self.rows[run])

    def owners(self) -> _Indices:
        """Return for each run the first run of its component: those of neighbouring rows that touch are one."""
        stride = self.width + 2  # so that the end of a row touches no start of the next
        below = (self.rows + 1) * stride
        first = np.searchsorted(self.rows * stride + self.ends, below + self.starts)
        counts = np.searchsorted(self.rows * stride + self.starts, below + self.ends, side="right") - first
        upper = np.repeat(np.arange(len(counts)), counts)
        lower = np.arange(len(upper)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        owners = np.arange(len(counts))
        while (owners[upper] != owners[lower]).any():
            pair = owners[upper], owners[lower]
            for roots in pair:
                np.minimum.at(owners, roots, np.minimum(*pair))
            while (owners != owners[owners]).any():
                owners = owners[owners]
        return owners
