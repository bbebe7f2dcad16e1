"""Plans of a bundle: their names, what the manifest says of them, and that the runtime reads it as before."""

import importlib.util
import json
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdps.commands.export import export as export_command
from mdps.commands.terminal import run
from mdps.export.engine import OPTIONS, Built
from mdps.export.plans import add_plans, profile_of
from mdps.models.checkpoints import save_denoiser
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime import load
from mdps.runtime.engines import Engine, named
from mdps.runtime.errors import BackendError, BundleError
from mdps.runtime.manifest import FileEntry, Manifest
from mdps.runtime.schedule import NoiseSchedule

RTX = named("tensorrt-rtx")


@dataclass
class FakeBuilder:
    """Answers as `Builder` does; its plans are the names of what it was given."""

    engine: Engine = RTX
    version: str = "1.7"
    capabilities: tuple[str, ...] = ("8.6", "12.0")
    built: list[str] = field(default_factory=list)
    refuses: str = "no graph"

    def build(self, path: Path, profile: Any, precision: str) -> Built:
        if path.name == self.refuses:
            raise BackendError(f"cannot build {path.name}")
        self.built.append(path.name)
        return Built(f"{path.name} {self.version}".encode(), {"FLOAT": 3}, "network")


@pytest.fixture
def bundle(line_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(line_bundle, tmp_path / "bundle"))


def planned(bundle: Path, builder: FakeBuilder, max_batch: int = 8) -> Manifest:
    manifest = add_plans(bundle, Manifest.read(bundle), builder, max_batch)  # type: ignore[arg-type]
    manifest.write(bundle)
    return Manifest.read(bundle)  # verifies every file


def test_every_graph_has_a_plan_the_manifest_tells_of(bundle: Path) -> None:
    entries = {entry.role: entry for entry in planned(bundle, FakeBuilder()).plans}
    assert set(entries) == {"guided_step", "plain_step", "features", "score"}
    guided = entries["guided_step"]
    assert guided.graph == "guided_step.openvino.onnx"  # the form without reshapes
    assert (bundle / guided.file).read_bytes() == b"guided_step.openvino.onnx 1.7"
    assert guided.file == f"guided_step.tensorrt-rtx.{guided.key[:16]}.plan"
    assert (guided.batch, guided.samples) == ((1, 1, 8), None)
    assert entries["score"].samples == (1, 1, 1)
    assert guided.compute_capabilities == ("8.6", "12.0")
    assert (guided.types, guided.inspected) == ({"FLOAT": 3}, "network")


def test_the_runtime_reads_a_bundle_with_plans(bundle: Path, line_images: list[bytes], tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(line_images[0])
    with load(bundle) as before:
        score = before(picture).score
    planned(bundle, FakeBuilder())
    with load(bundle) as after:
        assert after(picture).score == pytest.approx(score, abs=1e-6)
    victim = next(bundle.glob("*.plan"))
    victim.write_bytes(b"something else")
    with pytest.raises(BundleError, match=victim.name):
        load(bundle)


def test_a_plan_is_known_by_all_it_depends_on(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, base = Manifest.read(bundle), FakeBuilder()

    def key(builder: FakeBuilder, max_batch: int = 8) -> str:
        planned = add_plans(bundle, manifest, builder, max_batch).plans  # type: ignore[arg-type]
        return next(entry.key for entry in planned if entry.role == "guided_step")

    keys = [
        key(base),
        key(replace(base, version="1.8")),
        key(replace(base, capabilities=("8.9",))),
        key(replace(base, engine=named("tensorrt"))),
        key(base, max_batch=4),
    ]
    with monkeypatch.context() as patch:
        patch.setitem(OPTIONS, "tf32", True)
        keys.append(key(base))
    assert key(base) == keys[0]
    weights = bundle / "denoiser.weights"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    manifest = replace(manifest, files=manifest.files | {weights.name: FileEntry.of(weights)})
    keys.append(key(base))
    assert len(set(keys)) == len(keys)


def test_what_is_there_is_not_built_again_and_what_is_old_makes_way(bundle: Path) -> None:
    first = FakeBuilder()
    planned(bundle, first)
    planned(bundle, first)
    assert len(first.built) == 4
    planned(bundle, FakeBuilder(engine=named("tensorrt")))
    assert len(list(bundle.glob("*.plan"))) == 8
    manifest = planned(bundle, FakeBuilder(version="1.8"))
    assert sorted(entry.version for entry in manifest.plans) == ["1.7"] * 4 + ["1.8"] * 4
    assert {path.name for path in bundle.glob("*.plan")} == {entry.file for entry in manifest.plans}


def test_a_builder_that_fails_leaves_the_bundle_as_it_was(bundle: Path) -> None:
    before = (bundle / "manifest.json").read_bytes()
    with pytest.raises(BackendError, match=r"score\.onnx"):
        planned(bundle, FakeBuilder(refuses="score.onnx"))
    assert (bundle / "manifest.json").read_bytes() == before
    Manifest.read(bundle)


def test_profiles_follow_the_dynamic_axes(line_bundle: Path) -> None:
    step = profile_of(line_bundle / "guided_step.onnx", (1, 2, 8), None)
    assert step["x_t"] == ((1, 3, 16, 16), (2, 3, 16, 16), (8, 3, 16, 16))
    assert step["mask"][2] == (8, 1, 16, 16)
    assert "timestep" not in step
    score = profile_of(line_bundle / "score.onnx", (1, 1, 2), (1, 4, 4))
    assert score["posterior_samples"] == ((1, 1, 3, 16, 16), (1, 4, 3, 16, 16), (2, 4, 3, 16, 16))
    assert score["observation"][2] == (2, 3, 16, 16)


def test_a_damaged_list_is_named(bundle: Path) -> None:
    planned(bundle, FakeBuilder())
    path = bundle / "manifest.json"
    obj = json.loads(path.read_text())
    obj["plans"][0]["batch"] = "many"
    path.write_text(json.dumps(obj))
    with pytest.raises(BundleError, match=r"plans\[0\]\.batch"):
        Manifest.read(bundle)
    obj["plans"] = [obj["plans"][1] | {"file": "gone.plan"}]
    path.write_text(json.dumps(obj))
    with pytest.raises(BundleError, match=r"gone\.plan"):
        Manifest.read(bundle)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    small = {"channel_mult": (1,), "num_res_blocks": 1, "attention_factors": (), "num_heads": 2, "norm_groups": 4}
    network = UNet(UNetConfig(image_size=16, model_channels=16, **small)).eval()  # type: ignore[arg-type]
    for parameter in network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    save_denoiser(tmp_path / "small.safetensors", network, NoiseSchedule.linear(), "eps")
    return tmp_path / "small.safetensors"


def test_an_export_builds_all_four_graphs(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way by the command line, with the real TensorRT-RTX."""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        reason = "TensorRT-RTX is not installed: pip install 'mdps[tensorrt-rtx]'"
        pytest.fail(reason) if os.environ.get("MDPS_CI") else pytest.skip(reason)
    out = tmp_path / "bundle"
    command = ["--ckpt", str(checkpoint), "--out", str(out), "--backbone", "random_tiny", "--noise-level", "198"]
    command += ["--steps", "2", "--precision", "fp16", "--engine", "tensorrt-rtx", "--compute-capability", "8.6,12.0"]
    assert run(export_command, [*command, "--max-batch", "2"]) == 0
    entries = Manifest.read(out).plans
    assert [entry.role for entry in entries] == ["plain_step", "guided_step", "features", "score"]
    for entry in entries:
        step = entry.role.endswith("step")
        assert entry.precision == ("fp16" if step else "fp32")
        assert (entry.types.get("HALF", 0) > 20) == step
        assert entry.compute_capabilities == ("8.6", "12.0")
        assert entry.batch == (1, 1, 2)
        assert (out / entry.file).stat().st_size > 10_000
    with load(out, calibrated=False) as detector:
        assert np.isfinite(detector(np.zeros((16, 16, 3), np.uint8)).score)


def test_a_capability_is_refused_before_anything_is_written(checkpoint: Path, tmp_path: Path) -> None:
    command = ["--ckpt", str(checkpoint), "--out", str(tmp_path / "b"), "--backbone", "random_tiny", "--steps", "2"]
    assert run(export_command, [*command, "--compute-capability", "8.6"]) == 2  # of plans, and none are asked for
    assert run(export_command, [*command, "--engine", "tensorrt-rtx", "--compute-capability", "eight"]) == 2
    assert not (tmp_path / "b").exists()
