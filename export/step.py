"""One sampling step as a module that records to a graph: all of the step is inside (docs/develop/architecture.md)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mdps.export.linearize import block_type, linearize
from mdps.export.norms import Grouped, Linear, NormForm, Pullback
from mdps.models.checkpoints import Prediction
from mdps.models.unet import UNet


@dataclass(frozen=True)
class StepRules:
    """The choices that change the arithmetic of a step and so are fixed when it is exported."""

    mask_rule: Literal["blend", "replace", "inpaint"] = "blend"
    guidance_norm: Literal["l2", "squared"] = "l2"
    gradient: Literal["exact", "jacobian-free", "ddad"] = "exact"
    prediction: Prediction = "eps"


def eps_coefficients(prediction: Prediction, alpha: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """Return (p, q) with eps = p x_t + q output: what the network predicts, turned into the noise."""
    if prediction == "v":  # Salimans & Ho, 2022: v = sqrt(a) eps - sqrt(1 - a) x0
        return torch.sqrt(1 - alpha), torch.sqrt(alpha)
    if prediction == "x0":
        return torch.rsqrt(1 - alpha), -torch.sqrt(alpha) * torch.rsqrt(1 - alpha)
    return 0.0, 1.0


class Denoiser(nn.Module):
    """eps(x_t, t) from a network that predicts eps, v or x0, with its vector-Jacobian product.

    `norms` is the form in which the engine at hand runs group normalisation fastest.
    """

    def __init__(self, network: UNet, prediction: Prediction, norms: NormForm | None = None) -> None:
        super().__init__()
        self.network, self.prediction, self.norms = network, prediction, norms or Grouped()

    def forward(self, x_t: Tensor, timestep: Tensor, alpha_t: Tensor) -> Tensor:
        p, q = eps_coefficients(self.prediction, alpha_t)
        # torch's own group norm records to one instance norm, faster still where no pullback shares its values; it
        # knows one type only
        whole = isinstance(self.norms, Grouped) and block_type(self.network) == torch.float32
        output = self.network(x_t, timestep) if whole else linearize(self.network, x_t, timestep, self.norms)[0]
        return output if self.prediction == "eps" else p * x_t + q * output

    def linearize(self, x_t: Tensor, timestep: Tensor, alpha_t: Tensor) -> Linear:
        p, q = eps_coefficients(self.prediction, alpha_t)
        output, pullback = linearize(self.network, x_t, timestep, self.norms)
        if self.prediction == "eps":
            return output, pullback
        return p * x_t + q * output, lambda g: p * g + q * pullback(g)


def residual_direction(residual: Tensor, norm: str) -> Tensor:
    """Return the gradient of ||r|| (l2; zero where r = 0) or ||r||^2 (squared) by r, per image: [B, C, H, W]."""
    if norm == "squared":
        return 2.0 * residual
    length = torch.sqrt((residual * residual).sum(dim=(1, 2, 3), keepdim=True))
    return residual / torch.clamp(length, min=torch.finfo(torch.float32).tiny)


def keep_normal(mask: Tensor, sample: Tensor, known: Tensor) -> Tensor:
    """Return `sample` where the mask is 1, `known` where it is 0."""
    return known + mask * (sample - known)


class PlainStep(nn.Module):
    """A DDIM step without guidance: forward only."""

    def __init__(self, denoiser: Denoiser, rules: StepRules) -> None:
        super().__init__()
        self.denoiser, self.rules = denoiser, rules

    def forward(
        self, x_t: Tensor, observation: Tensor, mask: Tensor, noise: Tensor, mask_noise: Tensor | None,
        timestep: Tensor, alpha_t: Tensor, alpha_s: Tensor, sigma_t: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = self._known_noised(x_t, observation, mask, mask_noise, alpha_t)
        eps = self.denoiser(x, timestep, alpha_t)
        return self._update(x, observation, mask, noise, eps, alpha_t, alpha_s, sigma_t), eps

    def _known_noised(self, x: Tensor, y: Tensor, mask: Tensor, z: Tensor | None, alpha: Tensor) -> Tensor:
        """Replace x_t outside the mask by the observation under noise z; whose z it is, the sampler says."""
        if self.rules.mask_rule == "blend" or z is None:
            return x
        return keep_normal(mask, x, torch.sqrt(alpha) * y + torch.sqrt(1 - alpha) * z)

    def _update(
        self, x: Tensor, y: Tensor, mask: Tensor, noise: Tensor, eps: Tensor, alpha_t: Tensor, alpha_s: Tensor,
        sigma: Tensor,
    ) -> Tensor:  # fmt: skip
        """Apply Algorithm 1, lines 7 to 11, of the paper; `eps` is eps_phi inside the mask."""
        if self.rules.mask_rule == "blend":
            eps = keep_normal(mask, eps, (x - torch.sqrt(alpha_t) * y) * torch.rsqrt(1 - alpha_t))
        x0 = (x - torch.sqrt(1 - alpha_t) * eps) * torch.rsqrt(alpha_t)
        spread = torch.sqrt(torch.clamp(1 - alpha_s - sigma * sigma, min=0.0))
        return torch.sqrt(alpha_s) * x0 + spread * eps + sigma * noise


class GuidedStep(PlainStep):
    """A DDIM step with the guidance gradient (eqn. 18 of the paper, Algorithm 1)."""

    def forward(  # type: ignore[override]
        self, x_t: Tensor, observation: Tensor, mask: Tensor, noise: Tensor, mask_noise: Tensor | None,
        timestep: Tensor, alpha_t: Tensor, alpha_s: Tensor, sigma_t: Tensor, guidance_scale: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        x = self._known_noised(x_t, observation, mask, mask_noise, alpha_t)
        eps, gradient = self._guidance(x, observation, timestep, alpha_t)
        guided = eps + guidance_scale * torch.sqrt(1 - alpha_t) * gradient
        return self._update(x, observation, mask, noise, guided, alpha_t, alpha_s, sigma_t), eps, gradient

    def _guidance(self, x: Tensor, y: Tensor, timestep: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Return eps and the gradient of ||x0_hat - y|| with respect to x_t: (u - sqrt(1 - a) J^T u) / sqrt(a).

        DDAD pulls x_t towards y_t instead, the observation under the predicted noise: x_t - y_t = sqrt(a) (x0_hat - y).
        """
        if self.rules.gradient == "ddad":
            eps = self.denoiser(x, timestep, alpha)
            return eps, x - torch.sqrt(alpha) * y - torch.sqrt(1 - alpha) * eps
        if self.rules.gradient == "jacobian-free":
            eps = self.denoiser(x, timestep, alpha)
            return eps, self._direction(x, y, eps, alpha) * torch.rsqrt(alpha)
        eps, pullback = self.denoiser.linearize(x, timestep, alpha)
        u = self._direction(x, y, eps, alpha)
        return eps, (u - torch.sqrt(1 - alpha) * self._pulled(pullback, u)) * torch.rsqrt(alpha)

    def _pulled(self, pullback: Pullback, u: Tensor) -> Tensor:
        """Return J^T u. A unit vector lies below what fp16 resolves, so it goes through half blocks enlarged."""
        if block_type(self.denoiser.network) == torch.float32 or self.rules.guidance_norm != "l2":
            return pullback(u)
        scale = 2.0 ** round(
            math.log2(math.prod(u.shape[1:])) / 2
        )  # root mean square near 1; a power of two loses nothing
        return pullback(u * scale) * (1 / scale)

    def _direction(self, x: Tensor, y: Tensor, eps: Tensor, alpha: Tensor) -> Tensor:
        x0_hat = (x - torch.sqrt(1 - alpha) * eps) * torch.rsqrt(alpha)
        return residual_direction(x0_hat - y, self.rules.guidance_norm)
