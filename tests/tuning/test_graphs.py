"""The graphs of a tuning compute what their modules do, and a bundle holds the old tuning or the new one."""

import errno
import os
import shutil
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from mdps.export.parity import ParityError
from mdps.models.backbones import load_backbone
from mdps.runtime.calibration import Calibration
from mdps.runtime.engines.interface import open_session
from mdps.runtime.errors import MdpsError
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.settings import PassSettings, SamplerSettings
from mdps.runtime.tuning import Term, Tuning
from mdps.tuning import graphs
from mdps.tuning.graphs import Fitted, Fused, write
from mdps.tuning.statistics import (
    Distance,
    PhotographFeatures,
    Residual,
    Statistic,
    View,
    fit,
    fit_pixels,
    fusion,
    residual_features,
)

STAGES = (1, 2, 3)
NETWORK = (32, 32)  # of the tiny bundle
SAMPLER = SamplerSettings("paper", "blend", "l2", "exact", 1.0, PassSettings(50, 0.0, steps=1), None, samples=1, seed=0)


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def of_photographs(kind: str, size: int, blur: float = 2.0, stages: tuple[int, ...] = STAGES) -> Distance:
    """A statistic of photographs of this size, or of larger ones seen at it."""
    backbone = load_backbone("random_tiny", stages=STAGES)
    features = PhotographFeatures(backbone, stages, size)(images(4, 3, size, size, seed=6))
    return fit(Statistic(kind, "photograph", View(size, stages, size // 8), blur), features)  # type: ignore[arg-type]


def fused(size: int = 64, extra: float = 0.0) -> Fused:
    """Every kind of term, each of other stages."""
    backbone = load_backbone("random_tiny", stages=STAGES)
    y, samples = images(4, 3, *NETWORK, seed=7), images(4, 2, 3, *NETWORK, seed=8)
    view = View(48, (1, 2), 8)
    residual = fit(Statistic("shared", "residual", view, 2.0), residual_features(backbone, view)(y, samples))
    terms = [
        Fitted(Term("map", "map", "reconstruction", 0.1, 0.5 + extra, 1.0)),
        Fitted(Term("pixels", "pixels", "reconstruction", 0.0, 2.0, 0.5), fit_pixels(y, samples, 2.0)),
        Fitted(Term("position", "position", "photograph", 1.0, 9.0, 1.0), of_photographs("position", size)),
        Fitted(
            Term("bank", "bank", "photograph", 1.0, 9.0, 1.0), of_photographs("bank", size // 2, stages=(2, 3))
        ),
        Fitted(Term("residual", "shared", "residual", 1.0, 9.0, 1.0), residual),
    ]  # fmt: skip
    return Fused(terms, top=5, backbone=backbone, photograph=Preprocessing((size, size)), sampler=SAMPLER)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def run(bundle: Path, tuning: Tuning, role: str, engine: str, **arrays: Tensor) -> dict[str, np.ndarray]:
    session = open_session(bundle / tuning.graphs[role].file, engine)
    try:
        return session.run({name: arrays[name].numpy() for name in session.inputs})
    finally:
        session.close()


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_graphs_compute_what_their_modules_do_at_any_batch(bundle: Path, engine: str, size: int) -> None:
    given = fused(size)
    tuning = write(bundle, "part", given)
    modules = {one.term.name: one.module for one in given.terms}
    assert given.backbone is not None
    for batch in (1, 3):
        y, samples = images(batch, 3, *NETWORK, seed=2), images(batch, 2, 3, *NETWORK, seed=3)
        photograph = images(batch, 3, size, size, seed=4)
        stages = PhotographFeatures(given.backbone, STAGES, size)(photograph)
        halved = photograph.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).mean(dim=(3, 5))
        smaller = PhotographFeatures(given.backbone, (2, 3), size // 2)(halved)
        seen = {f"photograph_features_{k}": stage for k, stage in enumerate((*smaller, *stages), 1)}
        wanted = {
            "pixels": modules["pixels"](y, samples),
            "position": modules["position"](*stages),
            "bank": modules["bank"](*smaller),
            "residual": Residual(given.backbone, modules["residual"])(y, samples),
        }
        inputs = {"observation": y, "posterior_samples": samples, **seen}
        found = run(bundle, tuning, "photograph", engine, photograph=photograph)
        for name, stage in seen.items():
            np.testing.assert_allclose(found[name], stage, rtol=1e-3, atol=1e-4)
        for name, raw in wanted.items():
            found = run(bundle, tuning, name, engine, **inputs)["map"]
            np.testing.assert_allclose(found, raw, rtol=1e-3, atol=1e-3, err_msg=name)
        wanted["map"] = y[:, :1]
        terms = [one.term for one in given.terms]
        together = fusion(terms, NETWORK, 5)(*(wanted[term.name] for term in terms))
        found = run(bundle, tuning, "fusion", engine, **wanted)
        for name, tensor in zip(("anomaly_map", "anomaly_score", "mask"), together, strict=True):
            np.testing.assert_allclose(found[name], tensor, rtol=1e-3, atol=1e-3, err_msg=name)


def test_weights_of_the_backbone_are_those_of_the_bundle(bundle: Path) -> None:
    backbone = load_backbone("random_tiny", stages=STAGES)
    terms = [Fitted(Term("shared", "shared", "photograph", 1, 9, 1.0), of_photographs("shared", 64))]
    tuning = write(bundle, "part", Fused(terms, 5, backbone, Preprocessing((64, 64))))
    model = onnx.load(bundle / tuning.graphs["photograph"].file, load_external_data=False)
    outside = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    assert outside
    assert {entry.value for one in outside for entry in one.external_data if entry.key == "location"} == {
        "features.weights"
    }
    assert sorted(path.name for path in bundle.glob("tuning-*")) == [
        "tuning-part-1.fusion.onnx",
        "tuning-part-1.photograph.onnx",
        "tuning-part-1.shared.onnx",
        "tuning-part-1.weights",
    ]


def kept(bundle: Path) -> set[str]:
    return {path.name for path in bundle.glob("tuning-*")}


def test_a_tuning_takes_the_place_of_the_one_before_with_all_its_files(bundle: Path) -> None:
    plain = set(Manifest.read(bundle).files)
    other = write(bundle, "Part B", fused())
    for number in (1, 2, 1):
        tuning = write(bundle, "part b", fused(extra=number))
        manifest = Manifest.read(bundle)  # which checks every hash
        assert manifest.tunings == {"Part B": other, "part b": tuning}
        files = {graph.file for one in manifest.tunings.values() for graph in one.graphs.values()}
        weights = {f"{file.partition('.')[0]}.weights" for file in files}
        assert kept(bundle) == files | weights
        assert set(manifest.files) == plain | files | weights


def test_the_calibration_that_goes_with_it_is_written_with_it(bundle: Path) -> None:
    seen: list[Manifest] = []
    calibration = Calibration(1.5, 0.1, 0.1, 20, 0.0, 1.0, 0.0, 1.0, samples=1, seed=0)

    def settle(manifest: Manifest) -> tuple[Tuning, Calibration]:
        assert all((bundle / name).is_file() for name in manifest.files)
        assert not Manifest.read(bundle).tunings
        seen.append(manifest)
        return replace(manifest.tunings["part"], evidence={"settled": True}), calibration

    tuning = write(bundle, "part", fused(), settle)
    manifest = Manifest.read(bundle)
    assert (
        manifest.tunings == {"part": tuning} == {"part": replace(seen[0].tunings["part"], evidence={"settled": True})}
    )
    assert manifest.calibrations == {"part": calibration}


def test_a_graph_that_computes_something_else_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*arguments: Any) -> Any:
        model = recorded(*arguments)
        for node in model.graph.node:
            node.op_type = "Sub" if node.op_type == "Add" else node.op_type
        return model

    recorded = graphs.recorded
    monkeypatch.setattr(graphs, "recorded", off)
    with pytest.raises(ParityError, match=r"tuning-part-1\.\w+\.onnx differs from its module"):
        write(bundle, "part", fused())
    assert not kept(bundle)


def test_an_operator_the_recorder_does_not_know_is_traced(bundle: Path) -> None:
    class Odd(nn.Module):
        def __init__(self, backbone: nn.Module) -> None:
            super().__init__()
            self.backbone = backbone

        def forward(self, image: Tensor) -> tuple[Tensor, ...]:
            return tuple(nn.functional.elu(stage) for stage in self.backbone(image))

    backbone, said = load_backbone("random_tiny", stages=STAGES), []
    backbone.network = Odd(backbone.network)
    terms = [Fitted(Term("shared", "shared", "photograph", 1, 9, 1.0), of_photographs("shared", 64))]
    write(bundle, "part", Fused(terms, 5, backbone, Preprocessing((64, 64))), say=said.append)
    assert said == ["the exporter has no ONNX form of the torch operator 'elu': using torch's exporter"]


@pytest.fixture
def tuned(bundle: Path) -> Path:
    write(bundle, "part", fused())
    return bundle


def test_a_write_that_fails_leaves_the_old_tuning_whole(tuned: Path) -> None:
    """Let each write be the one that finds the disk full."""
    manifest, there, given = Manifest.read(tuned), kept(tuned), fused(extra=1.0)
    index, said = 0, full(tuned, given, 0)
    while said:
        assert str(tuned) in said
        assert said.endswith("No space left on device; make room or choose another place")
        assert Manifest.read(tuned) == manifest
        assert kept(tuned) == there
        index, said = index + 1, full(tuned, given, index + 1)
    assert index > 12  # six graphs, weights, a manifest
    assert Manifest.read(tuned) != manifest


def full(bundle: Path, given: Fused, index: int) -> str:
    """Let the write `index` of all find the disk full, and return what is said; "" where there are not so many."""
    left = [index]

    def counted(real: Any, writes: Any) -> Any:
        def call(path: Path, *arguments: Any, **named: Any) -> Any:
            if writes(*arguments):
                left[0] -= 1
                if left[0] == -1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return real(path, *arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", counted(Path.open, lambda mode="r", *_: "w" in mode or "+" in mode))
        patch.setattr(Path, "replace", counted(Path.replace, lambda *_: True))
        try:
            write(bundle, "part", given)
        except MdpsError as error:
            return str(error)
    return ""


def write_forever(bundle: Path, given: Fused) -> None:
    while True:
        write(bundle, "part", given)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_killed_process_leaves_a_bundle_that_loads(tuned: Path) -> None:
    """Kill it at moments that go through all of a write, and at last when it has written one."""
    before, given = Manifest.read(tuned), fused(extra=1.0)
    for moment in (0.03, 0.1, 0.2, 0.4, 0.7, 60.0):
        child = get_context("fork").Process(target=write_forever, args=(tuned, given))
        child.start()
        end = time.monotonic() + moment
        while time.monotonic() < end and (moment < 1 or Manifest.read(tuned, verify=False) == before):
            time.sleep(0.01)
        child.kill()
        child.join()
        child.close()
        assert set(Manifest.read(tuned).tunings) == {"part"}
    assert Manifest.read(tuned) != before
    write(tuned, "part", given)
    assert kept(tuned) == {name for name in Manifest.read(tuned).files if name.startswith("tuning-")}
