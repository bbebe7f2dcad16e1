"""Training: the objective, the settings and the recipes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from mdps.models.unet import UNet
from mdps.runtime.errors import MdpsError, UsageError
from mdps.runtime.schedule import NoiseSchedule
from mdps.training import TrainingConfig, fit, framing, paper_network, paper_recipe, small_network, small_recipe
from mdps.training.config import rate_factor
from mdps.training.draw import loss_weights, noise_losses, to_unit
from mdps.training.folder import CHECKPOINT, DENOISER
from mdps.training.state import TrainingState

CPU = torch.device("cpu")
ALPHAS = torch.tensor(NoiseSchedule.linear().alphas_cumprod, dtype=torch.float32)

# ---- the objective


def test_the_noised_image_is_that_of_diffusers():
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear")
    clean, noise = torch.rand(5, 3, 8, 8) * 2 - 1, torch.randn(5, 3, 8, 8)
    timesteps = torch.tensor([0, 1, 200, 700, 999])
    seen = []

    def network(x, t):
        seen.append((x, t))
        return torch.zeros_like(x)

    losses = noise_losses(network, clean, timesteps, noise, ALPHAS)
    torch.testing.assert_close(seen[0][0], scheduler.add_noise(clean, noise, timesteps), atol=1e-5, rtol=0)
    assert torch.equal(seen[0][1], timesteps)
    torch.testing.assert_close(losses, noise.square().mean(dim=(1, 2, 3)))


def test_min_snr_weights_are_those_of_diffusers():
    training_utils = pytest.importorskip("diffusers.training_utils")
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear")
    timesteps = torch.tensor([0, 10, 100, 300, 999])
    snr = training_utils.compute_snr(scheduler, timesteps)
    config = TrainingConfig(weighting="min-snr")
    torch.testing.assert_close(loss_weights(config, timesteps, ALPHAS), snr.clamp(max=5) / snr, atol=1e-5, rtol=1e-3)
    assert torch.equal(loss_weights(TrainingConfig(), timesteps, ALPHAS), torch.ones(5))


def test_pixels_are_scaled_as_the_runtime_does():
    from mdps.runtime.preprocessing import to_unit as runtime_to_unit

    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    np.testing.assert_array_equal(to_unit(torch.from_numpy(levels))[0].numpy(), runtime_to_unit(levels[0]))


def test_learning_rate_rises_then_falls_to_zero():
    config = TrainingConfig(warmup=10, decay="cosine")
    assert rate_factor(config, 0, 0.0) == pytest.approx(0.1)
    assert rate_factor(config, 50, 0.5) == pytest.approx(0.5)
    assert rate_factor(config, 99, 1.0) == pytest.approx(0.0)
    assert rate_factor(replace(config, decay="linear"), 50, 0.25) == pytest.approx(0.75)
    assert rate_factor(replace(config, decay="constant", warmup=0), 0, 0.9) == 1.0


# ---- recipes


def test_network_sizes_and_paper_settings_are_as_published():
    def millions(config):
        with torch.device("meta"):
            return sum(p.numel() for p in UNet(config).parameters()) / 1e6

    assert millions(paper_network()) == pytest.approx(33, abs=0.5)
    assert millions(small_network()) == pytest.approx(1.9, abs=0.05)
    assert millions(small_network(base=64)) > 3 * millions(small_network())
    paper = paper_recipe()
    assert (paper.optimizer, paper.learning_rate, paper.weight_decay, paper.batch) == ("adam", 1e-4, 5e-2, 8)
    assert (paper.epochs, paper.decay, paper.ema, paper.low_share, paper.weighting) == (
        2000,
        "constant",
        0,
        0,
        "uniform",
    )
    assert not any((paper.flip_horizontal, paper.flip_vertical, paper.rotate, paper.shift, paper.clip))
    assert paper.with_steps(209).last_step == 2000 * 27
    assert len(NoiseSchedule.linear()) == 1000


def test_epochs_count_where_no_steps_are_given():
    assert TrainingConfig(epochs=3, batch=8).with_steps(16).last_step == 6
    assert TrainingConfig(epochs=3, batch=8, steps=5).with_steps(16).last_step == 5
    with pytest.raises(UsageError, match="no epochs"):
        TrainingConfig(epochs=3).with_steps(None)
    with pytest.raises(UsageError, match="with_steps"):
        _ = TrainingConfig().last_step


def test_the_papers_network_takes_its_crop_of_224():
    with torch.device("meta"):
        network = UNet(paper_network(224))
        assert network(torch.zeros(1, 3, 224, 224), torch.tensor(5)).shape == (1, 3, 224, 224)
    attended = [block for block in network.input_blocks if "AttentionBlock" in repr(block)]
    assert len(attended) == 6  # two at each of 28, 14 and 7 pixels
    assert network.config.attention_factors == paper_network(256).attention_factors


def test_the_paper_cuts_the_centre_of_mvtec_and_of_nothing_else():
    said = []

    def framed(*args):
        said.clear()
        return framing(*args, say=said.append)

    cut = framed("paper", "mvtec-ad", None, None)
    assert (cut.image_size, cut.crop, cut.crop_size, cut.network_size) == ((256, 256), "input", 224, (224, 224))
    assert "as in the paper" in said[0]
    assert framed("paper", "btad", None, None).network_size == (256, 256)
    assert framed("paper", "plain", None, None).network_size == (256, 256)
    assert framed("small", "mvtec-ad", None, None).network_size == (64, 64)
    assert not said
    assert framed("paper", "mvtec-ad", None, 0).network_size == (256, 256)
    assert framed("paper", "mvtec-ad", 128, None).network_size == (128, 128)
    assert "no centre crop" in said[0]
    assert framed("small", "plain", 80, 64).network_size == (64, 64)
    with pytest.raises(UsageError, match="a crop of 300"):
        framed("small", "plain", None, 300)


# ---- the state


def test_a_fresh_network_predicts_no_noise(tiny_config):
    state = TrainingState(tiny_config, CPU)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(state.network(x, torch.tensor([3, 500])), torch.zeros_like(x))


def test_weight_decay_of_adam_goes_through_the_gradient_and_of_adamw_past_it(tiny_config):
    for optimizer, expected in (("adam", 1 - 1e-4), ("adamw", 1 - 1e-4 * 5e-2)):
        state = TrainingState(replace(tiny_config, optimizer=optimizer, learning_rate=1e-4, weight_decay=5e-2), CPU)
        weight = state.network.time_embed[0].weight
        with torch.no_grad():
            weight.fill_(1.0)
        weight.grad = torch.zeros_like(weight)
        state.optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, expected), atol=1e-7, rtol=0)


def test_the_average_is_the_weighted_sum_of_all_states(tiny_config):
    state = TrainingState(replace(tiny_config, ema=0.5), CPU)
    weight, average = state.network.out[2].bias, state.ema.out[2].bias
    expected = torch.zeros_like(average)
    for step in range(1, 20):
        with torch.no_grad():
            weight.fill_(float(step))
        state.step = step
        state.follow()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    torch.testing.assert_close(average, expected)
    assert not average.requires_grad


def test_without_an_average_the_last_weights_are_kept(tmp_path, tiny_images, tiny_config):
    fit(tiny_images, tmp_path / "run", replace(tiny_config, ema=0.0), device="cpu")
    content = torch.load(tmp_path / "run" / CHECKPOINT, weights_only=True)
    assert all(torch.equal(weight, content["ema"][name]) for name, weight in content["network"].items())


def test_it_learns(tmp_path, tiny_config):
    flat = np.full((2, 8, 8, 3), 200, dtype=np.uint8)
    config = replace(tiny_config, steps=150, learning_rate=5e-3, warmup=0, log_every=50, checkpoint_every=150, shift=0)
    rows = []
    fit(flat, tmp_path / "run", config, device="cpu", on_log=rows.append)
    assert rows[0]["loss"] > 2 * rows[-1]["loss"]
    assert rows[-1]["loss"] < 0.35


def test_a_clipped_gradient_moves_the_weights_less(tmp_path, tiny_images, tiny_config):
    # Adam forgets the gradient's length, but not that of one step against the next.
    ends = {}
    for clip in (None, 1e-12):
        config = replace(tiny_config, optimizer="adam", weight_decay=0.0, clip=clip)
        fit(tiny_images, tmp_path / str(clip), config, device="cpu")
        content = torch.load(tmp_path / str(clip) / CHECKPOINT, weights_only=True)
        ends[clip] = sum(float(v["exp_avg"].norm()) for v in content["optimizer"]["state"].values())
    assert 0 < ends[1e-12] < 1e-10 < ends[None]


def test_the_denoiser_loads_without_options_and_is_the_average(tmp_path, tiny_images, tiny_config):
    from mdps.models.checkpoints import load_denoiser

    path = fit(tiny_images, tmp_path / "run", tiny_config, device="cpu")
    denoiser = load_denoiser(path)
    average = torch.load(tmp_path / "run" / CHECKPOINT, weights_only=True)["ema"]
    weights = dict(denoiser.network.state_dict())
    assert weights.keys() == average.keys()
    assert all(torch.equal(weight, average[name]) for name, weight in weights.items())
    assert denoiser.config == tiny_config.network
    assert denoiser.schedule.betas == NoiseSchedule.linear().betas
    assert denoiser.prediction == "eps"


def test_a_time_limit_ends_the_run_with_the_learning_rate_near_zero(tmp_path, tiny_images, tiny_config):
    config = replace(tiny_config, steps=10**6, minutes=1.5 / 60, warmup=0, log_every=5, checkpoint_every=10**6)
    rows = []
    fit(tiny_images, tmp_path / "run", config, device="cpu", on_log=rows.append)
    assert 1.5 <= rows[-1]["seconds"] < 8
    assert rows[-1]["learning_rate"] < 0.2 * config.learning_rate
    assert (tmp_path / "run" / DENOISER).exists()


# ---- mistakes


def test_settings_that_cannot_be_meant_are_named(tmp_path, tiny_images, tiny_config):
    for setting, value in (("steps", 0), ("epochs", 0), ("ema", 1.5), ("low_share", -1), ("shift", -2), ("clip", 0.0)):
        with pytest.raises(UsageError, match=f"{setting} is {value}"):
            replace(tiny_config, **{setting: value})
    with pytest.raises(UsageError, match="multiple of 32"):
        small_network(base=40)
    with pytest.raises(UsageError, match="unknown device 'tpu9000'"):
        fit(tiny_images, tmp_path / "run", tiny_config, device="tpu9000")
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        fit(tiny_images, tmp_path / "run", replace(tiny_config, precision="fp16"), device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA device"):
            fit(tiny_images, tmp_path / "run", tiny_config, device="cuda")
    assert not (tmp_path / "run").exists()
    assert TrainingConfig.from_json(json.loads(json.dumps(tiny_config.to_json()))) == tiny_config
    with pytest.raises(UsageError, match="'colour'"):
        TrainingConfig.from_json(tiny_config.to_json() | {"colour": 1})


def test_a_loss_that_is_no_number_stops_the_run_and_spares_the_checkpoint(tmp_path, tiny_images, tiny_config):
    for every in (1, 100):  # whether the log or the checkpoint meets it first
        run = tmp_path / str(every)
        config = replace(tiny_config, learning_rate=1e30, warmup=0, log_every=every)
        with pytest.raises(MdpsError, match="lower the learning rate"):
            fit(tiny_images, run, config, device="cpu")
        if (run / CHECKPOINT).exists():
            network = torch.load(run / CHECKPOINT, weights_only=True)["network"]
            assert all(bool(torch.isfinite(weight).all()) for weight in network.values())


def test_the_small_recipe_is_what_it_says():
    small = small_recipe()
    assert (small.optimizer, small.decay, small.ema, small.low_share, small.steps) == (
        "adamw",
        "cosine",
        0.999,
        0.7,
        4000,
    )
