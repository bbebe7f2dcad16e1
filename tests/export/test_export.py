"""Checkpoint in, bundle out: what it holds, when it is refused, and that nothing half-written is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdps.export import ExportOptions, export_bundle
from mdps.export import parity as parity_module
from mdps.export.methods import PRESETS, preset
from mdps.export.parity import ParityError
from mdps.models.backbones import load_backbone
from mdps.models.checkpoints import CheckpointOptions, load_denoiser
from mdps.runtime import load
from mdps.runtime.bundle import Bundle
from mdps.runtime.errors import UsageError
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import Manifest
from mdps.runtime.schedule import Step, plan_steps

TINY = ExportOptions(backbone="random_tiny", noise_level=198, steps=3, load=CheckpointOptions(image_size=32))


def picture(seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (40, 50, 3), dtype=np.uint8)


def test_the_bundle_says_what_it_is(tiny_bundle: Path, small_checkpoint: Path) -> None:
    manifest = Manifest.read(tiny_bundle)
    assert set(manifest.graphs) == {"guided_step", "plain_step", "ddad_step", "features", "score"}
    for step in ("guided_step", "plain_step", "ddad_step"):
        assert manifest.graphs[step].variants == {"openvino": f"{step}.openvino.onnx"}
    assert set(manifest.files) == {p.name for p in tiny_bundle.iterdir()} - {"manifest.json"}
    assert manifest.checkpoint.name == small_checkpoint.name
    assert manifest.network["assumed"]["norm_groups"] == 32
    assert "image_size" not in manifest.network["assumed"]  # given
    checks = manifest.parity["checks"]
    assert set(checks) - {"openvino"} == set(parity_module.TOLERANCES) - {"mnn", "variants"}
    assert all(check["error"] <= check["tolerance"] for check in checks.values())
    assert manifest.parity["nodes"]["guided_step"]["Conv"] > manifest.parity["nodes"]["plain_step"]["Conv"]


def test_ddads_step_is_checked_and_only_there_to_be_asked_for(
    tiny_bundle: Path, small_denoiser: Any, tmp_path: Path
) -> None:
    bundle = Bundle.read(tiny_bundle)
    backbone, settings = load_backbone("random_tiny", None, (1, 2, 3)), bundle.settings
    with ExitStack() as opened:
        pipeline = open_pipeline(bundle, opened)
        assert "ddad_step" not in pipeline.engines
        wrong = replace(pipeline, graphs=replace(pipeline.graphs, ddad=pipeline.graphs.guided))
        parity_module.check_parity(pipeline, small_denoiser, backbone, (32, 32))
        with pytest.raises(ParityError, match="guidance_gradient off by"):
            parity_module.check_parity(wrong, small_denoiser, backbone, (32, 32))
    compared = {entry["role"] for entry in bundle.manifest.parity["engines"]}
    assert compared == set(json.loads((tiny_bundle / "reference.json").read_text())["outputs"]) >= {"ddad_step"}

    older = Path(shutil.copytree(tiny_bundle, tmp_path / "older"))
    graphs = {role: graph for role, graph in bundle.manifest.graphs.items() if role != "ddad_step"}
    replace(bundle.manifest, graphs=graphs, settings=settings).write(older)
    with load(older, calibrated=False) as old, load(tiny_bundle, calibrated=False) as new:
        assert old(picture()).score == new(picture()).score


def test_graphs_name_their_ends(tiny_bundle: Path) -> None:
    import onnx

    graph = onnx.load(tiny_bundle / "guided_step.onnx", load_external_data=False).graph
    assert [i.name for i in graph.input] == [
        "x_t", "observation", "mask", "noise", "timestep", "alpha_t", "alpha_s", "sigma_t", "guidance_scale",
    ]  # fmt: skip
    assert [o.name for o in graph.output] == ["x_s", "eps", "guidance_gradient"]
    text = (tiny_bundle / "score.onnx").read_bytes()
    assert b".py" not in text, "the exporter's notes on its own source files went into the graph"


def test_traced_and_onnx_bundles_agree(tiny_bundle: Path, small_checkpoint: Path, tmp_path: Path) -> None:
    traced = export_bundle(small_checkpoint, tmp_path / "traced", replace(TINY, guidance_backend="traced"))
    assert Manifest.read(traced).graphs["guided_step"].session == "traced"
    with load(tiny_bundle, calibrated=False) as one, load(traced, calibrated=False) as other:
        for seed in (1, 2):
            a, b = one(picture(seed)), other(picture(seed))
            assert abs(a.score - b.score) < 1e-5
            assert np.abs(a.posterior_sample - b.posterior_sample).max() < 1e-4
            assert (a.mask == b.mask).mean() > 0.99


@pytest.mark.parametrize("gradient", ["exact", "jacobian-free", "ddad"])
@pytest.mark.parametrize("backend", ["onnx", "traced"])
def test_every_preset_kind_passes_the_gate(backend: Any, gradient: Any, small_checkpoint: Path, tmp_path: Path) -> None:
    """hazelnut: another level for each pass, the masked one without guidance; at 32 x 32 with short passes."""
    options = ExportOptions(
        preset="mvtec/hazelnut", backbone="random_tiny", noise_level=60, guidance_backend=backend, gradient=gradient,
        load=CheckpointOptions(image_size=32),
    )  # fmt: skip
    manifest = Manifest.read(export_bundle(small_checkpoint, tmp_path / "bundle", options))
    assert manifest.settings.mode == "reference"
    assert [p.guidance_scale for p in manifest.settings.sampler.passes] == [50, 0]
    assert "plain_step" in manifest.graphs


def test_presets_are_the_authors(shared: Path) -> None:
    import csv

    with (shared / "reference-presets.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(PRESETS)
    for row in rows:
        found = preset(f"{row['dataset']}/{row['category']}")
        last = found.sampler.masked_pass or found.sampler.first_pass
        assert (found.sampler.masked_pass is not None) == (row["mask_steps"] != "0")
        assert last.guidance_scale == float(row["guidance"])
        assert last.noise_level == int(row["test_steps"])
        assert found.mask.mask_lambda == float(row["mask_lambda"])
        assert found.score.eta == float(row["eta"])
        if found.sampler.masked_pass:
            assert found.sampler.first_pass.guidance_scale == float(row["guidance_mask_pass"])
            assert found.sampler.first_pass.noise_level == int(row["mask_steps"])


def test_presets_call_the_steps_the_authors_do() -> None:
    from mdps.runtime.schedule import NoiseSchedule

    for name, calls in {"mvtec/carpet": 13, "mvtec/grid": 10, "mvtec/tile": 8}.items():
        sampler = preset(name).sampler
        _, steps = plan_steps(NoiseSchedule.linear(), sampler.time_index, sampler.first_pass, 1.0)
        assert len(steps) == calls
        assert steps[-1].timestep == 0


def test_a_preset_without_mask_pass_makes_one(small_checkpoint: Path, tmp_path: Path) -> None:
    options = ExportOptions(
        preset="mvtec/grid", backbone="random_tiny", noise_level=60, load=CheckpointOptions(image_size=32)
    )
    bundle = export_bundle(small_checkpoint, tmp_path / "bundle", options)
    assert Manifest.read(bundle).settings.sampler.masked_pass is None
    with pytest.raises(UsageError, match="mdps calibrate"):
        load(bundle)


def test_wrong_choices_are_said_before_anything_is_written(small_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    for options, words in (
        (ExportOptions(preset="mvtec/botle"), "mvtec/bottle"),
        (replace(TINY, load=CheckpointOptions(image_size=33)), "multiple of 2"),
        (replace(TINY, noise_level=200, steps=3), "200"),
        (replace(TINY, backbone="no_such_net"), "no_such_net"),
        (ExportOptions(preset="mvtec/bottle", steps=5), "--steps"),
        (ExportOptions(preset="mvtec/bottle", load=CheckpointOptions(image_size=16)), "too small"),
    ):
        with pytest.raises(UsageError, match=words):
            export_bundle(small_checkpoint, out, options)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept_unless_forced(tiny_bundle: Path, small_checkpoint: Path) -> None:
    before = (tiny_bundle / "manifest.json").read_bytes()
    with pytest.raises(UsageError, match="--force"):
        export_bundle(small_checkpoint, tiny_bundle, TINY)
    assert (tiny_bundle / "manifest.json").read_bytes() == before


def test_a_wrong_graph_does_not_pass_the_gate(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient weight that was not flipped is the classic: the bundle must not come into being."""
    from mdps.export import bundle as bundle_module

    def unflipped(network: Any, precision: str) -> Any:
        for module in network.modules():
            if module.__class__.__name__ == "Conv2d" and module.stride == (1, 1):
                module.register_buffer("input_gradient_weight", module.weight.transpose(0, 1).contiguous())
        return network

    monkeypatch.setattr(bundle_module, "prepare", unflipped)
    with pytest.raises(ParityError, match="guidance_gradient"):
        export_bundle(small_checkpoint, tmp_path / "bundle", TINY)
    assert not list(tmp_path.iterdir())


def test_the_gate_keeps_the_worst_error_and_lets_no_nan_through() -> None:
    report = parity_module.Report()
    for error in (0.0, 2e-4, 0.0):  # eps may be off by 1e-4
        report.compare("eps", np.array([1 + error]), torch.tensor([1.0], dtype=torch.float64))
    assert report.errors["eps"] == pytest.approx(2e-4)
    report.compare("anomaly_map", np.array([np.nan]), torch.tensor([1.0]))
    report.compare("anomaly_map", np.array([1.0]), torch.tensor([1.0]))
    report.compare("anomaly_score", np.array([1.0009]), torch.tensor([1.0]))  # may be off by 1e-3
    assert report.failures == ["eps", "anomaly_map"]


def test_a_frozen_gradient_is_found() -> None:
    class Frozen:
        inputs = ("x_t",)

        def run(self, feeds: Any, outputs: Any) -> Any:
            return {"guidance_gradient": np.ones_like(feeds["x_t"])}

    step, y = Step(99.0, 0.6, 0.7, 0.1), np.random.RandomState(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    with pytest.raises(ParityError, match="frozen"):
        parity_module._check_gradient_moves(Frozen(), y, step)  # type: ignore[arg-type]


def test_a_killed_export_leaves_nothing_that_loads(small_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    code = (
        "import sys; from mdps.export import *; from mdps.models.checkpoints import CheckpointOptions\n"
        "o = ExportOptions(backbone='random_tiny', load=CheckpointOptions(image_size=32))\n"
        "export_bundle(sys.argv[1], sys.argv[2], o, say=lambda s: print(s, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(small_checkpoint), str(out)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "comparing" in line:  # every file is written, only the gate and the rename are left
            os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    left = list(tmp_path.iterdir())
    assert left, "the export was killed too late to prove anything"
    for folder in left:
        with pytest.raises(UsageError):
            load(folder, calibrated=False)


def test_default_place_is_beside_the_checkpoint(small_checkpoint: Path) -> None:
    bundle = export_bundle(small_checkpoint, None, replace(TINY, mask_pass=False))
    assert bundle == small_checkpoint.with_name("checkpoint.bundle")
    assert json.loads((bundle / "manifest.json").read_text())["settings"]["sampler"]["masked_pass"] is None


def test_one_bundle_serves_any_number_of_samples_and_images(tiny_bundle: Path) -> None:
    pictures = [picture(seed) for seed in range(5)]
    with load(tiny_bundle, calibrated=False, max_batch=64) as detector:
        alone = [detector(p) for p in pictures]
        together = detector.batch(pictures)
        backwards = detector.batch(pictures[::-1])[::-1]
    for a, b, c in zip(alone, together, backwards, strict=True):
        assert a.score == b.score == c.score
        np.testing.assert_array_equal(a.anomaly_map, b.anomaly_map)
    for samples in (2, 5, 16):
        with load(tiny_bundle, calibrated=False, samples=samples, warm_up=False) as detector:
            assert np.isfinite(detector(pictures[0]).score)


def test_loading_twice_gives_the_same_to_the_bit(tiny_bundle: Path) -> None:
    scores = []
    for _ in range(2):
        with load(tiny_bundle, calibrated=False, threads=1) as detector:
            start = time.perf_counter()
            scores.append(detector(picture()).score)
            assert time.perf_counter() - start < 60
    assert scores[0] == scores[1]


def test_the_report_counts_what_torch_would_do_for_the_same_step(small_checkpoint: Path, tmp_path: Path) -> None:
    said: list[str] = []
    out = export_bundle(small_checkpoint, tmp_path / "b", replace(TINY, count_nodes=True), say=said.append)
    report = Manifest.read(out).parity
    torch_does, ours = report["autograd_operations"], report["nodes"]["guided_step"]
    network = load_denoiser(small_checkpoint, TINY.load).network
    convolutions = sum(isinstance(module, torch.nn.Conv2d | torch.nn.Conv1d) for module in network.modules())
    assert torch_does["convolution"] == torch_does["convolution_backward"] == convolutions
    assert sum(torch_does.values()) > sum(ours.values())
    assert any(f"{sum(ours.values())} nodes" in text for text in said)
    assert any("is assumed to have: num_heads = 4" in text and "norm_groups = 32" in text for text in said)
    assert "autograd_operations" not in Manifest.read(export_bundle(small_checkpoint, tmp_path / "c", TINY)).parity


def test_an_image_size_that_the_checkpoint_contradicts_is_refused(tmp_path: Path) -> None:
    """It changed the network's description alone, and the images stayed as they were."""
    demo = Path(__file__).resolve().parents[2] / "benchmarks" / "demo" / "denoiser.safetensors"
    with pytest.raises(UsageError, match="was trained on images of 64 x 64, not 96 x 96: leave out --image-size"):
        export_bundle(demo, tmp_path / "bundle", ExportOptions(load=CheckpointOptions(image_size=96)))
