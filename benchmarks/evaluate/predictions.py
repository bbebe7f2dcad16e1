"""What an evaluation asks of a judge of pictures, and how it gets an answer for every picture, also the broken ones."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import ImageError, MdpsError, UsageError
from mdps.runtime.preprocessing import read_image

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class Judge(Protocol):
    """Anything that scores pictures: a bundle, or a detector of another library."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def provenance(self) -> Mapping[str, object]:
        """What a stored result should carry: hashes, settings, seed, versions."""

    @property
    def crop(self) -> Box | None:
        """The part of an upright picture that a map shows, in shares of its width and height; None for all of it."""

    def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
        """Anomaly score and anomaly map [h, w] of each picture in order; an MdpsError at one that cannot be judged."""


@dataclass(frozen=True)
class Look:
    """What a judge says of one picture.

    `anomaly_map` float32 [h, w]; `ms` from the decoded picture to the map; `reconstruction` float32 [3, h, w] in
    [-1, 1] where the judge makes one.
    """

    score: float
    anomaly_map: NDArray[np.float32]
    ms: float
    reconstruction: NDArray[np.float32] | None = None


@runtime_checkable
class DetailedJudge(Protocol):
    """A judge that itself answers for broken pictures, knows its time a picture, and may have a threshold."""

    @property
    def threshold(self) -> float | None:
        """A score above it is a defect; None without a calibration that fits."""

    @property
    def notes(self) -> Sequence[str]:
        """What a reader of its numbers must know, as sentences."""

    def covered(self, size: tuple[int, int]) -> Box:
        """The box in pixels of an upright picture of `size` (W, H) that a map shows; ImageError where there is none."""

    def looks(self, paths: Sequence[Path]) -> Iterator[Look | str]:
        """A look for each picture in order, or the sentence that says why there is none."""


def looks_of(judge: Judge, paths: Sequence[Path]) -> Iterator[Look | str]:
    """A look for each of `paths` in order, or the sentence that says why the picture could not be judged.

    UsageErrors are raised: they would be the same for every picture.
    """
    if isinstance(judge, DetailedJudge):
        yield from judge.looks(paths)
        return
    broken = {path: sentence for path in paths if (sentence := _unreadable(path)) is not None}
    answers = _resumed(judge, [path for path in paths if path not in broken])
    for path in paths:
        yield broken[path] if path in broken else next(answers)


def _unreadable(path: Path) -> str | None:
    try:
        read_image(path)
    except ImageError as error:
        return str(error)
    return None


def _resumed(judge: Judge, paths: list[Path]) -> Iterator[Look | str]:
    """Answers of a judge that stops at what it cannot judge: it is called again for the rest."""
    done = 0
    while done < len(paths):
        try:
            for look in _timed(judge, paths[done:]):
                yield look
                done += 1
        except UsageError:
            raise
        except MdpsError as error:
            # A judge may work in batches: the one to blame is not known before each was tried alone.
            yield _alone(judge, paths[done]) if len(paths) - done > 1 else str(error)
            done += 1
        else:
            if done < len(paths):
                raise MdpsError(f"{judge.name} gave {done} answers to {len(paths)} pictures: report it")


def _alone(judge: Judge, path: Path) -> Look | str:
    try:
        return next(_timed(judge, [path]))
    except UsageError:
        raise
    except MdpsError as error:
        return str(error)


def _timed(judge: Judge, paths: Sequence[Path]) -> Iterator[Look]:
    answers = iter(judge(paths))
    while True:
        start = time.perf_counter()
        answer = next(answers, None)
        if answer is None:
            return
        score, anomaly_map = answer
        yield Look(float(score), np.asarray(anomaly_map, np.float32), (time.perf_counter() - start) * 1000)


def covered_box(judge: Judge, size: tuple[int, int]) -> Box:
    """The box in pixels of an upright picture of `size` (W, H) that the judge's maps show."""
    if isinstance(judge, DetailedJudge):
        return judge.covered(size)
    left, top, right, bottom = judge.crop or (0.0, 0.0, 1.0, 1.0)
    return (left * size[0], top * size[1], right * size[0], bottom * size[1])
