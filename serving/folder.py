"""Judge the images of folders: a row, a map and a picture each, and one bad file stops nothing."""

import json
import os
import re
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from PIL import Image

from mdps.runtime.atomic import LineFile, write_bytes, writing
from mdps.runtime.detector import Result
from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.image_files import LINES, MAPS, OVERLAYS, find_images, odd_pictures, open_file
from mdps.runtime.overlay import npy, png
from mdps.runtime.preprocessing import Preprocessing, read_image
from mdps.runtime.regions import Region
from mdps.runtime.tiles import Tiling

TABLE, REGIONS, REPORT = "results.csv", "regions.csv", "report.html"
WHOLE = f"{OVERLAYS}/whole"
_FORBIDDEN = frozenset('<>:"/\\|?*')  # what Windows refuses in a name
_LONGEST = 60  # characters of up to four bytes, where a name with its suffix may have 255 bytes
S = TypeVar("S")
T = TypeVar("T")


class BatchDetector(Protocol):
    """A detector of batches, which is all that `predictions` needs."""

    def batch(self, images: Sequence[Image.Image]) -> list[Result]:
        """Judge images; the result of each does not depend on the others."""


class FolderDetector(BatchDetector, Protocol):
    """A detector of which is known what `predict` needs."""

    @property
    def preprocessing(self) -> Preprocessing:
        """How its images are resized."""

    @property
    def tiles(self) -> Tiling | None:
        """How it cuts images into tiles, judging one at a time; None where it resizes them."""

    @property
    def doubt(self) -> str:
        """A sentence where the calibration found that it does not see defects on these parts, else empty."""


@dataclass(frozen=True)
class Row:
    """One image of a run.

    `verdict` is "pass", "fail", "error" (then only `path` and `error` are set) or None where scores were asked for
    without a calibration. `map` is the file of the anomaly map, relative to the output folder. `ms` is the time to read
    and judge the image, an equal share where a batch was judged at once. `early_exit`: it skipped the masked pass.
    `judged_by`: "tuned" or "published", as in `Result`. `regions` are those of `Result`, None without a calibration.
    Where parts are aligned `shift_x`, `shift_y` (pixels), `turn` (degrees) and `residual` say how this one lay, and
    `fault` why the image was not aligned but judged as it lies.
    `doubt` is the sentence of a detector that does not see defects on these parts.
    """

    path: str
    score: float | None = None
    threshold: float | None = None
    verdict: str | None = None
    map: str | None = None
    ms: float | None = None
    early_exit: bool | None = None
    judged_by: str | None = None
    regions: tuple[Region, ...] | None = None
    shift_x: float | None = None
    shift_y: float | None = None
    turn: float | None = None
    residual: float | None = None
    fault: str | None = None
    doubt: str | None = None
    error: str | None = None

    @property
    def overlay(self) -> str | None:
        """The picture that belongs to the map, relative to the output folder as well."""
        return f"{OVERLAYS}/{Path(self.map).stem}.png" if self.map else None

    def to_json(self) -> str:
        """The row as one line of JSON, all ASCII, so that a name of any bytes passes through any pipe."""
        regions = None if self.regions is None else [region.to_json() for region in self.regions]
        return json.dumps(asdict(self) | {"regions": regions})

    def to_csv(self) -> str:
        """The row as one line of CSV; what is not known stays empty, and of the regions there is their number."""
        regions = None if self.regions is None else len(self.regions)
        return _csv_line((asdict(self) | {"regions": regions}).values())

    def regions_csv(self) -> str:
        """Its regions as lines of CSV under REGIONS_HEADER; empty without any."""
        return "".join(_csv_line((self.path, *_numbers(region.to_json()))) for region in self.regions or ())


def _numbers(region: Mapping[str, Any]) -> tuple[object, ...]:
    nothing = [None] * 4
    numbers = (*region["box"], region["area"], region["peak"], *region["at"])
    return (*numbers, *region.get("box_mm", nothing), region.get("area_mm2"))


TABLE_HEADER = ",".join(field.name for field in fields(Row)) + "\n"
REGIONS_HEADER = "path,left,top,width,height,area,peak,x,y,left_mm,top_mm,width_mm,height_mm,area_mm2\n"
# What makes a formula of a cell, behind what spreadsheets pass over or, in some countries, part cells at.
_FORMULA = r"(?:\A|;)[\s\ufeff]*[-=+@\uff0d\uff1d\uff0b\uff20]"
_HOSTILE = re.compile(rf"{_FORMULA}|\A\"|[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _csv_line(values: Iterable[object]) -> str:
    return ",".join(map(_cell, values)) + "\n"


def _cell(value: object) -> str:
    """A value as a cell that is one in every importer; text that would be more is written as JSON text, in quotes."""
    if not isinstance(value, str):
        return "" if value is None else str(value)
    text = value
    if _HOSTILE.search(value):
        text = re.sub(r"(;\s*)([-=+@])", lambda found: f"{found[1]}\\u{ord(found[2]):04x}", json.dumps(value))
    is_plain = text == text.strip() and not set(text) & set(',;"')
    return text if is_plain else '"{}"'.format(text.replace('"', '""'))


def predict(
    detector: FolderDetector,
    inputs: Sequence[str | Path],
    out: Path,
    *,
    batch: int = 4,
    force: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Judge all images of `inputs`; write `results.jsonl`, two tables, `maps/` and `overlays/` into `out`.

    Maps are float32 [H, W] in NumPy's format, in the unit of the score and not normalised. Rows are on disk, and
    given to `on_row`, as soon as their files are; a killed run leaves complete rows. Pictures are drawn in the heat
    range of the calibration, without one each in its own; those in WHOLE are as large as the photograph, where
    it has regions, or as its map, where it is judged in tiles. Warns of images that are odd for the network first.

    Args:
        batch: images judged at once; no result depends on it.
        force: replaces the results of an earlier run in `out`: its files are removed, and nothing else.

    Returns:
        One row a file, in the order of the inputs. A file that cannot be judged has the verdict "error", also one that
        is gone since it was found.

    Raises:
        UsageError: an input is missing or has no images, `out` cannot be made, or holds results of an earlier run or
            inputs where outputs would be written.
        MdpsError: an output cannot be written.
    """
    images, batch = find_images(inputs, exclude=out), 1 if detector.tiles else batch
    for sentence in odd_pictures(images, None if detector.tiles else detector.preprocessing):
        warnings.warn(sentence, stacklevel=2)
    if not force:
        refuse_previous_run(out)
    _refuse_inputs_in(out, images)
    _prepare(out)
    rows, judged = [], predictions(detector, images, batch)
    with (
        LineFile(out / LINES, once_owned=lambda: _remove_previous_run(out)) as lines,
        LineFile(out / TABLE, TABLE_HEADER) as table,
        LineFile(out / REGIONS, REGIONS_HEADER) as regions,
    ):
        for found, name in zip(judged, output_names(images), strict=True):
            row = _write_outputs(found, name, out, detector)
            lines.append(row.to_json() + "\n")
            table.append(row.to_csv())
            regions.append(row.regions_csv())
            on_row(row)
            rows.append(row)
    return rows


@dataclass(frozen=True)
class Prediction:
    """A file with its result, or with the sentence that says why there is none."""

    path: Path
    result: Result | str
    ms: float


def predictions(detector: BatchDetector, paths: Sequence[Path], batch: int) -> Iterator[Prediction]:
    """Judge files by groups of `batch`, in order."""
    for start in range(0, len(paths), batch):
        group = paths[start : start + batch]
        opened = [_attempt(read_image, path) for path in group]
        judged = _judged(detector, [image for image, _ in opened if not isinstance(image, str)])
        for path, (image, read_ms) in zip(group, opened, strict=True):
            result, ms = (image, 0.0) if isinstance(image, str) else next(judged)
            yield Prediction(path, result, read_ms + ms)


def _judged(detector: BatchDetector, images: list[Image.Image]) -> Iterator[tuple[Result | str, float]]:
    """Judge images at once; where that fails, each alone, so that the fault stays with its image."""
    results, ms = _attempt(detector.batch, images)
    if not isinstance(results, str):
        yield from ((result, ms / len(images)) for result in results)
    elif len(images) == 1:
        yield results, ms
    else:
        for image in images:
            yield from _judged(detector, [image])


def _attempt(work: Callable[[S], T], subject: S) -> tuple[T | str, float]:
    """Return the result of `work`, or its error as a sentence, and the milliseconds it took."""
    started = time.perf_counter()
    outcome: T | str
    try:
        outcome = work(subject)
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


def _write_outputs(found: Prediction, name: str, out: Path, detector: FolderDetector) -> Row:
    result = found.result
    if isinstance(result, str):
        return Row(path=str(found.path), verdict="error", error=result)
    regions, doubt = None if result.pixel_limit is None else result.regions, detector.doubt or None
    told = result.to_json() | {"regions": regions}
    row = Row(path=str(found.path), map=f"{MAPS}/{name}.npy", ms=round(found.ms, 3), doubt=doubt, **told)
    _write(out / str(row.map), npy(result.anomaly_map))
    _write(out / str(row.overlay), png(result.overlay))
    if detector.tiles or result.regions:
        (out / WHOLE).mkdir(exist_ok=True)
        whole = result.heat if detector.tiles else result.heat_over(read_image(found.path))
        _write(out / WHOLE / f"{name}.png", png(whole))
    return row


def _write(path: Path, data: bytes) -> None:
    with writing(path):
        write_bytes(path, data)


def output_names(images: Sequence[Path]) -> list[str]:
    """A name for each image's outputs: its path below the folder that all share, as one word, such as `scratch_003`.

    Every file system and shell takes the names as names, and no two are the same, even where case does not count.
    """
    taken: set[str] = set()
    return [_unique(_plain(words), taken) for words in _below_common_folder(images)]


def _below_common_folder(images: Sequence[Path]) -> list[str]:
    absolute = [os.path.abspath(image.with_suffix("")) for image in images]  # noqa: PTH100 - Path.absolute keeps ".."
    try:
        common = os.path.commonpath([os.path.dirname(path) for path in absolute])  # noqa: PTH120
    except ValueError:  # nothing given, or drives of Windows
        return [Path(path).name for path in absolute]
    return ["_".join(Path(path).relative_to(common).parts) for path in absolute]


def _plain(name: str) -> str:
    """`name` without what some file system or shell reads as something else: separators, leading dots and dashes."""
    kept = "".join("_" if _is_odd(character) else character for character in name)
    return kept[-_LONGEST:].strip(" .").lstrip("-") or "image"


def _is_odd(character: str) -> bool:
    return character in _FORBIDDEN or unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}


def _unique(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while _key(candidate) in taken:
        count += 1
        candidate = f"{name}~{count}"
    taken.add(_key(candidate))
    return candidate


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def refuse_previous_run(out: Path) -> None:
    """UsageError where `out` holds results of an earlier run, be it complete or not."""
    for name, nothing in ((LINES, 0), (TABLE, len(TABLE_HEADER)), (REGIONS, len(REGIONS_HEADER)), (REPORT, 0)):
        with suppress(OSError):  # that there is none
            if (out / name).stat().st_size > nothing:
                raise UsageError(
                    f"--out {out} holds results of an earlier run ({name}): choose another folder, or replace them "
                    "with --force"
                )


def _refuse_inputs_in(out: Path, images: Sequence[Path]) -> None:
    """UsageError where an image lies in a folder of `out` that the run writes into: it might be overwritten."""
    written = [os.path.realpath(out / name) for name in (MAPS, OVERLAYS)]
    for image in images:
        real = os.path.realpath(image)
        if any(os.path.commonpath([real, folder]) == folder for folder in written if _same_drive(real, folder)):
            raise UsageError(f"{image} lies in a folder that the run would write into: choose another --out than {out}")


def _same_drive(one: str, other: str) -> bool:
    return os.path.splitdrive(one)[0] == os.path.splitdrive(other)[0]


def _remove_previous_run(out: Path) -> None:
    """Removes the report and the maps and pictures that `results.jsonl` lists, and nothing else.

    Raises:
        MdpsError: one of them cannot be removed.
    """
    for path in (out / REPORT, *_listed(out)):
        with writing(path):
            path.unlink(missing_ok=True)


def _listed(out: Path) -> Iterator[Path]:
    with writing(out / LINES), open_file(out / LINES) as file:
        lines = file.read().splitlines()
    for line in lines:
        try:
            name = PurePosixPath(json.loads(line)["map"])
        except (ValueError, TypeError, KeyError):  # an image without a map, or no line of ours
            continue
        if name.parts == (MAPS, name.name) and name.suffix == ".npy":  # a file that we name, wherever the line is from
            yield out / name
            yield out / OVERLAYS / f"{name.stem}.png"
            yield out / WHOLE / f"{name.stem}.png"
