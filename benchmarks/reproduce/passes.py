"""The first pass of a run that went on to a second one, evaluated without being computed again."""

import io
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.judges import BundleJudge
from mdps.benchmarks.looks import Box, Look
from mdps.runtime.atomic import write_bytes
from mdps.runtime.pipeline import Inspection


class TwoPasses(BundleJudge):
    """A bundle's judge that also remembers what its first pass said of every picture."""

    def looks(self, paths: Sequence[Path]) -> Iterator[Look | str]:
        """As the bundle's judge; what the first pass said is in `first`, in the same order."""
        self.first: list[Look | str] = []
        told: deque[tuple[float, NDArray[np.float32]]] = deque()
        self.watch(lambda found: told.extend(_each(found)))
        for look in super().looks(paths):
            self.first.append(look if isinstance(look, str) else _first(look, *told.popleft()))
            yield look


class Mapped(TwoPasses):
    """Remembers the maps of both passes, for whoever compares maps of several runs."""

    def looks(self, paths: Sequence[Path]) -> Iterator[Look | str]:
        """As the bundle's judge; the last pass's maps are in `last`, None for a picture that could not be judged."""
        self.last: list[NDArray[np.float32] | None] = []
        for look in super().looks(paths):
            self.last.append(None if isinstance(look, str) else look.anomaly_map)
            yield look

    def save(self, path: Path) -> None:
        """Writes `last` and `first`, [n, h, w] each, NaN where there is none, into one compressed npz file."""
        first = [None if isinstance(look, str) else look.anomaly_map for look in self.first]
        buffer = io.BytesIO()
        np.savez_compressed(buffer, last=_stacked(self.last), first=_stacked(first))
        write_bytes(path, buffer.getvalue())


class Remembered:
    """A judge that repeats `looks` in their order; `like` says what the maps show."""

    threshold: float | None = None

    def __init__(self, like: BundleJudge, looks: Sequence[Look | str]) -> None:
        self.name, self.crop, self.notes = f"{like.name}, first pass", like.crop, like.notes
        self.provenance = dict(like.provenance) | {"pass": "first"}
        self._like, self._looks = like, looks

    def covered(self, size: tuple[int, int]) -> Box:
        """As the bundle's judge."""
        return self._like.covered(size)

    def looks(self, paths: Sequence[Path]) -> Iterator[Look | str]:
        """The looks, one for each path."""
        return (look for look, _ in zip(self._looks, paths, strict=True))

    def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
        """Score and map of the pictures that could be judged."""
        return ((look.score, look.anomaly_map) for look in self.looks(paths) if not isinstance(look, str))


def _stacked(maps: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32]:
    blank = np.full_like(next(one for one in maps if one is not None), np.nan)
    return np.stack([blank if one is None else one for one in maps])


def _each(found: Inspection) -> Iterator[tuple[float, NDArray[np.float32]]]:
    return zip(map(float, found.first_score), found.first_map[:, 0], strict=True)


def _first(look: Look, score: float, anomaly_map: NDArray[np.float32]) -> Look:
    """`look` with the first pass's score and map, cut as its own was. The time of one pass was not measured alone."""
    (height, width), (whole_height, whole_width) = look.anomaly_map.shape, anomaly_map.shape
    top, left = (whole_height - height) // 2, (whole_width - width) // 2
    cut = anomaly_map[top : top + height, left : left + width]
    return replace(look, score=score, anomaly_map=cut, ms=math.nan, reconstruction=None)
