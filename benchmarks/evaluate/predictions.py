"""The interface of a predictor of pictures, and how to get an answer for every picture, also the broken ones."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mdps.benchmarks.data.samples import Box
from mdps.runtime.errors import ImageError, MdpsError, UsageError
from mdps.runtime.preprocessing import read_image


class Named(Protocol):
    """Who judges."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def provenance(self) -> Mapping[str, object]:
        """The facts a stored result should carry: hashes, settings, seed, versions."""


class Predictor(Named, Protocol):
    """Anything that scores pictures, such as a detector of another library."""

    @property
    def crop(self) -> Box | None:
        """The part of an upright picture that a map shows, in shares of its width and height; None for all of it."""

    def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
        """Anomaly score and anomaly map [h, w] of each picture in order; an MdpsError at one that cannot be judged."""


@dataclass(frozen=True)
class Prediction:
    """A predictor's answer to one picture.

    `anomaly_map` float32 [h, w]; `ms` from the decoded picture to the map; `reconstruction` float32 [3, h, w] in
    [-1, 1] where the predictor makes one; `limit` the map's value above which it lists regions, where it lists any.
    """

    score: float
    anomaly_map: NDArray[np.float32]
    ms: float
    reconstruction: NDArray[np.float32] | None = None
    limit: float | None = None


@runtime_checkable
class DetailedPredictor(Named, Protocol):
    """A predictor that itself answers for broken pictures, knows its time a picture, and may have a threshold."""

    @property
    def threshold(self) -> float | None:
        """A score above it is a defect; None without a calibration that fits."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes for a reader of its numbers, as sentences."""

    def covered(self, size: tuple[int, int]) -> Box:
        """The box in pixels of an upright picture of `size` (W, H) that a map shows; ImageError where there is none."""

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction | str]:
        """A prediction for each picture in order, or the sentence that says why there is none."""


Judge = Predictor | DetailedPredictor


def predictions_of(predictor: Judge, paths: Sequence[Path]) -> Iterator[Prediction | str]:
    """A prediction for each of `paths` in order, or the sentence that says why the picture could not be judged.

    UsageErrors are raised: they would be the same for every picture.
    """
    if isinstance(predictor, DetailedPredictor):
        yield from predictor.predictions(paths)
        return
    broken = {path: sentence for path in paths if (sentence := _unreadable(path)) is not None}
    answers = _resumed(predictor, [path for path in paths if path not in broken])
    for path in paths:
        yield broken[path] if path in broken else next(answers)


def _unreadable(path: Path) -> str | None:
    try:
        read_image(path)
    except ImageError as error:
        return str(error)
    return None


def _resumed(predictor: Predictor, paths: list[Path]) -> Iterator[Prediction | str]:
    """Answers of a predictor that stops at what it cannot judge: it is called again for the rest."""
    done = 0
    while done < len(paths):
        try:
            for prediction in _timed(predictor, paths[done:]):
                yield prediction
                done += 1
        except UsageError:
            raise
        except MdpsError as error:
            # A predictor may work in batches: the one to blame is not known before each was tried alone.
            yield _alone(predictor, paths[done]) if len(paths) - done > 1 else str(error)
            done += 1
        else:
            if done < len(paths):
                raise MdpsError(f"{predictor.name} gave {done} answers to {len(paths)} pictures: report it")


def _alone(predictor: Predictor, path: Path) -> Prediction | str:
    try:
        return next(_timed(predictor, [path]))
    except UsageError:
        raise
    except MdpsError as error:
        return str(error)


def _timed(predictor: Predictor, paths: Sequence[Path]) -> Iterator[Prediction]:
    answers = iter(predictor(paths))
    while True:
        start = time.perf_counter()
        answer = next(answers, None)
        if answer is None:
            return
        score, anomaly_map = answer
        yield Prediction(float(score), np.asarray(anomaly_map, np.float32), (time.perf_counter() - start) * 1000)


def covered_box(predictor: Judge, size: tuple[int, int]) -> Box:
    """The box in pixels of an upright picture of `size` (W, H) that the predictor's maps show."""
    if isinstance(predictor, DetailedPredictor):
        return predictor.covered(size)
    left, top, right, bottom = predictor.crop or (0.0, 0.0, 1.0, 1.0)
    return (left * size[0], top * size[1], right * size[0], bottom * size[1])
