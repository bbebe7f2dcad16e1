"""The oracle as the settings of a bundle describe it: what the parity gate and the benchmarks compare with."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mdps.models import oracle as oracles
from mdps.models.backbones import Backbone
from mdps.models.oracle import Oracle
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.settings import Settings

Network = Callable[[Tensor, Tensor], Tensor]


def eps_of(network: Network, prediction: str, schedule: NoiseSchedule) -> oracles.Eps:
    """Return eps from a network that predicts eps, v (Salimans & Ho, 2022) or x0."""
    alphas = schedule.alphas_cumprod.tolist()

    def eps(x_t: Tensor, timestep: Tensor) -> Tensor:
        output = network(x_t, timestep.to(x_t.device))[:, :3]
        if prediction == "eps":
            return output
        a = alphas[int(timestep)]
        if prediction == "v":
            return math.sqrt(1 - a) * x_t + math.sqrt(a) * output
        return (x_t - math.sqrt(a) * output) / math.sqrt(1 - a)

    return eps


def features_of(backbone: Backbone | None, settings: Settings) -> oracles.Features:
    """Return the stage features of images in [-1, 1], enlarged to the size the backbone was trained on."""
    if backbone is None:
        return lambda image: []
    network, wanted = backbone, settings.score.feature_size or 0
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (network.mean, network.std))

    def features(image: Tensor) -> Sequence[Tensor]:
        if min(image.shape[-2:]) < wanted:
            image = F.interpolate(image, [max(wanted, side) for side in image.shape[-2:]], mode="bilinear")
        stages: Sequence[Tensor] = network(((image + 1) / 2 - mean) / std)
        return stages

    return features


def oracle_of(settings: Settings, betas: Sequence[float], pass_index: int) -> Oracle:
    """Return the oracle's settings of one pass."""
    sampler, score = settings.sampler, settings.score
    one = sampler.passes[pass_index]
    return Oracle(
        alphas_cumprod=torch.cumprod(1 - torch.tensor(betas, dtype=torch.float64), dim=0),
        reference_times=sampler.time_index == "reference",
        known=sampler.mask_rule,
        noise_level=one.noise_level,
        steps=one.steps or 0,
        skip=one.skip or 0,
        resamples=one.resamples,
        stitched=one.start == "stitched",
        by_samples=one.target == "previous",
        guidance_scale=one.guidance_scale,
        squared_norm=sampler.guidance_norm == "squared",
        use_jacobian=sampler.gradient == "exact",
        ddad=sampler.gradient == "ddad",
        eta_ddim=sampler.eta_ddim,
        eta=score.eta,
        mask_lambda=settings.mask.mask_lambda,
        top=score.top,
        pixel=score.pixel,
        pool=score.pool,
        align_corners=score.align_corners,
        sigma=score.smoothing_sigma,
        kernel=score.smoothing_kernel,
        map_scale=score.map_scale,
        softmax_score=score.image_score == "softmax_top_sum",
        pixel_term=score.eta > 0,
        feature_term=bool(score.stages),
    )
