"""Laws of the method that hold for any schedule, plan, mask and network: what hypothesis draws."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mdps.export.linearize import linearize, prepare_input_gradients
from mdps.export.norms import ByChannel, Grouped
from mdps.export.step import Denoiser, GuidedStep, PlainStep, StepRules
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.graphs import Graphs
from mdps.runtime.noise import NoiseBank
from mdps.runtime.sampler import posterior_sampling
from mdps.runtime.schedule import NoiseSchedule, plan_steps
from mdps.runtime.session import CopyingRun
from mdps.runtime.settings import PassSettings, paper_settings

SIZE = 8
PAPER = paper_settings((SIZE, SIZE)).sampler


def network():
    torch.manual_seed(0)
    config = UNetConfig(
        SIZE,
        model_channels=8,
        channel_mult=(1, 2),
        num_res_blocks=1,
        attention_factors=(2,),
        num_heads=2,
        norm_groups=4,
    )
    made = UNet(config)
    for parameter in made.parameters():  # its last layers begin as zeros
        parameter.data += 0.1 * torch.randn_like(parameter)
    return prepare_input_gradients(made.eval().requires_grad_(False))


NETWORK = network()


@dataclass
class TorchStep:
    """The module that is exported, as a session."""

    rules: StepRules
    guided: bool
    provider = "torch"

    def __post_init__(self):
        self.module = (GuidedStep if self.guided else PlainStep)(Denoiser(NETWORK, "eps"), self.rules)
        names = ("x_t", "observation", "mask", "noise", "mask_noise", "timestep", "alpha_t", "alpha_s", "sigma_t")
        names = tuple(name for name in names if name != "mask_noise" or self.rules.mask_rule != "blend")
        self.inputs = (*names, "guidance_scale") if self.guided else names
        self.outputs = ("x_s", "eps", "guidance_gradient") if self.guided else ("x_s", "eps")

    def run(self, feeds, outputs=None):
        given = {name: torch.from_numpy(np.array(value)) for name, value in feeds.items()}
        with torch.no_grad():
            found = self.module(**{"mask_noise": None} | given)
        return {name: value.numpy() for name, value in zip(self.outputs, found, strict=True)}

    def bind(self, feeds):
        return CopyingRun(self, feeds)


def sample(settings, y, mask, pass_index=1, schedule=None):
    rules = StepRules(settings.mask_rule, settings.guidance_norm, settings.gradient)
    sessions = Graphs(TorchStep(rules, True), TorchStep(rules, False))
    bank = NoiseBank(settings.seed, (3, SIZE, SIZE))
    *_, last = posterior_sampling(sessions, schedule or NoiseSchedule.linear(), settings, y, mask, pass_index, bank)
    return last.x


def images(count, seed):
    return np.random.default_rng(seed).uniform(-1, 1, (count, 3, SIZE, SIZE)).astype(np.float32)


def masks(count, seed):
    return (np.random.default_rng(seed).random((count, 1, SIZE, SIZE)) < 0.4).astype(np.float32)


SEEDS = st.integers(0, 2**20)
SCHEDULES = st.one_of(
    st.lists(st.floats(1e-5, 0.5), min_size=2, max_size=60).map(lambda betas: NoiseSchedule(tuple(betas))),
    st.integers(2, 200).map(NoiseSchedule.cosine),
    st.builds(NoiseSchedule.linear, st.integers(2, 200), st.floats(1e-5, 1e-3), st.floats(0.01, 0.1)),
    st.builds(NoiseSchedule.scaled_linear, st.integers(2, 200), st.floats(1e-5, 1e-3), st.floats(0.01, 0.1)),
)


@st.composite
def plans(draw, resamples=3):
    """A schedule, a time index, and a pass that fits both; each step is made up to `resamples` times."""
    schedule, index = draw(SCHEDULES), draw(st.sampled_from(["paper", "reference"]))
    many = draw(st.integers(1, resamples))
    if index == "reference":
        level = draw(st.integers(1, len(schedule) - 1))
        return schedule, index, PassSettings(level, 1.0, skip=draw(st.integers(1, level)), resamples=many)
    steps = draw(st.integers(1, min(12, len(schedule))))
    level = steps * draw(st.integers(1, len(schedule) // steps))
    return schedule, index, PassSettings(level, 1.0, steps=steps, resamples=many)


# Schedules and plans


@given(schedule=SCHEDULES)
def test_every_schedule_loses_signal_at_every_step(schedule):
    alphas = np.array([1.0, *schedule.alphas_cumprod])
    assert (np.diff(alphas) < 0).all()
    np.testing.assert_allclose(1 - alphas[1:] / alphas[:-1], schedule.betas, rtol=1e-9, atol=1e-15)
    assert NoiseSchedule.from_json(schedule.to_json()) == schedule


@given(plan=plans(), eta=st.floats(0, 1))
def test_the_steps_of_a_plan_are_one_chain_from_noise_to_image(plan, eta):
    schedule, index, one_pass = plan
    first, steps = plan_steps(schedule, index, one_pass, eta)
    count = one_pass.steps or math.ceil(one_pass.noise_level / one_pass.skip)
    assert len(steps) == (count - 1) * one_pass.resamples + 1
    once = [step for step in steps if not step.again]
    assert [step.alpha_s for step in once] == [*(step.alpha_t for step in once[1:]), 1.0]
    assert first == once[0].alpha_t if index == "paper" else first < once[0].alpha_t
    for step in steps:
        assert 0 < step.alpha_t < step.alpha_s <= 1
        assert step.alpha_t == schedule.alphas_cumprod[int(step.timestep)]


@given(plan=plans(), eta=st.floats(0, 1))
def test_the_noise_of_a_step_never_exceeds_its_level_and_grows_with_eta(plan, eta):
    schedule, index, one_pass = plan
    for ours, full, none in zip(*(plan_steps(schedule, index, one_pass, e)[1] for e in (eta, 1.0, 0.0)), strict=True):
        assert none.sigma_t == 0
        assert ours.sigma_t == pytest.approx(eta * full.sigma_t, rel=1e-12)
        assert full.sigma_t**2 <= 1 - full.alpha_s + 1e-12
        assert (full.sigma_t == 0) == (full.alpha_s == 1)


@given(schedule=SCHEDULES, level=st.integers(1, 200))
def test_one_step_a_level_has_the_posterior_variance_of_ddpm(schedule, level):
    """Ho et al. 2020, equation 7: beta_t (1 - abar_{t-1}) / (1 - abar_t)."""
    assume(level <= len(schedule))
    alphas = [1.0, *schedule.alphas_cumprod]
    _, steps = plan_steps(schedule, "paper", PassSettings(level, 1.0, steps=level), 1.0)
    for t, step in zip(range(level, 0, -1), steps, strict=True):
        variance = schedule.betas[t - 1] * (1 - alphas[t - 1]) / (1 - alphas[t])
        assert step.sigma_t**2 == pytest.approx(variance, rel=1e-6, abs=1e-15)


# One step


class Feeds(dict):
    """Shown by its scalars: the arrays of a failing example would fill pages."""

    def __repr__(self):
        return str({name: float(value) for name, value in self.items() if not value.ndim})


@st.composite
def steps(draw, count=2):
    """The inputs of one step of two images, but its mask."""
    alpha_t, seed = draw(st.floats(0.05, 0.95)), draw(SEEDS)
    alpha_s = alpha_t + (1 - alpha_t) * draw(st.floats(0.01, 1.0))
    sigma = draw(st.floats(0, 1)) * math.sqrt((1 - alpha_s) / (1 - alpha_t) * (1 - alpha_t / alpha_s))
    normal = np.random.default_rng(seed).standard_normal((4, count, 3, SIZE, SIZE)).astype(np.float32)
    arrays = dict(zip(("x_t", "observation", "noise", "mask_noise"), normal, strict=True))
    scalars = {"timestep": draw(st.integers(0, 999)), "alpha_t": alpha_t, "alpha_s": alpha_s, "sigma_t": sigma}
    return Feeds(arrays | {name: np.asarray(value, np.float32) for name, value in scalars.items()})


def step(feeds, mask, rule="blend", guidance=None):
    session = TorchStep(StepRules(mask_rule=rule), guidance is not None)
    more = {} if guidance is None else {"guidance_scale": np.asarray(guidance, np.float32)}
    return session.run(
        {name: value for name, value in (feeds | {"mask": mask} | more).items() if name in session.inputs}
    )


def ones(count=2):
    return np.ones((count, 1, SIZE, SIZE), np.float32)


@given(feeds=steps(), seed=SEEDS, scale=st.floats(0, 300))
def test_a_blended_step_takes_each_pixel_from_the_free_step_or_from_the_known_one(feeds, seed, scale):
    mask, (a, b, sigma) = masks(2, seed), (float(feeds[name]) for name in ("alpha_t", "alpha_s", "sigma_t"))
    free, known = (step(feeds, m, guidance=scale)["x_s"] for m in (ones(), 0 * ones()))
    eps = (feeds["x_t"] - math.sqrt(a) * feeds["observation"]) / math.sqrt(1 - a)  # leads to the observation
    wanted = math.sqrt(b) * feeds["observation"] + math.sqrt(max(0, 1 - b - sigma**2)) * eps + sigma * feeds["noise"]
    np.testing.assert_allclose(known, wanted, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(
        step(feeds, mask, guidance=scale)["x_s"], np.where(mask > 0, free, known), rtol=1e-5, atol=1e-5
    )


@given(feeds=steps(), rule=st.sampled_from(["replace", "inpaint"]), scale=st.floats(0, 300))
def test_under_a_full_mask_all_rules_are_one(feeds, rule, scale):
    replaced, blended = (step(feeds, ones(), name, guidance=scale)["x_s"] for name in (rule, "blend"))
    np.testing.assert_allclose(replaced, blended, rtol=1e-3, atol=2e-3)  # y + (x - y) is not x to the last bit


@given(feeds=steps(), seed=SEEDS, rule=st.sampled_from(["blend", "replace", "inpaint"]))
def test_without_guidance_the_guided_step_is_the_plain_one(feeds, seed, rule):
    plain, guided = step(feeds, masks(2, seed), rule), step(feeds, masks(2, seed), rule, guidance=0.0)
    for name in plain:
        np.testing.assert_allclose(guided[name], plain[name], rtol=1e-5, atol=1e-5)


@given(feeds=steps(count=3), seed=SEEDS, order=st.permutations(range(3)), scale=st.sampled_from([0.0, 100.0]))
def test_a_step_treats_each_image_as_if_alone_and_in_any_order(feeds, seed, order, scale):
    mask = masks(3, seed)

    def picked(indices):
        return {name: value[indices] if value.ndim else value for name, value in feeds.items()}

    whole = step(picked(order), mask[order], guidance=scale)["x_s"]
    for place, index in enumerate(order):
        alone = step(picked([index]), mask[[index]], guidance=scale)["x_s"]
        np.testing.assert_allclose(whole[place], alone[0], rtol=1e-4, atol=1e-5)


@given(seed=SEEDS, timestep=st.integers(0, 999), norms=st.sampled_from([Grouped(), ByChannel()]))
def test_the_pullback_is_linear_and_the_adjoint_of_the_derivative(seed, timestep, norms):
    """<g, J v> = <J^T g, v>, J v by forward-mode differentiation, which shares nothing with the pullback."""
    generator = torch.Generator().manual_seed(seed)
    x, v, g, h = torch.randn(4, 2, 3, SIZE, SIZE, generator=generator).unbind(0)
    t = torch.tensor(float(timestep))
    _, pushed = torch.func.jvp(lambda image: NETWORK(image, t), (x,), (v,))
    _, pullback = linearize(NETWORK, x, t, norms)
    assert torch.allclose((g * pushed).sum((1, 2, 3)), (pullback(g) * v).sum((1, 2, 3)), rtol=1e-3, atol=1e-3)
    a, b = torch.randn(2, generator=generator).tolist()
    assert torch.allclose(pullback(a * g + b * h), a * pullback(g) + b * pullback(h), rtol=1e-4, atol=1e-4)


# Whole passes


@given(plan=plans(1), eta=st.floats(0, 1), seed=SEEDS, scale=st.sampled_from([0.0, 30.0]))
def test_an_empty_mask_gives_the_observation_whatever_the_plan(plan, eta, seed, scale):
    schedule, index, one_pass = plan
    assume(schedule.alphas_cumprod[one_pass.noise_level - 1] > 1e-3)  # below, float32 has no digits left for y
    assume(len(plan_steps(schedule, index, one_pass, eta)[1]) <= 12)
    one_pass = replace(one_pass, guidance_scale=scale)
    settings = replace(PAPER, time_index=index, eta_ddim=eta, first_pass=one_pass, masked_pass=one_pass)
    y = images(1, seed)
    np.testing.assert_allclose(sample(settings, y, 0 * ones(1), schedule=schedule), y, atol=1e-3)


@given(seed=SEEDS, samples=st.integers(1, 3), more=st.integers(0, 2), count=st.integers(1, 2))
def test_more_samples_or_images_leave_the_first_ones_as_they_are(seed, samples, more, count):
    y, mask = images(count, seed), masks(count, seed)
    small = replace(PAPER.first_pass, noise_level=60, steps=3)
    settings = replace(PAPER, first_pass=small, masked_pass=small, samples=samples, seed=seed)
    few = sample(settings, y, mask).reshape(count, samples, 3, SIZE, SIZE)
    many = sample(replace(settings, samples=samples + more), np.tile(y, (2, 1, 1, 1)), np.tile(mask, (2, 1, 1, 1)))
    many = many.reshape(2 * count, samples + more, 3, SIZE, SIZE)
    np.testing.assert_allclose(many[:count, :samples], few, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(many[count:, :samples], few, rtol=1e-4, atol=1e-4)


@given(
    seed=st.integers(0, 2**63 - 1),
    kind=st.sampled_from(["gaussian", "simplex"]),
    draws=st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 3), st.integers(1, 4), st.integers(1, 3)), max_size=6),
)
def test_what_the_bank_draws_depends_on_its_key_alone(seed, kind, draws):
    """Any draws before, any number of samples and images: the same noise for every image, and a prefix for fewer."""
    bank = NoiseBank(seed, (3, 4, 5), kind)
    for pass_index, step_index, samples, count in draws:
        noise = bank.draw(pass_index, step_index, samples, count)
        fresh = NoiseBank(seed, (3, 4, 5), kind).draw(pass_index, step_index, 4)
        np.testing.assert_array_equal(noise, np.tile(fresh[:samples], (count, 1, 1, 1)))
        assert not noise.flags.writeable
