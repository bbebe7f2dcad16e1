"""A result can be printed, saved, sent and shown."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdps.runtime.detector import Result
from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.overlay import HeatRange

MAP = np.zeros((16, 16), np.float32)
MAP[4:8, 4:10] = 3.0
VIEW = np.zeros((3, 16, 16), np.float32)
RESULT = Result(3.0, 2.0, "fail", MAP, MAP > 2, VIEW, VIEW, {"total": 1.0}, pixel_limit=2.0)


def test_as_json_it_is_its_verdict_and_where_the_defects_are() -> None:
    told = json.loads(json.dumps(RESULT.to_json()))
    (region,) = told.pop("regions")
    assert told == {"score": 3.0, "threshold": 2.0, "verdict": "fail", "early_exit": False, "judged_by": "published"}
    assert region["box"] == [4, 4, 6, 4]


def test_without_a_calibration_there_is_neither_verdict_nor_region() -> None:
    told = replace(RESULT, threshold=None, verdict=None, pixel_limit=None).to_json()
    assert (told["threshold"], told["verdict"], told["regions"]) == (None, None, None)


def test_it_is_saved_as_a_picture_with_its_numbers_beside(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "part.PNG")
    with Image.open(tmp_path / "part.PNG") as picture:
        assert picture.size == (4 * 256 + 12, 256)
    assert json.loads((tmp_path / "part.json").read_text(encoding="utf-8")) == RESULT.to_json()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.PNG", "part.json"]


@pytest.mark.parametrize("name", ["part.json", "part", "part.jpg"])
def test_another_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"should end in \.png"):
        RESULT.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MdpsError, match="absent"):
        RESULT.save(tmp_path / "absent" / "part.png")


def test_heat_is_drawn_in_the_calibrations_range() -> None:
    """A map far below what good parts reach stays dark; in its own range its peak is white."""

    def heat(result: Result) -> int:
        return int(np.asarray(result.overlay)[:, 2 * 260 : 2 * 260 + 256].max())

    assert heat(RESULT) > 200
    assert heat(replace(RESULT, heat_range=HeatRange(0.0, 3000.0), pixel_limit=3000.0)) < 100  # nothing is framed


def test_it_is_shown_and_a_notebook_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr(Image.Image, "show", lambda self: shown.append(self.size))
    RESULT.show()
    with Image.open(io.BytesIO(RESULT._repr_png_())) as picture:
        assert shown == [picture.size]


def test_as_text_it_is_one_line() -> None:
    assert str(RESULT) == "fail: score 3, threshold 2"
    assert str(replace(RESULT, threshold=None, verdict=None)) == "no verdict: score 3, without a threshold"
