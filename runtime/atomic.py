"""Files and folders that appear whole or not at all: a temporary sibling, fsync, then a rename."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.image_files import without_waiting

_MARK = ".mdps-tmp-"


def is_temporary(path: Path | str) -> bool:
    """Whether the name is one this module gives to unfinished files and folders."""
    return Path(path).name.startswith(_MARK)


def _temporary(path: Path) -> Path:
    # The name does not contain the target's, so that a long target name cannot exceed the limit of the file system.
    return path.parent / f"{_MARK}{uuid.uuid4().hex[:12]}"


def sync(path: Path) -> None:
    """Flush one file to the disk (read-write, because Windows refuses to flush a read-only handle)."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # Windows cannot open a folder, and its rename is journalled
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write `data` so that a reader sees the old content or the new, whatever interrupts; OSError as from `open`."""
    path = Path(path)
    temporary = _temporary(path)
    with _naming(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):  # the disk that refused the file may refuse this as well
                temporary.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def write_text(path: Path | str, text: str) -> None:
    """`write_bytes` of UTF-8 text; line ends stay as they are on every system."""
    write_bytes(path, text.encode("utf-8"))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Lets an OSError name `path`: nobody knows the temporary sibling, and a write that fails names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextmanager
def new_folder(path: Path | str, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `path` when the block ends without an exception.

    With `replace` an existing folder is set aside first and removed afterwards; if the rename fails it is put back.
    Raises UsageError where `path` exists and `replace` is false.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise UsageError(f"{path} already exists: choose another name, or remove it first")
    temporary = _temporary(path)
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                sync(file)
        _move_in(temporary, path, replace=replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(path.parent)


def _move_in(temporary: Path, path: Path, *, replace: bool) -> None:
    if not path.exists():
        temporary.rename(path)
        return
    if not replace:  # it appeared while the block ran
        raise UsageError(f"{path} was made by something else meanwhile: choose another name, or remove it first")
    old = _temporary(path)
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    if old.is_dir():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


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


class LineFile:
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
