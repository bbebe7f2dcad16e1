"""A detector that sees no defects on its parts: refused, or said wherever a verdict is, and nothing of another one."""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_process import serving

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import CalibrationError, load
from mdps.runtime.fitness import FLOOR, Fitness, Found
from mdps.runtime.manifest import Manifest
from mdps.serving.calibrate import defects_a_kind
from mdps.serving.defects import KINDS

SAID = "this detector does not see defects on these parts: it finds 3 of 12 that were put into good images"
ONE = ("--threads", "1")


def fitness(auroc: float) -> Fitness:
    kinds = {"crack": Found(6, 1, auroc), "stain": Found(6, 2, auroc)}
    return Fitness(auroc, kinds, {"small": Found(12, 3, auroc)})


def set_fitness(bundle: Path, found: Fitness | None) -> None:
    manifest = Manifest.read(bundle, verify=False)
    manifest.with_calibration("default", replace(manifest.calibrations["default"], fitness=found)).write(bundle)


@pytest.fixture
def bundle(line_bundle: Path, tmp_path: Path) -> Path:
    """A copy whose calibration found nothing to trust."""
    copy = shutil.copytree(line_bundle, tmp_path / "line")
    set_fitness(copy, fitness(FLOOR - 0.01))
    return copy


@pytest.fixture
def predict(bundle: Path, line_images: list[bytes], tmp_path: Path) -> Callable[..., int]:
    (tmp_path / "part.png").write_bytes(line_images[0])
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n")
    inputs = [str(tmp_path / "part.png"), str(tmp_path / "torn.png")]
    return lambda *more: run(cli, ["predict", str(bundle), *inputs, *ONE, "--out", str(tmp_path / "out"), *more])


def test_predict_refuses_it_in_one_sentence(
    predict: Callable[..., int], bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict() == 2
    said = capsys.readouterr()
    (sentence,) = said.err.splitlines()
    assert sentence.startswith(f"Error: {bundle}: {SAID}")
    assert sentence.endswith("or go on with --force")
    assert said.out == ""
    assert not (tmp_path / "out").exists()


def test_with_force_the_warning_is_on_the_terminal_in_every_row_and_on_top_of_the_report(
    predict: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict("--force", "--json") == 3
    said = capsys.readouterr()
    assert [line for line in said.err.splitlines() if line.startswith(f"Warning: {SAID}")]
    judged, torn = map(json.loads, said.out.splitlines())
    assert judged["verdict"] in ("pass", "fail")
    assert judged["doubt"].startswith(SAID)
    assert torn["doubt"] is None
    assert SAID in (tmp_path / "out" / "results.csv").read_text(encoding="utf-8")
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert 0 < report.index(f"Warning: {SAID}") < report.index("2 images:")
    assert f"<td>doubt</td><td>{SAID}" in report
    assert f"<td>calibration.fitness.crack</td><td>1 of 6, AUROC {FLOOR - 0.01:.2f}</td>" in report


@pytest.mark.parametrize("found", [fitness(FLOOR), None], ids=["fit", "not measured"])
def test_of_another_nothing_is_said(
    predict: Callable[..., int], bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], found: Fitness | None
) -> None:
    set_fitness(bundle, found)
    assert predict("--json") == 3
    said = capsys.readouterr()
    assert "see defects" not in said.out + said.err + (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(json.loads(line)["doubt"] is None for line in said.out.splitlines())


def test_scores_alone_need_no_force_for_they_are_no_verdicts(predict: Callable[..., int]) -> None:
    assert predict("--scores-only") == 3


def test_load_takes_it_with_force_and_says_so(bundle: Path) -> None:
    with pytest.raises(CalibrationError, match="does not see defects"):
        load(bundle, threads=1)
    with load(bundle, threads=1, force=True) as detector:
        assert detector.doubt.startswith(SAID)
        assert detector.provenance["doubt"] == detector.doubt


def test_what_measures_goes_on_and_says_so(
    bundle: Path, make_category: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    category = make_category(good=2, defective=2)
    assert run(cli, ["evaluate", str(bundle), str(category), *ONE, "--json"]) == 0
    (problem,) = [one for one in json.loads(capsys.readouterr().out)["problems"] if one.startswith(SAID)]
    assert run(cli, ["single-file", str(bundle), "--out", str(tmp_path / "alone.onnx")]) == 0
    assert f"Warning: {problem}" in capsys.readouterr().err
    assert SAID.encode() in (tmp_path / "alone.onnx").read_bytes()
    assert run(cli, ["inspect", str(bundle)]) == 0
    assert SAID in capsys.readouterr().out


@pytest.mark.parametrize(("images", "shown"), [(1, 2), (3 * len(KINDS) - 1, 2), (3 * len(KINDS), 3), (10_000, 16)])
def test_defects_take_no_longer_than_the_good_images_and_every_kind_comes_twice(images: int, shown: int) -> None:
    assert defects_a_kind(images) == shown


# The server

pytest.importorskip("starlette", reason="the extra [serve] is not installed")


def ask(url: str, body: bytes | None = None) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as reply:
        text = reply.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


def test_serve_refuses_it_in_one_sentence(bundle: Path) -> None:
    command = [sys.executable, "-m", "mdps.cli", "serve", str(bundle), "--port", "0", *ONE]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 2
    (sentence,) = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert SAID in sentence
    assert sentence.endswith("or go on with --force")


def test_with_force_every_answer_the_metrics_and_the_log_say_it(bundle: Path, line_images: list[bytes]) -> None:
    with serving([bundle], *ONE, "--force") as server:
        logged = server.wait_for("unfit")
        assert (logged["level"], logged["model"]) == ("warning", "line")
        doubt = logged["doubt"]
        assert doubt.startswith(SAID)
        assert ask(f"{server.url}/inspect", line_images[0])["doubt"] == doubt
        assert ask(f"{server.url}/v2/models/line")["doubt"] == doubt
        assert ask(f"{server.url}/v2/models/line/ready") == {"ready": True, "doubt": doubt}
        assert ask(f"{server.url}/v2/health/ready") == {"ready": True, "doubts": {"line": doubt}}
        assert ask(f"{server.url}/v2/repository/index", b"")[0]["reason"] == doubt
        assert ask(f"{server.url}/live/line")["model"]["doubt"] == doubt
        assert f'mdps_fitness_auroc{{model="line"}} {FLOOR - 0.01}' in ask(f"{server.url}/metrics")


def test_a_served_model_that_became_unfit_is_not_taken_up_without_force(bundle: Path, line_images: list[bytes]) -> None:
    set_fitness(bundle, fitness(FLOOR))
    with serving([bundle], *ONE) as server:
        assert ask(f"{server.url}/v2/health/ready") == {"ready": True}
        assert "doubt" not in ask(f"{server.url}/inspect", line_images[0])
        set_fitness(bundle, fitness(FLOOR - 0.01))
        assert SAID in server.wait_for("reload_failed")["error"]
        assert SAID in ask(f"{server.url}/live/line")["model"]["problem"]
        assert "doubt" not in ask(f"{server.url}/inspect", line_images[0])  # the one before goes on
        assert not server.named("unfit")
