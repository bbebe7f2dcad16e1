"""The real CUDA provider of onnxruntime-gpu on a CUDA that computes nothing (shared/fake-cuda), in a Python of its own.

MDPS_CARD_PYTHON names it, such as V/bin/python after `python -m venv V` and `V/bin/pip install numpy pillow click tqdm
'onnxruntime-gpu[cuda,cudnn]==1.31.1'`. The fake needs gcc. No number is right; who computes and what is printed is.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def card_python() -> str:
    python = os.environ.get("MDPS_CARD_PYTHON")
    if not python:
        pytest.skip("no Python with onnxruntime-gpu: set MDPS_CARD_PYTHON, see the top of this file")
    return python


@pytest.fixture(scope="module")
def fake(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake's libraries."""
    if not (shared / "fake-cuda").is_dir() or shutil.which("gcc") is None:
        pytest.skip("no shared/fake-cuda, or no gcc to build it")
    out = tmp_path_factory.mktemp("fake-cuda")
    subprocess.run(["sh", str(shared / "fake-cuda" / "build.sh"), str(out)], check=True)
    return out


@pytest.fixture(scope="module")
def run(card_python: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a line of Python there, with the libraries of the fake in `fake` or without a card."""
    link = tmp_path_factory.mktemp("path")
    (link / "mdps").symlink_to(ROOT)

    def run(line: str, fake: Path | None = None) -> "subprocess.CompletedProcess[str]":
        loaded = f"{fake}/librt_fake.so:{fake}/libcudnn.so.9"
        libraries = {"LD_LIBRARY_PATH": str(fake), "LD_PRELOAD": loaded} if fake else {}
        known = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
        environment = known | {"PYTHONPATH": str(link)} | libraries
        return subprocess.run(
            [card_python, "-c", line], env=environment, cwd=link, capture_output=True, text=True, timeout=300
        )

    return run


def checks(ran: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    """Why each engine is not usable, of a doctor's report, which must be JSON and nothing else."""
    return {check["name"]: check["reason"] for check in json.loads(ran.stdout)["engines"]}


DOCTOR = "import sys; from mdps.cli import main; sys.argv[1:] = ['doctor', '--json']; main()"


def test_without_a_driver_the_report_is_json_and_names_what_is_missing(run: Run) -> None:
    """CUDA and cuDNN were found in NVIDIA's wheels, which no loader finds by itself: only the driver is missed."""
    reasons = checks(run(DOCTOR))
    assert "libcuda.so.1" in reasons["onnxruntime-cuda"]
    assert "install NVIDIA's driver" in reasons["onnxruntime-cuda"]
    assert "libnvinfer.so.10" in reasons["onnxruntime-tensorrt"]
    assert 'pip install "mdps[gpu-tensorrt]"' in reasons["onnxruntime-tensorrt"]


def test_with_a_card_the_provider_itself_computes(run: Run, fake: Path) -> None:
    assert "computed [0.0, 0.0]" in checks(run(DOCTOR, fake))["onnxruntime-cuda"]
