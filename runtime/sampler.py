"""Masked Diffusion Posterior Sampling: the loop of Algorithm 1 around a step graph."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import BackendError
from mdps.runtime.noise import INITIAL, Noise
from mdps.runtime.schedule import NoiseSchedule, Step, plan_steps
from mdps.runtime.session import Session
from mdps.runtime.settings import SamplerSettings

Image = NDArray[np.float32]


@dataclass(frozen=True)
class StepSessions:
    """The two step graphs; one that no pass needs may be None."""

    guided: Session | None
    plain: Session | None

    def at(self, guidance_scale: float) -> Session:
        """The plain graph at scale 0, half the cost of the guided one; BackendError where it was not loaded."""
        session = self.guided if guidance_scale else self.plain
        if session is None:
            raise BackendError(f"no {'guided' if guidance_scale else 'plain'} step graph was loaded for this pass")
        return session


@dataclass(frozen=True)
class State:
    """One point of the loop: index -1 is the first x_t, index n the result of step n (arrays [N, 3, H, W])."""

    index: int
    step: Step | None
    x: Image
    eps: Image | None = None
    guidance_gradient: Image | None = None


def posterior_sampling(
    sessions: StepSessions,
    schedule: NoiseSchedule,
    settings: SamplerSettings,
    observation: Image,
    mask: Image,
    pass_index: int,
    noise: Noise,
) -> Iterator[State]:
    """Algorithm 1 on `observation` [B, 3, H, W] under `mask` [B, 1, H, W]; pass 0 is the first, 1 the masked.

    Yields the first x_T, then every x_s; the last `x` is the posterior sample [B * N_s, 3, H, W], image-major.
    """
    this_pass, samples = settings.passes[pass_index], settings.samples
    session = sessions.at(this_pass.guidance_scale)
    alpha_T, steps = plan_steps(schedule, settings.time_index, this_pass, settings.eta_ddim)  # noqa: N806
    y, m = np.repeat(observation, samples, axis=0), np.repeat(mask, samples, axis=0)

    def draw(index: int) -> Image:  # the same noise for every image
        return np.tile(noise.draw(pass_index, index, samples), (len(observation), 1, 1, 1))

    # Line 1 to 2. The authors' code uses this same z to noise the known part in the replace rule.
    z = draw(INITIAL)
    x_t = np.sqrt(np.float32(alpha_T)) * y + np.sqrt(np.float32(1 - alpha_T)) * z
    yield State(INITIAL, None, x_t)
    for n, step in enumerate(steps):  # line 3; t and s of line 4 are in `step`
        eps_t = draw(n) if step.sigma_t else np.zeros_like(y)  # line 11
        known = {"x_t": x_t, "observation": y, "mask": m, "noise": eps_t, "mask_noise": z}
        feeds = known | _scalars(step, this_pass.guidance_scale)
        result = session.run({name: feeds[name] for name in session.inputs})  # lines 5 to 10 and 12
        x_t = result["x_s"]
        yield State(n, step, x_t, result.get("eps"), result.get("guidance_gradient"))


def _scalars(step: Step, guidance_scale: float) -> dict[str, Image]:
    values = {
        "timestep": step.timestep,
        "alpha_t": step.alpha_t,
        "alpha_s": step.alpha_s,
        "sigma_t": step.sigma_t,
        "guidance_scale": guidance_scale,
    }
    return {name: np.asarray(value, dtype=np.float32) for name, value in values.items()}
