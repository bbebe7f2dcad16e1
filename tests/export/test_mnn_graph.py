"""The graph as rewritten for MNN, against the graph as it was, both in ONNX Runtime; and the order of the file."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from mdps.export.mnn_graph import for_mnn
from mdps.export.norms import ByDepthwise
from mdps.export.precision import prepare
from mdps.export.step import Denoiser, GuidedStep, StepRules
from mdps.export.tracer import record
from mdps.models.unet import UNet
from mdps.runtime import BackendError

IMAGES = ("x_t", "observation", "mask", "noise")
SCALARS = {"timestep": 99.0, "alpha_t": 0.6, "alpha_s": 0.7, "sigma_t": 0.1, "guidance_scale": 1.0}
OUTPUTS = ["x_s", "eps", "guidance_gradient"]


@pytest.fixture
def step(variant: str, make_network: Callable[..., UNet]) -> ModelProto:
    """A guided step as it is recorded, with a dynamic batch."""
    torch.manual_seed(0)
    inputs: dict[str, Any] = {name: torch.randn(1, 1 if name == "mask" else 3, 16, 16) for name in IMAGES}
    inputs |= {"mask_noise": None} | {name: torch.tensor(value) for name, value in SCALARS.items()}
    denoiser = Denoiser(prepare(make_network(variant, (1, 2, 2)), "fp32"), "eps", ByDepthwise())  # type: ignore[arg-type]
    return record(GuidedStep(denoiser, StepRules()).eval(), inputs, OUTPUTS, dict.fromkeys(IMAGES, ("batch",)))


def outputs(model: ModelProto) -> list[NDArray[Any]]:
    random = np.random.default_rng(3)
    feeds = {name: random.normal(size=(1, 1 if name == "mask" else 3, 16, 16)).astype(np.float32) for name in IMAGES}
    feeds |= {name: np.array(value, np.float32) for name, value in SCALARS.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def test_the_rewritten_graph_computes_the_same(step: ModelProto) -> None:
    rewritten = for_mnn(step)
    for found, expected in zip(outputs(rewritten), outputs(step), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_what_it_rewrites_is_there(step: ModelProto) -> None:
    """Attention's products are of matrices, and convolutions of small images are transposed ones."""
    before, after = (Counter(node.op_type for node in model.graph.node) for model in (step, for_mnn(step)))
    assert before["MatMul"], "a network without attention would satisfy the test"
    assert not after["MatMul"]
    assert after["Gemm"] > before["Gemm"]
    assert after["ConvTranspose"] > before["ConvTranspose"]
    assert after["Sub"] < before["Sub"], "the softmax rule's shift should be one more term of a product"
    model = for_mnn(step)
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.value_info}
    assert all(0 not in shape for shape in shapes.values()), "a dynamic axis is left"


def test_the_model_it_was_given_is_left_alone(step: ModelProto) -> None:
    before = step.SerializeToString(deterministic=True)
    for_mnn(step)
    assert step.SerializeToString(deterministic=True) == before


def late_user() -> ModelProto:
    """exp(x) is read by the first output and its square, which the file has second, by the last node alone."""
    nodes = [
        helper.make_node("Exp", ["x"], ["early"], name="early"),
        helper.make_node("Mul", ["early", "early"], ["kept"], name="kept"),
        helper.make_node("Sigmoid", ["early"], ["long"], name="long"),
        helper.make_node("Tanh", ["long"], ["way"], name="way"),
        helper.make_node("Mul", ["way", "kept"], ["out"], name="out"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8, 4, 4]) for name in ("x", "out")]
    graph = helper.make_graph(nodes, "late", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_operations_run_in_the_order_of_the_graph(tmp_path: Path) -> None:
    """As MNN itself calls them; by its converter's order `kept` would come last but one."""
    library = pytest.importorskip("MNN")
    from mdps.export.mnn import write

    write(late_user(), tmp_path / "late.mnn")
    interpreter = library.Interpreter(str(tmp_path / "late.mnn"))
    session = interpreter.createSession({"backend": "CPU", "numThread": 1})
    called: list[str] = []

    def note(_: Any, operation: Any) -> bool:
        called.append(operation.getName())
        return True

    interpreter.runSessionWithCallBackInfo(session, lambda *_: True, note)
    ours = [name for name in called if name in ("early", "kept", "long", "way", "out")]
    assert ours == ["early", "kept", "long", "way", "out"]


def test_a_file_of_another_kind_is_a_sentence() -> None:
    from mdps.export.mnn import reordered

    with pytest.raises(BackendError, match="MNN 3"):
        reordered(b"\x04\x00", {})
    with pytest.raises(BackendError, match="MNN 3"):
        reordered(bytes(range(256)) * 4, {})
    with pytest.raises(BackendError, match="MNN 3"):
        reordered(bytes.fromhex("04000000") + b"\xff" * 64, {})


def test_the_order_is_whole_and_respects_what_each_needs() -> None:
    from mdps.export.mnn import _order

    needs, makes = [[], [0], [0], [1, 2], [3]], [[0], [1], [2], [3], [4]]
    assert _order(needs, makes, [0, 2, 1, 3, 4]) == [0, 2, 1, 3, 4]
    assert _order(needs, makes, [9, 1, 1, 0, 0]) == [0, 1, 2, 3, 4], "a low rank cannot come before its inputs"
    assert _order(needs, makes, [0, None, 1, 2, 3]) == [0, 2, 1, 3, 4], "what has no rank comes right before its user"
