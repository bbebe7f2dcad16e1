"""The kit of the studies: tables, JSON values, hashes to resume by, reports that appear whole."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mdps.benchmarks.kit import Fields, digest, exit_code, given, number, plain, table, write_arrays, write_report
from mdps.runtime.errors import UsageError


@dataclass(frozen=True)
class Row(Fields):
    name: str
    share: float
    path: Path | None = None
    ends: tuple[float, float] = (0.0, math.inf)


def test_a_table_aligns_numbers_right_and_keeps_its_columns() -> None:
    shown = table(["way", "ms", "note"], [["a|b", "1", "x"]], left=(0, -1))
    assert shown.splitlines() == ["| way | ms | note |", "| --- | ---: | --- |", "| a/b | 1 | x |"]
    assert table(["a", "b"], []).splitlines()[1] == "| --- | ---: |"


def test_what_is_no_number_is_null_in_json() -> None:
    row = Row("x", math.nan, Path("a/b"))
    assert row.to_json() == {"name": "x", "share": None, "path": "a/b", "ends": [0.0, None]}
    json.dumps(row.to_json(), allow_nan=False)
    assert given(Row("x", 1.0)) == {"name": "x", "share": 1.0, "ends": [0.0, None]}
    assert plain({1: [Row("x", 1.0)]})["1"][0]["share"] == 1.0


def test_a_digest_knows_every_value_and_no_order_of_keys() -> None:
    assert digest({"a": 1, "b": (2, 3)}) == digest({"b": [2, 3], "a": 1})
    assert len({digest(Row("x", share)) for share in (1.0, 2.0)}) == 2
    assert digest(["bundle", "0.1"]) == "78ceb5b0215495e9"  # kept results of earlier runs are found by it


@pytest.mark.parametrize(("value", "text"), [(None, ""), (12345.6, "12,346"), (0.012345, "0.0123"), (100, "100")])
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_report_is_json_text_and_plot(tmp_path: Path) -> None:
    write_report(tmp_path / "out", "study", [{"a": 1}], "# Study\n", b"plot")
    assert json.loads((tmp_path / "out" / "study.json").read_text()) == [{"a": 1}]
    assert (tmp_path / "out" / "study.md").read_text() == "# Study\n"
    assert (tmp_path / "out" / "study.png").read_bytes() == b"plot"
    write_arrays(tmp_path / "new" / "maps.npz", last=np.arange(3))
    with np.load(tmp_path / "new" / "maps.npz") as arrays:
        assert arrays["last"].tolist() == [0, 1, 2]


def test_a_users_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong() -> None:
        raise UsageError("there is no such thing")

    assert exit_code(wrong) == 2
    assert capsys.readouterr().err == "error: there is no such thing\n"
    assert exit_code(lambda: None) == 0
