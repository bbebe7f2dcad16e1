"""The same detection in torch, by the functions of `models.oracle`: what runs without an export.

The ways: "authors" (two forwards and a backward a guided step: the authors' code calls the network once inside the
gradient and once more for eps), "eager" (one forward, whose output is eps too), "compile" (the same with the network
under torch.compile), "autocast" (the same in fp16 by torch.autocast). All but the last compute the same score.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdps.benchmarks.bench import Outcome, SkippedError, Spec, Timer, observation, torch_timer
from mdps.benchmarks.bench.reexport import known_of
from mdps.models import oracle as oracles
from mdps.models.backbones import Backbone, load_backbone
from mdps.models.checkpoints import Denoiser, load_denoiser
from mdps.models.oracle import Oracle
from mdps.models.oracle_setup import Network, eps_of, features_of, oracle_of
from mdps.runtime.manifest import Manifest
from mdps.runtime.noise import INITIAL, NoiseBank
from mdps.runtime.schedule import plan_steps
from mdps.runtime.settings import Settings


@dataclass(frozen=True)
class Detection:
    """Of all passes: one entry a pass in the lists; samples [B N_s, 3, H, W], maps and masks [B, 1, H, W]."""

    samples: list[Tensor]
    maps: list[Tensor]
    scores: list[Tensor]
    masks: list[Tensor]
    passes_ms: float


class Eager:
    """The bundle's detection on its checkpoint, in one of the ways."""

    def __init__(self, spec: Spec) -> None:
        torch.set_num_threads(spec.threads)
        manifest = Manifest.read(spec.bundle)
        self.timer: Timer = torch_timer(spec.device)
        self.facts: dict[str, Any] = {"note": f"torch {torch.__version__}"}
        self._settings = manifest.settings
        self.manifest = manifest
        if self._settings.sampler.mask_rule == "inpaint":
            raise SkippedError("stitching and resampling (AutoDDPM) are not among the ways in torch")
        denoiser = _denoiser(spec, manifest)
        network = _way(spec.variant, denoiser.network.to(spec.device))
        self.eps = eps_of(network, denoiser.prediction, denoiser.schedule)
        backbone = _backbone(spec, self._settings)
        torch.set_default_device(spec.device)  # there the oracle makes its constants
        self.features = features_of(backbone, self._settings)
        size = manifest.preprocessing.network_size
        images = np.stack([observation(size, index) for index in range(spec.batch)])
        self._y = torch.from_numpy(images).to(spec.device)
        samples = spec.samples or self._settings.sampler.samples
        bank = NoiseBank.of(self._settings.sampler, size)
        self.passes = [
            (
                oracle_of(self._settings, manifest.schedule.betas, index),
                _noise(bank, self._settings, manifest, index, samples),
            )
            for index in range(len(self._settings.sampler.passes))
        ]
        self.samples = samples

    def run(self) -> Outcome:
        """All passes and the scoring of the spec's batch."""
        found = self.detect(self._y)
        return Outcome(float(found.scores[-1][0]), found.passes_ms)

    @torch.no_grad()
    def detect(self, y: Tensor) -> Detection:
        """All passes and the scoring of observations [B, 3, H, W]; a frozen mask range is taken as (0, 1)."""
        n, found = self.samples, Detection([], [], [], [], 0.0)
        frozen = () if self._settings.mask.range == "per-image" else (torch.tensor(0.0), torch.tensor(1.0))
        many_y, mask = y.repeat_interleave(n, dim=0), torch.ones_like(y[:, :1])
        features_y = [feature.repeat_interleave(n, dim=0) for feature in self.features(y)]
        passes_ms = 0.0
        for oracle, noise in self.passes:
            given = (oracle, noise, many_y, mask, found.samples[-1] if found.samples else None)
            x0, ms = self.timer(lambda given=given: self._sample(*given))  # type: ignore[misc]
            passes_ms += ms
            each = oracles.difference(many_y, x0, features_y, self.features(x0), oracle)
            anomaly_map = each.reshape(len(y), n, 1, *y.shape[-2:]).mean(dim=1)
            mask = oracles.mask_of(anomaly_map, oracle, *frozen)
            found.samples.append(x0)
            found.maps.append(anomaly_map)
            found.scores.append(oracles.image_score(anomaly_map, oracle))
            found.masks.append(mask)
        return replace(found, passes_ms=passes_ms)

    def _sample(
        self, oracle: Oracle, noise: Sequence[Tensor], many_y: Tensor, mask: Tensor, before: Tensor | None
    ) -> Tensor:
        given = oracles.conditions(oracle, many_y, mask.repeat_interleave(self.samples, dim=0), before)
        guide, many_mask, start = given
        first, *steps = [z.repeat(len(many_y) // self.samples, 1, 1, 1) for z in noise]
        *_, x0 = oracles.posterior_sampling(self.eps, guide, many_mask, first, steps, oracle, start)
        return x0


def _denoiser(spec: Spec, manifest: Manifest) -> Denoiser:
    """The checkpoint, read with all that the bundle knows of it; SkippedError for another than the bundle's."""
    if spec.ckpt is None:
        raise SkippedError("no checkpoint: give --ckpt")
    denoiser = load_denoiser(spec.ckpt, known_of(manifest))
    if denoiser.report.sha256 != manifest.checkpoint.sha256:
        raise SkippedError(f"{spec.ckpt} is not the checkpoint the bundle was made from ({manifest.checkpoint.name})")
    return denoiser


def _backbone(spec: Spec, settings: Settings) -> Backbone | None:
    score = settings.score
    if not score.stages:
        return None
    weights = Path(spec.backbone_weights) if spec.backbone_weights else None
    return load_backbone(score.backbone, weights, score.stages).to(spec.device)


def _way(variant: str, network: torch.nn.Module) -> Network:
    if variant == "authors":
        return two_forwards(network)
    if variant == "compile":
        return _compiled(network)
    if variant == "autocast":
        return in_half(network)
    return network


def two_forwards(network: Network) -> Network:
    """Calls the network a second time wherever a gradient is wanted, as the authors' code does for eps."""

    def twice(x_t: Tensor, timestep: Tensor) -> Tensor:
        if x_t.requires_grad:
            with torch.no_grad():
                network(x_t.detach(), timestep)
        return network(x_t, timestep)

    return twice


def in_half(network: Network) -> Network:
    """The network in fp16 where torch.autocast thinks it safe, its result in float32."""

    def half(x_t: Tensor, timestep: Tensor) -> Tensor:
        with torch.autocast(x_t.device.type, torch.float16):
            return network(x_t, timestep).float()

    return half


def _compiled(network: Network) -> Network:
    compiled: Network = torch.compile(network)

    def call(x_t: Tensor, timestep: Tensor) -> Tensor:
        try:
            return compiled(x_t, timestep)
        except Exception as error:  # dynamo, the code generator and the C++ compiler each raise their own
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise SkippedError(f"torch.compile cannot compile the network here: {reason}") from error

    return call


def _noise(bank: NoiseBank, settings: Settings, manifest: Manifest, index: int, samples: int) -> list[Tensor]:
    """The noise of this pass as the runtime draws it: the first, then one a step, each [N_s, 3, H, W]."""
    sampler = settings.sampler
    _, steps = plan_steps(manifest.schedule, sampler.time_index, sampler.passes[index], sampler.eta_ddim)
    draws = [bank.draw(index, step, samples) for step in (INITIAL, *range(len(steps)))]
    return [torch.from_numpy(draw.copy()).to(torch.get_default_device()) for draw in draws]
