"""Files and folders appear whole or not at all."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mdps.runtime.atomic import is_temporary, new_folder, write_bytes, write_text
from mdps.runtime.errors import UsageError


def _names(folder):
    return [path.name for path in folder.iterdir()]


def _write_and_stop(path, **options):
    with new_folder(path, **options) as folder:
        (folder / "x").write_text("1")
        raise RuntimeError("stop")


def _race(path):
    with new_folder(path):
        path.mkdir()
        (path / "theirs").write_text("1")


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "übung #1.json"
    write_text(path, "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert _names(tmp_path) == [path.name]


def test_an_error_names_the_target_and_not_the_temporary_sibling(tmp_path):
    (tmp_path / "file").write_text("1")  # no folder, so nothing can be made in it
    with pytest.raises(FileNotFoundError) as missing:
        write_bytes(tmp_path / "nowhere" / "a", b"1")
    with pytest.raises(FileExistsError) as refused, new_folder(tmp_path / "file" / "b"):
        pass
    assert [error.value.filename for error in (missing, refused)] == [
        str(tmp_path / "nowhere" / "a"),
        str(tmp_path / "file" / "b"),
    ]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_bytes(path, b"old")
    monkeypatch.setattr(os, "fsync", _fail)
    with pytest.raises(OSError, match="disk full"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert _names(tmp_path) == ["a"]


def _fail(*_):
    raise OSError("disk full")


def test_a_folder_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "deep" / "bundle"
    with new_folder(path) as folder:
        (folder / "x").write_text("1")
        assert not path.exists()
        assert is_temporary(folder)
        assert folder.parent == path.parent
    assert (path / "x").read_text() == "1"
    assert _names(path.parent) == ["bundle"]


def test_a_failed_block_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        _write_and_stop(tmp_path / "b")
    assert _names(tmp_path) == []


def test_an_existing_folder_is_kept_unless_replaced(tmp_path):
    path = tmp_path / "b"
    path.mkdir()
    (path / "old").write_text("1")
    with pytest.raises(UsageError, match="already exists"), new_folder(path):
        pass
    with new_folder(path, replace=True) as folder:
        (folder / "new").write_text("2")
    assert _names(path) == ["new"]
    assert _names(tmp_path) == ["b"]


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "b"
    with pytest.raises(UsageError, match="meanwhile"):
        _race(path)
    assert _names(path) == ["theirs"]
    assert _names(tmp_path) == ["b"]


def test_a_failed_replacement_puts_the_old_folder_back(tmp_path):
    path = tmp_path / "b"
    path.mkdir()
    (path / "old").write_text("1")
    with pytest.raises(RuntimeError, match="stop"):
        _write_and_stop(path, replace=True)
    assert _names(path) == ["old"]


KILLED = """
import sys
from pathlib import Path
from mdps.runtime.atomic import new_folder, write_bytes
path = Path(sys.argv[1])
with new_folder(path / "bundle") as folder:
    print("ready", flush=True)
    while True:
        write_bytes(path / "file", b"x" * 100_000)
"""


def test_a_killed_process_leaves_no_half_file_and_no_half_folder(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline().strip() == b"ready"
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "bundle").exists()
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size == 100_000
    assert all(is_temporary(name) for name in _names(tmp_path) if name != "file")
