"""Recorded step graphs on ONNX Runtime against autograd and the oracle, for every U-Net variant and every rule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from mdps.export.graph import WeightStore, count_nodes, write
from mdps.export.linearize import prepare_input_gradients
from mdps.export.norms import ByChannel, Grouped, NormForm
from mdps.export.step import Denoiser, GuidedStep, PlainStep, StepRules
from mdps.export.tracer import record
from mdps.models import oracle as o
from mdps.models.unet import UNet

INPUTS = dict.fromkeys(("x_t", "observation", "mask", "noise", "mask_noise"), ("batch",))
ALPHA, ALPHA_S, TIMESTEP = 0.6, 0.7, 99


def feeds(batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    stream = np.random.RandomState(seed)
    images = {name: stream.standard_normal((batch, 3, 16, 16)) for name in INPUTS}
    images["mask"] = (stream.standard_normal((batch, 1, 16, 16)) > 0) * 1.0
    sigma = np.sqrt((1 - ALPHA_S) / (1 - ALPHA) * (1 - ALPHA / ALPHA_S))
    scalars = {"timestep": TIMESTEP, "alpha_t": ALPHA, "alpha_s": ALPHA_S, "sigma_t": sigma, "guidance_scale": 100.0}
    return {name: np.asarray(value, dtype=np.float32) for name, value in (images | scalars).items()}


def session(
    network: UNet, rules: StepRules, folder: Path, kind: str = "guided", norms: NormForm | None = None
) -> onnxruntime.InferenceSession:
    example: dict[str, Any] = {name: torch.from_numpy(value) for name, value in feeds(1, seed=9).items()}
    if rules.mask_rule == "blend":
        example["mask_noise"] = None
    module = (GuidedStep if kind == "guided" else PlainStep)(Denoiser(network, rules.prediction, norms), rules)
    outputs = ["x_s", "eps", "guidance_gradient"]
    if kind == "guided":
        prepare_input_gradients(network)
    else:
        del example["guidance_scale"]
        outputs = outputs[:2]
    path = folder / f"{kind}.onnx"
    write(record(module, example, outputs, INPUTS), path, WeightStore(folder / "weights"))
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def run(graph: onnxruntime.InferenceSession, values: dict[str, np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(a) for a in graph.run(None, {i.name: values[i.name] for i in graph.get_inputs()})]


def wanted(network: UNet, rules: StepRules, values: dict[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    """x_s, eps and gradient by the oracle's own loop and autograd."""
    replaced = rules.mask_rule != "blend"
    t = {name: torch.from_numpy(value) for name, value in values.items()}
    alphas = torch.full((1000,), ALPHA_S, dtype=torch.float64)
    alphas[TIMESTEP] = ALPHA
    oracle = o.Oracle(
        alphas,
        squared_norm=rules.guidance_norm == "squared",
        use_jacobian=rules.gradient == "exact",
        ddad=rules.gradient == "ddad",
    )
    x = t["x_t"]
    if replaced:
        x = t["mask"] * x + (1 - t["mask"]) * (ALPHA**0.5 * t["observation"] + (1 - ALPHA) ** 0.5 * t["mask_noise"])
    eps, gradient = o.guidance_gradient(network, x, t["observation"], TIMESTEP, ALPHA, oracle)
    e = eps + 100.0 * (1 - ALPHA) ** 0.5 * gradient
    if not replaced:
        e = (1 - t["mask"]) * (x - ALPHA**0.5 * t["observation"]) / (1 - ALPHA) ** 0.5 + t["mask"] * e
    x0 = (x - (1 - ALPHA) ** 0.5 * e) / ALPHA**0.5
    sigma = float(t["sigma_t"])
    x_s = ALPHA_S**0.5 * x0 + (1 - ALPHA_S - sigma**2) ** 0.5 * e + sigma * t["noise"]
    return x_s, eps, gradient


def relative(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("norms", [Grouped(), ByChannel()], ids=lambda form: type(form).__name__)
def test_every_variant_at_every_batch(
    variant: str, norms: NormForm, tmp_path: Path, make_network: Callable[..., UNet]
) -> None:
    network, rules = make_network(variant), StepRules()
    graph = session(network, rules, tmp_path, norms=norms)
    for batch in (1, 2, 5):
        values = feeds(batch, seed=batch)
        for found, reference in zip(run(graph, values), wanted(network, rules, values), strict=True):
            assert relative(found, reference) < 1e-4


@pytest.mark.parametrize(
    "rules",
    [
        StepRules(mask_rule="replace"),
        StepRules(guidance_norm="squared"),
        StepRules(gradient="jacobian-free"),
        StepRules(gradient="ddad"),
        StepRules(mask_rule="inpaint", gradient="ddad"),
        StepRules(mask_rule="replace", guidance_norm="squared", gradient="jacobian-free"),
    ],
    ids=str,
)
def test_every_rule(rules: StepRules, tmp_path: Path, make_network: Callable[..., UNet]) -> None:
    network, values = make_network("scale_shift"), feeds(2)
    found = run(session(network, rules, tmp_path), values)
    for got, reference in zip(found, wanted(network, rules, values), strict=True):
        assert relative(got, reference) < 1e-4


def test_the_plain_step_is_the_guided_one_at_scale_zero(tmp_path: Path, make_network: Callable[..., UNet]) -> None:
    network, values = make_network("biggan"), feeds(3) | {"guidance_scale": np.zeros((), np.float32)}
    guided = run(session(network, StepRules(), tmp_path), values)
    for norms in (Grouped(), ByChannel()):
        plain = run(session(network, StepRules(), tmp_path, kind="plain", norms=norms), values)
        assert relative(plain[0], guided[0]) < 1e-5
        assert relative(plain[1], guided[1]) < 1e-5


def test_a_residual_of_zero_has_no_gradient(tmp_path: Path, make_network: Callable[..., UNet]) -> None:
    network, values = make_network("biggan"), feeds(1)
    graph = session(network, StepRules(), tmp_path)
    eps = run(graph, values)[1].numpy()
    values["observation"] = (values["x_t"] - np.sqrt(np.float32(1 - ALPHA)) * eps) / np.sqrt(np.float32(ALPHA))
    gradient = run(graph, values)[2]
    assert torch.isfinite(gradient).all()


def test_two_images_have_two_gradients(tmp_path: Path, make_network: Callable[..., UNet]) -> None:
    graph = session(make_network("biggan"), StepRules(), tmp_path)
    one, other = run(graph, feeds(1, seed=1))[2], run(graph, feeds(1, seed=2))[2]
    assert (one - other).abs().max() > 0.1 * one.abs().max()


def test_the_graph_is_lean(tmp_path: Path, make_network: Callable[..., UNet]) -> None:
    """No shape arithmetic, and normalisation kept whole: what the make of this exporter promises."""
    example: dict[str, Any] = {name: torch.from_numpy(v) for name, v in feeds(1).items()} | {"mask_noise": None}
    module = GuidedStep(Denoiser(prepare_input_gradients(make_network("biggan")), "eps"), StepRules())  # type: ignore[arg-type]
    kinds = count_nodes(record(module, example, ["x_s", "eps", "guidance_gradient"], INPUTS))
    assert not {"Shape", "Gather", "GatherND", "Unsqueeze", "Cast", "Expand", "ConstantOfShape"} & set(kinds)


def test_graphs_share_their_weights(tmp_path: Path, make_network: Callable[..., UNet]) -> None:
    network = make_network("biggan")
    weights = WeightStore(tmp_path / "weights")
    example: dict[str, Any] = {name: torch.from_numpy(v) for name, v in feeds(1).items()} | {"mask_noise": None}
    guided = GuidedStep(Denoiser(prepare_input_gradients(network), "eps"), StepRules())  # type: ignore[arg-type]
    write(record(guided, example, ["x_s", "eps", "guidance_gradient"], INPUTS), tmp_path / "guided.onnx", weights)
    size = weights.path.stat().st_size
    del example["guidance_scale"]
    plain = PlainStep(Denoiser(network, "eps"), StepRules())
    write(record(plain, example, ["x_s", "eps"], INPUTS), tmp_path / "plain.onnx", weights)
    assert weights.path.stat().st_size < 1.02 * size


def test_what_no_output_needs_is_dropped() -> None:
    class Wasteful(torch.nn.Module):
        def forward(self, x_t: torch.Tensor) -> tuple[torch.Tensor]:
            torch.exp(x_t * torch.full((1, 3, 4, 4), 7.0))
            return (x_t + 1,)

    model = record(Wasteful(), {"x_t": torch.ones(1, 3, 4, 4)}, ["y"], {"x_t": ("batch",)})
    assert count_nodes(model) == {"Add": 1}
    assert len(model.graph.initializer) == 1


def test_an_operator_without_onnx_form_is_named() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x_t: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.erf(x_t),)

    with pytest.raises(TypeError, match="'erf'"):
        record(Odd(), {"x_t": torch.ones(1, 3, 4, 4)}, ["y"], {"x_t": ("batch",)})
