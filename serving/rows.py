"""One row an image: what a run says of it, as JSON and CSV, on disk as soon as it is known."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, Self

from mdps.runtime.errors import MdpsError
from mdps.runtime.image_files import LINES, OVERLAYS, without_waiting

TABLE = "results.csv"


@dataclass(frozen=True)
class Row:
    """One image of a run.

    `verdict` is "pass", "fail", "error" (then only `path` and `error` are set) or None where scores were asked for
    without a calibration. `map` is the file of the anomaly map, relative to the output folder. `ms` is the time to read
    and judge the image, an equal share where a batch was judged at once. `early_exit`: it skipped the masked pass.
    """

    path: str
    score: float | None = None
    threshold: float | None = None
    verdict: str | None = None
    map: str | None = None
    ms: float | None = None
    early_exit: bool | None = None
    error: str | None = None

    @property
    def overlay(self) -> str | None:
        """The picture that belongs to the map, relative to the output folder as well."""
        return f"{OVERLAYS}/{Path(self.map).stem}.png" if self.map else None

    def to_json(self) -> str:
        """The row as one line of JSON, all ASCII, so that a name of any bytes passes through any pipe."""
        return json.dumps(asdict(self))

    def to_csv(self) -> str:
        """The row as one line of CSV; what is not known stays empty."""
        return _csv_line(asdict(self).values())


TABLE_HEADER = ",".join(field.name for field in fields(Row)) + "\n"
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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a write that fails (full disk, no permission) into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise MdpsError(f"{path} cannot be written: {reason}; make room or choose another place") from error


def _own(file: BinaryIO, path: Path) -> None:
    """Takes the file for this run; MdpsError while another run writes to it.

    Windows has no lock that would leave the file readable meanwhile, nor do some network drives.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MdpsError(f"{path} is being written by another run: give each run a folder of its own") from None
    except (ImportError, OSError):
        pass


def _empty(file: BinaryIO, path: Path) -> None:
    with writing(path):
        if os.fstat(file.fileno()).st_size:
            os.ftruncate(file.fileno(), 0)


class RowFile:
    """A text file that grows by whole lines: a run that is killed, or finds the disk full, leaves no broken one.

    What it held is gone; `once_owned` is called before, when no other run can write to the file any more.
    """

    def __init__(self, path: Path, header: str = "", once_owned: Callable[[], None] = lambda: None) -> None:
        self._path = path
        with writing(path):
            # Emptied once it is known to be ours; a pipe that nobody reads is refused.
            self._file: BinaryIO = open(path, "ab", buffering=0, opener=without_waiting)  # noqa: SIM115
        try:
            _own(self._file, path)
            once_owned()
            _empty(self._file, path)
        except BaseException:
            self._file.close()
            raise
        if header:
            self.append(header)

    def append(self, line: str) -> None:
        """Adds `line`, which ends with a newline, in one write.

        Raises:
            MdpsError: the disk took only a part of the line; that part is cut off again.
        """
        data = line.encode()
        start = self._file.tell()
        with writing(self._path):
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with suppress(OSError):  # a device is no file that could be cut
                    os.ftruncate(self._file.fileno(), start)
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def open_rows(folder: Path, once_owned: Callable[[], None] = lambda: None) -> tuple[RowFile, RowFile]:
    """Starts `results.jsonl` and `results.csv` in `folder`; `once_owned` is called before they are emptied."""
    return RowFile(folder / LINES, once_owned=once_owned), RowFile(folder / TABLE, TABLE_HEADER)
