"""Masked Diffusion Posterior Sampling: the loop of Algorithm 1 around a step graph."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import BackendError, UsageError
from mdps.runtime.noise import INITIAL, JUMP, KNOWN, Noise
from mdps.runtime.schedule import NoiseSchedule, Step, plan_steps
from mdps.runtime.session import Session
from mdps.runtime.settings import PassSettings, SamplerSettings

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
    previous: Image | None = None,
) -> Iterator[State]:
    """Algorithm 1 on `observation` [B, 3, H, W] under `mask` [B, 1, H, W]; pass 0 is the first, 1 the masked.

    Yields the first x_T, then every x_s; the last `x` is the posterior sample [B * N_s, 3, H, W], image-major.
    `previous`, the samples of the pass before in that shape, is what a stitched start needs (UsageError without).
    """
    this_pass, samples = settings.passes[pass_index], settings.samples
    session = sessions.at(this_pass.guidance_scale)
    alpha_T, steps = plan_steps(schedule, settings.time_index, this_pass, settings.eta_ddim)  # noqa: N806
    y, m = np.repeat(observation, samples, axis=0), np.repeat(mask, samples, axis=0)
    inpaint = settings.mask_rule == "inpaint" and not mask.all()

    def draw(index: int) -> Image:  # the same noise for every image
        return np.tile(noise.draw(pass_index, index, samples), (len(observation), 1, 1, 1))

    # Line 1 to 2. The authors' code uses this same z to noise the known part in the replace rule.
    z = draw(INITIAL)
    x_t = _mix(_start(this_pass, y, m, previous), alpha_T, z)
    yield State(INITIAL, None, x_t)
    for n, step in enumerate(steps):  # line 3; t and s of line 4 are in `step`
        eps_t = draw(n) if step.sigma_t else np.zeros_like(y)  # line 11
        known_noise = draw(KNOWN + n) if inpaint and n else z
        known = {"x_t": x_t, "observation": y, "mask": m, "noise": eps_t, "mask_noise": known_noise}
        feeds = known | _scalars(step, this_pass.guidance_scale)
        result = session.run({name: feeds[name] for name in session.inputs})  # lines 5 to 10 and 12
        x_t = result["x_s"]
        if inpaint and step.alpha_s == 1:
            x_t = np.where(m > 0, x_t, y)
        yield State(n, step, x_t, result.get("eps"), result.get("guidance_gradient"))
        if step.again:
            x_t = _mix(x_t, step.alpha_t / step.alpha_s, draw(JUMP + n))


def _start(this_pass: PassSettings, y: Image, m: Image, previous: Image | None) -> Image:
    if this_pass.start == "observation":
        return y
    if previous is None:
        raise UsageError("a stitched pass starts from the samples of the pass before it, and none were given")
    return np.where(m > 0, previous, y)


def _mix(image: Image, alpha: float, noise: Image) -> Image:
    mixed: Image = np.sqrt(np.float32(alpha)) * image + np.sqrt(np.float32(1 - alpha)) * noise
    return mixed


def _scalars(step: Step, guidance_scale: float) -> dict[str, Image]:
    values = {
        "timestep": step.timestep,
        "alpha_t": step.alpha_t,
        "alpha_s": step.alpha_s,
        "sigma_t": step.sigma_t,
        "guidance_scale": guidance_scale,
    }
    return {name: np.asarray(value, dtype=np.float32) for name, value in values.items()}
