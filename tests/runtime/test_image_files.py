"""Which files of a folder count as images, for training, calibration and inspection alike."""

import os
from pathlib import Path

import pytest

from mdps.runtime.errors import UsageError
from mdps.runtime.image_files import find_images, image_files
from mdps.training.sources import images_below


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder of one image, a link to a day's folder elsewhere, and a link to itself."""
    touch(tmp_path / "line" / "a.png")
    touch(tmp_path / "share" / "monday" / "b.png")
    try:
        (tmp_path / "line" / "today").symlink_to(tmp_path / "share" / "monday", target_is_directory=True)
        (tmp_path / "line" / "loop").symlink_to(tmp_path / "line", target_is_directory=True)
    except OSError:
        pytest.skip("this user may make no links here")
    return tmp_path / "line"


@pytest.mark.parametrize("find", [image_files, images_below, lambda folder: find_images([folder])])
def test_linked_folders_are_searched_and_a_circle_ends(linked: Path, find: object) -> None:
    assert find(linked) == [linked / "a.png", linked / "today" / "b.png"]  # type: ignore[operator]


def test_a_folder_that_two_links_show_is_searched_once(linked: Path) -> None:
    (linked / "again").symlink_to(linked.parent / "share", target_is_directory=True)
    assert [path.name for path in image_files(linked)] == ["a.png", "b.png"]


def test_what_macos_leaves_beside_images_is_none(tmp_path: Path) -> None:
    touch(tmp_path / "._a.png")
    touch(tmp_path / ".Trashes" / "c.png")
    assert image_files(tmp_path) == []
    assert image_files(touch(tmp_path / "a.png").parent) == [tmp_path / "a.png"]


@pytest.mark.parametrize("find", [image_files, images_below, lambda folder: find_images([folder])])
def test_the_pictures_that_an_earlier_run_left_are_no_photographs(tmp_path: Path, find: object) -> None:
    wanted = [touch(tmp_path / name) for name in ("a.png", "monday/b.png", "monday/crops/c.png")]
    for run in (tmp_path, tmp_path / "monday" / "results"):
        touch(run / "results.jsonl")
        touch(run / "overlays" / "a.png")
        touch(run / "maps" / "heat" / "a.png")
    assert find(tmp_path) == wanted  # type: ignore[operator]


def test_a_folder_of_photographs_may_be_called_overlays(tmp_path: Path) -> None:
    image = touch(tmp_path / "overlays" / "a.png")
    assert image_files(tmp_path) == [image]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    touch(tmp_path / "closed" / "a.png").parent.chmod(0)
    try:
        with pytest.raises(UsageError, match="closed cannot be read"):
            image_files(tmp_path)
    finally:
        (tmp_path / "closed").chmod(0o755)


def test_a_folder_that_goes_while_it_is_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: str) -> None:
        raise OSError(116, "Stale file handle", path)

    monkeypatch.setattr(os, "scandir", gone)
    with pytest.raises(UsageError, match="cannot be read: Stale file handle"):
        image_files(tmp_path)


def test_an_input_whose_name_is_too_long_is_the_users_mistake() -> None:
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        find_images(["a" * 300])
