"""The gate at the end of an export: what was written must compute what the oracle computes, or there is no bundle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mdps.models import oracle as oracles
from mdps.models.backbones import Backbone
from mdps.models.checkpoints import Denoiser
from mdps.models.oracle_setup import eps_of, features_of, oracle_of
from mdps.runtime.engines import DEFAULT, ENGINES
from mdps.runtime.errors import BackendError
from mdps.runtime.noise import INITIAL, JUMP, KNOWN
from mdps.runtime.pipeline import Pipeline
from mdps.runtime.sampler import posterior_sampling, step_scalars
from mdps.runtime.schedule import Step, plan_steps
from mdps.runtime.session import Session
from mdps.runtime.settings import PassSettings, Settings

Array = NDArray[np.float32]
TOLERANCES = {
    "eps": 1e-4, "guidance_gradient": 1e-4, "one_step": 5e-4, "first_map": 2e-3, "mask_disagreement": 1e-2,
    "posterior_sample": 2e-3, "anomaly_map": 2e-3, "anomaly_score": 1e-3, "variants": 1e-4,
} | {row.name: row.tolerance for row in ENGINES if row.tolerance}  # fmt: skip
"""Largest difference over the largest value (at least 1, but for the gradient and the maps); shares for the mask.

An engine may have one of its own, for the step graphs in its form; "variants" is for all others'.
"""
FP16_TOLERANCES = {
    "eps": 2e-2, "guidance_gradient": 2e-2, "one_step": 2e-2, "first_map": 5e-2, "mask_disagreement": 5e-2,
    "posterior_sample": 5e-2, "anomaly_map": 5e-2, "anomaly_score": 5e-2, "variants": 2e-2,
}  # fmt: skip
BF16_TOLERANCES = {name: 8 * allowed for name, allowed in FP16_TOLERANCES.items()}  # three bits less
TOLERANCES_OF = {"fp32": TOLERANCES, "fp16": FP16_TOLERANCES, "bf16": BF16_TOLERANCES}
DIVERGED = 100.0
FEW_STEPS = 16  # the longest pass of the authors has 13
MAP_FLOOR = 1e-2  # one minus a cosine is exact to 1e-7 only: maps of nearly equal images are compared absolutely


class ParityError(BackendError):
    """The exported graphs do not compute what the oracle does."""


@dataclass
class Report:
    """Errors found beside their tolerances; `failures` names those outside."""

    tolerances: Mapping[str, float] = field(default_factory=lambda: TOLERANCES)
    errors: dict[str, float] = field(default_factory=dict)

    def compare(self, name: str, got: NDArray[Any], wanted: Tensor, floor: float = 1.0) -> None:
        reference = wanted.numpy()
        scale = max(floor, float(np.abs(reference).max()))
        error = float(np.abs(got - reference).max()) / scale
        self.errors[name] = float(np.maximum(self.errors.get(name, 0.0), error))  # the worst so far; keeps NaN

    @property
    def failures(self) -> list[str]:
        # written so that NaN fails
        return [name for name, error in self.errors.items() if not error <= self.tolerances.get(name, 0.0)]

    def say(self, name: str) -> str:
        """A comparison in words."""
        return f"{name} off by {self.errors[name]:.2g} (allowed {self.tolerances.get(name, 0.0):.2g})"

    def to_json(self) -> dict[str, Any]:
        allowed = self.tolerances
        return {name: {"error": error, "tolerance": allowed.get(name, 0.0)} for name, error in self.errors.items()}


def check_parity(
    pipeline: Pipeline,
    denoiser: Denoiser,
    backbone: Backbone | None,
    size: tuple[int, int],
    variants: Sequence[tuple[str, Session, Session]] = (),
    precision: str = "fp32",
) -> dict[str, Any]:
    """Runs every graph beside the oracle on two pictures of noise; the report, or ParityError outside tolerance.

    `variants` are pairs of step graphs that compute the same, under the name of the second one's engine, or "variants".
    The tolerances are those of `precision`; the oracle computes in float32 whatever it is.
    """
    report = Report(TOLERANCES_OF[precision])
    y = _pictures(size)
    # Both pictures together: a graph that mixes the images of a batch shows.
    pipeline = replace(pipeline, settings=_shortened(pipeline.settings), at_once=len(y))
    eps = eps_of(denoiser.network, denoiser.prediction, denoiser.schedule)
    with torch.no_grad():
        for index, _ in enumerate(pipeline.settings.sampler.passes):
            _check_first_step(report, pipeline, eps, y, index)
        if pipeline.graphs.ddad is not None:
            _check_first_step(report, _by_ddad(pipeline, pipeline.graphs.ddad), eps, y, 0)
        _check_whole(report, pipeline, eps, backbone, y)
    allowed = {name: report.tolerances["variants"] for name, _, _ in variants}
    report.tolerances = allowed | dict(report.tolerances)
    for name, plain, variant in variants:
        _check_variant(report, name, plain, variant, y)
    if wrong := [name for name in report.failures if name in allowed and name != "variants"]:
        raise ParityError(engines_disagree(", ".join(report.say(name) for name in wrong)))
    if report.failures:
        raise ParityError(
            "the exported graphs disagree with the torch oracle, so no bundle was written: "
            + ", ".join(map(report.say, report.failures))
        )
    return report.to_json()


def engines_disagree(found: str) -> str:
    """The sentence about engines that are not what the others are; `found` says which and how far."""
    return (
        f"an engine computes the exported graphs otherwise than {DEFAULT}, so no bundle was written: {found}; leave "
        f"it out of --engines ({DEFAULT} alone: --engines {DEFAULT}), and the bundle will be refused on it"
    )


def _shortened(settings: Settings) -> Settings:
    """Passes of hundreds of steps cut to a few: their graph is the same, and errors only add up along the way."""
    first, *masked = (_short(one) for one in settings.sampler.passes)
    sampler = replace(settings.sampler, first_pass=first, masked_pass=masked[0] if masked else None)
    return replace(settings, sampler=sampler)


def _short(one: PassSettings) -> PassSettings:
    short = replace(one, resamples=min(one.resamples, 2))
    if one.steps is not None and one.steps > FEW_STEPS:  # N must divide T
        return replace(short, steps=max(n for n in range(1, FEW_STEPS + 1) if one.noise_level % n == 0))
    if one.skip is not None and one.noise_level > FEW_STEPS * one.skip:
        return replace(short, skip=-(-one.noise_level // FEW_STEPS))
    return short


def _pictures(size: tuple[int, int]) -> Array:
    """Two pictures [2, 3, H, W] in [-1, 1] with structure at several scales."""
    stream = np.random.RandomState(0)
    layers = [torch.from_numpy(stream.standard_normal((2, 3, n, n)).astype(np.float32)) for n in (3, 9, 31)]
    layers = [F.interpolate(layer, size, mode="bilinear") for layer in layers]
    return np.asarray(torch.tanh(0.5 * torch.stack(layers).sum(dim=0)).numpy())


def _noise(pipeline: Pipeline, pass_index: int, images: int) -> oracles.Noise:
    """The bank's noise for so many images, image-major, first and then every step."""
    samples = pipeline.settings.sampler.samples

    def draw(step: int) -> Tensor:
        return torch.from_numpy(np.tile(pipeline.noise.draw(pass_index, step, samples), (images, 1, 1, 1)))

    sampler = pipeline.settings.sampler
    _, steps = plan_steps(pipeline.schedule, sampler.time_index, sampler.passes[pass_index], sampler.eta_ddim)
    every = range(len(steps))
    return oracles.Noise(draw(INITIAL), *([draw(kind + step) for step in every] for kind in (0, KNOWN, JUMP)))


def _check_first_step(report: Report, pipeline: Pipeline, eps: oracles.Eps, y: Array, index: int) -> None:
    """eps, gradient and x_s of the first step under a half mask, with both pictures at once and with one alone."""
    one = pipeline.settings.sampler.passes[index]
    oracle = oracle_of(pipeline.settings, pipeline.schedule.betas, index)
    mask = np.zeros_like(y[:, :1])
    mask[..., : mask.shape[-1] // 2] = 1
    for images in (1, 2):
        many = images * pipeline.settings.sampler.samples
        sampling = posterior_sampling(
            pipeline.graphs,
            pipeline.schedule,
            pipeline.settings.sampler,
            y[:images],
            mask[:images],
            index,
            pipeline.noise,
            previous=np.repeat(-y[:images], many // images, axis=0),
        )
        first, state = next(sampling), next(sampling)
        ty, tm = (torch.from_numpy(a[:images]).repeat_interleave(many // images, dim=0) for a in (y, mask))
        noise = _noise(pipeline, index, images)
        ty, tm, start = oracles.conditions(oracle, ty, tm, -ty)
        states = oracles.posterior_sampling(eps, ty, tm, noise.first, noise.steps, oracle, start, noise)
        next(states)
        report.compare("one_step", state.x, next(states))
        if one.guidance_scale and state.guidance_gradient is not None and state.step is not None:
            x = torch.from_numpy(first.x)
            if oracle.known != "blend":
                a = state.step.alpha_t
                x = tm * x + (1 - tm) * (a**0.5 * ty + (1 - a) ** 0.5 * noise.first)
            e, gradient = oracles.guidance_gradient(eps, x, ty, int(state.step.timestep), state.step.alpha_t, oracle)
            report.compare("eps", np.asarray(state.eps), e)
            report.compare("guidance_gradient", state.guidance_gradient, gradient, floor=1e-12)
    if one.guidance_scale and state.step is not None:
        _check_gradient_moves(pipeline.graphs.step(one.guidance_scale), y, state.step)


def _by_ddad(pipeline: Pipeline, step: Session) -> Pipeline:
    """The first pass as a tuned sampler has it that the gradient "ddad" guides, at scale 1."""
    sampler = pipeline.settings.sampler
    sampler = replace(sampler, gradient="ddad", first_pass=replace(sampler.first_pass, guidance_scale=1.0))
    settings = replace(pipeline.settings, sampler=sampler)
    return replace(pipeline, settings=settings, graphs=replace(pipeline.graphs, guided=step))


def _feeds(session: Session, y: Array, step: Step) -> dict[str, Array]:
    """Feeds of a step graph with each picture as the x_t of the other."""
    other = np.ascontiguousarray(y[::-1])
    values = {"x_t": y, "observation": other, "mask": np.ones_like(y[:, :1]), "noise": y, "mask_noise": y}
    values |= step_scalars(step) | {"guidance_scale": np.asarray(1.0, dtype=np.float32)}
    return {name: values[name] for name in session.inputs}


def _check_gradient_moves(session: Session, y: Array, step: Step) -> None:
    """A gradient frozen into a constant is the same for two x_t: here each picture against the other."""
    gradient = session.run(_feeds(session, y, step), ["guidance_gradient"])["guidance_gradient"]
    if np.abs(gradient[0] - gradient[1]).max() <= 1e-3 * np.abs(gradient).max():
        raise ParityError(
            "the exported guidance gradient is the same for two different images: it was frozen at export"
        )


def _check_variant(report: Report, name: str, session: Session, variant: Session, y: Array) -> None:
    """The same graph in the form of another engine, and on it if it is installed, gives the same."""
    feeds = _feeds(session, y, Step(timestep=99.0, alpha_t=0.6, alpha_s=0.7, sigma_t=0.1))
    wanted = session.run(feeds)
    for output, found in variant.run(feeds).items():
        report.compare(name, found, torch.from_numpy(wanted[output]), floor=1e-12)


def _check_bounded(samples: Array, norm: str) -> None:
    """Guidance that overshoots leaves the range of images by orders of magnitude; such a bundle judges noise."""
    if not (largest := float(np.abs(samples).max())) < DIVERGED:
        remedy = "use --guidance-norm l2" if norm == "squared" else "lower --guidance-scale"
        raise ParityError(
            f"the guidance diverges: posterior samples of images in [-1, 1] reach {largest:.2g}; {remedy}"
        )


def _check_whole(report: Report, pipeline: Pipeline, eps: oracles.Eps, backbone: Backbone | None, y: Array) -> None:
    """Both passes and the scores; the oracle's last pass runs under the runtime's mask, compared on its own."""
    sampler, ty = pipeline.settings.sampler, torch.from_numpy(y)
    features = features_of(backbone, pipeline.settings)
    found = pipeline.inspect(y, mask_range=(0.0, 1.0))
    _check_bounded(found.posterior_samples, sampler.guidance_norm)
    frozen = (torch.tensor(0.0), torch.tensor(1.0)) if pipeline.settings.mask.range != "per-image" else (None, None)
    mask, previous = torch.ones_like(ty[:, :1]), None
    for index, _ in enumerate(sampler.passes):
        oracle = oracle_of(pipeline.settings, pipeline.schedule.betas, index)
        anomaly_map, score, _, samples = oracles.mdps(
            eps, features, ty, [(oracle, _noise(pipeline, index, len(y)))], mask, previous
        )
        previous = samples[-1]
        if index == 0:
            report.compare("first_map", found.first_map, anomaly_map, floor=MAP_FLOOR)
            wanted = oracles.mask_of(anomaly_map, oracle, *frozen)
            report.errors["mask_disagreement"] = float(np.abs(found.mask - wanted.numpy()).mean())
            mask = torch.from_numpy(found.mask)
    report.compare("posterior_sample", found.posterior_samples, samples[-1])
    report.compare("anomaly_map", found.anomaly_map, anomaly_map, floor=MAP_FLOOR)
    report.compare("anomaly_score", found.anomaly_score, score, floor=MAP_FLOOR)
