"""The Node program of examples/ judges a picture by the one file as the bundle does."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mdps.export.single_file import export_single_file
from mdps.runtime import load

ROOT = Path(__file__).resolve().parents[2]


def missing(reason: str) -> None:
    if os.environ.get("MDPS_CI"):  # a run that decides must not pass because its proof was missing
        pytest.fail(reason)
    pytest.skip(reason)


def test_the_node_program_says_what_it_is_given_wrongly(tmp_path: Path) -> None:
    if shutil.which("node") is None:
        missing("node is not installed")
    shutil.copy(ROOT / "examples" / "node" / "detect.js", tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    read = "() => { throw new Error('Invalid file signature') }"
    stand_ins = {
        "pngjs": f"export const PNG = {{ sync: {{ read: {read} }} }};",
        "onnxruntime-node": "export default {};",
    }
    for name, source in stand_ins.items():
        package = tmp_path / "node_modules" / name
        package.mkdir(parents=True)
        (package / "index.js").write_text(source)
        (package / "package.json").write_text('{"type": "module", "exports": "./index.js"}')
    (tmp_path / "notes.txt").write_text("no picture")
    said = []
    for given in ([], ["d.onnx"], ["d.onnx", "notes.txt"], ["d.onnx", "gone.png"]):
        done = subprocess.run(
            ["node", "detect.js", *given], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        said.append((done.returncode, done.stdout, done.stderr))
    usage = (2, "", "usage: node detect.js detector.onnx part.png\n")
    assert said[:2] == [usage, usage]
    assert said[2] == (1, "", "notes.txt cannot be read as a PNG file: Invalid file signature\n")
    assert said[3][2].startswith("gone.png cannot be read as a PNG file: ENOENT")


def test_the_node_program(line_bundle: Path, line_images: list[bytes], tmp_path: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        missing("node or npm is not installed")
    program = tmp_path / "node"
    shutil.copytree(ROOT / "examples" / "node", program, ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(install, cwd=program, capture_output=True, text=True, check=False)
    if done.returncode:
        missing(f"npm could not install the example's packages: {done.stderr[-300:]}")
    part = tmp_path / "part.png"
    part.write_bytes(line_images[0])
    detector_file = export_single_file(line_bundle, tmp_path / "alone.onnx")
    command = ["node", "detect.js", str(detector_file), str(part)]
    printed = subprocess.run(command, cwd=program, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    found = json.loads(printed.stdout)
    with load(line_bundle, threads=1, warm_up=False) as detector:
        wanted = detector(part)
    assert abs(found["score"] - wanted.score) < 1e-4
    assert found["verdict"] == wanted.verdict
    assert found["map"] == [16, 16]
