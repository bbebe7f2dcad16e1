"""The hand-written pullback of the U-Net against autograd, on every variant of the architecture."""

from collections.abc import Callable

import pytest
import torch

from mdps.export.linearize import linearize, prepare_input_gradients
from mdps.export.norms import ByChannel, ByDepthwise, Grouped, NormForm
from mdps.export.step import Denoiser
from mdps.models.checkpoints import Prediction
from mdps.models.unet import UNet


@pytest.mark.parametrize(
    ("norms", "batch"),
    [(Grouped(), 1), (Grouped(), 3), (ByChannel(), 1), (ByChannel(), 3), (ByDepthwise(), 1)],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_output_and_pullback_equal_autograd(
    variant: str, batch: int, norms: NormForm, make_network: Callable[..., UNet]
) -> None:
    network = make_network(variant, (1, 2, 2))
    x = torch.randn(batch, 3, 16, 16, requires_grad=True)
    timestep, cotangent = torch.tensor(123.0), torch.randn(batch, 3, 16, 16)
    wanted = network(x, timestep)
    (wanted_gradient,) = torch.autograd.grad(wanted, x, cotangent)
    with torch.no_grad():
        found, pullback = linearize(prepare_input_gradients(network), x, timestep, norms)
        gradient = pullback(cotangent)
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-5
    assert (gradient - wanted_gradient).abs().max() / wanted_gradient.abs().max() < 1e-5


def test_the_pullback_is_linear(make_network: Callable[..., UNet]) -> None:
    network = prepare_input_gradients(make_network("biggan"))
    x, g, h = torch.randn(3, 1, 3, 16, 16).unbind(0)
    _, pullback = linearize(network, x, torch.tensor(50.0))
    both = pullback(2 * g - 3 * h)
    assert torch.allclose(both, 2 * pullback(g) - 3 * pullback(h), atol=1e-4)


@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_predictions_become_eps_with_their_gradient(prediction: Prediction, make_network: Callable[..., UNet]) -> None:
    network, alpha, timestep = make_network("biggan"), torch.tensor(0.6), torch.tensor(99.0)
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    output = network(x, timestep)
    x0 = {  # each definition read the other way round: the x0 that the network claims
        "eps": (x - (1 - alpha).sqrt() * output) / alpha.sqrt(),
        "v": alpha.sqrt() * x - (1 - alpha).sqrt() * output,
        "x0": output,
    }[prediction]
    wanted = (x - alpha.sqrt() * x0) / (1 - alpha).sqrt()
    cotangent = torch.randn(2, 3, 16, 16)
    (wanted_gradient,) = torch.autograd.grad(wanted, x, cotangent)
    denoiser = Denoiser(network, prediction)
    prepare_input_gradients(network)
    with torch.no_grad():
        eps, pullback = denoiser.linearize(x, timestep, alpha)
        assert torch.allclose(denoiser(x, timestep, alpha), wanted, atol=1e-4)
        assert torch.allclose(eps, wanted, atol=1e-4)
        assert torch.allclose(pullback(cotangent), wanted_gradient, atol=1e-4)


@pytest.mark.parametrize("norms", [Grouped(), ByChannel(), ByDepthwise()], ids=lambda form: type(form).__name__)
def test_a_norm_of_values_far_from_zero_keeps_its_digits(norms: NormForm) -> None:
    """Against autograd in float64, for a mean a hundred times the standard deviation."""
    torch.manual_seed(0)
    norm = torch.nn.GroupNorm(4, 16)
    x, g = 100 + torch.randn(1, 16, 8, 8), torch.randn(1, 16, 8, 8)
    gamma, beta = torch.randn(16, 1, 1), torch.randn(16, 1, 1)
    exact = x.double().requires_grad_()
    h = torch.nn.functional.group_norm(exact, 4, gamma.double().flatten(), beta.double().flatten(), norm.eps)
    wanted = torch.nn.functional.silu(h)
    (gradient,) = torch.autograd.grad(wanted, exact, g.double())
    y, pullback = norms.silu(norm, x, gamma, beta)
    assert (y - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert (pullback(g) - gradient).abs().max() < 1e-3 * gradient.abs().max()
