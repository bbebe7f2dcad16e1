"""The HTML report: complete, bounded, safe, and alone."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdps.runtime.regions import Region
from mdps.serving.folder import Row
from mdps.serving.report import MOST_PICTURES, MOST_REGIONS, MOST_ROWS, histogram, render, write_report

VOID = {"meta", "img", "rect", "line", "link", "br", "input"}


class Page(HTMLParser):
    """Reads a page: tags with attributes, text, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def row(name: str, score: float, verdict: str = "pass") -> Row:
    return Row(name, score, 0.5, verdict, f"maps/{name}.npy", 12.5)


def page_of(rows: list[Row], settings: dict[str, str] | None = None) -> Page:
    return Page(render(rows, settings or {}, "Inspection", lambda row: '<img alt="" src="data:,">'))


def test_the_page_says_what_decides_and_how_its_pictures_are_read() -> None:
    page = page_of([row("a", 0.1)])
    text = " ".join(page.text)
    assert page.open == []
    assert page.count("li") == 4  # as many as a picture has tiles
    for words in (
        "exceeds the threshold, 0.5.",
        "contour in green",
        "a pass may carry contours too",
        "share one scale",
    ):
        assert words in text
    uncalibrated = Row("a", 0.1, None, None, "maps/a.npy", 12.5)
    text = " ".join(page_of([uncalibrated]).text)
    assert "a scale of its own" in text
    assert "threshold," not in text
    assert "contour" not in " ".join(page_of([Row("a", verdict="error", error="torn")]).text)


def test_the_page_is_well_formed_and_lists_highest_scores_first() -> None:
    page = page_of([row("low", 0.1), row("high", 0.9, "fail"), row("middle", 0.4)])
    assert page.open == []
    assert [text for text in page.text if text in ("low", "middle", "high")] == ["high", "middle", "low"]


def test_regions_are_told_in_pixels_and_with_a_scale_in_mm() -> None:
    found = tuple(Region((10 * n, 5, 20, 30), 400, 2.0 - n / 100, (0, 0)) for n in range(MOST_REGIONS + 2))
    page = page_of([replace(row("a", 0.9, "fail"), regions=found)])
    assert page.open == []
    text = " ".join(page.text)
    assert "20 x 30 pixels at (70, 5), 400 pixels², peak 1.93" in text
    assert "(80, 5)" not in text
    assert "and 2 more" in text
    scaled = replace(row("a", 0.9, "fail"), regions=(replace(found[0], mm_per_pixel=0.05),))
    assert "; 1 x 1.5 mm, 1 mm²" in " ".join(page_of([scaled]).text)


def test_counts_name_every_verdict() -> None:
    rows = [row("a", 0.1), row("b", 0.9, "fail"), Row("c", verdict="error", error="c is no image"), Row("d", 0.2)]
    text = "".join(page_of(rows).text)
    assert "4 images: 1 fail, 1 pass, 1 error, 1 without verdict" in text
    assert "c is no image" in text


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>.png", '"><img src=x onerror=alert(1)>.png', "a&lt;b.png"])
def test_names_errors_and_settings_are_shown_and_never_run(evil: str) -> None:
    rows = [row(evil, 0.5), Row(evil, verdict="error", error=evil)]
    page = page_of(rows, {"bundle": evil})
    plain = page_of([row("x", 0.5), Row("x", verdict="error", error="x")], {"bundle": "x"})
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert "".join(page.text).count(evil) == 4


def test_nothing_is_loaded_from_anywhere() -> None:
    page = page_of([row("a", 0.5)])
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "data"):
            assert (attributes.get(name) or "data:").startswith("data:")
    text = render([row("a", 0.5)], {}, "t", lambda row: "")
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text


def test_many_images_show_pictures_of_the_highest_scores_only_and_say_so() -> None:
    shown: list[str] = []
    rows = [row(f"n{i}", i / 1000) for i in range(MOST_PICTURES + 20)]

    def picture(row: Row) -> str:
        shown.append(row.path)
        return "<img>"

    text = render(rows, {}, "t", picture)
    assert set(shown) == {f"n{i}" for i in range(20, MOST_PICTURES + 20)}
    assert text.count("<img>") == MOST_PICTURES
    assert f"Only the {MOST_PICTURES} images with the highest scores, of {MOST_PICTURES + 20}" in text


def test_rows_are_bounded_too() -> None:
    text = render([row(f"n{i}", 0.1) for i in range(MOST_ROWS + 1)], {}, "t", lambda row: "")
    assert text.count("<tr><td>n") == MOST_ROWS
    assert f"Only {MOST_ROWS} of {MOST_ROWS + 1} images are listed" in text


def test_a_name_of_bytes_that_are_no_text_is_shown_with_question_marks(tmp_path: Path) -> None:
    path = write_report(tmp_path, [Row("bad\udcff.png", verdict="error", error="bad\udcff.png")], {})
    assert "bad?.png" in path.read_text(encoding="utf-8")


def test_an_empty_run_gives_a_page() -> None:
    assert "0 images" in "".join(page_of([]).text)


def test_the_written_report_embeds_the_overlays(tmp_path: Path) -> None:
    (tmp_path / "overlays").mkdir()
    Image.fromarray(np.zeros((64, 268, 3), np.uint8)).save(tmp_path / "overlays" / "a.b.png")
    path = write_report(tmp_path, [row("a.b", 0.5)], {"samples": "1"})
    assert 'src="data:image/jpeg;base64,' in path.read_text(encoding="utf-8")
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["report.html"]


def test_the_histogram_counts_every_score_and_places_the_threshold() -> None:
    svg = histogram([0.0, 0.0, 1.0], 0.5)
    assert sum(map(int, re.findall(r"<title>(\d+)</title>", svg))) == 3
    (x,) = re.findall(r'<line x1="([\d.]+)"', svg)
    assert float(x) == pytest.approx(360, abs=0.1)  # in the middle of 720
    assert "threshold 0.5" in svg


def test_the_histogram_bears_one_score_none_and_a_threshold_outside() -> None:
    assert histogram([], 0.5) == ""
    assert "<line" not in histogram([0.3], None)
    (x,) = re.findall(r'<line x1="([\d.]+)"', histogram([0.0, 1.0], 5.0))
    assert 0 < float(x) < 720
