"""Masked Diffusion Posterior Sampling: the loop of Algorithm 1 around a step graph."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import UsageError
from mdps.runtime.graphs import Graphs
from mdps.runtime.noise import INITIAL, JUMP, KNOWN, Noise
from mdps.runtime.schedule import NoiseSchedule, Step, plan_steps
from mdps.runtime.session import Session
from mdps.runtime.settings import PassSettings, SamplerSettings

Image = NDArray[np.float32]


@dataclass(frozen=True)
class State:
    """One point of the loop: index -1 is the first x_t, index n the result of step n (float32 [N, 3, H, W]).

    `eps` and `guidance_gradient` are what the step graph says of this step: None for the first x_t, for a gradient
    that is not computed, and where the buffers are reused.
    """

    index: int
    step: Step | None
    x: Image
    eps: Image | None = None
    guidance_gradient: Image | None = None


def posterior_sampling(
    sessions: Graphs[Session],
    schedule: NoiseSchedule,
    settings: SamplerSettings,
    observation: Image,
    mask: Image,
    pass_index: int,
    noise: Noise,
    previous: Image | None = None,
    *,
    reuse: bool = False,
) -> Iterator[State]:
    """Algorithm 1 on `observation` [B, 3, H, W] under `mask` [B, 1, H, W]; pass 0 is the first, 1 the masked.

    Yields the first x_T, then every x_s; the last `x` is the posterior sample [B * N_s, 3, H, W], image-major.
    `previous`, the samples of the pass before in that shape, is what a stitched start and a pass that they guide need
    (UsageError without).

    A state's arrays are its own, to keep. With `reuse` they are not: it has `x` only, in one of two buffers that all
    steps share, and is valid until the next state is asked for; the last one stays, for the buffers are this pass's.
    """
    this_pass, samples = settings.passes[pass_index], settings.samples
    session = sessions.step(this_pass.guidance_scale)
    alpha_T, steps = plan_steps(schedule, settings.time_index, this_pass, settings.eta_ddim)  # noqa: N806
    y, m = np.repeat(observation, samples, axis=0), np.repeat(mask, samples, axis=0)
    guide = y
    if this_pass.target == "previous":
        guide, m = _given(previous), np.ones_like(m)
    inpaint = settings.mask_rule == "inpaint" and not m.all()
    draw = partial(noise.draw, pass_index, samples=samples, images=len(observation))

    # Line 1 to 2. The authors' code uses this same z to noise the known part in the replace rule.
    z, none = draw(INITIAL), np.zeros_like(y)
    x_t, x_s = np.empty_like(y), np.empty_like(y)
    _mix(_start(this_pass, y, m, previous), alpha_T, z, x_t, spare=x_s)
    yield State(INITIAL, None, x_t if reuse else x_t.copy())
    known = {"observation": guide, "mask": m, "guidance_scale": np.asarray(this_pass.guidance_scale, dtype=np.float32)}
    bound = session.bind(_named(session.inputs, known if inpaint else known | {"mask_noise": z}))
    for n, step in enumerate(steps):  # line 3; t and s of line 4 are in `step`
        feeds = {"x_t": x_t, "noise": draw(n) if step.sigma_t else none, **step_scalars(step)}  # line 11
        if inpaint:
            feeds["mask_noise"] = draw(KNOWN + n) if n else z
        more = {} if reuse else {name: np.empty_like(y) for name in session.outputs if name != "x_s"}
        bound.run(_named(session.inputs, feeds), {"x_s": x_s, **more})  # lines 5 to 10 and 12
        x_t, x_s = x_s, x_t
        if inpaint and step.alpha_s == 1:
            np.copyto(x_t, y, where=m <= 0)
        yield State(n, step, x_t if reuse else x_t.copy(), more.get("eps"), more.get("guidance_gradient"))
        if step.again:
            _mix(x_t, step.alpha_t / step.alpha_s, draw(JUMP + n), x_t, spare=x_s)


def _start(this_pass: PassSettings, y: Image, m: Image, previous: Image | None) -> Image:
    if this_pass.start == "observation":
        return y
    return np.where(m > 0, _given(previous), y)


def _given(previous: Image | None) -> Image:
    if previous is None:
        raise UsageError(
            "this pass starts from the samples of the one before it, or is guided by them: none were given"
        )
    return previous


def _mix(image: Image, alpha: float, noise: Image, out: Image, spare: Image) -> None:
    """sqrt(alpha) image + sqrt(1 - alpha) noise into `out`, which may be `image`; `spare` is written over."""
    np.multiply(noise, noise_root(alpha), out=spare)
    np.multiply(image, signal_root(alpha), out=out)
    np.add(out, spare, out=out)


def signal_root(alpha: float) -> np.float32:
    """The share of the image in an x_t."""
    return np.float32(np.sqrt(np.float32(alpha)))


def noise_root(alpha: float) -> np.float32:
    """The share of the noise in an x_t."""
    return np.float32(np.sqrt(np.float32(1 - alpha)))


def _named(names: Sequence[str], arrays: Mapping[str, Image]) -> dict[str, Image]:
    """Those of the arrays that a graph takes: no rule but "replace" and "inpaint" has a `mask_noise`."""
    return {name: array for name, array in arrays.items() if name in names}


def alone(x_t: Image) -> dict[str, Image]:
    """Return the arrays of a step that neither masks nor adds noise, by the names of its inputs."""
    none = np.zeros_like(x_t)
    return {"x_t": x_t, "observation": x_t, "mask": np.ones_like(x_t[:, :1]), "noise": none, "mask_noise": none}


def step_scalars(step: Step) -> dict[str, Image]:
    """Return the scalars of a step, by the names of the step graph's inputs."""
    values = {
        "timestep": step.timestep,
        "alpha_t": step.alpha_t,
        "alpha_s": step.alpha_s,
        "sigma_t": step.sigma_t,
    }
    return {name: np.asarray(value, dtype=np.float32) for name, value in values.items()}
