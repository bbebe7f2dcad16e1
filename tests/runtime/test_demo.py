"""The detector inside the package judges its own pictures, and is the demo's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mdps
from mdps.benchmarks import demo
from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import doctor
from mdps.runtime.demo import FOLDER, VERDICTS
from mdps.runtime.errors import BackendError, UsageError
from mdps.runtime.manifest import Manifest

MOST_BYTES = 12e6
BUNDLE = FOLDER / "bundle"


@pytest.fixture(scope="module")
def proof() -> doctor.Diagnosis:
    return doctor.prove(doctor.diagnose())


def test_the_doctor_judges_the_pictures_of_the_package(proof: doctor.Diagnosis) -> None:
    assert proof.demo == VERDICTS == {"good": "pass", "bad": "fail"}
    assert proof.works
    assert proof.problems == ()


def test_a_wrong_verdict_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "demo_picture", lambda name: Image.new("RGB", (64, 64)))
    found = doctor.prove(doctor.diagnose())
    assert not found.works
    assert "install mdps again" in found.problems[-1]


def test_a_detector_that_does_not_load_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise BackendError("the engine fails")

    monkeypatch.setattr(doctor, "demo_detector", fail)
    assert run(cli, ["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["works"], told["demo"], told["problems"]) == (False, {}, ["the engine fails"])


def test_a_picture_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"no picture 'ugly'.*good, bad"):
        mdps.demo_picture("ugly")


def test_all_of_it_is_small_and_of_the_demos_checkpoint() -> None:
    from safetensors.numpy import load_file

    manifest = Manifest.read(BUNDLE)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < MOST_BYTES
    assert manifest.settings == demo.OPTIONS.settings((64, 64))
    kernel = load_file(demo.CHECKPOINT)["output_blocks.0.0.in_layers.2.weight"].astype(np.float16)
    assert kernel.tobytes() in (BUNDLE / "denoiser.weights").read_bytes()


def test_the_package_is_imported_without_numpy_until_something_is_asked_for() -> None:
    code = "import sys, mdps; print('numpy' in sys.modules, mdps.load.__name__, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "load", "True"]


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    absent: Any = "demo_detektor"
    with pytest.raises(AttributeError, match=absent):
        getattr(mdps, absent)
    names = Path(mdps.__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
    assert all(f"import {name} as {name}\n" in names for name in ("demo_detector", "demo_picture", "load"))
    assert {"demo_detector", "demo_picture", "load"} <= set(dir(mdps))


@pytest.mark.slow
def test_it_can_be_made_again_of_the_checkpoint(tmp_path: Path) -> None:
    """All but the manifest, which names the versions of what made it."""
    from mdps.benchmarks.demo_detector import make

    make(tmp_path / "files")
    made = {
        path.relative_to(FOLDER): path for path in FOLDER.rglob("*") if path.suffix in (".onnx", ".weights", ".png")
    }
    assert len(made) == 8
    assert [name for name, path in made.items() if path.read_bytes() != (tmp_path / "files" / name).read_bytes()] == []
