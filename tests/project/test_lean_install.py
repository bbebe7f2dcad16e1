"""The wheel as a line installs it: base and [cpu] in an environment of its own, without torch, small and quick."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from first_verdict import Lean
from PIL import Image

from mdps.runtime import load

MOST_MEGABYTES = 250
MOST_SECONDS = 60
MOST_IMPORT = 0.4


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(tmp_path_factory.mktemp("lean"))


def test_torch_and_what_only_export_needs_are_absent(lean: Lean) -> None:
    installed = lean.installed()
    assert {"mdps", "numpy", "pillow", "click", "onnxruntime"} <= installed
    assert not installed & {"torch", "torchvision", "timm", "onnx", "onnxscript", "scikit-learn", "matplotlib", "scipy"}


def test_the_installed_size_is_bounded(lean: Lean) -> None:
    assert lean.megabytes() < MOST_MEGABYTES


def test_the_wheel_alone_gives_a_verdict_in_three_lines(lean: Lean) -> None:
    """Both commands together are bounded in processor time, which neighbours on a busy machine do not lengthen."""
    assert re.fullmatch(r"fail: score 2\.9\d+, threshold 2\.\d+", lean.verdict)
    assert lean.processor_seconds < MOST_SECONDS


def test_the_runtime_imports_quickly(lean: Lean) -> None:
    def seconds(code: str) -> float:
        """Processor time, which neighbours on a busy machine do not lengthen as they do the clock's."""
        before = os.times()
        lean.python("-c", code)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    assert min(seconds("import mdps.runtime") for _ in range(3)) - min(seconds("") for _ in range(3)) < MOST_IMPORT


def test_the_doctor_finds_it_working(lean: Lean) -> None:
    report = json.loads(lean.python("-m", "mdps.cli", "doctor", "--json"))
    assert report["works"] is True
    assert report["problems"] == []
    assert report["demo"] == {"good": "pass", "bad": "fail"}
    assert "torch" not in report["versions"]


def test_a_bundle_judges_images_there_as_it_does_here(lean: Lean, tiny_bundle: Path, tmp_path: Path) -> None:
    Image.effect_noise((40, 40), 60).save(tmp_path / "part.png")
    out = tmp_path / "out"
    arguments = [str(tiny_bundle), str(tmp_path / "part.png"), "--out", str(out), "--json", "--scores-only"]
    row = json.loads(lean.python("-m", "mdps.cli", "predict", *arguments))
    with load(tiny_bundle, calibrated=False) as detector:
        assert row["score"] == pytest.approx(detector(tmp_path / "part.png").score, abs=1e-5)
    assert (out / "report.html").is_file()


def test_a_command_that_needs_more_says_what_to_install(lean: Lean, tmp_path: Path) -> None:
    command = [str(lean.bin / "mdps"), "train", str(tmp_path), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'mdps[train]'" in done.stderr
    assert done.stderr.count("\n") == 1
