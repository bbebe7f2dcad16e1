"""Half precision: what is recorded is typed throughout, stays in range, and computes what float32 does."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, TensorProto

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.export import ExportOptions, export_bundle
from mdps.export.linearize import linearize, prepare_input_gradients
from mdps.export.norms import ByChannel, Grouped, NormForm
from mdps.export.operators import OPERATORS
from mdps.export.precision import FloatProducts, PrecisionError, emulate, in_precision, layer_errors, prepare
from mdps.export.step import Denoiser, GuidedStep, PlainStep, StepRules
from mdps.export.tracer import Tracer, record
from mdps.models import oracle as o
from mdps.models.checkpoints import CheckpointOptions
from mdps.models.unet import UNet
from mdps.runtime import load
from mdps.runtime.errors import BackendError, UsageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.schedule import NoiseSchedule, plan_steps

FORMS = pytest.mark.parametrize("norms", [Grouped(), ByChannel()], ids=lambda form: type(form).__name__)
ALLOWED = {"fp16": 2e-2, "bf16": 16e-2}  # of the largest value; fp16's is what a step may be off, bf16 has 3 bits less
IMAGES = ("x_t", "observation", "mask", "noise")
SCALARS = {"timestep": 99.0, "alpha_t": 0.6, "alpha_s": 0.7, "sigma_t": 0.1, "guidance_scale": 100.0}
OUTPUTS = ["x_s", "eps", "guidance_gradient"]
TINY = ExportOptions(backbone="random_tiny", noise_level=198, steps=3, load=CheckpointOptions(image_size=32))


def feeds(batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    stream = np.random.RandomState(seed)
    images = {name: stream.standard_normal((batch, 3, 16, 16)) for name in IMAGES}
    images["mask"] = (images["mask"][:, :1] > 0) * 1.0
    return {name: np.asarray(value, dtype=np.float32) for name, value in (images | SCALARS).items()}


def guided(network: UNet, precision: str, norms: NormForm) -> GuidedStep:
    return GuidedStep(Denoiser(prepare(in_precision(network, precision), precision), "eps", norms), StepRules())  # type: ignore[arg-type]


def recorded(network: UNet, precision: str, norms: NormForm) -> ModelProto:
    values = {name: torch.from_numpy(value) for name, value in feeds(1, seed=9).items()}
    inputs: dict[str, Any] = {name: values[name] for name in IMAGES} | {"mask_noise": None}
    inputs |= {name: values[name] for name in SCALARS}
    return record(guided(network, precision, norms), inputs, OUTPUTS, dict.fromkeys(IMAGES, ("batch",)))


def on_onnxruntime(model: ModelProto, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {i.name: values[i.name] for i in session.get_inputs()})
    return found


def relative(found: Any, reference: Any) -> float:
    return float(np.abs(np.asarray(found) - np.asarray(reference)).max() / np.abs(np.asarray(reference)).max())


def types_of(model: ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    types = {v.name: v.type.tensor_type.elem_type for v in [*inferred.value_info, *inferred.input, *inferred.output]}
    return types | {t.name: t.data_type for t in inferred.initializer}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_output_and_pullback_stay_near_autograd_in_float32(
    variant: str, precision: str, make_network: Callable[..., UNet]
) -> None:
    network = make_network(variant)
    x, timestep, cotangent = (
        torch.randn(2, 3, 16, 16, requires_grad=True),
        torch.tensor(123.0),
        torch.randn(2, 3, 16, 16),
    )
    wanted = network(x, timestep)
    (wanted_gradient,) = torch.autograd.grad(wanted, x, cotangent)
    with torch.no_grad(), FloatProducts():
        found, pullback = linearize(prepare(in_precision(network, precision), precision), x, timestep)  # type: ignore[arg-type]
        gradient = pullback(cotangent)
    assert found.dtype == gradient.dtype == torch.float32
    assert 0 < relative(found, wanted.detach()) < ALLOWED[precision]
    assert 0 < relative(gradient, wanted_gradient) < ALLOWED[precision]


@pytest.mark.parametrize("name", ["strided_new_attention", "asymmetric_strided"])
def test_strided_convolutions_pull_back_without_transposed_ones(
    name: str, make_network: Callable[..., UNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, in float32: TensorRT-RTX has no bfloat16 transposed convolution."""
    network = make_network(name, (1, 2, 2))
    x, cotangent = torch.randn(2, 3, 16, 24, requires_grad=True), torch.randn(2, 3, 16, 24)
    (wanted,) = torch.autograd.grad(network(x, torch.tensor(9.0)), x, cotangent)
    monkeypatch.delattr(torch.nn.functional, "conv_transpose2d")
    with torch.no_grad():
        _, pullback = linearize(prepare_input_gradients(network, subpixel=True), x, torch.tensor(9.0))  # type: ignore[arg-type]
        assert relative(pullback(cotangent), wanted) < 1e-5


@FORMS
def test_fp16_graphs_on_onnxruntime_stay_near_the_oracle(norms: NormForm, make_network: Callable[..., UNet]) -> None:
    network, alphas = make_network("biggan"), torch.full((1000,), SCALARS["alpha_t"], dtype=torch.float64)
    model = recorded(network, "fp16", norms)
    for batch in (1, 3):
        values = feeds(batch, seed=batch)
        _, eps, gradient = on_onnxruntime(model, values)
        x, y = (torch.from_numpy(values[name]) for name in ("x_t", "observation"))
        wanted = o.guidance_gradient(network, x, y, 99, SCALARS["alpha_t"], o.Oracle(alphas))
        assert relative(eps, wanted[0]) < ALLOWED["fp16"]
        assert relative(gradient, wanted[1]) < ALLOWED["fp16"]


@FORMS
def test_bf16_graphs_round_as_the_module_does(norms: NormForm, make_network: Callable[..., UNet]) -> None:
    network, values = make_network("biggan"), feeds(2)
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    arguments = [*(tensors[name] for name in IMAGES), None, *(tensors[name] for name in SCALARS)]
    found = on_onnxruntime(emulate(recorded(network, "bf16", norms)), values)
    with torch.no_grad(), FloatProducts():
        module, exact = (guided(network, precision, norms)(*arguments) for precision in ("bf16", "fp32"))
    for one, same, wanted in zip(found, module, exact, strict=True):
        assert relative(one, same) < 4e-2
        assert relative(one, wanted) < ALLOWED["bf16"]
    eps = np.ascontiguousarray(found[1])  # widened from bfloat16, so that half of its bits are zero
    assert not (eps.view(np.uint32) & 0xFFFF).any()


@FORMS
@pytest.mark.parametrize(("precision", "half"), [("fp16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)])
def test_every_type_is_in_the_graph(
    precision: str, half: int, norms: NormForm, make_network: Callable[..., UNet]
) -> None:
    model = recorded(make_network("scale_shift"), precision, norms)
    onnx.checker.check_model(model, full_check=True)
    types = types_of(model)
    for node in model.graph.node:
        kinds = {types[name] for name in [*node.input, *node.output] if name} - {TensorProto.INT64}
        if node.op_type in ("Conv", "ConvTranspose"):
            assert kinds == {half}, node.name
        if node.op_type in ("Softmax", "LayerNormalization", "ReduceMean", "Sqrt", "Gemm"):
            assert kinds == {TensorProto.FLOAT}, node.name
    assert {types[value.name] for value in [*model.graph.input, *model.graph.output]} == {TensorProto.FLOAT}


def test_the_norm_of_large_values_does_not_overflow() -> None:
    from mdps.export.linearize import _norm

    norm = torch.nn.GroupNorm(4, 8)
    x = 3000 + 500 * torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    wanted = norm.double()(x.half().double())
    for form in (Grouped(), ByChannel()):
        found, pullback = _norm(form, norm.float(), x.half())  # squares pass 65,504, sums of 512 values too
        assert found.dtype == torch.float16
        assert relative(found.detach().float(), wanted.detach()) < 2e-3
        assert torch.isfinite(pullback(found)).all()


def test_attention_with_large_logits_does_not_overflow(make_network: Callable[..., UNet]) -> None:
    """Queries and keys whose product passes 65,504 before the scale is applied, but not after."""
    network = make_network("pooled_one_head")
    block = next(m for m in network.modules() if type(m).__name__ == "AttentionBlock")
    block.qkv.weight.data[: 2 * block.proj_out.in_channels] *= 100
    x = torch.randn(1, 3, 16, 16)
    errors = layer_errors(network, "fp16", x, torch.tensor(50.0))
    assert all(math.isfinite(e) for layer in errors.values() for e in layer.values())


def test_a_unit_vector_is_enlarged_before_half_blocks(make_network: Callable[..., UNet]) -> None:
    """Its 196,608 values at 256 x 256 are near 2e-3, and what the network makes of them lies below fp16's smallest."""
    step = guided(make_network("biggan"), "fp16", Grouped())
    u = torch.randn(1, 3, 64, 64)
    u /= u.norm()
    seen: list[torch.Tensor] = []
    result = step._pulled(lambda g: seen.append(g) or 2 * g, u)  # type: ignore[func-returns-value]
    assert 0.5 < float(seen[0].square().mean().sqrt()) < 2
    assert torch.equal(result, 2 * u)
    assert guided(make_network("biggan"), "fp32", Grouped())._pulled(lambda g: g, u) is u


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_layers_are_reported_by_name_and_way(precision: str, make_network: Callable[..., UNet]) -> None:
    network = make_network("strided_new_attention")
    errors = layer_errors(network, precision, torch.randn(1, 3, 16, 16), torch.tensor(99.0))
    convolutions = [n for n, m in network.named_modules() if isinstance(m, torch.nn.Conv1d | torch.nn.Conv2d)]
    assert set(errors) == set(convolutions)
    assert all(set(ways) == {"forward", "gradient"} for ways in errors.values())
    assert all(0 < error < ALLOWED[precision] for ways in errors.values() for error in ways.values())


def test_a_layer_that_overflows_is_named(make_network: Callable[..., UNet]) -> None:
    network = make_network("biggan")
    network.get_submodule("output_blocks.1.0.in_layers.2").weight.data *= 1e6
    with pytest.raises(PrecisionError, match=r"fp16 the layer output_blocks\.1\.0\.in_layers\.2 .* bf16 or fp32"):
        layer_errors(network, "fp16", torch.randn(1, 3, 16, 16), torch.tensor(99.0))
    layer_errors(network, "bf16", torch.randn(1, 3, 16, 16), torch.tensor(99.0))


def test_types_that_torch_would_mix_are_refused() -> None:
    tracer = Tracer(torch.nn.Identity(), "x")
    with pytest.raises(TypeError, match="float16"):
        OPERATORS["add"](tracer, [], torch.ones(2), torch.ones(2, dtype=torch.float16))


@pytest.fixture(scope="module")
def half_bundles(line_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The line's bundle again, in half precision and uncalibrated."""
    folder, checkpoint = tmp_path_factory.mktemp("half"), line_bundle.parent / "line.safetensors"
    options = {
        p: ExportOptions(backbone="random_tiny", noise_level=198, steps=2, precision=p) for p in ("fp16", "bf16")
    }  # type: ignore[arg-type]
    return {p: export_bundle(checkpoint, folder / p, chosen) for p, chosen in options.items()}


def test_a_half_bundle_says_so_and_reports_its_layers(half_bundles: dict[str, Path], line_bundle: Path) -> None:
    for precision, bundle in half_bundles.items():
        manifest = Manifest.read(bundle)
        assert manifest.precision == precision
        assert manifest.parity["layers"]["input_blocks.0.0"].keys() == {"forward", "gradient"}
        assert all(check["error"] <= check["tolerance"] for check in manifest.parity["checks"].values())
        full = Manifest.read(line_bundle).files["denoiser.weights"].bytes
        assert manifest.files["denoiser.weights"].bytes < full
    assert Manifest.read(line_bundle).precision == "fp32"


def test_verdicts_of_an_fp16_bundle_are_those_of_fp32(
    half_bundles: dict[str, Path], line_bundle: Path, line_images: list[bytes], tmp_path: Path
) -> None:
    paths = [tmp_path / f"{index}.png" for index in range(12)]
    for path, data in zip(paths, line_images, strict=False):
        path.write_bytes(data)
    with load(line_bundle) as full, load(half_bundles["fp16"], calibrated=False) as half:
        wanted, found = ([detector(path) for path in paths] for detector in (full, half))
    assert {one.verdict for one in wanted} == {"pass", "fail"}
    assert relative([one.score for one in found], [one.score for one in wanted]) < 5e-3
    verdicts = ["fail" if one.score > same.threshold else "pass" for one, same in zip(found, wanted, strict=True)]
    assert verdicts == [one.verdict for one in wanted]


def test_bf16_on_a_cpu_ends_in_one_sentence(half_bundles: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"step\.onnx cannot be loaded on CPUExecutionProvider"):
        load(half_bundles["bf16"], calibrated=False)
    arguments = ["export", "--ckpt", "x.pt", "--precision", "bf16", "--calibrate", str(tmp_path)]
    assert run(cli, arguments) == 2


def test_an_overflow_ends_the_export(small_weights: Any, tmp_path: Path) -> None:
    weights = {f"module.{key}": torch.from_numpy(np.asarray(value)) for key, value in small_weights.items()}
    weights["module.out.2.weight"] = weights["module.out.2.weight"] * 1e6
    checkpoint = tmp_path / "checkpoint"
    torch.save(weights, checkpoint)
    with pytest.raises(PrecisionError, match=r"out\.2"):
        export_bundle(checkpoint, tmp_path / "bundle", replace(TINY, precision="fp16"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_traced_bundle_has_no_half_precision() -> None:
    with pytest.raises(UsageError, match="traced"):
        ExportOptions(precision="fp16", guidance_backend="traced")


def demo_steps(precision: str, guided_one: bool) -> Any:
    """A session of the demo's step graph, its norms in the form ONNX Runtime is given."""
    from mdps.benchmarks import demo
    from mdps.models.checkpoints import load_denoiser

    loaded = load_denoiser(demo.CHECKPOINT)
    denoiser = Denoiser(prepare(in_precision(loaded.network, precision), precision), loaded.prediction, Grouped())  # type: ignore[arg-type]
    image, scalars = torch.randn(1, 3, 64, 64), {name: torch.tensor(value) for name, value in SCALARS.items()}
    inputs: dict[str, Any] = {name: image + i for i, name in enumerate(IMAGES)}
    inputs["mask"] = image[:, :1]
    if not guided_one:
        del scalars["guidance_scale"]
    module = (GuidedStep if guided_one else PlainStep)(denoiser, StepRules())
    model = record(
        module,
        inputs | {"mask_noise": None} | scalars,
        OUTPUTS[: 3 if guided_one else 2],
        dict.fromkeys(IMAGES, ("batch",)),
    )
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("guided_one", [True, False], ids=["guided", "plain"])
def test_every_step_of_the_demo_in_fp16_is_near_that_in_fp32(guided_one: bool) -> None:
    """Each of a pass's ten steps from the same x, on a photograph; run with -s for the figures."""
    from mdps.benchmarks import demo
    from mdps.benchmarks.data.textures import TextureSet

    full, half = (demo_steps(precision, guided_one) for precision in ("fp32", "fp16"))
    schedule, sampler, stream = (
        NoiseSchedule.linear(),
        demo.OPTIONS.settings((64, 64)).sampler,
        np.random.RandomState(0),
    )
    alpha_first, steps = plan_steps(schedule, sampler.time_index, sampler.first_pass, sampler.eta_ddim)
    sample = next(one for one in TextureSet(demo.PHOTO).test() if one.kind != "good")
    y = (sample.image.transpose(2, 0, 1)[None] / 127.5 - 1).astype(np.float32)
    x = (alpha_first**0.5 * y + (1 - alpha_first) ** 0.5 * stream.standard_normal(y.shape)).astype(np.float32)
    errors: dict[str, list[float]] = {name: [] for name in OUTPUTS}
    for step in steps:
        feeds = {"x_t": x, "observation": y, "mask": np.ones_like(y[:, :1]), "noise": np.zeros_like(y)}
        feeds["noise"] += stream.standard_normal(y.shape).astype(np.float32)
        feeds |= {
            name: np.asarray(getattr(step, name), np.float32) for name in ("timestep", "alpha_t", "alpha_s", "sigma_t")
        }
        feeds["guidance_scale"] = np.asarray(sampler.first_pass.guidance_scale, np.float32)
        wanted, found = (one.run(None, {i.name: feeds[i.name] for i in one.get_inputs()}) for one in (full, half))
        for name, exact, other in zip(OUTPUTS, wanted, found, strict=False):
            errors[name].append(relative(other, exact))
        x = wanted[0]
    print({name: f"{max(values):.1e}" for name, values in errors.items() if values})
    assert len(errors["x_s"]) == 10
    assert all(0 < error < ALLOWED["fp16"] for values in errors.values() for error in values)


@pytest.mark.slow  # 80 images in each precision
def test_verdicts_on_the_demos_test_set_are_those_of_fp32(tmp_path: Path) -> None:
    """Run with -s for the figures."""
    from mdps.benchmarks import demo
    from mdps.benchmarks.data.textures import TextureSet

    textures, errors, nearest, seen = TextureSet(demo.PHOTO), [0.0], 1.0, {"pass": 0, "fail": 0}
    full = demo.export_demo(tmp_path / "full")
    demo.calibrate_demo(full, tmp_path / "good", textures)
    half = export_bundle(demo.CHECKPOINT, tmp_path / "half", replace(demo.OPTIONS, precision="fp16"))
    with load(full) as exact, load(half, calibrated=False) as detector:
        for sample in textures.test():
            wanted, found = exact(sample.image), detector(sample.image)
            assert ("fail" if found.score > wanted.threshold else "pass") == wanted.verdict, sample.name
            assert found.score == pytest.approx(wanted.score, rel=2e-2)
            errors.append(abs(found.score - wanted.score) / wanted.score)
            nearest = min(nearest, abs(wanted.score - wanted.threshold) / wanted.threshold)
            seen[wanted.verdict] += 1
            print(f"{sum(seen.values())}: {seen}, scores differ by {max(errors):.1e} at most; nearest to the "
                  f"threshold {nearest:.1e}", flush=True)  # fmt: skip
    assert sum(seen.values()) == 80
    assert min(seen.values()) > 10
