"""Faults where a detector really runs: odd mounts, consoles, editors, worker processes, plain pictures."""

import ast
import asyncio
import io
import json
import multiprocessing
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from PIL import Image

from mdps.benchmarks.data.samples import Sample
from mdps.benchmarks.demo import CHECKPOINT, OPTIONS
from mdps.commands.serve import _token
from mdps.commands.terminal import run
from mdps.export import export_bundle
from mdps.models.checkpoints.statements import read_sidecar
from mdps.runtime import load
from mdps.runtime.pictures import read_image
from mdps.runtime.pipeline import check_finite
from mdps.runtime.preprocessing import Observations

ROOT = Path(__file__).resolve().parents[2]
BOM = b"\xef\xbb\xbf"  # what Notepad and PowerShell write in front of UTF-8


def _ask(detector: Any, answer: Any) -> None:
    try:
        answer.send(detector(np.zeros((16, 16, 3), np.uint8)).score)
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn of every fork beside threads
def test_a_detector_in_a_forked_worker_says_so(line_bundle: Path) -> None:
    """As with gunicorn --preload: the engine's threads stay in the parent, and the worker would hang at its end."""
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe()
    with load(line_bundle, threads=2) as detector:
        worker = forking.Process(target=_ask, args=(detector, theirs), daemon=True)
        worker.start()
        assert ours.poll(30), "the worker does not answer"
        assert "load the bundle in each worker process" in str(ours.recv())
        worker.join(30)
        assert np.isfinite(detector(np.zeros((16, 16, 3), np.uint8)).score)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_bundle_mounted_as_links_works(line_bundle: Path, tmp_path: Path, backend: str) -> None:
    """As Kubernetes mounts volumes and as model caches store files; the graphs' weights are in files of their own."""
    pytest.importorskip(backend)
    (tmp_path / "mount").mkdir()
    try:
        (tmp_path / "mount" / "..data").symlink_to(line_bundle, target_is_directory=True)
    except OSError:
        pytest.skip("this user may make no links here")
    for file in line_bundle.iterdir():
        (tmp_path / "mount" / file.name).symlink_to(Path("..data") / file.name)
    picture = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    scores = []
    for folder in (line_bundle, tmp_path / "mount"):
        with load(folder, threads=1, engine=backend, warm_up=False) as detector:
            scores.append(detector(picture).score)
    assert scores[0] == scores[1]


def test_judging_writes_nothing_into_the_bundle(line_bundle: Path) -> None:
    """So that it may lie on a medium that cannot be written."""

    def state() -> list[tuple[str, int, int]]:
        entries = [line_bundle, *sorted(line_bundle.rglob("*"))]
        return [(str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in entries]

    before = state()
    with load(line_bundle, threads=1) as detector:
        detector(np.zeros((16, 16, 3), np.uint8))
    assert state() == before


@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (128, 128, 128), (255, 0, 7)])
def test_a_picture_of_one_colour_has_a_finite_score(line_bundle: Path, colour: tuple[int, int, int]) -> None:
    """Where a map's range is nothing, a feature has no length or a channel no spread, others divide by zero."""
    with load(line_bundle, threads=1, warm_up=False) as detector:
        result = detector(Image.new("RGB", (24, 24), colour))
        assert np.isfinite(result.score)
        assert np.isfinite(result.anomaly_map).all()
        if len(set(colour)) == 1:
            assert detector(Image.new("L", (24, 24), colour[0])).score == result.score


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-8"])
def test_a_name_that_the_console_cannot_show_ends_no_run(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def show() -> int:
        click.echo("fail  検査 bad\udcff.png")
        click.echo("3 of 3 images judged")
        return 0

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert run(show, []) == 0
    sys.stdout.flush()
    assert b"3 of 3 images judged" in written.getvalue()
    assert rb"bad\udcff.png" in written.getvalue()


def test_the_mark_that_windows_editors_put_before_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    token = "a-long-enough-token-for-a-line"
    (tmp_path / "token").write_bytes(BOM + token.encode() + b"\r\n")
    assert _token(tmp_path / "token") == token
    for name, mark in (("a.pt", b""), ("b.pt", BOM)):
        described = json.dumps({"prediction": "eps"}, indent=1).replace("\n", "\r\n")
        (tmp_path / f"{name}.json").write_bytes(mark + described.encode())
    assert read_sidecar(tmp_path / "a.pt") is not None
    assert repr(read_sidecar(tmp_path / "b.pt")) == repr(read_sidecar(tmp_path / "a.pt")).replace("a.pt", "b.pt")


def test_a_mask_turns_with_its_photograph_whatever_else_the_exif_block_holds(tmp_path: Path) -> None:
    turned = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + bytes.fromhex("1201 0300 01000000 06000000 0001 0900 01000000 fbffffff")
    corner = Image.new("L", (12, 8))
    corner.paste(255, (0, 0, 4, 4))
    for name, image in (("part", corner.convert("RGB")), ("mask", corner)):
        image.save(tmp_path / f"{name}.png", exif=turned + b"\0\0\0\0")
    truth = Sample(tmp_path / "part.png", "dent", True, (tmp_path / "mask.png",)).truth()
    np.testing.assert_array_equal(truth, np.asarray(read_image(tmp_path / "part.png"))[..., 0] > 127)
    assert truth.shape == (12, 8)


def test_a_bundle_is_plain_files_and_no_links(line_bundle: Path) -> None:
    """Links need administrator rights on Windows, and are lost by many ways of copying."""
    assert all(entry.is_file() and not entry.is_symlink() for entry in line_bundle.iterdir())


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _memory_growth_mb(bundle: Path, images: list[bytes], count: int, backend: str = "onnxruntime") -> float:
    """By how much judging so many images makes this process larger, after the first 50."""
    with load(bundle, threads=1, calibrated=False, engine=backend) as detector:
        for index in range(50):
            detector(images[index % len(images)])
        before = _resident_mb()
        for index in range(count):
            detector(images[index % len(images)])
        grown = _resident_mb() - before
    print(f"{count} images: {grown:+.2f} MB on {before:.0f} MB")
    return grown


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_images_judged(line_bundle: Path, line_images: list[bytes], count: int) -> None:
    assert _memory_growth_mb(line_bundle, line_images, count) < 5


@pytest.mark.slow  # ten minutes
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("backend", ["onnxruntime", "mnn"])
def test_memory_does_not_grow_over_two_thousand_images_of_the_demo(
    tmp_path: Path, line_images: list[bytes], backend: str
) -> None:
    """With two steps a pass: each takes and leaves the same, and ten would make an hour of it."""
    pytest.importorskip("MNN")
    bundle = export_bundle(CHECKPOINT, tmp_path / "bundle", replace(OPTIONS, steps=2, engine="mnn"))
    assert _memory_growth_mb(bundle, line_images, 2000, backend) < 5


def test_an_image_that_becomes_nan_is_counted_and_has_no_verdict() -> None:
    """The pipeline's warning goes through the served model, to the counter."""
    pytest.importorskip("starlette", reason="the extra [serve] is not installed")
    from mdps.serving.http.model import Loaded, Model
    from mdps.serving.http.options import ServerOptions
    from mdps.serving.http.refusals import Refusal
    from mdps.serving.http.telemetry import Metrics

    def judge(observations: Any) -> None:
        check_finite(np.zeros((1, 1, 2, 2), np.float32), np.array([np.nan], np.float32))

    detector: Any = SimpleNamespace(
        judge=judge, preprocessing=None, calibration=None, doubt="", engine="", provenance={"engines": {}},
        close=lambda: None, warm_up_seconds=0.0,
    )  # fmt: skip
    metrics = Metrics()

    async def ask() -> Refusal:
        with ThreadPoolExecutor(1) as pool:
            first, options = Loaded(detector, None, 0.0), ServerOptions()
            model = Model("line", Path(), first, load=lambda: detector, options=options, metrics=metrics, pool=pool)
            try:
                with pytest.raises(Refusal) as refused:
                    await model.predict(
                        lambda _: Observations(np.zeros((1, 3, 2, 2), np.float32)),
                        asyncio.get_running_loop().time() + 60,
                    )
            finally:
                await asyncio.to_thread(model.close)
        return refused.value

    refusal = asyncio.run(ask())
    assert (refusal.status, refusal.kind) == (500, "nan")
    assert b'mdps_nan_total{model="line"} 1.0' in metrics.text()


def test_no_duration_is_taken_from_the_wall_clock() -> None:
    """It jumps when it is set; these modules read it to say when something happened, and subtract nothing."""
    stamping = {f"serving/http/{name}.py" for name in ("endpoints", "model", "server", "telemetry")}
    for part in ("runtime", "serving", "training", "export", "models", "benchmarks"):
        for path in (ROOT / part).rglob("*.py"):
            reads = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if _is_wall_clock(node)]
            assert not reads or path.relative_to(ROOT).as_posix() in stamping, f"{path} reads the wall clock"


def _is_wall_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "datetime.now", "time.time_ns")


def test_every_test_that_the_table_of_faults_names_exists() -> None:
    page = (ROOT / "docs" / "develop" / "field-faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+): ([a-z0-9_]+)`", page)
    assert len(named) > 60
    for file, name in named:
        (path,) = (ROOT / "tests").rglob(f"test_{file}.py")
        text = path.read_text(encoding="utf-8")
        assert f"def test_{name}(" in text, f"docs/develop/field-faults.md names {file}: {name}, which is no test"
