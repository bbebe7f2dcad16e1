"""Photographs of any size, judged in overlapping tiles of the network's size."""

from dataclasses import dataclass

from mdps.runtime.errors import require
from mdps.runtime.records import Record


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
