"""Folders of images with what is no image in them: pipes, sockets, devices, links to nothing, files that go or change.

None of it is waited for, and each is named: a row of an error where images are judged, a refusal where all are needed.
"""

import builtins
import json
import os
import re
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import load
from mdps.serving.folder import predict

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")

# What the error of each says; `good` are images.
SAID = {
    "dangling.png": "is a link to .*nowhere.png, which does not exist",
    "empty.png": r"is empty \(0 bytes\)",
    "folder.png": "it is a folder, not a file",
    "loop.png": "cannot be read: Too many levels of symbolic links",
    "pipe.png": "it is a named pipe, not a file",
    "socket.png": "it is a socket, not a file",
    "to_pipe.png": "it is a named pipe, not a file",
    "to_zero.png": "it is a device, not a file",
    "unreadable.png": "cannot be read: Permission denied",
    "zero.png": "it is a device, not a file",
}


class HangsError(BaseException):
    """Something waits for what never comes; nobody can take it for an error of a file."""


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    def late(*_: object) -> None:
        raise HangsError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], set[str]]:
    """A function that puts all of SAID into a folder, and tells their names; what this system lacks is left out."""
    opened = builtins.open

    def refusing(path: Any, *arguments: Any, **options: Any) -> Any:  # root reads everything
        if Path(str(path)).name == "unreadable.png":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    def make(folder: Path) -> set[str]:
        (folder / "dangling.png").symlink_to(folder / "nowhere.png")
        (folder / "empty.png").touch()
        (folder / "folder.png").mkdir()
        (folder / "round").symlink_to(folder, target_is_directory=True)
        (folder / "loop.png").symlink_to("loop.png")
        os.mkfifo(folder / "pipe.png")
        os.mknod(folder / "socket.png", stat.S_IFSOCK | 0o600)
        (folder / "out.of.the.way").mkdir()
        os.mkfifo(folder / "out.of.the.way" / ".hidden.png")
        pipe = folder.parent / f"pipe to {folder.name}"
        os.mkfifo(pipe)
        (folder / "to_pipe.png").symlink_to(pipe)
        (folder / "to_zero.png").symlink_to("/dev/zero")
        (folder / "unreadable.png").write_bytes(b"secret")
        monkeypatch.setattr(builtins, "open", refusing)
        try:
            os.mknod(folder / "zero.png", stat.S_IFCHR | 0o600, os.makedev(1, 5))
        except PermissionError:  # only root may, and not in every container
            return set(SAID) - {"zero.png"}
        return set(SAID)

    return make


def pictures(folder: Path, images: list[bytes]) -> Path:
    folder.mkdir(parents=True)
    for index, image in enumerate(images):
        (folder / f"good{index}.png").write_bytes(image)
    return folder


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def check_errors(errors: dict[str, str], names: set[str]) -> None:
    assert set(errors) == names
    for name, error in errors.items():
        assert re.search(SAID[name], error), (name, error)
        assert name in error


def test_predict_gives_each_a_row_and_judges_the_rest(
    line_bundle: Path, line_images: list[bytes], tmp_path: Path, spoil: Callable[[Path], set[str]]
) -> None:
    names = spoil(pictures(tmp_path / "in", line_images[:3]))
    out = tmp_path / "out"
    assert run(cli, ["predict", str(line_bundle), str(tmp_path / "in"), "--out", str(out), "--threads", "1"]) == 3
    rows = rows_of(out)
    assert len(rows) == len(names) + 3
    assert sum(row["error"] is None for row in rows) == 3
    check_errors({Path(row["path"]).name: row["error"] for row in rows if row["error"]}, names)


def test_calibrate_names_them_and_changes_nothing(
    line_bundle: Path,
    line_images: list[bytes],
    tmp_path: Path,
    spoil: Callable[[Path], set[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = pictures(tmp_path / "good", line_images[:3])
    names, before = spoil(good), (line_bundle / "manifest.json").read_bytes()
    assert run(cli, ["calibrate", str(line_bundle), str(good), "--threads", "1"]) == 3
    said = capsys.readouterr().err
    assert f"Error: {len(names)} of {len(names) + 3} images cannot be read" in said
    assert all(f"{name} " in said for name in sorted(names - {"folder.png"})[:5])
    assert (line_bundle / "manifest.json").read_bytes() == before


def test_train_names_them(
    line_images: list[bytes], tmp_path: Path, spoil: Callable[[Path], set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    good = pictures(tmp_path / "good", line_images[:3])
    names = spoil(good)
    command = ["train", str(good), "--out", str(tmp_path / "run"), "--recipe", "small", "--steps", "1"]
    assert run(cli, command) == 3
    said = capsys.readouterr().err
    assert f"Error: {len(names)} of {len(names) + 3} training images cannot be read" in said
    assert all(f"{name} " in said for name in sorted(names)[:5])


def test_evaluate_gives_each_an_error_and_measures_the_rest(
    line_bundle: Path, make_category: Callable[..., Path], tmp_path: Path, spoil: Callable[[Path], set[str]]
) -> None:
    category = make_category()
    names = spoil(category / "test" / "spot")
    mask = category / "ground_truth" / "spot" / "004_mask.png"
    mask.unlink()
    os.mkfifo(mask)
    out = tmp_path / "out"
    code = run(cli, ["evaluate", str(line_bundle), str(category), "--out", str(out), "--threads", "1"])
    assert code == 3
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert found["images"] == 7
    check_errors({Path(row["path"]).name: row["error"] for row in found["rows"] if row["error"]}, names)
    assert any("004_mask.png cannot be read as an image" in problem for problem in found["problems"])


def test_files_that_go_or_change_while_a_run_goes_on_are_rows(
    line_bundle: Path, line_images: list[bytes], tmp_path: Path
) -> None:
    folder, out = pictures(tmp_path / "in", line_images[:7]), tmp_path / "out"

    def after_listing(row: Any) -> None:
        if Path(row.path).name != "good0.png":
            return
        (folder / "good1.png").unlink()
        (folder / "good2.png").write_bytes(line_images[2][:200])
        (folder / "good3.png").unlink()
        os.mkfifo(folder / "good3.png")
        (folder / "good4.png").unlink()
        (folder / "good4.png").mkdir()
        (folder / "good5.png").unlink()
        (folder / "good5.png").symlink_to(folder / "good1.png")

    with load(line_bundle, threads=1, warm_up=False) as detector:
        rows = predict(detector, [folder], out, batch=1, on_row=after_listing)
    assert [row.verdict == "error" for row in rows] == [False, True, True, True, True, True, False]
    said = [str(row.error) for row in rows]
    assert "does not exist" in said[1]
    assert "truncated" in said[2]
    assert "named pipe" in said[3]
    assert "folder" in said[4]
    assert "is a link to" in said[5]


def test_a_folder_is_searched_once(
    line_bundle: Path, line_images: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, walked = pictures(tmp_path / "in", line_images[:2]), []
    walk = os.walk

    def counted(top: Any, **options: Any) -> Any:
        walked.append(Path(top))
        return walk(top, **options)

    monkeypatch.setattr(os, "walk", counted)
    assert run(cli, ["predict", str(line_bundle), str(folder), "--out", str(tmp_path / "out"), "--threads", "1"]) == 0
    assert walked == [folder]


@pytest.mark.parametrize("name", ["pipe.png", "dangling.png", "loop.png", "zero.png"])
def test_what_is_named_on_the_command_line_and_is_no_file_is_the_users_mistake(
    line_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "dangling.png").symlink_to("nowhere")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    command = ["predict", str(line_bundle), str(tmp_path / name), "--out", str(tmp_path / "out"), "--threads", "1"]
    assert run(cli, command) == 2
    assert f"{name} is neither an image nor a folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["results.jsonl", "results.csv"])
def test_results_are_not_written_into_a_pipe_that_nobody_reads(
    line_bundle: Path, line_images: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder, out = pictures(tmp_path / "in", line_images[:1]), tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / name)
    assert run(cli, ["predict", str(line_bundle), str(folder), "--out", str(out), "--threads", "1"]) == 1
    assert f"{name} cannot be written" in capsys.readouterr().err


def test_a_checkpoint_that_is_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "denoiser.pt")
    assert run(cli, ["export", "--ckpt", str(tmp_path / "denoiser.pt")]) == 2
    assert "denoiser.pt cannot be read (it is a named pipe, not a file)" in capsys.readouterr().err
