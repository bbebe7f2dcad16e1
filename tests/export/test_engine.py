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

from mdps.export import ExportOptions, export_bundle
from mdps.export import engine as engine_module
from mdps.export.engine import OPTIONS, Builder, Built, inspected_types, parseable
from mdps.export.graph import WeightStore, write
from mdps.export.norms import ByChannel, Grouped, NormForm
from mdps.export.plans import add_plans, profile_of
from mdps.export.precision import in_precision, prepare
from mdps.export.step import Denoiser, GuidedStep, PlainStep, StepRules
from mdps.export.tracer import record
from mdps.models.checkpoints import save_denoiser
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime import cards as cards_module
from mdps.runtime.cards import Card
from mdps.runtime.engines import named
from mdps.runtime.engines.tensorrt import logger
from mdps.runtime.errors import BackendError, UsageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.schedule import NoiseSchedule

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
    return Builder.of(named("tensorrt-rtx"), ("8.6",))


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


def graph(
    network: UNet, kind: str, precision: str, norms: NormForm, path: Path, rules: StepRules | None = None
) -> Path:
    """A step graph with its weights beside it."""
    rules, side = rules or StepRules(), network.config.image_size
    image = torch.randn(1, 3, side, side)
    inputs: dict[str, Any] = {name: image + i for i, name in enumerate(IMAGES)}
    inputs["mask_noise"] = None if rules.mask_rule == "blend" else image + 9
    inputs["mask"] = image[:, :1]
    inputs |= {name: torch.tensor(value) for name, value in SCALARS.items()}
    outputs = ["x_s", "eps", "guidance_gradient"]
    if kind == "plain":
        del inputs["guidance_scale"], outputs[2]
    network = in_precision(network, precision)  # type: ignore[arg-type]
    denoiser = Denoiser(prepare(network, precision), rules.prediction, norms)  # type: ignore[arg-type]
    module = (GuidedStep if kind == "guided" else PlainStep)(denoiser, rules)
    axes = dict.fromkeys((*IMAGES, "mask_noise"), ("batch",))
    write(record(module, inputs, outputs, axes), path, WeightStore(path.with_suffix(".w")))
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


EVERY_CARD = ("8.6", "8.9", "12.0")
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
KINDS = pytest.mark.parametrize("kind", ["guided", "plain"])
Note = Callable[[str, str, str, dict[str, int], int], None]


@pytest.fixture(scope="module")
def note() -> Note:
    """Takes down what was built (network, graph, precision, layers by type, bytes) in the file MDPS_BUILD_TABLE.

    After every build, so that a run that is stopped leaves what it did.
    """
    rows = ["| network | graph | precision | layers | plan, MB |", "|---|---|---|---|---:|"]

    def row(network: str, graph: str, precision: str, types: dict[str, int], size: int) -> None:
        layers = ", ".join(f"{count} {name}" for name, count in sorted(types.items()))
        rows.append(f"| {network} | {graph} | {precision} | {sum(types.values())} ({layers}) | {size / 1e6:.1f} |")
        if file := os.environ.get("MDPS_BUILD_TABLE"):
            Path(file).write_text("\n".join(rows) + "\n")

    return row


def build_for(capabilities: tuple[str, ...], path: Path, precision: str, batch: int = 16) -> Built:
    built = Builder.of(named("tensorrt-rtx"), capabilities, precision).build(
        path, profile_of(path, (1, 1, batch), None), precision
    )
    assert built.types[TYPES[precision]] > 20
    return built


def build_for_every_card(path: Path, precision: str, batch: int = 16) -> Built:
    return build_for(EVERY_CARD, path, precision, batch)


@pytest.mark.slow
@pytest.mark.parametrize("capability", EVERY_CARD)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@KINDS
def test_steps_build_for_one_card_alone(
    kind: str, precision: str, capability: str, make_network: Callable[..., UNet], rtx: Builder, note: Note,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A plan for one capability is not a part of the plan for three: the builder chooses anew."""
    path = graph(make_network("biggan"), kind, precision, ByChannel(), tmp_path / "step.onnx")
    built = build_for((capability,), path, precision)
    note("biggan", f"{kind} step, by-channel, {capability} alone", precision, built.types, len(built.plan))


@pytest.mark.slow
@PRECISIONS
@pytest.mark.parametrize("form", FORMS)
@KINDS
def test_every_variant_builds_for_every_card(
    kind: str, form: str, precision: str, variant: str, make_network: Callable[..., UNet], rtx: Builder, note: Note,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = graph(make_network(variant), kind, precision, FORMS[form], tmp_path / "step.onnx")
    built = build_for_every_card(path, precision)
    note(variant, f"{kind} step, {form}", precision, built.types, len(built.plan))


RULES = {
    "replace": StepRules("replace"),
    "inpaint": StepRules("inpaint"),
    "squared norm": StepRules(guidance_norm="squared"),
    "jacobian-free": StepRules(gradient="jacobian-free"),
    "ddad": StepRules("replace", gradient="ddad"),
    "predicts v": StepRules(prediction="v"),
    "predicts x0": StepRules(prediction="x0"),
}


@pytest.mark.slow
@PRECISIONS
@pytest.mark.parametrize("rules", RULES)
def test_every_rule_builds_for_every_card(
    rules: str, precision: str, make_network: Callable[..., UNet], rtx: Builder, note: Note, tmp_path: Path
) -> None:
    path = graph(make_network("biggan"), "guided", precision, ByChannel(), tmp_path / "step.onnx", RULES[rules])
    built = build_for_every_card(path, precision)
    note("biggan", f"guided step, {rules}", precision, built.types, len(built.plan))


@pytest.mark.parametrize("rules", ["predicts v", "predicts x0"])
def test_what_a_network_predicts_is_recorded_as_torch_computes_it(rules: str, tmp_path: Path) -> None:
    network = smallest()
    path = graph(network, "guided", "fp32", ByChannel(), tmp_path / "step.onnx", RULES[rules])
    images = [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    fed = dict(zip(IMAGES, images, strict=True)) | {name: torch.tensor(value) for name, value in SCALARS.items()}
    fed["mask"] = fed["mask"][:, :1]
    module = GuidedStep(Denoiser(prepare(network, "fp32"), RULES[rules].prediction, ByChannel()), RULES[rules])
    order = (*IMAGES, None, *list(SCALARS)[:4], "guidance_scale")
    with torch.no_grad():
        wanted = module(*(None if name is None else fed[name] for name in order))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: tensor.numpy() for name, tensor in fed.items()})
    for one, reference in zip(found, wanted, strict=True):
        assert np.abs(one - reference.numpy()).max() < 1e-4 * max(1.0, float(reference.abs().max()))


SCORES: dict[str, dict[str, Any]] = {
    "paper": {},
    "reference": {"preset": "mvtec/bottle"},
    "paper, EfficientNet-Lite0": {"backbone": "efficientnet_lite0"},
    "ddim": {"method": "ddim"},
    "ddad": {"method": "ddad"},
    "anoddpm": {"method": "anoddpm"},
    "autoddpm": {"method": "autoddpm"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("score", "capabilities"),
    [*((score, EVERY_CARD) for score in SCORES), *(("paper", (one,)) for one in EVERY_CARD)],
)
def test_features_and_scores_of_every_method_build(
    score: str, capabilities: tuple[str, ...], rtx: Builder, note: Note, tmp_path: Path
) -> None:
    """In float32, whatever the denoiser's precision is; for every card together, and the paper's for each alone."""
    torch.manual_seed(0)
    network = UNet(
        UNetConfig(image_size=32, model_channels=32, channel_mult=(1,), num_res_blocks=1, attention_factors=())
    )
    save_denoiser(tmp_path / "small.safetensors", network, NoiseSchedule.linear(), "eps")
    tiny = {} if score == "anoddpm" else {"backbone": "random_tiny"}
    options = ExportOptions(**(tiny | SCORES[score]))
    bundle = export_bundle(tmp_path / "small.safetensors", tmp_path / "bundle", options)
    manifest = add_plans(bundle, Manifest.read(bundle), Builder.of(named("tensorrt-rtx"), capabilities))
    alone = f", {capabilities[0]} alone" if len(capabilities) == 1 else ""
    roles = [entry.role for entry in manifest.plans]
    assert "score" in roles
    assert ("features" in roles) == (score != "anoddpm")
    for entry in manifest.plans:
        if entry.role in ("features", "score"):
            note(entry.role, f"{score}, {options.backbone or 'pixels'}{alone}", "fp32", entry.types,
                 (bundle / entry.file).stat().st_size)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@KINDS
def test_the_authors_network_builds_for_every_card(
    kind: str, precision: str, rtx: Builder, note: Note, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network = UNet(UNetConfig(image_size=256)).eval().requires_grad_(False)  # 33 M parameters
    path = graph(network, kind, precision, ByChannel(), tmp_path / "step.onnx")
    built = build_for_every_card(path, precision, batch=8)
    note("the authors', 256 x 256", f"{kind} step, by-channel", precision, built.types, len(built.plan))


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


def test_a_plan_of_rtx_allocates_nothing_while_it_is_recorded(rtx: Builder, tmp_path: Path) -> None:
    path, log = one_node("Relu", tmp_path / "g.onnx"), logger(rtx.library)
    builder = rtx.library.Builder(log)
    network = rtx._parsed(builder, log, path)
    config = rtx._config(builder, network, {"x": ((1, 4, 4), (1, 4, 4), (4, 4, 4))})
    assert config.get_flag(rtx.library.BuilderFlag.REQUIRE_USER_ALLOCATION)
    assert builder.build_serialized_network(network, config) is not None
    assert OPTIONS["user_allocation"]  # a plan of before has another key


def test_a_build_that_fails_is_one_sentence(rtx: Builder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = one_node("Relu", tmp_path / "relu.onnx")
    with pytest.raises(BackendError, match=r"cannot build relu\.onnx for compute capability 8\.6: .*") as caught:
        rtx.build(path, {}, "fp32")  # a dynamic axis without a range
    assert "\n" not in str(caught.value)
    assert not capfd.readouterr().err, "the library's log reached the terminal"


def test_capabilities_that_cannot_be_built_for(rtx: Builder) -> None:
    with pytest.raises(UsageError, match=r"8\.6, 8\.9, 12\.0.*, not 9\.0: leave it out"):
        Builder.of(named("tensorrt-rtx"), ("8.6", "9.0"))
    with pytest.raises(UsageError, match=r"7\.5 has no bf16"):
        Builder.of(named("tensorrt-rtx"), ("7.5", "8.6"), "bf16")
    assert Builder.of(named("tensorrt-rtx"), ("12.0", "8.6", "8.6")).capabilities == ("8.6", "12.0")


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_missing_library_is_named_with_its_remedy(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BackendError, match=rf"pip install 'mdps\[{backend}\]'"):
        Builder.of(named(backend))


def fake_tensorrt(monkeypatch: pytest.MonkeyPatch, *capabilities: str) -> None:
    """A fake TensorRT, and a fake CUDA that shows cards of these capabilities, in its order."""

    def shown() -> tuple[str, ...]:
        if not capabilities:
            raise BackendError("CUDA shows this process no card")
        return capabilities

    library = SimpleNamespace(__version__="10.9.0", Builder=object)
    monkeypatch.setattr(importlib, "import_module", lambda name: library)
    monkeypatch.setattr(engine_module, "cuda_capabilities", shown)


def test_tensorrt_builds_for_the_card_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt(monkeypatch, "9.0")
    assert Builder.of(named("tensorrt")).capabilities == ("9.0",)
    assert Builder.of(named("tensorrt"), ("9.0",)).version == "10.9.0"
    with pytest.raises(UsageError, match=r"capability 9\.0, not for 8\.6: leave out --compute-capability"):
        Builder.of(named("tensorrt"), ("8.6",))
    fake_tensorrt(monkeypatch)
    with pytest.raises(BackendError, match="CUDA shows none"):
        Builder.of(named("tensorrt"))


def test_tensorrt_builds_for_the_card_cuda_lists_first_not_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt(monkeypatch, "8.9", "7.5")
    smi = tuple(Card(i, f"GPU-{i}", "a card", one, None, None, "580.1") for i, one in enumerate(("7.5", "8.9")))
    monkeypatch.setattr(cards_module, "cards", lambda: smi)
    assert Builder.of(named("tensorrt"), ("8.9",)).capabilities == ("8.9",)
    with pytest.raises(UsageError, match=r"8\.9, not for 7\.5, which another .*CUDA_VISIBLE_DEVICES=UUID"):
        Builder.of(named("tensorrt"), ("7.5",))
    with pytest.raises(UsageError, match=r"of compute capability 8\.9, 7\.5: .* --compute-capability 8\.9"):
        Builder.of(named("tensorrt"))
    fake_tensorrt(monkeypatch, "8.9", "8.9")  # it does not matter which
    assert Builder.of(named("tensorrt")).capabilities == ("8.9",)


@pytest.mark.parametrize(("shown", "loads"), [(("8.6", "12.0"), True), (("12.0", "8.6"), False), ((), False)])
def test_an_engine_is_inspected_where_it_would_be_loaded(
    shown: tuple[str, ...], loads: bool, rtx: Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On CUDA's first card; loading a plan on another card than its own is an error of the library's."""
    monkeypatch.setattr(engine_module, "cuda_capabilities", lambda: shown)
    monkeypatch.setattr(engine_module, "engine_types", lambda *_: {"Float": 1})
    path = one_node("Relu", tmp_path / "relu.onnx")
    built = rtx.build(path, {"x": ((1, 4, 4), (1, 4, 4), (2, 4, 4))}, "fp32")
    assert built.inspected == ("engine" if loads else "network")


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
    model = parseable(path)
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    assert norms
    assert all(len(node.output) == 1 for node in norms)
