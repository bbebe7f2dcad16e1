"""The loop of Algorithm 1, on a denoiser with a closed form, against diffusers and against its own invariances."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler

from mdps.runtime.errors import BackendError
from mdps.runtime.graphs import Graphs
from mdps.runtime.noise import INITIAL, NoiseBank
from mdps.runtime.sampler import posterior_sampling
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.session import ChunkedSession, CopyingRun
from mdps.runtime.settings import paper_settings, reference_settings

SCHEDULE = NoiseSchedule.linear()
SHAPE = (3, 8, 8)
PAPER = paper_settings().sampler
REFERENCE = reference_settings(7, 50, 100, 200, 200, 20, 0.12).sampler
MU, VARIANCE = 0.2, 0.3**2


def eps_of_gaussian(x, a):
    """The exact denoiser where every pixel of the data is drawn from N(MU, VARIANCE)."""
    expected = (VARIANCE * np.sqrt(a) * x + (1 - a) * MU) / (a * VARIANCE + 1 - a)
    return (x - np.sqrt(a) * expected) / np.sqrt(1 - a)


@dataclass
class GaussianStep:
    """docs/develop/architecture.md, "One step", in float64 with that denoiser; its Jacobian is a number."""

    rule: str = "blend"
    guided: bool = True
    provider: str = "numpy"
    calls: list = field(default_factory=list)

    @property
    def inputs(self):
        names = ("x_t", "observation", "mask", "noise", "timestep", "alpha_t", "alpha_s", "sigma_t")
        return (
            *names,
            *(("mask_noise",) if self.rule == "replace" else ()),
            *(("guidance_scale",) if self.guided else ()),
        )

    @property
    def outputs(self):
        return ("x_s", "eps", "guidance_gradient") if self.guided else ("x_s", "eps")

    def run(self, feeds, outputs=None):
        assert set(feeds) == set(self.inputs)
        assert all(value.dtype == np.float32 for value in feeds.values())
        self.calls.append(feeds)
        f = {name: value.astype(np.float64) for name, value in feeds.items()}
        a, b, sigma, y, m, x = (f[k] for k in ("alpha_t", "alpha_s", "sigma_t", "observation", "mask", "x_t"))
        if self.rule == "replace":
            x = m * x + (1 - m) * (np.sqrt(a) * y + np.sqrt(1 - a) * f["mask_noise"])
        e = eps_of_gaussian(x, a)
        r = (x - np.sqrt(1 - a) * e) / np.sqrt(a) - y
        norm = np.sqrt((r**2).sum(axis=(1, 2, 3), keepdims=True))
        u = np.divide(r, norm, out=np.zeros_like(r), where=norm > 0)
        jacobian = np.sqrt(1 - a) / (a * VARIANCE + 1 - a)
        gradient = (u - np.sqrt(1 - a) * jacobian * u) / np.sqrt(a)
        e_phi = e + f.get("guidance_scale", 0) * np.sqrt(1 - a) * gradient
        if self.rule == "blend":
            e_phi = (1 - m) * (x - np.sqrt(a) * y) / np.sqrt(1 - a) + m * e_phi
        x0 = (x - np.sqrt(1 - a) * e_phi) / np.sqrt(a)
        x_s = np.sqrt(b) * x0 + np.sqrt(1 - b - sigma**2) * e_phi + sigma * f["noise"]
        found = {"x_s": x_s, "eps": e, "guidance_gradient": gradient}
        return {name: found[name].astype(np.float32) for name in self.outputs}

    def bind(self, feeds):
        return CopyingRun(self, feeds)

    def close(self):
        pass


def sessions(settings):
    return Graphs(GaussianStep(settings.mask_rule), GaussianStep(settings.mask_rule, guided=False))


def images(count, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, *SHAPE)).astype(np.float32)


def ones(count):
    return np.ones((count, 1, *SHAPE[1:]), np.float32)


def states(settings, y, m, pass_index=0, noise=None, steps=None):
    bank = noise or NoiseBank(settings.seed, SHAPE)
    return list(posterior_sampling(steps or sessions(settings), SCHEDULE, settings, y, m, pass_index, bank))


def sample(settings, y, m, pass_index=0, **options):
    return states(settings, y, m, pass_index, **options)[-1].x


def unguided(settings):
    return replace(settings, first_pass=replace(settings.first_pass, guidance_scale=0.0))


@pytest.mark.parametrize("settings", [PAPER, REFERENCE], ids=["paper", "reference"])
def test_the_unguided_pass_is_ddim_of_diffusers(settings):
    settings, y, bank = unguided(settings), images(1), NoiseBank(0, SHAPE)
    theirs = DDIMScheduler(
        beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False, set_alpha_to_one=True
    )
    theirs.set_timesteps(50)  # a stride of 20
    calls = range(199, 0, -20) if settings.time_index == "paper" else range(180, -1, -20)
    first = torch.tensor([199 if settings.time_index == "paper" else 200])
    x = theirs.add_noise(torch.tensor(y), torch.tensor(bank.draw(0, INITIAL, 1)), first)
    ours = states(settings, y, ones(1))
    np.testing.assert_allclose(ours[0].x, x.numpy(), atol=1e-5)
    for n, t in enumerate(calls):
        eps = eps_of_gaussian(x.double().numpy(), float(theirs.alphas_cumprod[t]))
        noise = torch.tensor(bank.draw(0, n, 1))
        x = theirs.step(torch.tensor(eps).float(), t, x, eta=1.0, variance_noise=noise).prev_sample
        np.testing.assert_allclose(ours[n + 1].x, x.numpy(), atol=2e-4)
    assert len(ours) == len(calls) + 1


def test_the_first_state_is_the_goldens(shared):
    golden = np.load(shared / "golden" / "golden.npz")

    class Recorded:
        def draw(self, pass_index, step_index, samples, images=1):
            return golden["sample0_init_noise"] if step_index == INITIAL else golden["sample0_step_noise"][[step_index]]

    y = golden["y"][:1]
    first = states(REFERENCE, y, np.ones((1, 1, 64, 64), np.float32), noise=Recorded())[0]
    np.testing.assert_allclose(first.x, golden["sample0_states"][:1], atol=1e-5)


def test_the_first_state_of_paper_mode_is_the_goldens(shared):
    small = np.load(shared / "golden" / "small.npz")

    class Recorded:
        def draw(self, pass_index, step_index, samples, images=1):
            return small["paper_guided_init_noise"] if step_index == INITIAL else small["paper_guided_step_noise"][[0]]

    first = states(PAPER, small["y"], np.ones((1, 1, 32, 32), np.float32), noise=Recorded())[0]
    np.testing.assert_allclose(first.x, small["paper_guided_states"][:1], atol=1e-5)


def test_an_empty_mask_in_paper_mode_gives_the_observation():
    y = images(2)
    np.testing.assert_allclose(sample(PAPER, y, np.zeros_like(ones(2)), 1), y, atol=2e-5)


def test_outside_the_mask_the_posterior_sample_is_the_observation():
    y, m = images(1), ones(1)
    m[..., :4] = 0
    x = sample(PAPER, y, m, 1)
    np.testing.assert_allclose(x[..., :4], y[..., :4], atol=2e-5)
    assert np.abs(x[..., 4:] - y[..., 4:]).max() > 0.05


def test_a_full_mask_equals_no_mask():
    """With m = 1 both rules are the same method, so they must agree where times and noise do."""
    y, blend = images(1), replace(REFERENCE, mask_rule="blend")
    np.testing.assert_allclose(sample(blend, y, ones(1)), sample(REFERENCE, y, ones(1)), atol=1e-5)


def test_guidance_pulls_towards_the_observation():
    y = images(1)
    distance = {
        scale: np.linalg.norm(
            sample(replace(PAPER, first_pass=replace(PAPER.first_pass, guidance_scale=scale)), y, ones(1)) - y
        )
        for scale in (0.0, 1.0, 4.0)
    }
    assert distance[4.0] < distance[1.0] < distance[0.0]


@pytest.mark.parametrize("settings", [PAPER, REFERENCE], ids=["paper", "reference"])
def test_a_result_depends_on_neither_batch_nor_order(settings):
    settings = replace(settings, samples=2)
    y, m = images(4), (np.random.default_rng(1).uniform(size=(4, 1, 8, 8)) > 0.5).astype(np.float32)
    together = sample(settings, y, m, 1).reshape(4, 2, *SHAPE)
    order = [2, 0, 3, 1]
    np.testing.assert_allclose(
        sample(settings, y[order], m[order], 1).reshape(4, 2, *SHAPE), together[order], atol=1e-5
    )
    for i in range(4):
        np.testing.assert_allclose(sample(settings, y[i : i + 1], m[i : i + 1], 1), together[i], atol=1e-5)


def test_samples_of_one_batch_equal_samples_one_by_one():
    y, bank = images(2), NoiseBank(0, SHAPE)
    together = sample(replace(PAPER, samples=3), y, ones(2)).reshape(2, 3, *SHAPE)

    @dataclass
    class Only:
        index: int

        def draw(self, pass_index, step_index, samples, images=1):
            return np.tile(bank.draw(pass_index, step_index, self.index + 1)[-1:], (images, 1, 1, 1))

    for index in range(3):
        np.testing.assert_allclose(sample(PAPER, y, ones(2), noise=Only(index)), together[:, index], atol=1e-5)
    assert np.abs(together[:, 0] - together[:, 1]).max() > 1e-3


def test_chunks_change_nothing():
    settings, y = replace(PAPER, samples=3), images(3)
    inner = GaussianStep()
    chunked = Graphs(ChunkedSession(inner, 4), None)
    np.testing.assert_allclose(sample(settings, y, ones(3), steps=chunked), sample(settings, y, ones(3)), atol=1e-6)
    assert {len(feeds["x_t"]) for feeds in inner.calls} == {4, 1}


def test_each_pass_has_its_own_noise():
    y = images(1)
    assert np.abs(sample(PAPER, y, ones(1), 0) - sample(PAPER, y, ones(1), 1)).max() > 1e-3


def test_the_same_seed_repeats_and_another_differs():
    y = images(1)
    np.testing.assert_array_equal(sample(PAPER, y, ones(1)), sample(PAPER, y, ones(1)))
    assert np.abs(sample(PAPER, y, ones(1)) - sample(replace(PAPER, seed=1), y, ones(1))).max() > 1e-3


def test_the_known_part_is_noised_with_the_initial_noise():
    steps = sessions(REFERENCE)
    y, m = images(1), np.zeros_like(ones(1))
    first = states(REFERENCE, y, m, 1, steps=steps)[0].x
    z = NoiseBank(0, SHAPE).draw(1, INITIAL, 1)
    for feeds in steps.guided.calls:
        np.testing.assert_array_equal(feeds["mask_noise"], z)
    a = SCHEDULE.alphas_cumprod[200]
    np.testing.assert_allclose(first, np.sqrt(a) * y + np.sqrt(1 - a) * z, atol=1e-6)


def test_scale_zero_runs_the_plain_graph_only():
    steps = sessions(PAPER)
    states(unguided(PAPER), images(1), ones(1), steps=steps)
    assert (len(steps.guided.calls), len(steps.plain.calls)) == (0, 10)
    states(PAPER, images(1), ones(1), steps=steps)
    assert (len(steps.guided.calls), len(steps.plain.calls)) == (10, 10)


def test_the_plain_graph_equals_the_guided_at_scale_zero():
    y = images(1)
    guided = GaussianStep()
    forced = Graphs(guided, guided)
    np.testing.assert_allclose(
        sample(unguided(PAPER), y, ones(1), steps=forced), sample(unguided(PAPER), y, ones(1)), atol=1e-6
    )


def test_a_step_graph_that_was_not_loaded_is_a_sentence():
    with pytest.raises(BackendError, match="no plain step graph"):
        states(unguided(PAPER), images(1), ones(1), steps=Graphs(GaussianStep(), None))


def test_no_noise_is_drawn_for_the_last_step():
    bank, drawn = NoiseBank(0, SHAPE), []

    class Recording:
        def draw(self, pass_index, step_index, samples, images=1):
            drawn.append(step_index)
            return bank.draw(pass_index, step_index, samples, images)

    states(PAPER, images(2), ones(2), noise=Recording())
    assert drawn == [INITIAL, *range(9)]


def test_states_carry_eps_and_gradient():
    found = states(PAPER, images(1), ones(1))
    assert [state.index for state in found] == [INITIAL, *range(10)]
    assert found[0].step is None
    assert found[1].eps.shape == found[1].guidance_gradient.shape == (1, *SHAPE)
    assert found[1].step.timestep == 199
    assert states(unguided(PAPER), images(1), ones(1))[1].guidance_gradient is None
