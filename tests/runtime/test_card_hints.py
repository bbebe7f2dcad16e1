"""Advice of the commands about a card: options that lead there and not back to the processor."""

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from PIL import Image

import mdps.export
from mdps.cli import cli
from mdps.commands.terminal import needs, run
from mdps.export import ExportOptions, export_bundle
from mdps.export.engine import Built
from mdps.export.plans import add_plans
from mdps.runtime import load
from mdps.runtime.engines import named
from mdps.runtime.errors import BackendError, CalibrationError
from mdps.runtime.manifest import Manifest


class NamesAsPlans:
    """Stands in for TensorRT-RTX, which is not everywhere: a plan is its graph's name."""

    engine, version, capabilities = named("tensorrt-rtx"), "1.7", ("8.9",)
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def build(self, path: Path, profile: Any, precision: str) -> Built:
        return Built(path.name.encode(), {"FLOAT": 1}, "network")


@pytest.fixture
def bundle(line_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(line_bundle, tmp_path / "bundle"))


def plan(bundle: Path) -> Path:
    """The same bundle with plans."""
    add_plans(bundle, Manifest.read(bundle), NamesAsPlans(), 8).write(bundle)  # type: ignore[arg-type]
    return bundle


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, ""),
        ({"engine": "tensorrt-rtx"}, " --engine tensorrt-rtx"),
        ({"engine": "onnxruntime-cuda", "device": "1"}, " --engine onnxruntime-cuda --device 1"),
        ({"product": "cap", "engine": "openvino"}, " --product cap --engine openvino"),
    ],
)
def test_a_bundle_is_to_be_calibrated_where_it_was_to_run(bundle: Path, given: dict[str, Any], options: str) -> None:
    replace(Manifest.read(bundle), calibrations={}).write(bundle)
    with pytest.raises(CalibrationError) as raised:
        load(bundle, **given)
    assert str(raised.value).endswith(f"run `mdps calibrate {bundle} GOOD_FOLDER{options}`")


@pytest.mark.parametrize(("backend", "options"), [([], ""), (["--engine", "tensorrt-rtx"], " --engine tensorrt-rtx")])
def test_an_export_with_plans_goes_on_with_their_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], backend: list[str], options: str
) -> None:
    monkeypatch.setattr(mdps.export, "export_bundle", lambda *_, **__: Path("B"))
    assert run(cli, ["export", "--ckpt", "x.pt", *backend]) == 0
    assert capsys.readouterr().out == f"wrote B; next: mdps calibrate B GOOD_FOLDER{options}\n"


def test_a_bf16_bundle_says_where_it_can_run(line_bundle: Path, tmp_path: Path) -> None:
    options = ExportOptions(backbone="random_tiny", noise_level=198, steps=2, precision="bf16")
    bundle = export_bundle(line_bundle.parent / "line.safetensors", tmp_path / "bf16", options)
    with pytest.raises(BackendError, match=r"bf16, which only a card computes: it has no plans: export it again"):
        load(bundle, calibrated=False)
    with pytest.raises(BackendError, match=r"bf16, which only a card computes: run it with --engine tensorrt-rtx\)$"):
        load(plan(bundle), calibrated=False)


@pytest.mark.parametrize(("there", "extras"), [(True, "serve"), (False, "serve,cpu")])
def test_the_processors_onnxruntime_is_not_advised_over_another(
    monkeypatch: pytest.MonkeyPatch, there: bool, extras: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    with pytest.raises(click.ClickException) as raised, needs("serve", "cpu"):
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette")
    assert raised.value.message.endswith(f"pip install 'mdps[{extras}]'")


@pytest.mark.parametrize(("given", "meant"), [("99", "9.9"), ("8.6,120", "12.0"), ("x", "8.6,12.0")])
def test_a_compute_capability_without_its_dot_is_written_out(
    capsys: pytest.CaptureFixture[str], given: str, meant: str
) -> None:
    assert run(cli, ["export", "--ckpt", "x.pt", "--engine", "tensorrt-rtx", "--compute-capability", given]) == 2
    said = capsys.readouterr().err
    assert meant in said
    assert ("lacks its dot" in said) == (given != "x")


def test_bench_leads_to_what_measures_plans(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["bench", str(bundle), "--engines", "tensorrt-rtx"]) == 2
    assert "onnxruntime-tensorrt (`mdps gpu-check` measures engine plans)" in capsys.readouterr().err
    assert run(cli, ["bench", str(bundle), "--torch", "wrong"]) == 2
    assert "gpu-check" not in capsys.readouterr().err


LEFT_UNUSED = "has plans for tensorrt-rtx, but this runs on the CPU: add --engine tensorrt-rtx to use them"


@pytest.fixture
def commands(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every command that judges, each with nothing to judge: the line comes before, and the command ends there."""
    from mdps.serving.http import server

    monkeypatch.setattr(server, "run", lambda served, settings: None)
    (tmp_path / "data" / "test" / "good").mkdir(parents=True)
    (tmp_path / "data" / "train" / "good").mkdir(parents=True)
    for kind in ("test", "train"):
        Image.new("RGB", (16, 16)).save(tmp_path / "data" / kind / "good" / "0.png")
    good = str(tmp_path / "data" / "test" / "good")
    return [
        ["predict", str(bundle), good, "--out", str(tmp_path / "out"), "--force"],
        ["calibrate", str(bundle), good],
        ["evaluate", str(bundle), str(tmp_path / "data")],
        ["serve", str(bundle)],
    ]


def test_plans_that_a_command_leaves_unused_are_mentioned(
    bundle: Path, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in commands:
        run(cli, command)
        assert "plans" not in capsys.readouterr().err, command
    plan(bundle)
    for command in commands:
        run(cli, command)
        said = capsys.readouterr().err.splitlines()
        assert [line for line in said if "plans" in line] == [f"{bundle} {LEFT_UNUSED}"], command
        run(cli, [*command, "--engine", "onnxruntime"])  # chosen: nothing to be told
        assert "plans" not in capsys.readouterr().err, command


def test_a_library_that_loads_says_nothing_of_plans(
    bundle: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    load(plan(bundle)).close()
    assert not recwarn.list
    assert capsys.readouterr().err == ""


def test_inspect_leads_to_a_calibration_on_the_plans(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(Manifest.read(plan(bundle)), calibrations={}).write(bundle)
    assert run(cli, ["inspect", str(bundle)]) == 0
    assert f"next: mdps calibrate {bundle} GOOD_FOLDER --engine tensorrt-rtx\n" in capsys.readouterr().out
