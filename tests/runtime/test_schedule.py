"""Noise schedules and step plans, against the golden numbers, diffusers, and the times the authors' code calls."""

import json
import math

import numpy as np
import pytest
from diffusers import DDIMScheduler

from mdps.runtime.errors import BundleError, UsageError
from mdps.runtime.schedule import NoiseSchedule, plan_steps
from mdps.runtime.settings import PassSettings

LINEAR = NoiseSchedule.linear()


def test_linear_is_the_authors_cumulative_product(shared):
    golden = np.load(shared / "golden" / "golden.npz")["alpha_bar_0_to_999"]
    np.testing.assert_allclose(LINEAR.alphas_cumprod, golden, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("ours", "beta_schedule", "start", "end"),
    [
        (LINEAR, "linear", 1e-4, 0.02),
        (NoiseSchedule.scaled_linear(), "scaled_linear", 0.00085, 0.012),
        (NoiseSchedule.cosine(), "squaredcos_cap_v2", 1e-4, 0.02),
    ],
)
def test_schedules_are_those_of_diffusers(ours, beta_schedule, start, end):
    theirs = DDIMScheduler(beta_schedule=beta_schedule, beta_start=start, beta_end=end)
    np.testing.assert_allclose(ours.betas, theirs.betas.numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ours.alphas_cumprod, theirs.alphas_cumprod.numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        (LINEAR, "linear"),
        (NoiseSchedule.linear(250, 4e-4, 0.08), "linear"),
        (NoiseSchedule.cosine(500), "cosine"),
        (NoiseSchedule.scaled_linear(), "scaled_linear"),
        (NoiseSchedule((0.1, 0.3, 0.2)), "given"),
    ],
)
def test_json_gives_the_very_same_betas_back(schedule, kind):
    described = schedule.to_json()
    assert described["kind"] == kind
    assert len(json.dumps(described)) < 200
    assert NoiseSchedule.from_json(json.loads(json.dumps(described))) == schedule


@pytest.mark.parametrize(
    ("obj", "names"),
    [
        (None, "schedule.kind"),
        ({"kind": "magic"}, "linear"),
        ({"kind": []}, "linear"),
        ({"kind": "cosine"}, "steps"),
        ({"kind": "cosine", "steps": 10, "more": 1}, "steps"),
        ({"kind": "cosine", "steps": "10"}, "schedule.steps"),
        ({"kind": "cosine", "steps": -3}, "at least one beta"),
        ({"kind": "cosine", "steps": 10**12}, "million"),
        ({"kind": "given", "betas": [0.1, 2.0]}, "between 0 and 1"),
        ({"kind": "linear", "beta_start": 0.1, "beta_end": float("nan"), "steps": 5}, "schedule.beta_end"),
    ],
)
def test_a_wrong_description_is_named(obj, names):
    with pytest.raises(BundleError, match=names):
        NoiseSchedule.from_json(obj)


def test_paper_times_follow_algorithm_1():
    alpha_first, steps = plan_steps(LINEAR, "paper", PassSettings(200, 100.0, steps=10), 1.0)
    product = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    assert alpha_first == pytest.approx(product[199])
    assert [step.timestep for step in steps] == [199, 179, 159, 139, 119, 99, 79, 59, 39, 19]
    assert [step.alpha_t for step in steps] == pytest.approx([product[t - 1] for t in range(200, 0, -20)])
    assert [step.alpha_s for step in steps] == pytest.approx([*(product[t - 1] for t in range(180, 0, -20)), 1.0])


@pytest.mark.parametrize(
    ("level", "calls", "first"), [(200, 10, 180), (250, 13, 240), (150, 8, 140), (20, 1, 0), (5, 1, 0)]
)
def test_reference_times_are_those_of_the_authors_code(level, calls, first):
    alpha_first, steps = plan_steps(LINEAR, "reference", PassSettings(level, 1.0, skip=20), 1.0)
    product = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    assert alpha_first == pytest.approx(product[level])
    assert [step.timestep for step in steps] == list(range(first, -1, -20))
    assert len(steps) == calls
    assert [step.alpha_t for step in steps] == pytest.approx([product[t] for t in range(first, -1, -20)])
    assert [step.alpha_s for step in steps] == pytest.approx([*(product[t] for t in range(first - 20, -1, -20)), 1.0])


@pytest.mark.parametrize("time_index", ["paper", "reference"])
def test_sigma_is_diffusers_variance(time_index):
    choice = {"steps": 10} if time_index == "paper" else {"skip": 20}
    _, steps = plan_steps(LINEAR, time_index, PassSettings(200, 1.0, **choice), 0.7)
    theirs = DDIMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", set_alpha_to_one=True)
    for step in steps:
        t = int(step.timestep)
        assert step.sigma_t == pytest.approx(0.7 * math.sqrt(theirs._get_variance(t, t - 20)), rel=2e-4)
    assert steps[-1].sigma_t == 0.0
    assert all(1 - step.alpha_s - step.sigma_t**2 >= 0 for step in steps)


@pytest.mark.parametrize(
    ("time_index", "settings", "sentence"),
    [
        ("paper", PassSettings(1001, 1.0, steps=7), "beyond the 1000 steps"),
        ("paper", PassSettings(200, 1.0, steps=7), "not divisible by 7"),
        ("paper", PassSettings(200, 1.0, skip=20), "needs a number of steps"),
        ("reference", PassSettings(1000, 1.0, skip=20), "last entry is 999"),
        ("reference", PassSettings(200, 1.0, steps=10), "needs a skip"),
    ],
)
def test_a_plan_that_does_not_fit_says_why(time_index, settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        plan_steps(LINEAR, time_index, settings, 1.0)


def test_the_last_timestep_of_the_schedule_is_allowed():
    assert plan_steps(LINEAR, "paper", PassSettings(1000, 1.0, steps=10), 1.0)[1][0].timestep == 999
    assert plan_steps(LINEAR, "reference", PassSettings(999, 1.0, skip=20), 1.0)[1][0].timestep == 980


def test_the_product_cannot_be_changed_from_outside():
    with pytest.raises(ValueError, match="read-only"):
        LINEAR.alphas_cumprod[0] = 0.5
