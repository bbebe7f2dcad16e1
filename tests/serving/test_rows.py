"""Names of any bytes in results.jsonl and results.csv: each comes back whole, and no spreadsheet finds a formula."""

import csv
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdps.runtime.atomic import LineFile
from mdps.serving.folder import TABLE_HEADER, Row

NAMES = [
    b"plain.png", "ü 日本 🔩.png".encode(), b"a,b.png", b'a"b.png', b'"quoted".png', b'""', b"a;b.png", b"a\tb.png",
    b"a\nb.png", b"a\rb.png", b"a\r\nb.png", b"\ra.png", b"\na.png", b"\ta.png", b"a.png\r", b" a.png ", b"a\\nb.png",
    b"=1+1.png", b"+1.png", b"-rf.png", b"@SUM(A1).png", b" =1+1.png", b"\t=1+1.png", b"\r=1+1.png", b"\n@x.png",
    "\u00a0=1+1.png".encode(), "\u3000-1.png".encode(), "\ufeff=1.png".encode(), "\uff1d1+1.png".encode(),
    "\uff20x.png".encode(),
    b"x;=1+1;.png", b"x; \t-1.png", b"=cmd|' /C calc'!A0.png", b'=HYPERLINK("http://x/?"&A1).png', b"'=1.png",
    b"bad\xff.png", b"\xff\xfe=1.png", b"=\xe9t\xe9.png", b"a\x01\x1b[2J.png", b"\xed\xa0\x80.png",
    "a\u2028b\u0085c.png".encode(), b"nul\x7f.png", b"n" * 3000 + b".png", b"=" * 255, b"", b"{}", b"NA",
    b"1e5", b"[1]",
]  # fmt: skip
FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20\t\r\n")


def row(name: bytes) -> Row:
    path = os.fsdecode(name)
    return Row(path=path, verdict="error", error=f"{path} cannot be read")


def undone(cell: str) -> bytes:
    """As docs/use/running.md has it."""
    return os.fsencode(json.loads(cell) if cell.startswith('"') else cell)


def table(names: list[bytes]) -> bytes:
    return (TABLE_HEADER + "".join(row(name).to_csv() for name in names)).encode("utf-8")


def cells(text: str, separators: str = ",") -> list[list[str]]:
    """The cells as LibreOffice's importer parts them: any of the separators, unless between quotes that begin a cell.

    (`rtl_uString`'s ScImportExport::ScanNextFieldFromString: a quote counts only as the first character of a field, two
    are one, and what stands behind the closing one up to the separator belongs to the field.)
    """
    found: list[list[str]] = [[""]]
    at = 0
    while at < len(text):
        if text[at] == '"' and found[-1][-1] == "":
            closed = re.compile(r'"((?:[^"]|"")*)"').match(text, at)
            assert closed, text[at : at + 80]
            found[-1][-1] = closed[1].replace('""', '"') + "\0"  # so that another quote does not open it again
            at = closed.end()
            continue
        if text[at] in "\r\n":
            found.append([""])
        elif text[at] in separators:
            found[-1].append("")
        else:
            found[-1][-1] += text[at]
        at += 1
    return [[cell.replace("\0", "") for cell in line] for line in found[:-1]]


def test_there_are_forty_names_and_each_is_another() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 40


@pytest.mark.skipif(sys.platform == "win32", reason="names are no bytes there")
@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_a_line_of_json_gives_the_name_back(name: bytes) -> None:
    line = row(name).to_json()
    assert line.isascii()
    assert line.isprintable()
    assert os.fsencode(json.loads(line)["path"]) == name


@pytest.mark.skipif(sys.platform == "win32", reason="names are no bytes there")
@pytest.mark.parametrize("newline", ["", None])
def test_the_table_is_utf8_and_gives_the_names_back(tmp_path: Path, newline: str | None) -> None:
    """Also where line ends are translated, as Python does without newline=""."""
    with LineFile(tmp_path / "results.csv", TABLE_HEADER) as file:
        for name in NAMES:
            file.append(row(name).to_csv())
    with (tmp_path / "results.csv").open(encoding="utf-8", newline=newline) as text:
        read = list(csv.DictReader(text, strict=True))
    assert [undone(found["path"]) for found in read] == NAMES
    assert [undone(found["error"]) for found in read] == [name + b" cannot be read" for name in NAMES]
    assert len((tmp_path / "results.csv").read_bytes().split(b"\n")) == len(NAMES) + 2


@pytest.mark.skipif(sys.platform == "win32", reason="names are no bytes there")
@pytest.mark.parametrize("separators", [",", ";", "\t", ",;\t"], ids=["comma", "semicolon", "tab", "all"])
def test_no_cell_is_a_formula_wherever_a_spreadsheet_parts_the_lines(separators: str) -> None:
    """LibreOffice's dialog offers all three at first; Excel takes the semicolon where the comma is the decimal sign."""
    read = cells(table(NAMES).decode("utf-8"), separators)
    assert len(read) == len(NAMES) + 1
    for line in read:
        for cell in line:
            assert not cell.startswith(FORMULA), cell
            assert not cell.strip(" \u00a0\u3000\ufeff").startswith(FORMULA), cell


@pytest.mark.skipif(sys.platform == "win32", reason="names are no bytes there")
def test_pandas_reads_the_names_back() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    read = pandas.read_csv(io.BytesIO(table(NAMES)), keep_default_na=False, dtype=str)
    assert [undone(cell) for cell in read["path"]] == NAMES


@pytest.mark.skipif(sys.platform == "win32", reason="names are no bytes there")
@given(st.binary(max_size=40) | st.text(st.sampled_from('=+-@;,"\\ \t\r\n\u00a0xü'), max_size=12).map(str.encode))
def test_any_name_comes_back_and_is_no_formula(name: bytes) -> None:
    text = row(name).to_csv()
    text.encode("utf-8")
    (read,) = csv.reader(io.StringIO(text, newline=""), strict=True)
    assert (undone(read[0]), undone(read[-1])) == (name, name + b" cannot be read")
    for separators in (",", ";", "\t", ",;\t"):
        (line,) = cells(text, separators)
        assert not any(cell.strip().startswith(FORMULA) for cell in line)


def test_plain_names_and_numbers_are_written_plainly() -> None:
    good = Row("in/part-1.png", -0.5, 1.0, "pass", "maps/part-1.npy", 12.5, False, "tuned")
    assert good.to_csv() == "in/part-1.png,-0.5,1.0,pass,maps/part-1.npy,12.5,False,tuned,,,,,,,,\n"
    keys = "path,score,threshold,verdict,map,ms,early_exit,judged_by,regions,shift_x,shift_y,turn,residual,fault,doubt"
    assert TABLE_HEADER.split(",error") == [keys, "\n"]
