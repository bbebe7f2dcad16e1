"""A user's code against `mdps.runtime` type-checks strictly, so that their editors and checkers know our types."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USE = """
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import mdps
from mdps import runtime
from mdps.runtime import Calibration, CalibrationError, Detector, ImageError, MdpsError, Result, UsageError, load

version: str = mdps.__version__


def judge(folder: Path) -> Literal["pass", "fail"] | None:
    try:
        with load(folder, product="blue", threads=2, samples=1, seed=7) as detector:
            results: list[Result] = detector.batch([folder / "a.png", "b.png", Image.new("RGB", (8, 8))])
            frame: NDArray[np.uint8] = np.zeros((64, 64, 3), np.uint8)
            result = detector(frame)
    except (ImageError, CalibrationError) as error:
        code: int = error.exit_code
        raise SystemExit(code) from error
    anomaly_map: NDArray[np.float32] = result.anomaly_map
    mask: NDArray[np.bool_] = results[0].mask
    total: float = result.times["total"]
    threshold: float | None = result.threshold
    print(anomaly_map.max(), mask.any(), total, threshold, result.score + 1.0)
    return result.verdict


def calibrate(detector: Detector, good: list[Path]) -> Calibration:
    calibration = runtime.calibrate(detector, good, false_alarm_rate=0.01)
    low: float = calibration.threshold
    print(low)
    return calibration


kinds: tuple[type[MdpsError], ...] = (UsageError, ImageError)
"""

WRONG = {
    "load(7)": "arg-type",
    "load('bundle').inspect('a.png')": "arg-type",
    "load('bundle')('a.png').verdikt": "attr-defined",
    "load('bundle', sample=1)": "call-arg",
}


CONFIG = """[mypy]
strict = true
mypy_path = .
explicit_package_bases = true
[mypy-onnxruntime.*,openvino.*,MNN.*,cuda.*,pycuda.*,pynvml.*,tensorrt.*,tensorrt_rtx.*]
ignore_missing_imports = true
[mypy-torch.*]
# Not part of the interface, and half a minute to read.
follow_imports = skip
ignore_missing_imports = true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, in which mypy finds mdps through a link as the linter does."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mdps").symlink_to(ROOT)
    (folder / "mypy.ini").write_text(CONFIG)
    return folder


def check(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Strict mypy on `code`."""
    (folder / "use.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "use.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_users_code_checks_strictly(folder: Path) -> None:
    done = check(USE, folder)
    assert done.returncode == 0, done.stdout


def test_a_users_mistakes_are_found(folder: Path) -> None:
    done = check("from mdps.runtime import load\n" + "\n".join(WRONG) + "\n", folder)
    for line, kind in enumerate(WRONG.values(), start=2):
        assert any(text.startswith(f"use.py:{line}:") and f"[{kind}]" in text for text in done.stdout.splitlines()), (
            kind
        )


def test_every_public_name_exists_and_is_documented() -> None:
    import mdps.runtime as runtime

    for name in runtime.__all__:
        assert getattr(runtime, name).__doc__
