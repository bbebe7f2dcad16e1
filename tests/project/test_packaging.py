"""The wheel contains the package and no more, the metadata is complete, and a build can be repeated."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mdps import __version__
from mdps.runtime.engines import ENGINES, named

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"commands", "runtime", "models", "export", "training", "serving", "tuning", "benchmarks"}
ROOT_FILES = ("__init__.py", "__init__.pyi", "cli.py", "py.typed", "pyproject.toml", "MANIFEST.in", "README.md")
SOURCE = [*PACKAGES, *ROOT_FILES, "LICENSE", "CHANGELOG.md", "constraints.txt", "tools", "tests", "docs"]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with a source archive and a wheel: made of the archive, and of a tree whose files are a day older.

    Of copies, because a build leaves folders in the tree that other tests would see.
    """
    return [build(tmp_path_factory.mktemp("tree"), age) for age in (0, 86_400)]


def build(tree: Path, age: int) -> Path:
    for name in SOURCE:
        source = ROOT / name
        shutil.copytree(source, tree / name) if source.is_dir() else shutil.copy(source, tree / name)
    for path in tree.rglob("*"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    command = [sys.executable, "-m", "build", "--no-isolation", *(["--sdist", "--wheel"] if age else []), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel_files(built: list[Path]) -> set[str]:
    """Names in the wheel that was made of the source archive."""
    with zipfile.ZipFile(next(built[0].glob("*.whl"))) as archive:
        return set(archive.namelist())


def test_two_builds_are_equal_to_the_byte(built: list[Path]) -> None:
    one, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in built)
    assert {name.rsplit(".", 1)[1] for name in one} == {"whl", "gz"}
    assert one == other


def test_the_wheel_has_only_the_package_and_its_metadata(wheel_files: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_files}
    assert tops == {"mdps", f"mdps-{__version__}.dist-info"}


def test_the_top_of_the_package_is_two_modules_and_what_type_checkers_read(wheel_files: set[str]) -> None:
    inside = {name.split("/", 1)[1] for name in wheel_files if name.startswith("mdps/")}
    assert {name for name in inside if "/" not in name} == {"__init__.py", "__init__.pyi", "cli.py", "py.typed"}
    assert {name.split("/")[0] for name in inside if "/" in name} == PACKAGES


def test_every_module_of_every_package_is_in_the_wheel(wheel_files: set[str]) -> None:
    for package in PACKAGES:
        modules = {f"mdps/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / package).rglob("*.py")}
        assert modules <= wheel_files


def test_files_that_are_no_modules_and_the_licence_travel(wheel_files: set[str]) -> None:
    """The demo's checkpoint, the paper's numbers, the page: an editable install finds them even if a wheel does not."""
    left_out = {"results", "__pycache__"}
    for package in PACKAGES:
        paths = [path for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix != ".py"]
        data = {path.relative_to(ROOT) for path in paths if not left_out & set(path.parts)}
        assert {f"mdps/{path.as_posix()}" for path in data} <= wheel_files
    assert f"mdps-{__version__}.dist-info/licenses/LICENSE" in wheel_files


def test_the_installed_version_is_the_source_version() -> None:
    try:
        installed = importlib.metadata.version("mdps")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mdps is on the path but not installed")
    assert installed == __version__


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_resolves(extra: str) -> None:
    """Its packages can be installed together, by what the registry says of them; none is fetched."""
    uv = pytest.importorskip("uv", reason="uv is in mdps[dev], and not installed here")
    command = [uv.find_uv_bin(), "pip", "compile", "--quiet", "--extra", extra, str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "pypi.nvidia.com" in done.stderr:
        pytest.skip("NVIDIA's own registry, where TensorRT's libraries lie, cannot be reached")
    assert done.returncode == 0, done.stderr
    assert "\nnumpy==" in done.stdout


def test_constraints_pin_every_direct_dependency() -> None:
    wanted = [
        *PROJECT["dependencies"],
        *(item for extra in ("cpu", "export", "train", "bench", "serve", "dev") for item in EXTRAS[extra]),
    ]
    names = {requirement.split("[")[0].split(">")[0].split("=")[0] for requirement in wanted} - {"mdps"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    assert names <= pinned


def test_an_extra_brings_what_its_engine_loads() -> None:
    """CUDA with ONNX Runtime, whose graphs replay without waiting from 1.31 on; TensorRT 10 with its provider."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {engine.extra for engine in ENGINES} <= set(extras)
    gpu = {one.name: one for one in map(Requirement, extras["gpu"])}["onnxruntime-gpu"]
    assert gpu.extras == {"cuda", "cudnn"}
    assert (gpu.specifier.contains("1.30"), gpu.specifier.contains("1.31.1")) == (False, True)
    provider = {one.name: one for one in map(Requirement, extras[named("onnxruntime-tensorrt").extra])}
    assert provider["mdps"].extras == {"gpu"}
    releases = {version: provider["tensorrt"].specifier.contains(version) for version in ("10.8", "10.16.1.11", "11.4")}
    assert releases == {"10.8": False, "10.16.1.11": True, "11.4": False}
