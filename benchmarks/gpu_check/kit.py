"""A folder to carry to a machine without a network: `python -m mdps.benchmarks.gpu_check.kit --out KIT`.

It holds wheels of mdps and of all it needs there, prepared bundles with plans and the oracle's numbers, in parts of a
chosen size with a sum each, and `run.sh`, which joins, checks, installs and runs `mdps gpu-check`. What is there
already is used again, so a run that was stopped goes on.
"""

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mdps
from mdps.benchmarks.gpu_check import items
from mdps.benchmarks.kit import Say, exit_code, last_words, quiet, say_on_stderr
from mdps.runtime.atomic import write_bytes, write_text
from mdps.runtime.errors import MdpsError, UsageError, require
from mdps.runtime.machine import versions

EXTRAS = ("gpu", "tensorrt-rtx")
TORCH_EXTRAS = ("export", "bench")
LIBRARIES = ("onnxruntime-gpu[cuda,cudnn]", "cuda-bindings", "nvidia-cuda-runtime")
"""Packages that the extras leave out: CUDA and cuDNN as ONNX Runtime wants them, and the calls into the driver."""
THINGS = (
    "demo:photographs",
    "demo:fp16:tensorrt-rtx",
    "demo:fp32:tensorrt-rtx",
    "demo:oracle",
    "authors:fp16:tensorrt-rtx",
    "authors:oracle",
    "authors:fp16x16:tensorrt-rtx",
)
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
TEXTS = (".py", ".toml", ".md", ".typed", "")
LEFT_OUT = shutil.ignore_patterns(".*", "results", "__pycache__")
SUMS, MANIFEST, RUN, PART = "SHA256SUMS", "manifest.json", "run.sh", "kit.tar."


@dataclass(frozen=True)
class KitOptions:
    """For which machine, and what goes along. `find_links` and `no_index` are pip's; `wheel` stands in for our own."""

    python: str = f"{sys.version_info[0]}.{sys.version_info[1]}"
    platform: str = "manylinux_2_28_x86_64"
    extras: tuple[str, ...] = EXTRAS
    libraries: tuple[str, ...] = LIBRARIES
    with_torch: bool = False
    things: tuple[str, ...] = THINGS
    capabilities: str | None = None
    part_size: int = 60 * 10**6
    find_links: Path | None = None
    no_index: bool = False
    wheel: Path | None = None

    def __post_init__(self) -> None:
        require(self.part_size >= 1000, f"a part should hold at least 1 KB, not {self.part_size} bytes")
        for thing in self.things:  # before gigabytes of wheels are fetched
            items.parsed(thing)
        require(
            re.fullmatch(r"3\.\d+", self.python) is not None, f"{self.python!r} is no version of Python such as 3.12"
        )

    @property
    def requirements(self) -> list[str]:
        """The packages that pip is asked for there."""
        extras = (*self.extras, *(TORCH_EXTRAS if self.with_torch else ()))
        return [f"mdps[{','.join(extras)}]" if extras else "mdps", *self.libraries]


def make_kit(out: Path, options: KitOptions, say: Say = quiet) -> dict[str, Any]:
    """Fills the folder `out`; what the manifest says. MdpsError where pip finds no wheel or a thing cannot be made."""
    source = None if options.wheel else source_tree()  # asked before any folder is made
    staging = out.with_name(out.name + ".staging")  # wheels and bundles, kept for the next run
    for folder in (out, staging / "wheels", staging / "prepared"):
        folder.mkdir(parents=True, exist_ok=True)
    say("collecting wheels")
    _wheels(staging / "wheels", options, source)
    if options.things:
        say("preparing bundles")
        _prepare(staging / "prepared", options)
    write_text(staging / "requirements.txt", "\n".join(options.requirements) + "\n")
    files = _files(staging, options.with_torch)
    say(f"writing {len(files)} files in parts")
    parts = _split(files, staging, out, options.part_size)
    manifest = {
        "python": options.python,
        "platform": options.platform,
        "requirements": options.requirements,
        "parts": parts,
        "files": {str(path.relative_to(staging)): path.stat().st_size for path in files},
        "versions": versions("torch", "onnx", "tensorrt-rtx-cu13-libs"),
    }
    script = (Path(__file__).parent / RUN).read_text(encoding="utf-8")
    write_text(out / RUN, script.replace("@PYTHON@", options.python))
    write_text(out / SUMS, "".join(f"{sum_}  {name}\n" for name, sum_ in parts.items()))
    write_text(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _wheels(folder: Path, options: KitOptions, source: Path | None) -> None:
    for old in folder.glob("mdps-*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="mdps-kit-") as built:
        own = _own_wheel(source, Path(built), options) if source else options.wheel
        assert own is not None
        own = Path(shutil.copy(own, folder))
    wanted = [options.requirements[0].replace("mdps", str(own), 1), *options.requirements[1:]]
    command = [
        "download", "--quiet", "--dest", str(folder), "--only-binary", ":all:", "--implementation", "cp",
        "--python-version", options.python, *_platforms(options.platform), *_sources(options), *wanted,
    ]  # fmt: skip
    _pip(command)


def source_tree() -> Path:
    """Where mdps was installed from in place, or else the working directory; UsageError where neither is its source."""
    for root in (Path(mdps.__file__).parent, Path.cwd()):
        try:
            if _project(root)["project"]["name"] == "mdps":
                return root
        except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError):
            continue
    raise UsageError(
        f"mdps is installed without its source, and {Path.cwd()} is no clone of its repository: run this in a clone, "
        "or give --mdps-wheel"
    )


def _project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def _own_wheel(root: Path, folder: Path, options: KitOptions) -> Path:
    """Built of what the wheel needs alone: a clone that is worked in also holds bundles, kits and environments."""
    tree = folder / "tree"
    tree.mkdir()
    packages = {name.split(".")[1] for name in _project(root)["tool"]["setuptools"]["packages"] if "." in name}
    for path in root.iterdir():
        if path.name in packages:
            shutil.copytree(path, tree / path.name, ignore=LEFT_OUT)
        elif path.is_file() and path.suffix in TEXTS:  # a checkpoint of gigabytes may lie beside them
            shutil.copy(path, tree)
    isolation = ["--no-build-isolation"] if options.no_index else []
    _pip(["wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", str(folder), str(tree)])
    (wheel,) = folder.glob("mdps-*.whl")
    return wheel


def _platforms(platform: str) -> list[str]:
    """The platform with the older ones whose wheels run on it too: pip takes each by its name only."""
    names = [platform]
    if found := re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform):
        names = [f"manylinux_2_{minor}_{found[2]}" for minor in range(int(found[1]), 4, -1)]
        names += [f"{old}_{found[2]}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    return [argument for name in names for argument in ("--platform", name)]


def _sources(options: KitOptions) -> list[str]:
    links = ["--find-links", str(options.find_links)] if options.find_links else []
    return links + (["--no-index"] if options.no_index else [])


def _pip(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1].removeprefix("ERROR: ") if said else f"pip ended with code {done.returncode}"
        raise MdpsError(f"the wheels cannot be had: {reason}")


def _prepare(folder: Path, options: KitOptions) -> None:
    capability = ["--compute-capability", options.capabilities] if options.capabilities else []
    command = [sys.executable, "-m", "mdps.benchmarks.gpu_check.prepare", *options.things, "--work", str(folder)]
    done = subprocess.run([*command, *capability], stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        raise MdpsError(f"the bundles cannot be made: {last_words(done).removeprefix('error: ') or 'no reason given'}")


def _files(staging: Path, with_torch: bool) -> list[Path]:
    """All that travels. Only torch reads the large network's checkpoint."""
    found = [path for path in sorted(staging.rglob("*")) if path.is_file()]
    return [path for path in found if with_torch or path.name != "authors.safetensors"]


def _split(files: Sequence[Path], root: Path, out: Path, size: int) -> dict[str, str]:
    """One tar file in parts: {name: sum}. Parts that are there and right are not written again."""
    writer = _Parts(out, size)
    with tarfile.open(fileobj=writer, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for path in files:
            info = archive.gettarinfo(path, str(path.relative_to(root)))
            info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode = 0, 0, 0, "", "", 0o644
            with path.open("rb") as file:
                archive.addfile(info, file)
    writer.close()
    for old in out.glob(f"{PART}*"):
        if old.name not in writer.sums:
            old.unlink()
    return writer.sums


class _Parts(io.RawIOBase):
    """Cuts what is written into files of a size."""

    def __init__(self, out: Path, size: int) -> None:
        self._out, self._size, self._kept = out, size, bytearray()
        self.sums: dict[str, str] = {}

    def write(self, data: Any) -> int:
        self._kept += data
        while len(self._kept) >= self._size:
            self._store(bytes(self._kept[: self._size]))
            del self._kept[: self._size]
        return len(data)

    def close(self) -> None:
        if not self.closed and self._kept:
            self._store(bytes(self._kept))
            self._kept.clear()
        super().close()

    def _store(self, data: bytes) -> None:
        name = f"{PART}{len(self.sums):04d}"
        self.sums[name] = hashlib.sha256(data).hexdigest()
        path = self._out / name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == self.sums[name]:
            return
        write_bytes(path, data)


def size_of(text: str) -> int:
    """Bytes of "60MB" or "64MiB"; UsageError for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise UsageError(f"{text!r} is no size such as 60MB or 64MiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def main(argv: list[str] | None = None) -> int:
    """Run the command; what goes wrong is one sentence on stderr."""
    known = KitOptions()
    parser = argparse.ArgumentParser(prog="mdps.benchmarks.gpu_check.kit", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder; OUT.staging beside it keeps what it is made of"
    )
    parser.add_argument("--part-size", default="60MB", help="of each file [60MB]")
    parser.add_argument("--python", default=known.python, help=f"version there [{known.python}]")
    parser.add_argument("--platform", default=known.platform, help=f"of the wheels [{known.platform}]")
    parser.add_argument("--extras", type=_some, default=EXTRAS, help=f"of mdps, or none [{','.join(EXTRAS)}]")
    parser.add_argument(
        "--libraries", type=lambda text: _some(text, None), default=LIBRARIES,
        help=f"other packages, between spaces, or none: CUDA's, which --extras none does not leave out "
        f"[{' '.join(LIBRARIES)}]",
    )  # fmt: skip
    parser.add_argument("--with-torch", action="store_true", help="torch and all that exports, some 3 GB")
    parser.add_argument(
        "--things", type=_some, default=THINGS, help=f"to prepare, between commas, or none: {items.THINGS}"
    )
    parser.add_argument(
        "--compute-capability", dest="capabilities", help="of the cards that plans are for [8.6,8.9,12.0]"
    )
    parser.add_argument("--find-links", type=Path, help="folder with wheels to take from")
    parser.add_argument("--no-index", action="store_true", help="take wheels from --find-links only")
    parser.add_argument("--mdps-wheel", type=Path, dest="wheel", help="wheel of mdps [built from this clone]")
    return exit_code(lambda: _run(**vars(parser.parse_args(argv))))


def _some(text: str, between: str | None = ",") -> tuple[str, ...]:
    return () if text == "none" else tuple(text.split(between))


def _run(out: Path, part_size: str, **given: Any) -> None:
    options = KitOptions(part_size=size_of(part_size), **given)
    try:
        manifest = make_kit(out, options, say_on_stderr)
    except OSError as error:
        raise MdpsError(f"{out} cannot be written: {error}") from error
    print(f"wrote {out} in {len(manifest['parts'])} parts; there: sh {RUN}")


if __name__ == "__main__":
    sys.exit(main())
