"""The torch oracle's arrays at every stage of a bundle's detection, on the processor."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mdps.benchmarks.bench.eager import Eager
from mdps.benchmarks.bench.picture import observation
from mdps.benchmarks.bench.rate import forward_flop
from mdps.benchmarks.bench.spec import Spec
from mdps.benchmarks.gpu_check.reference import SCALARS, Reference, identity
from mdps.models import oracle as oracles
from mdps.runtime.schedule import plan_steps
from mdps.runtime.versions import versions

Arrays = dict[str, NDArray[Any]]
GUIDANCE = 100.0
"""The scale of the guided step where the passes have none."""


def make_reference(
    bundle: str,
    ckpt: str,
    threads: int,
    tolerances: Mapping[str, Mapping[str, float]],
    samples: Sequence[int],
    judged: Sequence[tuple[NDArray[np.float32], bool]] = (),
) -> Reference:
    """Runs the oracle on one picture: a step of each kind, features, a score, and whole detections with each N_s.

    `judged` are observations [3, H, W] and whether each has a defect; their scores, and a threshold half-way between
    the best defect and the worst good part, are the verdicts that a backend should come to.
    """
    spec = Spec("oracle", "torch", "eager", bundle, threads, ckpt=ckpt)
    eager = Eager(spec)
    manifest = eager.manifest
    y = observation(manifest.preprocessing.network_size)[None]
    arrays = _steps(eager, torch.from_numpy(y)) | _scoring(eager, torch.from_numpy(y))
    for count in samples:
        many = eager if count == eager.samples else Eager(replace(spec, samples=count))
        arrays |= {f"whole{count}.{name}": value for name, value in _whole(many, torch.from_numpy(y)).items()}
    if judged:
        arrays |= {f"verdict.{name}": value for name, value in _verdicts(eager, judged).items()}
    about = {
        "of": identity(manifest),
        "tolerances": {name: dict(allowed) for name, allowed in tolerances.items()},
        "forward_flop": forward_flop(manifest),
        "versions": versions("torch", "numpy"),
    }
    return Reference(arrays, about)


@torch.no_grad()
def _steps(eager: Eager, y: torch.Tensor) -> Arrays:
    """The first pass's first step under a half mask: all that goes into it, and what comes out."""
    oracle, (first, second, *others) = eager.passes[0]
    oracle = replace(oracle, guidance_scale=oracle.guidance_scale or GUIDANCE)
    sampler = eager.manifest.settings.sampler
    step = plan_steps(eager.manifest.schedule, sampler.time_index, sampler.first_pass, sampler.eta_ddim)[1][0]
    z, noise = first[:1], second[:1]
    mask = torch.zeros_like(y[:, :1])
    mask[..., : mask.shape[-1] // 2] = 1
    fed = {"observation": y, "mask": mask, "noise": noise, "mask_noise": z}
    found = {f"step.{name}": value.numpy() for name, value in fed.items()}
    found |= {f"step.{name}": np.asarray(getattr(step, name)) for name in SCALARS}
    found["step.guidance_scale"] = np.asarray(oracle.guidance_scale)
    all_noise = [noise] * (1 + len(others))
    for role, scale in (("guided_step", oracle.guidance_scale), ("plain_step", 0.0)):
        states = oracles.posterior_sampling(eager.eps, y, mask, z, all_noise, replace(oracle, guidance_scale=scale))
        x_t, x_s = next(states), next(states)
        found |= {"step.x_t": x_t.numpy(), f"{role}.x_s": x_s.numpy()}
        if oracle.known != "blend":
            a = step.alpha_t
            x_t = mask * x_t + (1 - mask) * (a**0.5 * y + (1 - a) ** 0.5 * z)
        eps, gradient = oracles.guidance_gradient(eager.eps, x_t, y, int(step.timestep), step.alpha_t, oracle)
        found[f"{role}.eps"] = eps.numpy()
        if scale:
            found[f"{role}.guidance_gradient"] = gradient.numpy()
    return found


@torch.no_grad()
def _scoring(eager: Eager, y: torch.Tensor) -> Arrays:
    """Features as unit vectors, as the graph gives them; the score of another picture as the posterior sample."""
    oracle, _ = eager.passes[0]
    sample = torch.from_numpy(observation((int(y.shape[-2]), int(y.shape[-1])), 1)[None])
    features = list(eager.features(y))
    anomaly_map = oracles.difference(y, sample, features, eager.features(sample), oracle)
    settings = eager.manifest.settings
    frozen = () if settings.mask.range == "per-image" else (torch.tensor(0.0), torch.tensor(1.0))
    units = [torch.nn.functional.normalize(feature, dim=1, eps=1e-8) for feature in features]
    return {
        "score.sample": sample.numpy(),
        "score.anomaly_map": anomaly_map.numpy(),
        "score.anomaly_score": oracles.image_score(anomaly_map, oracle).numpy(),
        "score.mask": oracles.mask_of(anomaly_map, oracle, *frozen).numpy(),
    } | {f"features.{index}": feature.numpy() for index, feature in enumerate(units, start=1)}


def _whole(eager: Eager, y: torch.Tensor) -> Arrays:
    found = eager.detect(y)
    return {
        "first_map": found.maps[0].numpy(),
        "first_score": found.scores[0].numpy(),
        "mask": found.masks[0].numpy(),
        "posterior_samples": found.samples[-1].numpy(),
        "anomaly_map": found.maps[-1].numpy(),
        "anomaly_score": found.scores[-1].numpy(),
    }


def _verdicts(eager: Eager, judged: Sequence[tuple[NDArray[np.float32], bool]]) -> Arrays:
    images = np.stack([image for image, _ in judged])
    scores = np.concatenate([eager.detect(torch.from_numpy(image[None])).scores[-1].numpy() for image in images])
    defective = np.array([defect for _, defect in judged])
    threshold = (scores[defective].min() + scores[~defective].max()) / 2
    return {"observations": images, "scores": scores, "threshold": np.asarray(threshold)}
