"""`mdps gpu-check`: the harness on the processor, what fits into minutes, the kit for a machine without a network."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mdps.benchmarks.bench import Spec
from mdps.benchmarks.bench.rounds import Measurement
from mdps.benchmarks.gpu_check import Minutes, UsedMemory, Workshop, kit, report, run_check, skip_all
from mdps.benchmarks.gpu_check.checked import STAGES, Finding, PlanRuns, Reference
from mdps.benchmarks.gpu_check.items import Item, Prepared, parsed, pieces
from mdps.benchmarks.gpu_check.report import Row, measured_row, worst
from mdps.benchmarks.options import CheckOptions
from mdps.cli import cli
from mdps.commands import terminal
from mdps.runtime import cards
from mdps.runtime.cards import Card
from mdps.runtime.errors import UsageError
from mdps.runtime.image_files import find_images
from mdps.runtime.session import Port


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The command on the processor with the demo's network at a step a pass, as a user runs it: JSON and folder."""
    out = tmp_path_factory.mktemp("gpu") / "out"
    command = [sys.executable, "-m", "mdps.cli", "gpu-check", "--cpu", "--networks", "demo", "--steps", "1", "--json"]
    command += [
        "--precisions",
        "fp32",
        "--set",
        "samples=2",
        "--set",
        "rounds=2",
        "--set",
        "matrix-side=64",
        "--threads",
        "1",
    ]
    command += ["--minutes", "120", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), out


def row_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in found["rows"] if row["name"] == name]
    return dict(row)


def test_every_backend_of_the_processor_agrees_with_the_oracle_at_every_stage(
    checked: tuple[dict[str, Any], Path],
) -> None:
    found, _ = checked
    for name in ("ONNX Runtime, CPU", "OpenVINO, CPU", "guided step traced, torch on the CPU"):
        row = row_of(found, f"{name}, demo fp32 N_s 1")
        assert (row["state"], row["agrees"], row["runs"]) == ("ran", True, 2), row
        stages = {finding["output"].partition(".")[0] for finding in row["findings"]}
        wanted = set(STAGES) - ({"plain_step"} if "traced" in name else set())
        assert stages == wanted
        assert row["p99_ms"] >= row["p95_ms"] >= row["median_ms"] > 0
        assert row["share"] > 0
        assert row_of(found, f"{name}, demo fp32 N_s 2")["agrees"]
    assert row_of(found, "torch eager on the CPU, demo fp32 N_s 1")["agrees"]


def test_every_row_of_a_card_says_why_there_is_none(checked: tuple[dict[str, Any], Path]) -> None:
    found, out = checked
    for name in ("TensorRT-RTX plans", "TensorRT plans", "ONNX Runtime, CUDA", "ONNX Runtime, TensorRT"):
        row = row_of(found, f"{name}, demo fp32 N_s 1")
        assert row["state"] == "skipped"
        assert row["reason"]
    text = (out / "gpu_check.md").read_text()
    assert "## Parity with the torch oracle" in text
    assert "TensorRT plans, demo fp32 N_s 1" in text.partition("## Skipped")[2]
    assert json.loads((out / "gpu_check.json").read_text()) == found
    assert found["finished"] is True


def test_what_is_prepared_is_used_again_and_other_settings_are_refused(
    checked: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    work = Path(shutil.copytree(checked[1] / "work", tmp_path / "work"))
    assert Prepared(work).has("demo:oracle")
    manifest = work / "demo-fp32" / "manifest.json"
    changed = json.loads(manifest.read_text())
    changed["settings"]["sampler"]["first_pass"]["guidance_scale"] = 3.0
    manifest.write_text(json.dumps(changed))
    item = next(
        one for one in pieces(Prepared(work), CheckOptions(networks=("demo",)), False) if one.name.startswith("ONNX")
    )
    row = Workshop(Prepared(work), rounds=1, threads=1)(item, 300.0, {})
    assert row.state == "skipped"
    assert "remove the work folder" in row.reason


def test_a_wrong_result_is_found_at_its_stage(checked: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    work = Prepared(Path(shutil.copytree(checked[1] / "work", tmp_path / "work")))
    right = Reference.read(work.reference("demo"))
    Reference({**right.arrays, "plain_step.eps": right["plain_step.eps"] + 0.01}, right.about).save(
        work.reference("demo")
    )
    item = next(one for one in pieces(work, CheckOptions(networks=("demo",)), False) if one.name.startswith("ONNX"))
    row = Workshop(work, rounds=1, threads=1)(item, 300.0, {})
    assert (row.state, row.agrees) == ("ran", False)
    assert [one.output for one in row.findings if not one.agrees] == ["plain_step.eps"]


def test_a_file_that_is_no_reference_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"not one")
    with pytest.raises(UsageError, match=r"x\.npz cannot be read"):
        Reference.read(tmp_path / "x.npz")


class FakeCard:
    """A driver whose memory is a dictionary; a fake, as no driver is here."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.given = 0
        self.asked: list[str] = []

    def current(self) -> Any:
        return contextlib.nullcontext()

    def allocate(self, nbytes: int) -> int:
        self.given += 256
        return self.given

    def upload(self, to: int, array: np.ndarray, stream: Any) -> None:
        self.memory[to] = array.copy()
        self.asked.append("up")

    def download(self, into: np.ndarray, source: int, stream: Any) -> None:
        into[...] = self.memory[source]
        self.asked.append("down")

    def synchronise(self, stream: Any) -> None:
        self.asked.append("wait")


class FakeEngine:
    """Doubles x and adds the scalar s."""

    inputs = (Port("x", np.dtype(np.float32), (None, 2)), Port("s", np.dtype(np.float32), ()))
    outputs = (Port("y", np.dtype(np.float32), (None, 2)),)

    def __init__(self, card: FakeCard) -> None:
        self.card = card

    def bind(self, buffers: Any) -> Any:
        x, s, y = (buffers[name].address for name in "xsy")
        assert (buffers["s"].shape, buffers["y"].shape) == ((), (3, 2))

        def enqueue(stream: Any) -> None:
            self.card.memory[y] = self.card.memory[x] * 2 + self.card.memory[s]
            self.card.asked.append("run")

        return SimpleNamespace(enqueue=enqueue)


def test_a_plan_is_run_alone_with_everything_up_and_down() -> None:
    card = FakeCard()
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    feeds = {"x": x, "s": np.asarray(1.0, np.float32), "other": x}
    found = PlanRuns(card, None, FakeEngine(card)).run(feeds)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found["y"], 2 * x + 1)
    assert card.asked == ["up", "up", "run", "down", "wait"]


# What fits


class Clock:
    """A clock that a fake doer turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def item(name: str, seconds: float, **more: Any) -> Item:
    spec = None if more.get("thing") else Spec(name, "checked", "x", "b", 1)
    return Item(name, seconds, spec=spec, **more)


def checks(
    items: list[Item], minutes: float = 6.0, states: dict[str, Row] | None = None
) -> tuple[list[Row], list[int]]:
    clock, written = Clock(), list[int]()

    def do(one: Item, limit: float, rates: dict[str, float], hurried: bool) -> Row:
        assert limit <= minutes * 60 - clock.now
        clock.now += min(one.seconds, limit)
        return (states or {}).get(one.name, Row(one.name, "ran", load_ms=1.0))

    rows = run_check(items, Minutes(minutes * 60, clock), do, lambda rows: written.append(len(rows)), lambda _: None)
    return rows, written


def test_what_does_not_fit_is_named_and_what_is_shorter_still_runs() -> None:
    rows, written = checks([item("a", 200), item("b", 200), item("c", 100), item("d", 70)])
    assert [row.state for row in rows] == ["ran", "skipped", "ran", "skipped"]
    assert rows[1].reason == "does not fit: it takes some 200 s and 160 s were left"
    assert written == [1, 2, 3, 4]


def test_what_does_not_fit_never_reads_as_if_it_did() -> None:
    rows, _ = checks([item("a", 335.4), item("b", 25)])  # 24.6 s are left
    assert rows[1].reason == "does not fit: it takes some 25 s and 24 s were left"


def test_a_piece_that_is_cut_short_by_the_minutes_knows() -> None:
    asked: list[tuple[float, bool]] = []
    clock = Clock()

    def do(one: Item, limit: float, rates: dict[str, float], hurried: bool) -> Row:
        asked.append((limit, hurried))
        clock.now += 280
        return Row(one.name, "ran")

    run_check([item("a", 20), item("b", 40)], Minutes(360, clock), do, lambda rows: None, lambda text: None)
    assert asked == [(60.0, False), (80.0, True)]


def test_half_precision_alone_needs_no_bundle_of_the_other_where_the_oracle_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CheckOptions(networks=("demo",), precisions=("fp16",))

    def prepared() -> list[str]:
        found = [one for one in pieces(Prepared(tmp_path), options, True) if "plans" in one.name or one.thing]
        first = next(index for index, one in enumerate(found) if not one.thing)
        return [one.thing for one in found[:first]]

    assert prepared()[:2] == ["demo:fp32", "demo:oracle"]  # which the oracle computes from
    monkeypatch.setattr(Prepared, "has", lambda self, thing: thing == "demo:oracle")
    assert prepared() == ["demo:oracle", "demo:fp16", "demo:fp16:tensorrt-rtx"]


def test_a_thing_is_prepared_before_the_first_that_needs_it(tmp_path: Path) -> None:
    rows, _ = checks(pieces(Prepared(tmp_path), CheckOptions(), True), minutes=600)
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert names.index("prepare demo:oracle") < names.index("TensorRT-RTX plans, demo fp32 N_s 1")
    assert names.index("prepare authors:fp16x16:tensorrt") < names.index("TensorRT plans, authors fp16 N_s 16")
    assert all(row.state == "ran" for row in rows)


def test_what_rests_on_something_missing_is_not_tried() -> None:
    made = item("prepare demo:fp16", 10, thing="demo:fp16")
    items = [made, made, item("a", 10, needs=("demo:fp16",)), item("b", 10)]
    rows, _ = checks(items, states={"prepare demo:fp16": Row("prepare demo:fp16", "failed", "no memory")})
    assert [(row.name, row.state) for row in rows] == [
        ("prepare demo:fp16", "failed"), ("a", "skipped"), ("b", "ran"),
    ]  # fmt: skip
    assert rows[1].reason == "there is no demo:fp16: no memory"


def test_a_backend_that_cannot_be_loaded_is_tried_once() -> None:
    items = [item(name, 10, family="TensorRT plans") for name in "ab"] + [item("c", 10, family="CUDA")]
    rows, _ = checks(items, states={"a": Row("a", "skipped", "no driver")})
    assert [row.state for row in rows] == ["skipped", "skipped", "ran"]
    assert rows[1].reason == "as before: no driver"


def test_all_of_a_card_fits_into_six_minutes_where_it_was_prepared(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Prepared, "has", lambda self, thing: True)
    rows, _ = checks(pieces(Prepared(tmp_path), CheckOptions(), True))
    done = {row.name for row in rows if row.state == "ran"}
    for name in ("TensorRT-RTX plans", "TensorRT plans", "ONNX Runtime, CUDA", "ONNX Runtime, TensorRT"):
        assert f"{name}, authors fp16 N_s 1" in done
    skipped = [row for row in rows if row.state == "skipped"]
    assert all("does not fit" in row.reason for row in skipped)


def test_a_crash_and_a_hang_cost_a_row_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies, hangs = tmp_path / "dies.py", tmp_path / "hangs.py"
    dies.write_text("import os; input(); os.abort()")
    hangs.write_text("import time; input(); time.sleep(600)")
    real = subprocess.Popen
    workshop = Workshop(Prepared(tmp_path), rounds=2, threads=1)
    for script, limit, hurried, state, reason in (
        (dies, 60.0, True, "failed", "ended with code"),
        (hangs, 1.0, False, "failed", "took longer than 1 s to load it"),
        (hangs, 1.0, True, "skipped", "out of minutes: the 1 s left were not enough to load it"),
    ):

        def instead(command: list[str], script: Path = script, **options: Any) -> Any:
            return real([command[0], str(script)], **options)

        monkeypatch.setattr(subprocess, "Popen", instead)
        row = workshop(item("a", 1.0, on_card=False), limit, {}, hurried=hurried)
        assert row.state == state
        assert reason in row.reason


def test_a_run_that_the_minutes_end_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow.py"
    opened = json.dumps({"load_ms": 1.0, "first_ms": 1.0, "score": 0.0})
    slow.write_text(f"import time; input(); print({opened!r}, flush=True); time.sleep(600)")
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: real([command[0], str(slow)], **options))
    workshop = Workshop(Prepared(tmp_path), rounds=2, threads=1)
    row = workshop(item("a", 1.0, on_card=False), 2.0, {}, hurried=True)
    assert (row.state, row.reason) == ("skipped", "out of minutes: the 2 s left were not enough at a run")


@pytest.mark.parametrize(("hurried", "state"), [(True, "skipped"), (False, "failed")])
def test_preparing_that_the_minutes_end_is_no_failure(tmp_path: Path, hurried: bool, state: str) -> None:
    workshop = Workshop(Prepared(tmp_path), rounds=1, threads=1)
    row = workshop(item("prepare", 1.0, thing="demo:fp32"), 0.01, {}, hurried=hurried)
    assert row.state == state


def test_preparing_without_torch_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    row = Workshop(Prepared(tmp_path), rounds=1, threads=1)(item("prepare", 1.0, thing="demo:traced"), 60.0, {})
    assert row.state == "skipped"
    assert row.reason.startswith("needs torch, which is not installed here")


def test_preparing_what_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    workshop = Workshop(Prepared(tmp_path), rounds=1, threads=1)
    row = workshop(item("prepare", 10, thing="demo:fp8"), 300.0, {})
    assert row.state == "skipped"
    assert row.reason.startswith("there is no 'demo:fp8' to prepare: choose among demo:photographs")


def test_photographs_are_prepared_for_a_first_verdict(tmp_path: Path) -> None:
    from mdps.benchmarks.gpu_check import prepare

    assert "demo:photographs" in kit.KitOptions().things
    work = Prepared(tmp_path / "work")
    assert not work.has("demo:photographs")
    assert prepare.main(["demo:photographs", "--work", str(work.folder)]) == 0
    assert work.has("demo:photographs")
    assert len(find_images([work.folder / "photographs" / "good"])) == 48
    shown = find_images([work.folder / "photographs" / "test"])
    assert {path.parent.name == "good" for path in shown} == {True, False}


# Rows and the report


def a_measurement(**facts: Any) -> Measurement:
    return Measurement(Spec("a", "checked", "x", "b", 1), facts, [3.0, 1.0, 2.0], [], 50.0)


def test_a_row_has_percentiles_findings_and_no_rate_without_a_reference() -> None:
    far = {"output": "both_passes.anomaly_map", "error": 0.3, "tolerance": 0.1}
    near = {"output": "first_pass.anomaly_map", "error": 0.05, "tolerance": 0.1}
    one = a_measurement(findings=[far, near], load_ms=1.0, first_ms=2.0)
    row = measured_row(item("a", 1.0), one, failed=False, seconds=2.0, device_mb=None, rates={})
    assert (row.state, row.median_ms, row.runs, row.agrees) == ("ran", 2.0, 3, False)
    assert row.p99_ms == pytest.approx(np.percentile([1, 2, 3], 99))
    assert row.share is None
    text = report.markdown(report.Check(True, MACHINE, [row, *(Row(name, "skipped", "no card") for name in "bc")]))
    assert "DISAGREES" in text
    assert "| **3** |" in text
    assert "- b; c: no card" in text


MACHINE: dict[str, Any] = {
    "cards": [{"name": "RTX", "compute_capability": "8.9", "driver": "580"}], "cpu": "c", "cpus": 1,
    "load_average": None, "system": "s", "versions": {},
}  # fmt: skip


def test_the_worst_of_a_stage_is_in_shares_of_what_is_allowed() -> None:
    findings = [
        Finding("score.anomaly_map", 0.1, 1.0),
        Finding("score.mask", 0.01, 0.01),
        Finding("verdict.x", 0.0, 0.0),
    ]
    assert worst(findings, "score") == findings[1]
    assert worst(findings, "features") is None
    broken = Finding("score.anomaly_score", None, 1.0)
    assert worst([*findings, broken], "score") == broken
    assert not broken.agrees


def test_targets_are_beside_the_fastest_that_agrees() -> None:
    rows = [
        Row(name, "ran", network="authors", precision="fp16", samples=1, median_ms=ms, agrees=agrees)
        for name, ms, agrees in (("wrong", 10.0, False), ("plans", 40.0, True), ("torch", 20.0, True))
    ]
    assert "N_s 1: 40 ms (plans); 60 ms on an H100 met" in report.markdown(report.Check(True, MACHINE, rows))


def test_memory_of_a_card_is_what_it_grew_by(monkeypatch: pytest.MonkeyPatch) -> None:
    free, seen = [900], threading.Event()

    def one_card() -> tuple[Card, ...]:
        if free[0] == 500:
            seen.set()
        return (Card(0, "GPU-1", "RTX", "8.9", free[0] * 10**6, 1000 * 10**6, "580"),)

    monkeypatch.setattr(cards, "cards", one_card)
    with UsedMemory(None, seconds=0.01) as memory:
        free[0] = 500
        assert seen.wait(60)
    assert memory.grown_mb == pytest.approx(400)
    monkeypatch.setattr(cards, "cards", lambda: ())
    with UsedMemory(None) as memory:
        pass
    assert memory.grown_mb is None


def test_without_a_card_the_command_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if cards.cards():
        pytest.skip("there is a card here")
    assert terminal.run(cli, ["gpu-check", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert terminal.run(cli, ["gpu-check", "--networks", "mine"]) == 2


# The kit


def wheel(folder: Path, name: str, files: dict[str, str], requires: str = "") -> Path:
    """The smallest wheel pip installs."""
    info = f"{name}-1.0.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}"
    every = files | {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in every) + f"{info}/RECORD,,\n"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (every | {f"{info}/RECORD": record}).items():
            archive.writestr(file, text)
    return path


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Makes a kit of a stand-in for mdps, which prints what it is given, and of one package that it needs."""
    links = tmp_path / "links"
    links.mkdir()
    wheel(links, "needed", {"needed.py": "x = 'needed'\n"})
    main = "import os, sys, needed\nprint(needed.x, *sys.argv[1:])\n"
    main += "print(os.environ['LD_LIBRARY_PATH'], file=sys.stderr)\n"
    wheel(links, "nvidia", {"nvidia/cu13/lib/libcudart.so": ""})
    (tmp_path / "own").mkdir()
    own = wheel(tmp_path / "own", "mdps", {"mdps/__init__.py": "", "mdps/cli.py": main}, "needed")

    def made(**changes: Any) -> dict[str, Any]:
        options = kit.KitOptions(
            extras=(), libraries=(), things=(), part_size=2000, find_links=links, no_index=True, wheel=own
        )
        return kit.make_kit(tmp_path / "kit", replace(options, **changes))

    return made


def there(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "MDPS_KIT": str(folder / "unpacked")}
    return subprocess.run(
        ["sh", str(folder / "kit" / "run.sh"), *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_kit_installs_without_a_network_and_runs(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    manifest = make()
    assert len(manifest["parts"]) > 1
    assert all((tmp_path / "kit" / name).stat().st_size <= 2000 for name in manifest["parts"])
    done = there(tmp_path, "--minutes", "3")
    assert done.returncode == 0, done.stderr
    work = tmp_path / "unpacked" / "prepared"
    assert done.stdout.split() == [
        "needed",
        "gpu-check",
        "--work",
        str(work),
        "--out",
        str(tmp_path / "gpu-check"),
        "--minutes",
        "3",
    ]
    assert "installing" not in there(tmp_path).stderr  # it goes on where it was


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_kit_leaves_the_command_with_nvidias_libraries(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    make(libraries=("nvidia",))
    assert there(tmp_path).returncode == 0
    command = [str(tmp_path / "unpacked" / "mdps"), "predict", "a b"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == "needed predict a b\n"
    folder = Path(done.stderr.strip().partition(":")[0])
    assert folder.is_relative_to(tmp_path / "unpacked" / "venv")
    assert (folder / "libcudart.so").is_file()


def test_a_thing_that_is_none_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kit, "_pip", lambda arguments: pytest.fail("something is fetched"))
    for thing in ("bogus", "demo", "demo:oracle:tensorrt", "mine:fp32", "demo:fp16:tensorrt:x", "authors:photographs"):
        assert kit.main(["--out", str(tmp_path / "kit"), "--things", f"demo:fp32,{thing}"]) == 2
        error = capsys.readouterr().err
        assert f"there is no {thing!r} to prepare" in error
        assert "demo:fp16:tensorrt-rtx" in error
    assert not list(tmp_path.glob("kit*"))
    for thing in kit.THINGS:
        parsed(thing)


@pytest.mark.parametrize("program", ["kit", "prepare"])
def test_help_lists_what_can_be_prepared(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    from mdps.benchmarks.gpu_check import prepare

    with pytest.raises(SystemExit):
        {"kit": kit, "prepare": prepare}[program].main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(thing in said for thing in ("demo:photographs", "demo:traced", "demo:oracle", "demo:fp16x16"))


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_damaged_or_missing_part_is_one_sentence(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    name = list(make()["parts"])[1]
    part = tmp_path / "kit" / name
    data = part.read_bytes()
    for damage, sentence in (
        (lambda: part.write_bytes(data[:-1] + b"?"), f"error: {name} is damaged: copy it again"),
        (part.unlink, f"error: {name} is missing: copy it to {tmp_path / 'kit'}"),
    ):
        damage()
        done = there(tmp_path)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == sentence
        assert not (tmp_path / "unpacked").exists()
    make()
    assert part.read_bytes() == data  # made again, and the same
    assert there(tmp_path).returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_another_python_is_one_sentence(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    make(python="3.99")
    done = there(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the wheels are for Python 3.99 and")
    assert done.stderr.count("\n") == 1


def test_parts_that_are_right_stay_and_others_go(make: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    first = make()
    times = {name: (tmp_path / "kit" / name).stat().st_mtime_ns for name in first["parts"]}
    assert make() == first
    assert {name: (tmp_path / "kit" / name).stat().st_mtime_ns for name in first["parts"]} == times
    larger = make(part_size=10**6)
    assert (
        sorted(path.name for path in (tmp_path / "kit").glob("kit.tar.*")) == list(larger["parts"]) == ["kit.tar.0000"]
    )


def test_a_wheel_that_cannot_be_had_is_one_sentence(
    make: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "--out",
        str(tmp_path / "kit"),
        "--find-links",
        str(tmp_path / "links"),
        "--no-index",
        "--extras",
        "none",
    ]
    command += ["--mdps-wheel", str(tmp_path / "own" / "mdps-1.0-py3-none-any.whl"), "--things", "none"]
    assert kit.main([*command, "--libraries", "absent"]) == 1
    error = capsys.readouterr().err
    assert "error: the wheels cannot be had: No matching distribution found for absent" in error
    assert kit.main([*command, "--part-size", "many"]) == 2
    assert kit.main([*command, "--libraries", "none", "--part-size", "1KB"]) == 0


def a_clone(folder: Path, name: str = "mdps") -> Path:
    """As much of a clone as a wheel is built from, and some of what a user leaves in one."""
    for path in ("runtime/x.py", "benchmarks/results/x.md", "benchmarks/x.py", "kit.staging/x", "venv/x.py", "x.pt"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\n[tool.setuptools]\npackages = ["mdps", "mdps.runtime", "mdps.benchmarks"]\n'
    )
    return folder


def test_where_mdps_is_installed_as_a_copy_the_working_directory_is_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit.mdps, "__file__", str(tmp_path / "site-packages" / "mdps" / "__init__.py"))
    monkeypatch.chdir(a_clone(tmp_path / "clone"))
    built: list[set[str]] = []

    def pip(arguments: list[str]) -> None:
        tree = Path(arguments[-1])
        if arguments[0] == "wheel":
            built.append({str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()})
            (tree.parent / "mdps-1.0-py3-none-any.whl").touch()

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(kit, "_pip", pip)
    kit.make_kit(tmp_path / "kit", kit.KitOptions(things=()))
    assert built == [{"pyproject.toml", "runtime/x.py", "benchmarks/x.py"}]
    assert not list((tmp_path / "temporary").iterdir())


def test_outside_of_a_clone_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kit.mdps, "__file__", str(tmp_path / "site-packages" / "mdps" / "__init__.py"))
    monkeypatch.chdir(a_clone(tmp_path / "other", "something"))
    assert kit.main(["--out", str(tmp_path / "kit")]) == 2
    assert "is no clone of its repository" in capsys.readouterr().err
    assert not list(tmp_path.glob("kit*"))


@pytest.mark.parametrize(("text", "size"), [("60MB", 60_000_000), ("1.5 KiB", 1536), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert kit.size_of(text) == size


def test_the_real_requirements_name_the_extras() -> None:
    assert kit.KitOptions().requirements[0] == "mdps[gpu,tensorrt-rtx]"
    assert kit.KitOptions(with_torch=True).requirements[0] == "mdps[gpu,tensorrt-rtx,export,bench]"
    assert "manylinux2014_x86_64" in kit._platforms("manylinux_2_28_x86_64")
    assert skip_all([item("a", 1.0)], "no")[0].reason == "no"
