"""`--align` on its way to people: a calibration that stores it, rows of a folder, answers of the server."""

import csv
import io
import json
import re
import urllib.request

import numpy as np
import pytest
import test_aligned_detector as parts
import test_detector as tiny
from PIL import Image
from server_process import serving
from tuned_bundle import TERMS, tuned_bundle

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import load
from mdps.runtime.errors import UsageError
from mdps.runtime.manifest import Manifest
from mdps.serving.calibrate import calibrate_folder

pytestmark = pytest.mark.filterwarnings(
    "ignore::mdps.runtime.errors.BackendWarning", "ignore::mdps.runtime.calibration.CalibrationWarning"
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    for seed in range(8):
        Image.fromarray(parts.part(seed)).save(folder / f"{seed}.png")
    return folder


@pytest.fixture(scope="module")
def bundle(good, tmp_path_factory):
    folder = tiny.make_bundle(tmp_path_factory.mktemp("aligned") / "line")
    assert run(cli, ["calibrate", str(folder), str(good), "--align", "--threads", "1"]) == 0
    return folder


def test_a_calibration_stores_the_reference_and_without_align_forgets_it(bundle, good, tmp_path):
    manifest = Manifest.read(bundle)
    assert manifest.alignments["default"].images == 8
    assert manifest.calibrations["default"].aligned == manifest.aligned("default") != ""
    copy = tiny.make_bundle(tmp_path / "copy")
    manifest.write(copy)
    calibrate_folder(copy, good, 0.1, threads=1)
    assert Manifest.read(copy).alignments == {}
    assert Manifest.read(copy).calibrations["default"].aligned == ""


def test_a_tuned_bundle_keeps_how_it_was_tuned(good, tmp_path):
    folder = tuned_bundle(tmp_path / "line", TERMS[2:3])
    with pytest.raises(UsageError, match=r"tuned .* to parts that were not aligned: run `mdps tune --align`"):
        calibrate_folder(folder, good, 0.1, threads=1, align=True)
    parts.aligned(folder)
    assert calibrate_folder(folder, good, 0.1, threads=1).aligned == parts.ALIGNMENT.name
    assert Manifest.read(folder).alignments == {"default": parts.ALIGNMENT}


def test_rows_say_how_a_part_lay_and_which_was_not_aligned(bundle, tmp_path, capsys):
    for name, picture in zip("abcd", parts.PICTURES, strict=True):
        (tmp_path / "in").mkdir(exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "in" / f"{name}.png")
    out = tmp_path / "out"
    assert run(cli, ["predict", str(bundle), str(tmp_path / "in"), "--out", str(out), "--threads", "1", "--force"]) == 0
    assert "Warning: 1 of 4 images were not aligned but judged as they lie" in capsys.readouterr().err
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]
    assert [rows[0][key] for key in ("shift_x", "shift_y", "turn")] == pytest.approx([6, -4, 0], abs=0.5)
    assert 0 < rows[0]["residual"] < 0.1
    assert [row["fault"] is None for row in rows] == [True, True, False, True]
    assert re.fullmatch("it was not aligned but judged as it lies: nothing in it is like .*", rows[2]["fault"])
    table = list(csv.DictReader((out / "results.csv").open(encoding="utf-8")))
    assert [row["fault"] for row in table] == [row["fault"] or "" for row in rows]
    assert rows[2]["fault"] in (out / "report.html").read_text("utf-8")


def test_the_server_says_what_the_runtime_says(bundle):
    with load(bundle, threads=1, force=True) as detector:
        wanted = detector.batch(parts.PICTURES)
    with serving([bundle], "--threads", "1", "--force") as server:
        for picture, result in zip(parts.PICTURES, wanted, strict=True):
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "PNG")
            answer = json.loads(urllib.request.urlopen(f"{server.url}/inspect", file.getvalue()).read())
            assert answer["score"] == pytest.approx(result.score)
            told = {name: value for name, value in result.alignment.told().items() if value is not None}
            assert {name: answer[name] for name in told} == told
            assert answer.get("fault") == (result.alignment.fault or None)
            assert answer.get("notes", []) == ([result.alignment.fault] if result.alignment.fault else [])


def test_a_single_file_is_refused(bundle, capsys):
    assert run(cli, ["single-file", str(bundle)]) == 2
    assert "aligns the parts of the product 'default', which the single file does not" in capsys.readouterr().err


def test_good_images_with_nothing_in_common_leave_the_bundle_as_it_was(bundle, tmp_path, capsys):
    for index in range(6):
        pixels = np.random.default_rng(index).integers(0, 255, (48, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    before = (bundle / "manifest.json").read_bytes()
    assert run(cli, ["calibrate", str(bundle), str(tmp_path), "--align", "--threads", "1"]) == 2
    assert "of 6 good images cannot be aligned with the others" in capsys.readouterr().err
    assert (bundle / "manifest.json").read_bytes() == before
