"""The runtime as a line installs it: base and [cpu] in an environment of its own, without torch, small and quick."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mdps.runtime import load

ROOT = Path(__file__).resolve().parents[2]
MOST_MEGABYTES = 350
MOST_SECONDS = 0.4
NOT_OURS = ("pip", "setuptools", "_distutils_hack", "pkg_resources")
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "tests", "out", "runs", "__pycache__", "*.egg-info", "demo-report"
)


class Lean:
    """A virtual environment with nothing but `pip install .[cpu]`."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        # A copy, because a build leaves folders in the tree that it builds from.
        shutil.copytree(ROOT, folder / "tree", ignore=LEFT_OUT, symlinks=True)
        install = ["-m", "pip", "install", "--quiet", f"{folder / 'tree'}[cpu]", "-c", str(ROOT / "constraints.txt")]
        self.python(*install)

    def python(self, *arguments: str) -> str:
        """Runs Python there, away from the checkout, and gives what it printed."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.bin / "python"), *arguments],
            cwd=self.bin,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def packages(self) -> Path:
        return Path(self.python("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(tmp_path_factory.mktemp("lean"))


def test_torch_and_what_only_export_needs_are_absent(lean: Lean) -> None:
    installed = {item["name"] for item in json.loads(lean.python("-m", "pip", "list", "--format", "json"))}
    assert {"mdps", "numpy", "pillow", "click", "onnxruntime"} <= installed
    assert not installed & {"torch", "torchvision", "timm", "onnx", "onnxscript", "scikit-learn", "matplotlib", "scipy"}


def test_the_installed_size_is_bounded(lean: Lean) -> None:
    files = [path for path in lean.packages().rglob("*") if path.is_file() and not path.is_symlink()]
    top = len(lean.packages().parts)
    counted = [path for path in files if not path.parts[top].startswith(NOT_OURS)]
    megabytes = sum(path.stat().st_size for path in counted) / 1e6
    assert megabytes < MOST_MEGABYTES


def test_the_runtime_imports_quickly(lean: Lean) -> None:
    def seconds(code: str) -> float:
        """Processor time, which neighbours on a busy machine do not lengthen as they do the clock's."""
        before = os.times()
        lean.python("-c", code)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    assert min(seconds("import mdps.runtime") for _ in range(3)) - min(seconds("") for _ in range(3)) < MOST_SECONDS


def test_the_doctor_finds_it_working(lean: Lean) -> None:
    report = json.loads(lean.python("-m", "mdps.cli", "doctor", "--json"))
    assert report["works"] is True
    assert report["problems"] == []
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
