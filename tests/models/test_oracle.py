"""The oracle against numbers computed by the authors' code and by an independent implementation of the paper."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mdps.models import oracle as o
from mdps.models.checkpoints import CheckpointOptions, load_denoiser
from mdps.models.unet import UNet

ALPHAS = o.linear_schedule()
REFERENCE = o.reference(ALPHAS, eta=7.0)
PAPER = o.Oracle(ALPHAS, top=8)


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, Tensor]:
    with np.load(shared / "golden" / "golden.npz") as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.fixture(scope="module")
def network(shared: Path) -> UNet:
    return load_denoiser(shared / "golden" / "checkpoint", CheckpointOptions(image_size=64)).network


@pytest.fixture(scope="module")
def arrays(small: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in small.items()}


def states(eps: UNet, arrays: Mapping[str, Tensor], name: str, y: Tensor, mask: Tensor, oracle: o.Oracle) -> Tensor:
    first = arrays.get(f"{name}_z", arrays.get(f"{name}_init_noise"))
    assert first is not None
    noises = list(arrays[f"{name}_step_noise"].split(1))
    return torch.cat(list(o.posterior_sampling(eps, y, mask, first, noises, oracle)))


def test_the_schedule_is_the_authors(golden: Mapping[str, Tensor]) -> None:
    assert (ALPHAS - golden["alpha_bar_0_to_999"]).abs().max() < 1e-6


def test_eps_and_gradient_of_one_call(golden: Mapping[str, Tensor], network: UNet) -> None:
    alpha = float(golden["call_alpha_bar"][0])
    eps, gradient = o.guidance_gradient(network, golden["call_x_t"], golden["y"], 180, alpha, REFERENCE)
    assert (eps - golden["call_eps"]).abs().max() < 1e-4
    assert (gradient - golden["call_grad_per_image"]).abs().max() < 1e-5
    # one norm over the batch is another number: the tolerance tells the two apart
    assert (gradient - golden["call_grad_batch_norm"]).abs().max() > 1e-3


@pytest.mark.parametrize("index", [0, 1])
def test_reference_passes(index: int, golden: Mapping[str, Tensor], network: UNet) -> None:
    y, everywhere = golden["y"][index : index + 1], torch.ones(1, 1, 64, 64)
    found = states(network, golden, f"sample{index}", y, everywhere, REFERENCE)
    assert (found - golden[f"sample{index}_states"]).abs().max() < 2e-3
    found = states(network, golden, f"masked{index}", y, golden[f"masked{index}_mask"], REFERENCE)
    assert (found - golden[f"masked{index}_states"]).abs().max() < 2e-3


def test_reference_pass_without_guidance(golden: Mapping[str, Tensor], network: UNet) -> None:
    unguided = replace(REFERENCE, guidance_scale=0.0)
    found = states(network, golden, "unguided", golden["y"][:1], torch.ones(1, 1, 64, 64), unguided)
    assert (found - golden["unguided_states"]).abs().max() < 2e-3


@pytest.mark.parametrize("index", [0, 1])
def test_reference_map_and_score(index: int, golden: Mapping[str, Tensor]) -> None:
    of_y, of_x0 = ([golden[f"map{index}_features_{who}_stage{k}"] for k in (2, 3)] for who in ("y", "x0"))
    x0 = golden[f"sample{index}_states"][-1:]
    found = o.difference(golden["y"][index : index + 1], x0, of_y, of_x0, REFERENCE)
    assert (found - golden[f"map{index}"]).abs().max() < 1e-5
    assert (o.image_score(found, REFERENCE) - golden[f"score{index}_official"]).abs().max() < 1e-6


@pytest.mark.parametrize("mode", ["reference", "paper"])
@pytest.mark.parametrize("kind", ["guided", "unguided", "masked"])
def test_both_modes_at_32(mode: str, kind: str, arrays: Mapping[str, Tensor], small_network: UNet) -> None:
    oracle = {"reference": REFERENCE, "paper": PAPER}[mode]
    oracle = replace(oracle, guidance_scale=0.0 if kind == "unguided" else 100.0)
    mask = arrays["mask"] if kind == "masked" else torch.ones(1, 1, 32, 32)
    found = states(small_network, arrays, f"{mode}_{kind}", arrays["y"], mask, oracle)
    assert (found - arrays[f"{mode}_{kind}_states"]).abs().max() < 2e-5


def test_paper_map_score_and_mask(arrays: Mapping[str, Tensor]) -> None:
    of_y, of_x0 = ([arrays[f"paper_features_{who}_stage{k}"] for k in (1, 2, 3)] for who in ("y", "x0"))
    found = o.difference(arrays["y"], arrays["paper_guided_states"][-1:], of_y, of_x0, PAPER)
    assert (found - arrays["paper_map_eta_0.3"]).abs().max() < 1e-5
    assert (o.image_score(found, PAPER) - arrays["paper_score_top_8"]).abs().max() < 1e-6
    assert torch.equal(o.mask_of(found, PAPER), arrays["paper_mask_lambda_0.1"])


def test_the_gradient_of_ddad_is_its_conditioned_noise(small_network: UNet, arrays: Mapping[str, Tensor]) -> None:
    """eps + w sqrt(1 - a) gradient = eps - w sqrt(1 - a) (y_t - x_t), written as in the publication."""
    a, w, y, x_t = 0.4, 3.0, arrays["y"], torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    oracle = o.Oracle(ALPHAS, ddad=True)
    eps, gradient = o.guidance_gradient(small_network, x_t, y, 300, a, oracle)
    with torch.no_grad():
        wanted = small_network(x_t, torch.tensor(300.0))
    y_t = a**0.5 * y + (1 - a) ** 0.5 * wanted
    assert torch.allclose(eps, wanted)
    conditioned = wanted - w * (1 - a) ** 0.5 * (y_t - x_t)
    assert torch.allclose(eps + w * (1 - a) ** 0.5 * gradient, conditioned, atol=1e-6)


def test_the_gradient_is_zero_where_the_residual_is(small_network: UNet) -> None:
    def eps(x_t: Tensor, timestep: Tensor) -> Tensor:
        return x_t * 0

    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    _, gradient = o.guidance_gradient(eps, x, x / 0.5**0.5, 99, 0.5, PAPER)
    assert torch.equal(gradient, torch.zeros_like(x))
