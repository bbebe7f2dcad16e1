"""Noise levels of the diffusion process, and the steps one pass of Algorithm 1 makes over them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import BundleError, UsageError, require
from mdps.runtime.records import decode
from mdps.runtime.settings import PassSettings


@dataclass(frozen=True)
class NoiseSchedule:
    """Variances `betas` of the forward process, one a training timestep; float64 inside. UsageError outside (0, 1)."""

    betas: tuple[float, ...]

    def __post_init__(self) -> None:
        require(len(self.betas) > 0, "a noise schedule needs at least one beta")
        require(all(0 < beta < 1 for beta in self.betas), "every beta of a noise schedule must lie between 0 and 1")

    def __len__(self) -> int:
        return len(self.betas)

    @classmethod
    def linear(cls, steps: int = 1000, start: float = 1e-4, end: float = 0.02) -> Self:
        """Betas on a line (DDPM; what the authors trained with)."""
        _check(steps, start, end)
        return cls(tuple(np.linspace(start, end, steps, dtype=np.float64).tolist()))

    @classmethod
    def scaled_linear(cls, steps: int = 1000, start: float = 0.00085, end: float = 0.012) -> Self:
        """Square roots of the betas on a line (latent diffusion)."""
        _check(steps, start, end)
        return cls(tuple((np.linspace(start**0.5, end**0.5, steps, dtype=np.float64) ** 2).tolist()))

    @classmethod
    def cosine(cls, steps: int = 1000) -> Self:
        """Cumulative product on a squared cosine, betas at most 0.999 (Nichol and Dhariwal 2021, equation 17)."""
        _check(steps)
        level = [math.cos((t / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(steps + 1)]
        return cls(tuple(min(1 - level[t + 1] / level[t], 0.999) for t in range(steps)))

    @cached_property
    def alphas_cumprod(self) -> NDArray[np.float64]:
        """Read-only [steps]: entry t is the product of 1 - beta over t + 1 factors."""
        product: NDArray[np.float64] = np.cumprod(1.0 - np.asarray(self.betas, dtype=np.float64), dtype=np.float64)
        product.setflags(write=False)
        return product

    def to_json(self) -> dict[str, Any]:
        """The shortest description that gives these very betas back."""
        ends = (self.betas[0], self.betas[-1])
        candidates: list[dict[str, Any]] = [{"kind": "cosine", "steps": len(self)}]
        for kind in ("linear", "scaled_linear"):
            # Squaring a root moves the last digit, so the twelve-digit ends are tried as well.
            for start, end in (ends, tuple(float(f"{value:.12g}") for value in ends)):
                if max(start, end) < 1:  # an end just below may have been rounded up
                    candidates.append({"kind": kind, "beta_start": start, "beta_end": end, "steps": len(self)})
        for candidate in candidates:
            if _build(candidate).betas == self.betas:
                return candidate
        return {"kind": "given", "betas": list(self.betas)}

    @classmethod
    def from_json(cls, obj: object, where: str = "schedule") -> Self:
        """The schedule `to_json` described; BundleError naming the key otherwise."""
        if not isinstance(obj, dict) or obj.get("kind") not in tuple(_KINDS):  # a tuple: a list has no hash
            raise BundleError(f"{where}.kind should be one of {', '.join(_KINDS)}")
        _, expected = _KINDS[obj["kind"]]
        if obj.keys() != {"kind", *expected}:
            raise BundleError(f"{where} of kind {obj['kind']} should have the keys {', '.join(expected)} and no other")
        values = {key: decode(hint, obj[key], f"{where}.{key}") for key, hint in expected.items()}
        try:
            return cls(_build({"kind": obj["kind"], **values}).betas)
        except (UsageError, ValueError) as error:
            raise BundleError(f"{where}: {error}") from None


def _check(steps: int, *ends: float) -> None:
    """Before a schedule is built: so many steps would fill the memory, and a negative end has no root."""
    require(steps >= 1, "a noise schedule needs at least one beta")
    require(steps <= 1_000_000, "a noise schedule of more than a million steps is not sensible")
    require(all(0 < end < 1 for end in ends), "every beta of a noise schedule must lie between 0 and 1")


_ENDS: dict[str, Any] = {"steps": int, "beta_start": float, "beta_end": float}
# What builds a kind, and its keys with their types in the order of the arguments.
_KINDS: dict[str, tuple[Callable[..., NoiseSchedule], dict[str, Any]]] = {
    "linear": (NoiseSchedule.linear, _ENDS),
    "scaled_linear": (NoiseSchedule.scaled_linear, _ENDS),
    "cosine": (NoiseSchedule.cosine, {"steps": int}),
    "given": (NoiseSchedule, {"betas": tuple[float, ...]}),
}


def _build(obj: dict[str, Any]) -> NoiseSchedule:
    make, keys = _KINDS[obj["kind"]]
    return make(*(obj[key] for key in keys))


@dataclass(frozen=True)
class Step:
    """Scalars of one step t -> s: what the network is told, the two cumulative products, the noise it adds.

    `again`: x_s is noised back to t, and the same step follows once more (RePaint).
    """

    timestep: float
    alpha_t: float
    alpha_s: float
    sigma_t: float
    again: bool = False


@lru_cache(maxsize=16)  # asked for once an image, and there are as many as a bundle has passes
def plan_steps(
    schedule: NoiseSchedule,
    time_index: Literal["paper", "reference"],
    pass_settings: PassSettings,
    eta_ddim: float,
) -> tuple[float, tuple[Step, ...]]:
    """Alpha of the first x_t (Algorithm 1, line 2) and the steps of its loop (lines 3 to 4), first to last.

    `paper`: t = T n / N, s = T (n - 1) / N, alpha(t) = alphas_cumprod[t - 1], alpha(0) = 1, network told t - 1.
    `reference`: what the authors' code does: calls at range(0, T, skip) reversed, alpha(t) = alphas_cumprod[t], the
    last step lands on 1, and the first x_t carries the noise of T although the first call is below T.
    A step is there `resamples` times but where it lands on 1. eta_ddim = 1 and N = T is the ancestral sampling of DDPM.
    Raises UsageError where T does not fit the schedule or the number of steps.
    """
    plan = _paper_times if time_index == "paper" else _reference_times
    alpha_first, times = plan(schedule, pass_settings)
    steps: list[Step] = []
    for timestep, alpha_t, alpha_s in times:
        step = Step(timestep, alpha_t, alpha_s, _sigma(alpha_t, alpha_s, eta_ddim))
        more = pass_settings.resamples - 1 if alpha_s < 1 else 0
        steps += [*[replace(step, again=True)] * more, step]
    return alpha_first, tuple(steps)


_Times = tuple[float, list[tuple[float, float, float]]]


def _paper_times(schedule: NoiseSchedule, settings: PassSettings) -> _Times:
    level, steps = settings.noise_level, settings.steps
    if steps is None:
        raise UsageError("the paper's time index needs a number of steps (N)")
    require(
        level <= len(schedule),
        f"noise level {level} is beyond the {len(schedule)} steps of the schedule: choose at most {len(schedule)}",
    )
    require(level % steps == 0, f"noise level {level} is not divisible by {steps} steps: choose a multiple of {steps}")
    alpha = [1.0, *schedule.alphas_cumprod.tolist()]
    stride = level // steps
    return alpha[level], [(t - 1.0, alpha[t], alpha[t - stride]) for t in range(level, 0, -stride)]


def _reference_times(schedule: NoiseSchedule, settings: PassSettings) -> _Times:
    level, skip = settings.noise_level, settings.skip
    if skip is None:
        raise UsageError("the reference's time index needs a skip")
    require(
        level < len(schedule),
        f"noise level {level} is beyond the schedule, whose last entry is {len(schedule) - 1}: choose at most that",
    )
    alpha = schedule.alphas_cumprod.tolist()
    calls = reversed(range(0, level, skip))
    return alpha[level], [(float(t), alpha[t], alpha[t - skip] if t >= skip else 1.0) for t in calls]


def _sigma(alpha_t: float, alpha_s: float, eta_ddim: float) -> float:
    """sigma_t of DDIM (Song et al. 2021, equation 16); 0 on the step that lands on alpha_s = 1."""
    return eta_ddim * math.sqrt((1 - alpha_s) / (1 - alpha_t)) * math.sqrt(1 - alpha_t / alpha_s)
