"""Engine plans: real builds by TensorRT-RTX, which needs no GPU, and what is said where one cannot be had."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from mdps.export import engine as engine_module
from mdps.export.engine import Builder
from mdps.export.engine_graph import parseable, without_layer_statistics
from mdps.export.engine_types import inspected_types
from mdps.export.graph import WeightStore, write
from mdps.export.norms import ByChannel, Grouped, NormForm
from mdps.export.plans import profile_of
from mdps.export.precision import in_precision, prepare
from mdps.export.step import Denoiser, GuidedStep, PlainStep, StepRules
from mdps.export.tracer import record
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.errors import BackendError, UsageError

FORMS = {"grouped": Grouped(), "by-channel": ByChannel()}
IMAGES = ("x_t", "observation", "mask", "noise")
SCALARS = {"timestep": 99.0, "alpha_t": 0.6, "alpha_s": 0.7, "sigma_t": 0.1, "guidance_scale": 100.0}
TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDPS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def rtx() -> Builder:
    """The real builder, for one card."""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        reason = "TensorRT-RTX is not installed: pip install 'mdps[tensorrt-rtx]'"
        if os.environ.get("MDPS_CI"):  # a run that decides must not pass because its proof was missing
            pytest.fail(reason)
        pytest.skip(reason)
    return Builder.of("tensorrt-rtx", ("8.6",))


def smallest() -> UNet:
    """One level, one residual block a side, attention in the middle: all kinds of layers in a second's build."""
    torch.manual_seed(0)
    network = UNet(
        UNetConfig(
            image_size=16, model_channels=16, channel_mult=(1,), num_res_blocks=1, attention_factors=(), num_heads=2,
            norm_groups=4,
        )
    )  # fmt: skip
    for parameter in network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return network.eval().requires_grad_(False)


def graph(network: UNet, kind: str, precision: str, norms: NormForm, path: Path) -> Path:
    """A step graph with its weights beside it."""
    image = torch.randn(1, 3, 16, 16)
    inputs: dict[str, Any] = {name: image + i for i, name in enumerate(IMAGES)} | {"mask_noise": None}
    inputs["mask"] = image[:, :1]
    inputs |= {name: torch.tensor(value) for name, value in SCALARS.items()}
    outputs = ["x_s", "eps", "guidance_gradient"]
    if kind == "plain":
        del inputs["guidance_scale"], outputs[2]
    denoiser = Denoiser(prepare(in_precision(network, precision), precision), "eps", norms)  # type: ignore[arg-type]
    module = (GuidedStep if kind == "guided" else PlainStep)(denoiser, StepRules())
    write(record(module, inputs, outputs, dict.fromkeys(IMAGES, ("batch",))), path, WeightStore(path.with_suffix(".w")))
    return path


@pytest.mark.parametrize(
    ("kind", "precision", "form"),
    [
        ("guided", "fp16", "by-channel"),
        ("guided", "fp16", "grouped"),
        ("guided", "fp32", "by-channel"),
        ("plain", "bf16", "by-channel"),
        ("plain", "fp32", "grouped"),
    ],
)
def test_steps_build(kind: str, precision: str, form: str, rtx: Builder, tmp_path: Path) -> None:
    path = graph(smallest(), kind, precision, FORMS[form], tmp_path / "step.onnx")
    built = rtx.build(path, profile_of(path, (1, 1, 4), None), precision)
    assert len(built.plan) > 100_000
    assert built.types[TYPES[precision]] > 20


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["guided", "plain"])
def test_every_variant_builds_for_every_card(
    kind: str, form: str, precision: str, variant: str, make_network: Callable[..., UNet], rtx: Builder, tmp_path: Path
) -> None:
    path = graph(make_network(variant), kind, precision, FORMS[form], tmp_path / "step.onnx")
    builder = Builder.of("tensorrt-rtx", ("8.6", "8.9", "12.0"), precision)
    built = builder.build(path, profile_of(path, (1, 1, 16), None), precision)
    assert built.types[TYPES[precision]] > 20


def test_a_graph_in_another_type_is_refused(rtx: Builder, tmp_path: Path) -> None:
    path = graph(smallest(), "plain", "fp32", ByChannel(), tmp_path / "step.onnx")
    with pytest.raises(BackendError, match=r"step\.onnx computes Conv_\d+ in FLOAT where HALF was asked for"):
        rtx.build(path, profile_of(path, (1, 1, 4), None), "fp16")


def one_node(operator: str, path: Path, **attributes: Any) -> Path:
    value = helper.make_tensor_value_info
    node = helper.make_node(operator, ["x"], ["y"], name="odd", **attributes)
    ends = [value(name, TensorProto.FLOAT, ["batch", 4, 4]) for name in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), ir_version=9)
    model.opset_import[0].version = 20
    onnx.save(model, path)
    return path


def test_what_the_parser_does_not_know_is_named_in_one_sentence(rtx: Builder, tmp_path: Path) -> None:
    path = one_node("Det", tmp_path / "odd.onnx")
    with pytest.raises(BackendError, match=r"does not read odd\.onnx: .*\(node odd, operator Det\)") as caught:
        rtx.build(path, profile_of(path, (1, 1, 4), None), "fp32")
    assert "\n" not in str(caught.value)


def test_a_build_that_fails_is_one_sentence(rtx: Builder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = one_node("Relu", tmp_path / "relu.onnx")
    with pytest.raises(BackendError, match=r"cannot build relu\.onnx for compute capability 8\.6: .*") as caught:
        rtx.build(path, {}, "fp32")  # a dynamic axis without a range
    assert "\n" not in str(caught.value)
    assert not capfd.readouterr().err, "the library's log reached the terminal"


def test_capabilities_that_cannot_be_built_for(rtx: Builder) -> None:
    with pytest.raises(UsageError, match=r"8\.6, 8\.9, 12\.0.*, not 9\.0: leave it out"):
        Builder.of("tensorrt-rtx", ("8.6", "9.0"))
    with pytest.raises(UsageError, match=r"7\.5 has no bf16"):
        Builder.of("tensorrt-rtx", ("7.5", "8.6"), "bf16")
    assert Builder.of("tensorrt-rtx", ("12.0", "8.6", "8.6")).capabilities == ("8.6", "12.0")


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_missing_library_is_named_with_its_remedy(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(engine_module.importlib, "import_module", missing)
    with pytest.raises(BackendError, match=rf"pip install 'mdps\[{backend}\]'"):
        Builder.of(backend)


def fake_tensorrt(monkeypatch: pytest.MonkeyPatch, cards: tuple[str, ...]) -> None:
    library = SimpleNamespace(__version__="10.9.0", Builder=object)
    monkeypatch.setattr(engine_module.importlib, "import_module", lambda name: library)
    monkeypatch.setattr(engine_module, "gpus", lambda: cards)


def test_tensorrt_builds_for_the_card_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt(monkeypatch, ("NVIDIA H100, 580.1, 81559 MiB, 9.0",))
    assert Builder.of("tensorrt").capabilities == ("9.0",)
    assert Builder.of("tensorrt", ("9.0",)).version == "10.9.0"
    with pytest.raises(UsageError, match=r"capability 9\.0, not for 8\.6"):
        Builder.of("tensorrt", ("8.6",))
    fake_tensorrt(monkeypatch, ())
    with pytest.raises(BackendError, match="nvidia-smi shows none"):
        Builder.of("tensorrt")


def layer(kind: str, given: str, result: str) -> dict[str, Any]:
    tensors = [[{"Name": "t", "Dimensions": [1], "Format/Datatype": text}] for text in (given, result)]
    return {"Name": f"{kind} 1", "LayerType": kind, "Inputs": tensors[0], "Outputs": tensors[1]}


def test_the_inspector_finds_a_layer_that_fell_back(tmp_path: Path) -> None:
    half = "Channel major FP16 format where channel % 8 == 0"
    good = [layer("CaskConvolution", half, half), layer("PointWise", "Float", "Float")]
    path = tmp_path / "step.onnx"
    assert inspected_types(json.dumps({"Layers": good}), "fp16", path) == {"Half": 1, "Float": 1}
    fallen = [*good, layer("CaskConvolution", "Row major linear FP32", half)]
    with pytest.raises(BackendError, match="CaskConvolution 1 in Float where Half was asked for"):
        inspected_types(json.dumps({"Layers": fallen}), "fp16", path)
    one = [layer("Myelin", "Float", "Float"), "ForeignNode[a...b]"]
    assert inspected_types(json.dumps({"Layers": one}), "fp16", path) is None


def test_layer_norms_written_out_compute_the_same(tmp_path: Path) -> None:
    network = smallest()
    path = graph(network, "guided", "fp32", Grouped(), tmp_path / "step.onnx")
    other = tmp_path / "written.onnx"
    model = parseable(path)
    assert all(len(node.output) == 1 for node in model.graph.node if node.op_type == "LayerNormalization")
    onnx.save(model, other)
    stream = np.random.RandomState(0)
    feeds = {name: stream.standard_normal((2, 3, 16, 16)).astype(np.float32) for name in IMAGES}
    feeds["mask"] = feeds["mask"][:, :1]
    feeds |= {name: np.asarray(value, np.float32) for name, value in SCALARS.items()}
    wanted, found = (
        onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feeds)
        for file in (path, other)
    )
    for one, reference in zip(found, wanted, strict=True):
        assert np.abs(one - reference).max() < 1e-4 * np.abs(reference).max()


def test_a_layer_norm_nobody_asks_for_statistics_stays_whole(tmp_path: Path) -> None:
    path = graph(smallest(), "plain", "fp16", Grouped(), tmp_path / "step.onnx")
    model = without_layer_statistics(onnx.load(path, load_external_data=False))
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    assert norms
    assert all(len(node.output) == 1 for node in norms)
