"""Weights in half the bytes compute the same to the bit."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from mdps.export.halves import _halve, make_small
from mdps.runtime import load
from mdps.runtime.manifest import Manifest


def model(*weights: np.ndarray) -> onnx.ModelProto:
    """A product with each of the square matrices, one after another."""
    names = [f"w{index}" for index in range(len(weights))]
    nodes = [helper.make_node("MatMul", [f"x{i}", name], [f"x{i + 1}"]) for i, name in enumerate(names)]
    ends = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [4, 4]) for i in (0, len(weights))]
    stored = [numpy_helper.from_array(one, name) for name, one in zip(names, weights, strict=True)]
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], stored), opset_imports=opset, ir_version=9
    )


def computed(one: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(one, full_check=True)
    session = onnxruntime.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x0": x})[0])


def test_only_what_loses_nothing_is_stored_in_half() -> None:
    x, exact, inexact = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32)
    exact = exact.astype(np.float16).astype(np.float32)
    large = np.full((4, 4), 1e6, np.float32)  # beyond the range of half precision
    halved = model(exact, inexact, large)
    wanted = computed(halved, x)
    _halve(halved)
    types = {one.name: one.data_type for one in halved.graph.initializer}
    assert types == {"w0.half": TensorProto.FLOAT16, "w1": TensorProto.FLOAT, "w2": TensorProto.FLOAT}
    np.testing.assert_array_equal(computed(halved, x), wanted)


def test_a_small_bundle_judges_as_the_whole_one(line_bundle: Path, tmp_path: Path) -> None:
    small = Path(shutil.copytree(line_bundle, tmp_path / "small"))
    make_small(small)
    manifest = Manifest.read(small)
    assert "ddad_step" not in manifest.graphs
    assert not any(graph.variants for graph in manifest.graphs.values())
    assert {path.name for path in small.iterdir()} == {*manifest.files, "manifest.json"}
    picture = np.random.default_rng(0).integers(0, 255, (24, 24, 3), np.uint8)
    with load(line_bundle, threads=1) as whole, load(small, threads=1) as part:
        assert part(picture).score == whole(picture).score
