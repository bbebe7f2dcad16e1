"""Judging folders: what is found, what outputs are called, and that one bad file stops nothing."""

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mdps.runtime.atomic import LineFile
from mdps.runtime.detector import Result
from mdps.runtime.errors import BackendError, MdpsError, UsageError
from mdps.runtime.image_files import find_images
from mdps.runtime.preprocessing import Preprocessing
from mdps.serving.folder import REGIONS_HEADER, TABLE_HEADER, Row, output_names, predict, predictions


class BrightnessDetector:
    """Scores an image by its mean, so that a result tells which image it belongs to."""

    preprocessing, calibration, doubt, tiles = Preprocessing((16, 16)), None, "", None

    def __init__(self, threshold: float | None = 0.5) -> None:
        self.threshold = threshold
        self.batches: list[int] = []

    def batch(self, images: Sequence[Image.Image]) -> list[Result]:
        self.batches.append(len(images))
        return [self._judge(np.asarray(image, np.float32) / 255) for image in images]

    def _judge(self, pixels: np.ndarray) -> Result:
        score = float(pixels.mean())
        observation = (pixels.transpose(2, 0, 1) * 2 - 1).astype(np.float32)
        verdict: Any = None if self.threshold is None else "fail" if score > self.threshold else "pass"
        anomaly_map = pixels.mean(axis=2)
        values: dict[str, Any] = {
            "score": score,
            "threshold": self.threshold,
            "verdict": verdict,
            "anomaly_map": anomaly_map,
            "mask": anomaly_map > 0.5,
            "posterior_sample": observation,
            "observation": observation,
            "times": {"total": 1.0},
        }
        return Result(**values)


def save(path: Path, level: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), (level, level, level)).save(path)
    return path


def read_rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


# Finding images


def test_folders_are_searched_to_the_bottom_and_other_files_passed_over(tmp_path: Path) -> None:
    wanted = [save(tmp_path / name, 0) for name in ("a.png", "deep/er/b.JPG", "deep/c.webp", "z.tiff")]
    for other in ("notes.txt", ".hidden.png", "deep/.cache/d.png"):
        save(tmp_path / "x.png", 0).rename((tmp_path / other).parent.mkdir(exist_ok=True) or tmp_path / other)
    assert set(find_images([tmp_path])) == set(wanted)


def test_the_order_is_that_of_the_inputs_then_of_names_and_nothing_comes_twice(tmp_path: Path) -> None:
    b, a = save(tmp_path / "two" / "b.png", 0), save(tmp_path / "one" / "a.png", 0)
    c = save(tmp_path / "one" / "c.png", 0)
    assert find_images([b, tmp_path / "one", tmp_path / "two", a]) == [b, a, c]


def test_a_file_is_taken_whatever_its_suffix(tmp_path: Path) -> None:
    odd = save(tmp_path / "a.png", 0).rename(tmp_path / "frame.raw")
    assert find_images([odd]) == [odd]


def test_outputs_of_an_earlier_run_are_no_input(tmp_path: Path) -> None:
    image = save(tmp_path / "a.png", 0)
    save(tmp_path / "out" / "overlays" / "a.png", 0)
    assert find_images([tmp_path], exclude=tmp_path / "out") == [image]


def test_a_wrong_path_and_a_folder_without_images_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere does not exist"):
        find_images([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="holds no image"):
        find_images([tmp_path])


# Names of outputs


def test_names_tell_where_an_image_came_from() -> None:
    assert output_names([Path("t/good/000.png"), Path("t/crack/000.png")]) == ["good_000", "crack_000"]
    assert output_names([Path("t/good/000.png")]) == ["000"]


def test_names_that_would_meet_are_told_apart() -> None:
    names = output_names([Path("a/b.png"), Path("a_b.png"), Path("a/b.jpg"), Path("A/B.png")])
    assert len({name.casefold() for name in names}) == 4


@given(st.lists(st.text(st.characters(blacklist_characters="/\0"), min_size=1, max_size=80), max_size=8))
def test_any_name_becomes_one_that_every_system_takes(stems: list[str]) -> None:
    names = output_names([Path("folder") / f"{stem}.png" for stem in stems])
    assert len({name.casefold() for name in names}) == len(stems)
    for name in names:
        assert name == name.strip(" .")
        assert name[0] != "-"
        assert not set(name) & set('<>:"/\\|?*\n\0')
        assert len(f"{name}.png".encode()) <= 255


# Judging


def test_a_run_leaves_rows_maps_and_pictures(tmp_path: Path) -> None:
    dark, bright = save(tmp_path / "in" / "dark.png", 51), save(tmp_path / "in" / "bright.png", 204)
    out = tmp_path / "out"
    rows = predict(BrightnessDetector(), [tmp_path / "in"], out)
    assert [(row.path, row.verdict) for row in rows] == [(str(bright), "fail"), (str(dark), "pass")]
    assert read_rows(out) == [json.loads(row.to_json()) for row in rows]
    assert list(read_rows(out)[0]) == TABLE_HEADER.rstrip().split(",")
    for row in rows:
        anomaly_map = np.load(out / str(row.map), allow_pickle=False)
        assert (anomaly_map.dtype, anomaly_map.shape) == (np.float32, (16, 16))
        assert anomaly_map.mean() == pytest.approx(row.score)
        with Image.open(out / str(row.overlay)) as overlay:
            assert overlay.size == (4 * 256 + 12, 256)


def test_the_table_says_what_the_lines_say(tmp_path: Path) -> None:
    save(tmp_path / "in" / 'odd, "name" ü.png', 51)
    (tmp_path / "in" / "bad.png").write_bytes(b"no image")
    predict(BrightnessDetector(), [tmp_path / "in"], tmp_path / "out")
    with (tmp_path / "out" / "results.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    expected = [
        {key: "" if value is None else str(value) for key, value in row.items()} for row in read_rows(tmp_path / "out")
    ]
    assert table == expected


def test_regions_are_in_the_lines_and_in_a_table_of_their_own(tmp_path: Path) -> None:
    class Finding(BrightnessDetector):
        def batch(self, images: Sequence[Image.Image]) -> list[Result]:
            on_photograph: dict[str, Any] = {"pixel_limit": 0.5, "box": (0.0, 0.0, 16.0, 16.0), "mm_per_pixel": 0.5}
            return [replace(result, **on_photograph) for result in super().batch(images)]

    spots = np.zeros((16, 16), np.uint8)
    spots[2:4, 5], spots[10, 10] = 200, 250
    (tmp_path / "in").mkdir()
    Image.fromarray(spots).convert("RGB").save(tmp_path / "in" / "a,b.png")
    save(tmp_path / "in" / "dark.png", 20)
    predict(Finding(), [tmp_path / "in"], tmp_path / "out")
    one, other = (row["regions"] for row in read_rows(tmp_path / "out"))
    assert [region["box"] for region in one] == [[10, 10, 1, 1], [5, 2, 1, 2]]
    assert other == []
    with Image.open(tmp_path / "out" / "overlays" / "whole" / "a,b.png") as whole:
        assert whole.size == (16, 16)  # the photograph's own
    assert not (tmp_path / "out" / "overlays" / "whole" / "dark.png").exists()
    with (tmp_path / "out" / "results.csv").open(encoding="utf-8", newline="") as file:
        assert [row["regions"] for row in csv.DictReader(file)] == ["2", "0"]
    with (tmp_path / "out" / "regions.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["path"] for row in table] == [str(tmp_path / "in" / "a,b.png")] * 2
    numbers = [{key: float(value) for key, value in row.items() if key != "path"} for row in table]
    assert numbers[0] == {
        "left": 10, "top": 10, "width": 1, "height": 1, "area": 1, "peak": pytest.approx(250 / 255), "x": 10, "y": 10,
        "left_mm": 5, "top_mm": 5, "width_mm": 0.5, "height_mm": 0.5, "area_mm2": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_one_bad_file_is_a_row_and_the_rest_completes(tmp_path: Path, batch: int) -> None:
    for index in range(5):
        save(tmp_path / "in" / f"{index}.png", 20 * index)
    whole = (tmp_path / "in" / "1.png").read_bytes()
    (tmp_path / "in" / "1.png").write_bytes(whole[: len(whole) // 2])
    detector = BrightnessDetector()
    rows = predict(detector, [tmp_path / "in"], tmp_path / "out", batch=batch)
    assert [row.verdict for row in rows] == ["pass", "error", "pass", "pass", "pass"]
    assert [row.score for row in rows] == [0.0, None, *(pytest.approx(20 * i / 255, abs=1e-6) for i in (2, 3, 4))]
    assert "1.png" in str(rows[1].error)
    assert max(detector.batches) <= batch


def test_an_image_that_the_detector_refuses_does_not_take_its_batch_along(tmp_path: Path) -> None:
    class Refusing(BrightnessDetector):
        def batch(self, images: Sequence[Image.Image]) -> list[Result]:
            results = super().batch(images)
            if any(result.score > 0.7 for result in results):
                raise BackendError("the score is not a number")
            return results

    images = [save(tmp_path / f"{level}.png", level) for level in (10, 250, 20)]
    judged = list(predictions(Refusing(), images, batch=3))
    assert [item.result if isinstance(item.result, str) else "ok" for item in judged] == [
        "ok",
        "the score is not a number",
        "ok",
    ]


def test_files_of_one_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    for name, level in (("a", 30), ("b", 60), ("c", 90)):
        save(tmp_path / name / "part.png", level)
    rows = predict(BrightnessDetector(), [tmp_path / name for name in "abc"], tmp_path / "out")
    assert len({row.map for row in rows}) == 3
    for row in rows:
        assert np.load(tmp_path / "out" / str(row.map)).mean() == pytest.approx(row.score)


@pytest.mark.parametrize("name", ["-rf.png", "mit leer zeichen.png", "日本.png", "a'b\"c.png", "..png"])
def test_odd_names_are_judged_like_others(tmp_path: Path, name: str) -> None:
    save(tmp_path / "a.png", 51).rename(tmp_path / name)
    (row,) = predict(BrightnessDetector(), [tmp_path / name], tmp_path / "out")
    assert row.verdict == "pass"
    assert json.loads(row.to_json())["path"] == str(tmp_path / name)


@pytest.mark.skipif(sys.platform != "linux", reason="only here are names bytes")
def test_a_name_of_bytes_that_are_no_text_passes_through(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", 51).rename(tmp_path / "bad\udcff.png")
    predict(BrightnessDetector(), [path], tmp_path / "out")
    assert read_rows(tmp_path / "out")[0]["path"] == str(path)
    with (tmp_path / "out" / "results.csv").open(encoding="utf-8", newline="") as file:
        assert json.loads(next(csv.DictReader(file))["path"]) == str(path)


def test_without_calibration_there_are_scores_and_no_verdicts(tmp_path: Path) -> None:
    save(tmp_path / "a.png", 51)
    (row,) = predict(BrightnessDetector(threshold=None), [tmp_path / "a.png"], tmp_path / "out")
    assert (row.verdict, row.threshold, row.error) == (None, None, None)
    assert row.score == pytest.approx(0.2)


# Interruptions and disks


def test_rows_are_on_disk_when_they_are_announced(tmp_path: Path) -> None:
    for index in range(4):
        save(tmp_path / "in" / f"{index}.png", 20 * index)
    seen: list[Row] = []

    def check(row: Row) -> None:
        seen.append(row)
        assert [entry["path"] for entry in read_rows(tmp_path / "out")] == [item.path for item in seen]
        assert (tmp_path / "out" / str(row.map)).is_file()

    predict(BrightnessDetector(), [tmp_path / "in"], tmp_path / "out", batch=2, on_row=check)
    assert len(seen) == 4


def test_an_interrupted_run_leaves_complete_rows_and_no_report_of_an_earlier_one(tmp_path: Path) -> None:
    for index in range(4):
        save(tmp_path / "in" / f"{index}.png", 20 * index)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.html").write_text("earlier")

    class Interrupted(BrightnessDetector):
        def batch(self, images: Sequence[Image.Image]) -> list[Result]:
            if len(self.batches) == 2:
                raise KeyboardInterrupt
            return super().batch(images)

    with pytest.raises(KeyboardInterrupt):
        predict(Interrupted(), [tmp_path / "in"], tmp_path / "out", batch=1, force=True)
    assert len(read_rows(tmp_path / "out")) == 2
    assert not (tmp_path / "out" / "report.html").exists()


def test_an_output_folder_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    image = save(tmp_path / "a.png", 0)
    with pytest.raises(UsageError, match="cannot be used as a folder"):
        predict(BrightnessDetector(), [image], image)


def test_two_runs_do_not_mix_in_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="no such lock on Windows")
    image, out = save(tmp_path / "a.png", 51), tmp_path / "out"

    def other_run(row: Row) -> None:
        with pytest.raises(MdpsError, match="being written by another run"):
            predict(BrightnessDetector(), [image], out, force=True)
        with pytest.raises(UsageError, match="results of an earlier run"):
            predict(BrightnessDetector(), [image], out)

    (row,) = predict(BrightnessDetector(), [image], out, on_row=other_run)
    assert len(read_rows(out)) == 1
    assert (out / str(row.map)).is_file()
    predict(BrightnessDetector(), [image], out, force=True)
    assert len(read_rows(out)) == 1


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kept", ["results.jsonl", "results.csv", "regions.csv", "report.html"])
def test_results_of_an_earlier_run_are_not_overwritten(tmp_path: Path, kept: str) -> None:
    image, out = save(tmp_path / "a.png", 51), tmp_path / "out"
    predict(BrightnessDetector(), [image], out)
    (out / "report.html").write_text("report")
    (out / "regions.csv").write_text(REGIONS_HEADER + "a.png,1,2,3,4,5,6,7,8,,,,,\n")
    for path in out.iterdir():
        if path.is_file() and path.name != kept:
            path.unlink()
    before = {name: (out / name).read_bytes() for name in files_below(out)}
    with pytest.raises(UsageError, match=rf"out holds results of an earlier run \({kept}\): .* --force"):
        predict(BrightnessDetector(), [image], out)
    assert {name: (out / name).read_bytes() for name in files_below(out)} == before


def test_with_force_the_files_of_an_earlier_run_go_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for index in range(3):
        save(tmp_path / "in" / f"{index}.png", 20 * index)
    predict(BrightnessDetector(), [tmp_path / "in"], out)
    (out / "report.html").write_text("report")
    for other in ("notes.txt", "maps/of_mine.npy", "overlays/of_mine.png"):
        (out / other).write_text("mine")
    (tmp_path / "photo.npy").write_text("mine")
    with (out / "results.jsonl").open("a") as lines:
        lines.write('{"map": "maps/../../photo.npy"}\n{"map": "../photo.npy"}\n{"map": 3}\n[]\nnonsense\n')
    predict(BrightnessDetector(), [tmp_path / "in" / "1.png"], out, force=True)
    new = {"results.jsonl", "results.csv", "regions.csv", "maps/1.npy", "overlays/1.png"}
    assert files_below(out) == new | {"notes.txt", "maps/of_mine.npy", "overlays/of_mine.png"}
    assert (tmp_path / "photo.npy").exists()
    assert len(read_rows(out)) == 1


def test_a_run_that_judged_nothing_does_not_stand_in_the_way(tmp_path: Path) -> None:
    class Broken(BrightnessDetector):
        def batch(self, images: Sequence[Image.Image]) -> list[Result]:
            raise UsageError("wrong bundle")

    image, out = save(tmp_path / "a.png", 51), tmp_path / "out"
    with pytest.raises(UsageError, match="wrong bundle"):
        predict(Broken(), [image], out)
    assert len(predict(BrightnessDetector(), [image], out)) == 1


def test_a_folder_may_hold_its_images_and_their_results(tmp_path: Path) -> None:
    image = save(tmp_path / "a.png", 51)
    first = predict(BrightnessDetector(), [tmp_path], tmp_path)
    again = predict(BrightnessDetector(), [tmp_path], tmp_path, force=True)
    assert [row.path for row in first] == [row.path for row in again] == [str(image)]


def test_photographs_where_outputs_would_be_written_are_left_alone(tmp_path: Path) -> None:
    image = save(tmp_path / "overlays" / "a.png", 51)
    before = image.read_bytes()
    with pytest.raises(UsageError, match="lies in a folder that the run would write into"):
        predict(BrightnessDetector(), [tmp_path], tmp_path)
    assert image.read_bytes() == before


FILL = """
import resource, sys
from pathlib import Path
from mdps.runtime.errors import MdpsError
from mdps.runtime.atomic import LineFile
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # the system refuses byte 101, as a full disk does
with LineFile(Path(sys.argv[1])) as file:
    try:
        for _ in range(9):
            file.append("x" * 29 + "\\n")
    except MdpsError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_a_disk_that_fills_up_within_a_row_leaves_whole_rows_and_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path / "rows")], capture_output=True, text=True, check=True
    )
    assert "cannot be written" in done.stdout
    assert (tmp_path / "rows").read_text() == ("x" * 29 + "\n") * 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_sentence() -> None:
    with pytest.raises(MdpsError, match="No space left on device"):
        LineFile(Path("/dev/full"), "header\n")
