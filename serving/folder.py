"""Judges many image files: a row each, a map and a picture each, and one bad file stops nothing."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from PIL import Image

from mdps.runtime.atomic import write_bytes
from mdps.runtime.detector import Result
from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.image_files import MAPS, OVERLAYS
from mdps.runtime.preprocessing import read_image
from mdps.serving.earlier import refuse_inputs_in, refuse_results, remove_results
from mdps.serving.inputs import output_names
from mdps.serving.overlay import HeatRange, own_range, png, strip
from mdps.serving.rows import Row, open_rows, writing

T = TypeVar("T")


class Judge(Protocol):
    """The part of a detector that this module needs."""

    def batch(self, images: Sequence[Image.Image]) -> list[Result]:
        """Judges images; the result of each does not depend on the others."""


@dataclass(frozen=True)
class Judged:
    """A file with its result or with the sentence that says why there is none."""

    path: Path
    result: Result | str
    ms: float


def predict(
    detector: Judge,
    images: Sequence[Path],
    out: Path,
    *,
    batch: int = 4,
    force: bool = False,
    heat_range: HeatRange | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Judge the `images` that were found and write `results.jsonl`, `results.csv`, `maps/` and `overlays/` into `out`.

    Maps are float32 [H, W] in NumPy's format, in the unit of the score and not normalised. Rows are on disk, and
    given to `on_row`, as soon as their files are; a killed run leaves complete rows.

    Args:
        batch: images judged at once; no result depends on it.
        force: replaces the results of an earlier run in `out`: its files are removed, and nothing else.
        heat_range: map values drawn as no and full heat; None takes each map's own range.

    Returns:
        One row a file, in their order. A file that cannot be judged has the verdict "error", also one that is gone.

    Raises:
        UsageError: `out` cannot be made, or holds results of an earlier run or images where outputs would be written.
        MdpsError: an output cannot be written.
    """
    if not force:
        refuse_results(out)
    refuse_inputs_in(out, images)
    _prepare(out)
    rows = []
    with ExitStack() as files:
        jsonl, table = (files.enter_context(file) for file in open_rows(out, lambda: remove_results(out)))
        for judged, name in zip(judge_all(detector, images, batch), output_names(images), strict=True):
            row = _write_outputs(judged, name, out, heat_range)
            jsonl.append(row.to_json() + "\n")
            table.append(row.to_csv())
            on_row(row)
            rows.append(row)
    return rows


def judge_all(detector: Judge, images: Sequence[Path], batch: int) -> Iterator[Judged]:
    """Judges `images` by groups of `batch`, in order."""
    for start in range(0, len(images), batch):
        yield from _judge_group(detector, images[start : start + batch])


def _judge_group(detector: Judge, paths: Sequence[Path]) -> list[Judged]:
    opened = [_timed(lambda path=path: read_image(path)) for path in paths]  # type: ignore[misc]
    readable = [image for image, _ in opened if not isinstance(image, str)]
    verdicts = iter(_judge_readable(detector, readable))
    return [
        Judged(path, image, read_ms) if isinstance(image, str) else _add_time(path, *next(verdicts), read_ms)
        for path, (image, read_ms) in zip(paths, opened, strict=True)
    ]


def _add_time(path: Path, result: Result | str, ms: float, read_ms: float) -> Judged:
    return Judged(path, result, ms + read_ms)


def _judge_readable(detector: Judge, images: list[Image.Image]) -> list[tuple[Result | str, float]]:
    """Judges a group at once; where that fails, each alone, so that the fault stays with its image."""
    if not images:
        return []
    results, ms = _timed(lambda: detector.batch(images))
    if not isinstance(results, str):
        return [(result, ms / len(images)) for result in results]
    if len(images) == 1:
        return [(results, ms)]
    return [outcome for image in images for outcome in _judge_readable(detector, [image])]


def _timed(work: Callable[[], T]) -> tuple[T | str, float]:
    """The result of `work`, or its error as a sentence, and the milliseconds it took."""
    started = time.perf_counter()
    outcome: T | str
    try:
        outcome = work()
    except UsageError:  # not the image's fault: it would be the same for every image
        raise
    except MdpsError as error:
        outcome = str(error)
    return outcome, (time.perf_counter() - started) * 1000


def _prepare(out: Path) -> None:
    try:
        for name in (MAPS, OVERLAYS):
            (out / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be used as a folder: {error.strerror or error}") from error


def _write_outputs(judged: Judged, name: str, out: Path, heat_range: HeatRange | None) -> Row:
    result = judged.result
    if isinstance(result, str):
        return Row(path=str(judged.path), verdict="error", error=result)
    picture = strip(
        result.observation,
        result.posterior_sample,
        result.anomaly_map,
        result.mask,
        heat_range or own_range(result.anomaly_map),
    )
    row = Row(
        path=str(judged.path),
        score=float(result.score),
        threshold=None if result.threshold is None else float(result.threshold),
        verdict=result.verdict,
        map=f"{MAPS}/{name}.npy",
        ms=round(judged.ms, 3),
        early_exit=result.early_exit,
    )
    _write(out / str(row.map), _npy(result.anomaly_map))
    _write(out / str(row.overlay), png(picture))
    return row


def _write(path: Path, data: bytes) -> None:
    with writing(path):
        write_bytes(path, data)


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array.astype(np.float32), allow_pickle=False)
    return buffer.getvalue()
