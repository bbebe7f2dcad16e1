"""Dependencies point one way, and the runtime lives without torch."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("runtime", "models", "export", "training", "serving", "benchmarks", "commands")
ALLOWED = {
    "runtime": set(),
    "models": {"runtime"},
    "export": {"models", "runtime"},
    "training": {"models", "runtime"},
    "serving": {"runtime"},
    "benchmarks": {"runtime"},
    "commands": set(PARTS),
}
# The demos, their network and a study of training walk the whole path, as the commands do; nothing else imports them.
WHOLE_PATH = {
    "benchmarks/demo.py",
    "benchmarks/demo_detector.py",
    "benchmarks/short_training.py",
    "benchmarks/random_denoiser.py",
    "benchmarks/gpu_check/prepare.py",
}
# What `mdps bench` compares with: our network in torch. Processes of their own run it, so it is no part of a line.
ALSO_MODELS = {"benchmarks/bench/eager.py", "benchmarks/bench/local.py", "benchmarks/peers/fitting.py"}
# An evaluation is shown with the pictures and pages of an inspection.
ALSO_SERVING = {f"benchmarks/evaluate/{name}.py" for name in ("bundle", "gallery", "report")}
ALSO_SERVING |= {"benchmarks/missing.py"}  # draws large missing parts as a calibration draws defects
# A table of the paper needs a bundle a variant, a comparison one a method and size; a study of precision writes graphs.
ALSO_EXPORT = {"benchmarks/study/__init__.py", "benchmarks/bench/reexport.py", "benchmarks/trade/bundles.py"}
RUNTIME_MODULES = sorted(
    ".".join(path.relative_to(ROOT / "runtime").with_suffix("").parts)
    for path in (ROOT / "runtime").rglob("*.py")
    if path.stem != "__init__"
)
RUNTIME_LIBRARIES = {"numpy", "PIL", "mdps"}


def imported(path):
    """Every module a file imports anywhere, also inside functions, as dotted names."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def parts_of(names):
    return {name.split(".")[1] for name in names if name.startswith("mdps.")} & set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_dependencies_point_one_way(part):
    for path in (ROOT / part).rglob("*.py"):
        if path.relative_to(ROOT).as_posix() in WHOLE_PATH:
            continue
        name = path.relative_to(ROOT).as_posix()
        also = ({"models"} if name in ALSO_MODELS else set()) | ({"serving"} if name in ALSO_SERVING else set())
        also |= {"export", "models"} if name in ALSO_EXPORT else set()
        wrong = parts_of(imported(path)) - ALLOWED[part] - {part} - also
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_nothing_but_the_command_line_imports_what_walks_the_whole_path():
    names = {path[:-3].replace("/", ".") for path in WHOLE_PATH}
    for part in set(PARTS) - {"commands"}:
        for path in (ROOT / part).rglob("*.py"):
            if path.relative_to(ROOT).as_posix() not in WHOLE_PATH:
                assert not [name for name in imported(path) if any(f"mdps.{whole}" in name for whole in names)], path


def test_only_the_commands_know_the_library_of_the_command_line():
    for part in set(PARTS) - {"commands"}:
        for path in (ROOT / part).rglob("*.py"):
            assert "click" not in {name.split(".")[0] for name in imported(path)}, path


def test_the_oracle_computes_its_own():
    path = ROOT / "models" / "oracle.py"
    assert path.is_file()
    assert "runtime" not in parts_of(imported(path))


def test_the_root_stays_light():
    outside = {name.split(".")[0] for name in imported(ROOT / "__init__.py")} - set(sys.stdlib_module_names)
    assert not outside


def test_the_runtime_uses_numpy_pillow_and_one_engine_library_a_module():
    engines = {
        "engines/onnxruntime": {"onnxruntime"},
        "engines/openvino": {"openvino"},
        "engines/mnn": {"MNN"},
        "engines/torch": {"torch"},
        "cards": {"pynvml"},
        "device/cuda": {"cuda", "pycuda"},
        "registration": {"cv2"},
    }
    for path in (ROOT / "runtime").rglob("*.py"):
        module = path.relative_to(ROOT / "runtime").with_suffix("").as_posix()
        libraries = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names)
        wrong = libraries - RUNTIME_LIBRARIES - engines.get(module, set())
        assert not wrong, f"runtime/{path.name} imports {', '.join(sorted(wrong))}"


WITHOUT_TORCH = """
import builtins, importlib, json, sys
real = builtins.__import__
def refuse(name, *args, **kwargs):
    if name.split(".")[0] in ("torch", "timm", "onnx", "click"):
        raise AssertionError("imported " + name)
    return real(name, *args, **kwargs)
builtins.__import__ = refuse
import mdps.runtime
for name in json.loads(sys.argv[1]):
    importlib.import_module("mdps.runtime." + name)
engines = {"torch", "onnxruntime", "openvino", "MNN", "PIL.Image"}
assert not engines & set(sys.modules), "an engine was loaded before it was needed"
for name in mdps.runtime.__all__:
    getattr(mdps.runtime, name)
"""


def test_every_module_of_the_runtime_imports_without_torch_and_engines():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, json.dumps(RUNTIME_MODULES)], check=True)


TIMED = "import time; t = time.process_time(); import mdps.runtime; print(time.process_time() - t)"


def test_the_runtime_imports_in_no_time():
    """Processor time, the best of five: on a busy machine the clock says nothing."""
    times = [
        float(subprocess.run([sys.executable, "-c", TIMED], check=True, capture_output=True, text=True).stdout)
        for _ in range(5)
    ]
    assert min(times) < 0.4
