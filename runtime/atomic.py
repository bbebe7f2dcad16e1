"""Files and folders that appear whole or not at all: a temporary sibling, fsync, then a rename."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mdps.runtime.errors import UsageError

_MARK = ".mdps-tmp-"


def is_temporary(path: Path | str) -> bool:
    """Whether the name is one this module gives to unfinished files and folders."""
    return Path(path).name.startswith(_MARK)


def _temporary(path: Path) -> Path:
    # The name does not contain the target's, so that a long target name cannot exceed the limit of the file system.
    return path.parent / f"{_MARK}{uuid.uuid4().hex[:12]}"


def _sync(path: Path) -> None:
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
                _sync(file)
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
