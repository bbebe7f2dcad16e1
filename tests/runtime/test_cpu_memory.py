"""Memory on the CPU: what is refused before it starts, and that what is allowed fits."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mdps.commands.terminal import run
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.errors import UsageError
from mdps.runtime.loading import load
from mdps.runtime.manifest import Manifest
from mdps.runtime.memory import (
    Need,
    Room,
    bundle_need,
    check_batch,
    check_bundle,
    check_export,
    check_room,
    check_training,
    rooms,
)

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1_200_000  # kB of addresses, as `ulimit -v` takes them
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of these limits")


def _files(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _rooms(tmp_path: Path, group: str) -> list[Room]:
    return list(rooms(tmp_path / "proc", _files(tmp_path, cgroup=group) / "cgroup", tmp_path / "sys"))


def test_a_machine_without_limits_has_what_is_available_and_its_swap(tmp_path: Path) -> None:
    _files(tmp_path / "proc", meminfo="MemTotal: 9000 kB\nMemAvailable: 300 kB\nSwapFree: 100 kB\nHugePages: 0\n")
    assert [(room.bytes, room.mapped) for room in _rooms(tmp_path, "0::/\n")] == [(400 * 1024, False)]


def test_a_group_of_version_2_counts_what_it_uses_but_not_cached_files_and_so_do_those_above_it(tmp_path: Path) -> None:
    sys_folder = tmp_path / "sys"
    stat = "anon 5\ninactive_file 40\n"
    _files(sys_folder / "a" / "b", memory_DOT_max="1000", memory_DOT_current="700", memory_DOT_stat=stat)
    _files(sys_folder / "a", memory_DOT_max="max", memory_DOT_current="900")
    _files(sys_folder, memory_DOT_max="800", memory_DOT_current="790")
    assert [room.bytes for room in _rooms(tmp_path, "0::/a/b\n")] == [340, 10]


def test_a_group_of_version_1_without_a_limit_bounds_nothing(tmp_path: Path) -> None:
    sys_folder = tmp_path / "sys" / "memory"
    names = {"memory_DOT_limit_in_bytes": "500", "memory_DOT_usage_in_bytes": "600"}
    _files(sys_folder / "jobs", **names)
    _files(sys_folder, **names | {"memory_DOT_limit_in_bytes": str(2**63 - 4096)})
    assert [room.bytes for room in _rooms(tmp_path, "4:memory:/jobs\n0::/\n")] == [0]


def _bound(monkeypatch: pytest.MonkeyPatch, size: int, mapped: bool = False) -> None:
    monkeypatch.setattr("mdps.runtime.memory.rooms", lambda: iter([Room(size, "a bound", mapped)]))


def test_the_sentence_has_both_figures_and_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Need({"weights": 2 * 10**9, "arrays": 10**9}, mapped=5 * 10**9)
    _bound(monkeypatch, 3 * 10**9)
    check_room(need, "it", "lower it")  # what is only reserved is not used
    _bound(monkeypatch, 4 * 10**9, mapped=True)
    with pytest.raises(UsageError, match=r"it needs 8\.0 GB .*weights 2\.0.*there are 4\.0 GB \(a bound\): lower it"):
        check_room(need, "it", "lower it")


def test_a_bundle_is_refused_before_anything_is_opened(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _bound(monkeypatch, 2 * 10**9)
    monkeypatch.setattr("mdps.runtime.loading.module_of", lambda *_: pytest.fail("a graph was opened"))
    for engine in ("onnxruntime", "auto", "openvino"):
        with pytest.raises(UsageError, match=r"with 4096 samples needs .*lower --samples"):
            load(tiny_bundle, samples=4096, calibrated=False, engine=engine)


def test_a_card_is_not_asked_for_the_memory_of_the_machine(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _bound(monkeypatch, 0)
    bundle = Bundle.read(tiny_bundle)
    for engine in ("tensorrt", "onnxruntime-cuda"):
        check_bundle(bundle, LoadOptions(engine=engine))
    with pytest.raises(UsageError):
        check_bundle(bundle, LoadOptions())


def test_a_large_batch_is_refused_for_the_samples_it_keeps(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _bound(monkeypatch, 0)
    manifest = Manifest.read(tiny_bundle)
    check_batch(manifest, manifest.settings, 8)
    with pytest.raises(UsageError, match=r"30000 images at once .*lower --batch"):
        check_batch(manifest, manifest.settings, 30000)


def test_more_of_anything_needs_more_and_no_bundle_needs_nothing(tiny_bundle: Path) -> None:
    manifest = Manifest.read(tiny_bundle)

    def need(samples: int, max_batch: int, engine: str = "onnxruntime") -> int:
        return bundle_need(manifest, LoadOptions(samples=samples).override(manifest.settings), engine, max_batch).total

    assert 0 < need(1, 1) < need(8, 1) < need(8, 8) < need(64, 8)
    old = replace(manifest, network={k: v for k, v in manifest.network.items() if k != "live_bytes"})
    assert bundle_need(old, manifest.settings, "onnxruntime", 8).total > 0


def test_an_export_and_a_training_are_refused(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest.read(tiny_bundle)
    _bound(monkeypatch, 4 * 10**9)
    check_export(manifest.network, (32, 32), manifest.settings)
    with pytest.raises(UsageError, match="lower --samples"):
        check_export(manifest.network, (32, 32), LoadOptions(samples=4096).override(manifest.settings))
    check_training(manifest.network, (32, 32), 8, 1)
    with pytest.raises(UsageError, match="lower --batch"):
        check_training(manifest.network, (32, 32), 8192, 1)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("can't start new thread")]
)
def test_memory_that_is_used_up_all_the_same_ends_as_a_sentence(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import click

    def work() -> None:
        raise error

    assert run(click.Command("work", callback=work), []) == 1
    said = capsys.readouterr().err
    assert "is used up" in said
    assert "unexpected" not in said


@pytest.fixture(scope="module")
def line_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three grey pictures."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("good")
    for value in (90, 120, 150):
        Image.new("RGB", (40, 40), (value,) * 3).save(folder / f"{value}.png")
    return folder


@linux
@pytest.mark.parametrize("command", ["predict", "calibrate", "serve", "evaluate", "export", "train"])
def test_under_1200_mb_of_addresses_each_command_refuses_within_seconds(
    command: str,
    tiny_bundle: Path,
    small_checkpoint: Path,
    line_folder: Path,
    tmp_path: Path,
    write_category: Callable[..., Path],
) -> None:
    out = str(tmp_path / "out")
    arguments = {
        "predict": [str(tiny_bundle), str(line_folder), "--out", out, "--samples", "4096", "--scores-only"],
        "calibrate": [str(tiny_bundle), str(line_folder), "--samples", "4096"],
        "serve": [str(tiny_bundle), "--samples", "4096", "--scores-only"],
        "evaluate": [str(tiny_bundle), str(write_category(tmp_path / "disc")), "--samples", "4096"],
        "export": ["--ckpt", str(small_checkpoint), "--out", out, "--samples", "4096"],
        "train": [str(line_folder), "--out", out, "--recipe", "small", "--batch", "4096"],
    }[command]
    main = [sys.executable, "-c", "from mdps.cli import main; main()", command, *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        ["bash", "-c", f'ulimit -v {LIMIT}; exec "$@"', "-", *main], capture_output=True, text=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 2, ended.stderr
    assert "GB of memory" in ended.stderr
    assert re.search(r"there are [01]\.\d GB \(left of the limit that `ulimit -v` shows\)", ended.stderr)
    assert "Traceback" not in ended.stderr
    # Of the processor's time, which a busy machine does not stretch; an evaluation imports twice as much.
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took < (10 if command == "evaluate" else 5)


_JUDGE = r"""
import json, re, sys, numpy
import mdps.serving.calibrate, mdps.serving.report
from pathlib import Path
from mdps.runtime import load
from mdps.runtime.memory import bundle_need
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.manifest import Manifest
path, engine, samples, at_once, images = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
peak = lambda: 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
manifest = Manifest.read(path)
settings = LoadOptions(samples=samples).override(manifest.settings)
need = peak() + bundle_need(manifest, settings, engine, at_once).total
detector = load(path, engine=engine, samples=samples, max_batch=at_once, calibrated=False, warm_up=False, threads=2)
pictures = numpy.random.default_rng(0).integers(0, 256, (images, *manifest.preprocessing.network_size, 3), numpy.uint8)
detector.batch(list(pictures))
print(json.dumps([need, peak()]))
"""
# network, size, engine, samples, samples at once, images at once
COMBINATIONS = [
    ("small", 64, "onnxruntime", 1, 1, 1), ("small", 64, "onnxruntime", 16, 8, 4),
    ("small", 128, "onnxruntime", 4, 4, 1), ("small", 128, "onnxruntime", 12, 12, 2),
    ("wide", 64, "onnxruntime", 8, 8, 1), ("small", 64, "openvino", 8, 8, 2),
    ("small", 128, "openvino", 16, 8, 1), ("wide", 64, "openvino", 4, 4, 4),
    ("small", 128, "mnn", 8, 8, 1), ("wide", 64, "mnn", 16, 8, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def measured_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Exports an untrained network once: of scale-shift norms or, "wide", the paper's with half its channels."""
    from mdps.export import ExportOptions, export_bundle
    from mdps.models.checkpoints import save_denoiser
    from mdps.models.unet import UNet
    from mdps.runtime.schedule import NoiseSchedule
    from mdps.training.config import paper_network, small_network

    folder = Path(os.environ.get("MDPS_MEMORY_BUNDLES") or tmp_path_factory.mktemp("measured"))

    def make(kind: str, size: int) -> Path:
        bundle, checkpoint = folder / f"{kind}{size}", folder / f"{kind}{size}.safetensors"
        if not bundle.exists():
            network = small_network(size) if kind == "small" else paper_network(size, 32)
            save_denoiser(checkpoint, UNet(network), NoiseSchedule.linear())
            options = ExportOptions(backbone="random_tiny", noise_level=198, steps=3, engine="mnn")
            export_bundle(checkpoint, bundle, options)
        return bundle

    return make


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "engine", "samples", "at_once", "images"), COMBINATIONS)
def test_what_is_allowed_fits(
    kind: str,
    size: int,
    engine: str,
    samples: int,
    at_once: int,
    images: int,
    measured_bundle: Callable[[str, int], Path],
) -> None:
    pytest.importorskip({"mnn": "MNN"}.get(engine, engine))
    arguments = [str(measured_bundle(kind, size)), engine, *map(str, (samples, at_once, images))]
    ended = subprocess.run([sys.executable, "-c", _JUDGE, *arguments], capture_output=True, text=True, check=True)
    predicted, peak = json.loads(ended.stdout)
    print(  # a row as in docs/measure/results.md
        f"| {kind} {size} | {engine} | {samples} | {at_once} | {images} | {predicted / 1e6:.0f} | {peak / 1e6:.0f} "
        f"| {100 * (peak / predicted - 1):+.0f} % |"
    )
    assert 0.85 * predicted < peak < 1.1 * predicted
