"""How many files an image goes through from the command to its row: docs/develop/image-way.md lists them."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mdps.runtime
from mdps.cli import cli
from mdps.commands.terminal import run

ROOT = Path(__file__).resolve().parents[2]
MOST = 15


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> dict[str, None]:
    """The files of mdps whose functions run between the loaded bundle and the first row, in order."""
    files = {"commands/predict.py": None}  # it is on its way already
    load = mdps.runtime.load

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / ".venv"):
            files[path.relative_to(ROOT).as_posix()] = None

    def loaded(*arguments: Any, **options: Any) -> Any:
        detector = load(*arguments, **options)
        sys.setprofile(note)
        return detector

    monkeypatch.setattr(mdps.runtime, "load", loaded)
    monkeypatch.setattr("mdps.commands.predict._RowPrinter.__call__", lambda *_: sys.setprofile(None))
    return files


def test_the_way_of_an_image_is_short_and_is_written_down(
    line_bundle: Path, line_images: list[bytes], tmp_path: Path, entered: dict[str, None]
) -> None:
    (tmp_path / "part.png").write_bytes(line_images[0])
    command = ["predict", str(line_bundle), str(tmp_path / "part.png"), "--threads", "1", "--out"]
    assert run(cli, [*command, str(tmp_path / "first")]) == 0  # imports what is imported late
    first = set(entered)
    entered.clear()
    assert run(cli, [*command, str(tmp_path / "second")]) == 0
    way = {"commands/predict.py", *entered} - {"tests/serving/test_image_way.py"}
    assert way <= first
    assert len(way) <= MOST, sorted(way)
    page = (ROOT / "docs" / "develop" / "image-way.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \d+ \| `([\w/]+\.py)`", page, re.MULTILINE)) == way
