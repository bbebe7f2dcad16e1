"""Masked Diffusion Posterior Sampling in plain torch, written for reading: what every backend is compared with.

Imports nothing of `runtime/` and computes its own schedule, so that parity is never a thing against itself. Equations
and Algorithm 1: "Unsupervised Anomaly Detection via Masked Diffusion Posterior Sampling" (Wu et al., 2024).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Eps = Callable[[Tensor, Tensor], Tensor]
"""eps_theta(x_t [B, 3, H, W], timestep []) -> [B, 3, H, W]."""
Features = Callable[[Tensor], Sequence[Tensor]]
"""Stage features of images [B, 3, H, W] in [-1, 1]."""
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Oracle:
    """Choices that the paper leaves open. The defaults are `paper` mode; `reference()` is the authors' code."""

    alphas_cumprod: Tensor  # float64 [1000]
    reference_times: bool = False
    known: str = "blend"  # how the part outside the mask is kept: blend, replace, inpaint
    noise_level: int = 200  # T
    steps: int = 10  # N
    skip: int = 20  # reference times: the distance of the called timesteps
    resamples: int = 1  # how often a step is made (RePaint)
    stitched: bool = False  # starts from the pass before inside the mask
    by_samples: bool = False  # those of the pass before guide it in the place of y, without a mask
    guidance_scale: float = 100.0  # rho, w
    squared_norm: bool = False
    use_jacobian: bool = True
    ddad: bool = False  # x_t - y_t for the gradient (Mousakhan et al. 2023)
    eta_ddim: float = 1.0
    eta: float = 0.3
    mask_lambda: float = 0.1
    top: int = 500  # S
    pixel: str = "l1"  # l1, squared, scaled
    pool: int = 0
    align_corners: bool = False
    sigma: float = 0.0  # of a Gaussian over the map, on `kernel` pixels
    kernel: int = 1
    map_scale: float = 1.0
    softmax_score: bool = False
    pixel_term: bool = True
    feature_term: bool = True


def reference(alphas_cumprod: Tensor, **changes: Any) -> Oracle:
    """Return the settings of the authors' published code, with `changes`."""
    theirs: dict[str, Any] = {
        "reference_times": True, "known": "replace", "pixel": "scaled", "pool": 3, "align_corners": True,
        "sigma": 4.0, "kernel": 33, "map_scale": 0.5, "softmax_score": True,
    }  # fmt: skip
    return Oracle(alphas_cumprod, **(theirs | changes))


def linear_schedule(steps: int = 1000, start: float = 1e-4, end: float = 0.02) -> Tensor:
    """Return alpha-bar of the linear schedule, float64 [steps]; entry t has t + 1 factors."""
    return torch.cumprod(1 - torch.linspace(start, end, steps, dtype=torch.float64), dim=0)


def times(oracle: Oracle) -> tuple[float, list[tuple[int, float, float]]]:
    """Return alpha of the first x_t, then (timestep given to the network, alpha_t, alpha_s) for every step."""
    alpha = oracle.alphas_cumprod.tolist()
    if oracle.reference_times:
        called = list(range(0, oracle.noise_level, oracle.skip))
        after = [1.0] + [alpha[t] for t in called[:-1]]
        return alpha[oracle.noise_level], [(t, alpha[t], s) for t, s in reversed(list(zip(called, after, strict=True)))]
    alpha = [1.0, *alpha]  # alpha(0) = 1; the network was trained on 0..999, so time t is its t - 1
    edges = [oracle.noise_level * n // oracle.steps for n in range(oracle.steps, -1, -1)]
    return alpha[edges[0]], [(t - 1, alpha[t], alpha[s]) for t, s in pairwise(edges)]


def guidance_gradient(
    eps: Eps, x_t: Tensor, y: Tensor, timestep: int, a: float, oracle: Oracle
) -> tuple[Tensor, Tensor]:
    """Return eps_theta and the gradient of ||y - x0_hat|| (eqn. 16; squared on request) by x_t, each image alone."""
    if oracle.ddad:
        e = eps(x_t, torch.tensor(float(timestep))).detach()
        return e, x_t - (math.sqrt(a) * y + math.sqrt(1 - a) * e)
    x_t = x_t.detach().requires_grad_()
    with torch.enable_grad():
        e = eps(x_t, torch.tensor(float(timestep)))
        x0_hat = (x_t - math.sqrt(1 - a) * (e if oracle.use_jacobian else e.detach())) / math.sqrt(a)  # eqn. 13
        square = (y - x0_hat).square().sum(dim=(1, 2, 3))
        distance = square if oracle.squared_norm else torch.where(square > 0, square, 1.0).sqrt() * (square > 0)
        gradient = torch.autograd.grad(distance.sum(), x_t)[0]
    return e.detach(), gradient


@dataclass(frozen=True)
class Noise:
    """Noises of one pass: `first` [B N_s, 3, H, W], the others a sequence of the same shape, one a step that is made.

    `steps` is what a step adds, `known` what covers the part outside the mask before it, `jumps` the way back after it.
    """

    first: Tensor
    steps: Sequence[Tensor]
    known: Sequence[Tensor] = ()
    jumps: Sequence[Tensor] = ()


def posterior_sampling(
    eps: Eps,
    y: Tensor,
    mask: Tensor,
    first_noise: Tensor,
    step_noise: Sequence[Tensor],
    oracle: Oracle,
    start: Tensor | None = None,
    inpainting: Noise | None = None,
) -> Iterator[Tensor]:
    """Run Algorithm 1: yield x_T, then x_s after every step; the last one is the normal image x_0.

    y [B, 3, H, W] in [-1, 1]; mask [B, 1, H, W], 1 where anomalous; noises like y. Outside the mask eps is blended
    (eqn. 18), or x_t is replaced before each call by y under noise: the first one ("replace", the authors' code), or a
    fresh one of `inpainting` ("inpaint", RePaint, Lugmayr et al. 2022), where y itself follows the last step. `start`
    is noised in the place of y.
    """
    a, steps = times(oracle)
    x_t = math.sqrt(a) * (y if start is None else start) + math.sqrt(1 - a) * first_noise  # lines 1, 2
    yield x_t
    made = 0
    for timestep, a, a_s in steps:  # lines 3, 4
        repeats = oracle.resamples if a_s < 1 else 1
        for again in reversed(range(repeats)):
            z = inpainting.known[made] if inpainting and oracle.known == "inpaint" and made else first_noise
            x_t = _step(eps, x_t, y, mask, z, step_noise[made], (timestep, a, a_s), oracle)
            yield x_t
            if again:
                assert inpainting is not None
                x_t = math.sqrt(a / a_s) * x_t + math.sqrt(1 - a / a_s) * inpainting.jumps[made]
            made += 1


def _step(
    eps: Eps, x_t: Tensor, y: Tensor, mask: Tensor, z: Tensor, noise: Tensor, step: tuple[int, float, float],
    oracle: Oracle,
) -> Tensor:  # fmt: skip
    timestep, a, a_s = step
    if oracle.known != "blend":
        x_t = mask * x_t + (1 - mask) * (math.sqrt(a) * y + math.sqrt(1 - a) * z)
    if oracle.guidance_scale == 0:
        e = eps(x_t, torch.tensor(float(timestep)))
    else:
        e, gradient = guidance_gradient(eps, x_t, y, timestep, a, oracle)  # line 5
        e = e + oracle.guidance_scale * math.sqrt(1 - a) * gradient  # line 6
    if oracle.known == "blend":
        e = (1 - mask) * (x_t - math.sqrt(a) * y) / math.sqrt(1 - a) + mask * e  # lines 7, 8
    x0 = (x_t - math.sqrt(1 - a) * e) / math.sqrt(a)  # line 9
    sigma = oracle.eta_ddim * math.sqrt((1 - a_s) / (1 - a)) * math.sqrt(1 - a / a_s)
    x_s = math.sqrt(a_s) * x0 + math.sqrt(max(1 - a_s - sigma**2, 0.0)) * e + sigma * noise  # lines 10, 11
    return mask * x_s + (1 - mask) * y if oracle.known == "inpaint" and a_s == 1 else x_s


def difference(
    y: Tensor, x0: Tensor, features_y: Sequence[Tensor], features_x0: Sequence[Tensor], oracle: Oracle
) -> Tensor:
    """Return D(x0, y), eqn. 20: [B, 1, H, W], with the authors' pooling, normalisation and smoothing where chosen."""
    size = (int(y.shape[-2]), int(y.shape[-1]))
    feature = torch.zeros_like(y[:, :1])
    if oracle.feature_term:
        for fy, fx in zip(features_y, features_x0, strict=True):
            if oracle.pool:
                fy, fx = (F.avg_pool2d(f, oracle.pool, stride=1, padding=oracle.pool // 2) for f in (fy, fx))
            distance = 1 - F.cosine_similarity(fx, fy, dim=1).unsqueeze(1)
            feature = feature + F.interpolate(distance, size, mode="bilinear", align_corners=oracle.align_corners)
    pixel = oracle.eta * _pixel_distance(y, x0, feature, oracle) if oracle.pixel_term else torch.zeros_like(feature)
    smoothed = _smooth(feature + pixel, oracle.sigma, oracle.kernel) if oracle.sigma else feature + pixel
    return oracle.map_scale * smoothed


def _pixel_distance(y: Tensor, x0: Tensor, feature: Tensor, oracle: Oracle) -> Tensor:
    if oracle.pixel == "squared":
        return (y - x0).square().sum(dim=1, keepdim=True)
    if oracle.pixel == "l1":
        return (y - x0).abs().sum(dim=1, keepdim=True)
    std = torch.tensor(IMAGENET_STD).reshape(1, 3, 1, 1)
    pixel = ((y - x0) / 2 / std).abs().mean(dim=1, keepdim=True)
    largest = pixel.amax(dim=(1, 2, 3), keepdim=True)
    ratio = feature.amax(dim=(1, 2, 3), keepdim=True) / torch.where(largest > 0, largest, 1.0)
    return pixel * ratio if oracle.feature_term else pixel


def _smooth(image: Tensor, sigma: float, kernel: int) -> Tensor:
    offsets = torch.arange(kernel, dtype=torch.float32) - kernel // 2
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    image = F.pad(image, [kernel // 2] * 4, mode="reflect")
    return F.conv2d(F.conv2d(image, weights.reshape(1, 1, -1, 1)), weights.reshape(1, 1, 1, -1))


def image_score(anomaly_map: Tensor, oracle: Oracle) -> Tensor:
    """Return [B]: mean of the S largest map values (paper), or the sum of a softmax's S largest (reference)."""
    values = anomaly_map.flatten(1)
    if oracle.softmax_score:
        return torch.softmax(values, dim=1).topk(oracle.top).values.sum(dim=1)
    return values.topk(oracle.top).values.mean(dim=1)


def mask_of(anomaly_map: Tensor, oracle: Oracle, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Apply eqn. 22: 1 where the map exceeds min + lambda (max - min), of each image itself unless a range is given."""
    low = anomaly_map.amin(dim=(1, 2, 3), keepdim=True) if low is None else low
    high = anomaly_map.amax(dim=(1, 2, 3), keepdim=True) if high is None else high
    return (anomaly_map > low + oracle.mask_lambda * (high - low)).float()


def conditions(
    oracle: Oracle, y: Tensor, mask: Tensor, previous: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what guides a pass, under which mask, and what is noised at its start (None: what guides it).

    A stitched pass (Bercea et al. 2023) starts from the samples of the one before it inside the mask, y outside; one of
    DiffusionAD (Zhang et al. 2023) starts from y and goes towards these samples everywhere.
    """
    if not (oracle.stitched or oracle.by_samples):
        return y, mask, None
    assert previous is not None
    if oracle.by_samples:
        return previous, torch.ones_like(mask), y
    return y, mask, mask * previous + (1 - mask) * y


def mdps(
    eps: Eps,
    features: Features,
    y: Tensor,
    passes: Sequence[tuple[Oracle, Noise]],
    mask: Tensor | None = None,
    previous: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the whole method: every pass samples under the mask the one before it made (at first `mask`, 1 by default).

    `previous` are the samples before the first of these passes, for those that need such (see `conditions`).
    Returns anomaly map [B, 1, H, W], score [B], the last mask used, the posterior samples of every pass (image-major).
    """
    next_mask = torch.ones_like(y[:, :1]) if mask is None else mask
    features_y, samples = features(y), []
    for oracle, noise in passes:
        mask = next_mask  # of the pass before
        count = noise.first.shape[0] // y.shape[0]
        many_y, many_mask = y.repeat_interleave(count, dim=0), mask.repeat_interleave(count, dim=0)
        guide, under, start = conditions(oracle, many_y, many_mask, previous)
        *_, x0 = posterior_sampling(eps, guide, under, noise.first, noise.steps, oracle, start, noise)
        previous = x0
        repeated = [f.repeat_interleave(count, dim=0) for f in features_y]
        differences = difference(many_y, x0, repeated, features(x0), oracle)
        anomaly_map = differences.reshape(y.shape[0], count, 1, *y.shape[-2:]).mean(dim=1)  # eqn. 21
        next_mask = mask_of(anomaly_map, oracle)
        samples.append(x0)
    assert mask is not None
    return anomaly_map, image_score(anomaly_map, passes[-1][0]), mask, samples
