"""The programs of examples/ run as a user runs them, and find what the package finds."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mdps.benchmarks.metrics import auroc
from mdps.runtime import Result, load

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def images(line_images: list[bytes], tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{index}.png" for index in range(8)]
    for path, data in zip(paths, line_images, strict=False):
        path.write_bytes(data)
    return paths


@pytest.fixture
def results(line_bundle: Path, images: list[Path]) -> list[Result]:
    with load(line_bundle) as detector:
        return [detector(path) for path in images]


def test_predict_prints_what_the_detector_says(line_bundle: Path, images: list[Path], results: list[Result]) -> None:
    assert {result.verdict for result in results} == {"pass", "fail"}
    done = run("predict.py", line_bundle, *images)
    assert done.returncode == 0, done.stderr
    wanted = [f"{path}: {found.verdict}, score {found.score:.4f}" for path, found in zip(images, results, strict=True)]
    assert [line.partition(", threshold")[0] for line in done.stdout.splitlines()] == wanted


def test_evaluate_counts_what_the_detector_misses(
    line_bundle: Path, images: list[Path], results: list[Result], tmp_path: Path
) -> None:
    good, bad = images[::2], images[1::2]
    for folder, paths in (("good", good), ("bad", bad)):
        (tmp_path / folder).mkdir()
        for path in paths:
            path.rename(tmp_path / folder / path.name)
    done = run("evaluate.py", line_bundle, tmp_path / "good", tmp_path / "bad")
    assert done.returncode == 0, done.stderr
    wanted = auroc([False, True] * 4, [result.score for result in results])
    alarms = sum(result.verdict == "fail" for result in results[::2])
    missed = sum(result.verdict == "pass" for result in results[1::2])
    assert done.stdout.splitlines() == [
        f"AUROC {wanted:.3f}",
        f"good parts that fail: {alarms} of 4",
        f"bad parts that pass: {missed} of 4",
    ]


def test_an_engine_of_ones_own_judges_as_the_default_one(
    line_bundle: Path, images: list[Path], results: list[Result]
) -> None:
    done = run("own_engine.py", line_bundle, images[0])
    assert done.returncode == 0, done.stderr
    verdict, score, computed_by = re.fullmatch(r"(\w+), score (\S+), by (.*)\n", done.stdout).groups()
    assert verdict == results[0].verdict
    assert float(score) == pytest.approx(results[0].score, abs=1e-3)
    assert set(ast.literal_eval(computed_by).values()) == {"onnx.reference"}


def test_the_three_lines_of_the_readme_give_a_verdict(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert sum(bool(line.strip()) for line in code.splitlines()) == 3
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert re.fullmatch(r"fail: score [\d.]+, threshold [\d.]+\n", done.stdout), done.stderr


@pytest.mark.parametrize("name", ["predict.py", "evaluate.py", "own_engine.py"])
def test_mistakes_are_sentences(name: str, line_bundle: Path, tmp_path: Path) -> None:
    assert run(name).stderr.startswith("usage: ")
    done = run(name, tmp_path / "nowhere", tmp_path, *[tmp_path] * (name == "evaluate.py"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr
