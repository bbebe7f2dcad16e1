"""Training: the loss, the data, checkpoints that resume to the bit, and mistakes told in one sentence."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.errors import ImageError, MdpsError, UsageError
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule
from mdps.training import ArraySource, CropSource, FolderSource, TrainingConfig, fit, paper_network, paper_recipe
from mdps.training.config import rate_factor, small_network, small_recipe
from mdps.training.fit import CHECKPOINT, DENOISER, LOG
from mdps.training.loss import draw_timesteps, noise_loss, to_unit
from mdps.training.sources import image_files, vary
from mdps.training.state import TrainingState

TINY = UNetConfig(
    image_size=8,
    model_channels=8,
    channel_mult=(1, 1),
    num_res_blocks=1,
    attention_factors=(2,),
    num_heads=2,
    norm_groups=4,
    scale_shift_norm=True,
    dropout=0.1,  # so that the generator torch uses inside the network must be restored too
)
CONFIG = replace(
    small_recipe(TINY),
    steps=8,
    batch=4,
    warmup=2,
    flip_horizontal=True,
    shift=1,
    log_every=1,
    checkpoint_every=2,
)
CPU = torch.device("cpu")


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)


def tensors(path):
    content = torch.load(path, weights_only=True)
    parts = {f"{part}.{k}": v for part in ("network", "ema") for k, v in content[part].items()}
    for index, moments in content["optimizer"]["state"].items():
        parts |= {f"optimizer.{index}.{k}": torch.as_tensor(v) for k, v in moments.items()}
    return parts | {"rng": content["rng"], "torch_rng": content["torch_rng"], "step": content["step"]}


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items())


class KilledError(Exception):
    pass


def kill_at(step):
    def on_log(row):
        if row["step"] == step:
            raise KilledError

    return on_log


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

    alphas = torch.tensor(NoiseSchedule.linear().alphas_cumprod, dtype=torch.float32)
    loss = noise_loss(network, clean, timesteps, noise, alphas)
    torch.testing.assert_close(seen[0][0], scheduler.add_noise(clean, noise, timesteps), atol=1e-5, rtol=0)
    assert torch.equal(seen[0][1], timesteps)
    torch.testing.assert_close(loss, noise.square().mean())


def test_pixels_are_scaled_as_the_runtime_does():
    from mdps.runtime.preprocessing import to_unit as runtime_to_unit

    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    np.testing.assert_array_equal(to_unit(torch.from_numpy(levels))[0].numpy(), runtime_to_unit(levels[0]))


def test_the_recipe_draws_seventy_percent_of_the_timesteps_below_260():
    torch.manual_seed(0)
    low = draw_timesteps(small_recipe(), 100_000, 1000, CPU)
    assert (low.min(), low.max()) == (0, 999)
    assert (low < 260).float().mean() == pytest.approx(0.7 + 0.3 * 0.26, abs=0.01)
    even = draw_timesteps(paper_recipe(), 100_000, 1000, CPU)
    assert even.float().mean() == pytest.approx(499.5, abs=5)


def test_learning_rate_rises_then_falls_to_zero():
    config = TrainingConfig(warmup=10, decay="cosine")
    assert rate_factor(config, 0, 0.0) == pytest.approx(0.1)
    assert rate_factor(config, 50, 0.5) == pytest.approx(0.5)
    assert rate_factor(config, 99, 1.0) == pytest.approx(0.0)
    assert rate_factor(replace(config, decay="linear"), 50, 0.25) == pytest.approx(0.75)
    assert rate_factor(replace(config, decay="constant", warmup=0), 0, 0.9) == 1.0


def test_network_sizes_and_paper_settings_are_as_published():
    def millions(config):
        with torch.device("meta"):
            return sum(p.numel() for p in UNet(config).parameters()) / 1e6

    assert millions(paper_network()) == pytest.approx(33, abs=0.5)
    assert millions(small_network()) == pytest.approx(1.9, abs=0.05)
    assert millions(small_network(base=64)) > 3 * millions(small_network())
    paper = paper_recipe()
    assert (paper.optimizer, paper.learning_rate, paper.weight_decay, paper.batch) == ("adam", 1e-4, 5e-2, 8)


def test_a_fresh_network_predicts_no_noise():
    state = TrainingState(CONFIG, CPU)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(state.network(x, torch.tensor([3, 500])), torch.zeros_like(x))


def test_weight_decay_of_adam_goes_through_the_gradient_and_of_adamw_past_it():
    for optimizer, expected in (("adam", 1 - 1e-4), ("adamw", 1 - 1e-4 * 5e-2)):
        state = TrainingState(replace(CONFIG, optimizer=optimizer, learning_rate=1e-4, weight_decay=5e-2), CPU)
        weight = state.network.time_embed[0].weight
        with torch.no_grad():
            weight.fill_(1.0)
        weight.grad = torch.zeros_like(weight)
        state.optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, expected), atol=1e-7, rtol=0)


def test_the_average_is_the_weighted_sum_of_all_states():
    state = TrainingState(replace(CONFIG, ema=0.5), CPU)
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


def test_it_learns(tmp_path):
    flat = np.full((2, 8, 8, 3), 200, dtype=np.uint8)
    config = replace(CONFIG, steps=150, learning_rate=5e-3, warmup=0, log_every=50, checkpoint_every=150, shift=0)
    rows = []
    fit(flat, tmp_path / "run", config, device="cpu", on_log=rows.append)
    assert rows[0]["loss"] > 2 * rows[-1]["loss"]
    assert rows[-1]["loss"] < 0.35


# ---- checkpoints


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, precision="bf16"), replace(CONFIG, optimizer="adam")])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, images, config):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(images, whole, config, device="cpu")
    with pytest.raises(KilledError):
        fit(images, cut, config, device="cpu", on_log=kill_at(5))
    assert torch.load(cut / CHECKPOINT, weights_only=True)["step"] == 4
    torch.manual_seed(99)  # another process would not have our global generator's state
    fit(images, cut, config, device="cpu", resume=True)
    assert same(tensors(whole / CHECKPOINT), tensors(cut / CHECKPOINT))
    assert (whole / DENOISER).read_bytes() == (cut / DENOISER).read_bytes()
    assert [json.loads(line)["step"] for line in (cut / LOG).read_text().splitlines()] == list(range(1, 9))
    losses = [[json.loads(line)["loss"] for line in (f / LOG).read_text().splitlines()] for f in (whole, cut)]
    assert losses[0] == losses[1]


def test_training_leaves_the_callers_random_numbers_alone(tmp_path, images):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    fit(images, tmp_path / "run", CONFIG, device="cpu")
    assert torch.equal(torch.rand(1), expected)


def test_another_seed_gives_other_weights(tmp_path, images):
    for seed in (0, 1):
        fit(images, tmp_path / str(seed), replace(CONFIG, seed=seed), device="cpu")
    assert not same(tensors(tmp_path / "0" / CHECKPOINT), tensors(tmp_path / "1" / CHECKPOINT))


def test_the_denoiser_loads_without_options_and_is_the_average(tmp_path, images):
    from mdps.models.checkpoints import load_denoiser

    path = fit(images, tmp_path / "run", CONFIG, device="cpu")
    denoiser = load_denoiser(path)
    average = torch.load(tmp_path / "run" / CHECKPOINT, weights_only=True)["ema"]
    assert same(dict(denoiser.network.state_dict()), average)
    assert denoiser.config == TINY
    assert denoiser.schedule.betas == NoiseSchedule.linear().betas
    assert denoiser.prediction == "eps"


def test_a_finished_run_resumed_writes_the_same_denoiser(tmp_path, images):
    path = fit(images, tmp_path / "run", CONFIG, device="cpu")
    before = path.read_bytes()
    path.unlink()
    assert fit(images, tmp_path / "run", CONFIG, device="cpu", resume=True).read_bytes() == before


def test_a_time_limit_ends_the_run_with_the_learning_rate_near_zero(tmp_path, images):
    config = replace(CONFIG, steps=10**6, minutes=1.5 / 60, warmup=0, log_every=5, checkpoint_every=10**6)
    rows = []
    fit(images, tmp_path / "run", config, device="cpu", on_log=rows.append)
    assert 1.5 <= rows[-1]["seconds"] < 5
    assert rows[-1]["learning_rate"] < 0.1 * config.learning_rate
    assert (tmp_path / "run" / DENOISER).exists()


# ---- data


def test_a_folder_is_seen_as_the_detector_sees_it(tmp_path):
    rng = np.random.default_rng(1)
    (tmp_path / "sub").mkdir()
    for name in ("b.png", "a.PNG", "sub/c.bmp", ".hidden.png", "notes.txt"):
        if name.endswith("txt"):
            (tmp_path / name).write_text("no image")
        else:
            Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(tmp_path / name)
    preprocessing = Preprocessing(image_size=(8, 8))
    source = FolderSource(tmp_path, preprocessing)
    assert [path.name for path in image_files(tmp_path)] == ["a.PNG", "b.png", "c.bmp"]
    np.testing.assert_allclose(
        to_unit(torch.from_numpy(source.images))[1].numpy(), preprocessing(tmp_path / "b.png"), atol=1e-6
    )


def test_crops_come_from_everywhere_in_the_picture():
    picture = np.arange(12 * 10, dtype=np.uint8).reshape(12, 10, 1).repeat(3, axis=2)
    crops = CropSource(picture, (8, 8)).batch(np.random.default_rng(0), 500)
    assert crops.shape == (500, 8, 8, 3)
    corners = {divmod(int(crop[0, 0, 0]), 10) for crop in crops}
    assert corners == {(y, x) for y in range(5) for x in range(3)}
    for crop in crops:
        y, x = divmod(int(crop[0, 0, 0]), 10)
        assert (crop == picture[y : y + 8, x : x + 8]).all()


def test_variations_are_mirrorings_and_small_shifts(images):
    rng = np.random.default_rng(0)
    assert vary(images, rng, horizontal=False, vertical=False, shift=0) is images
    flipped = np.concatenate([vary(images, rng, horizontal=True, vertical=True, shift=0) for _ in range(20)])
    kinds = set()
    for index, image in enumerate(flipped):
        original = images[index % len(images)]
        options = [original, original[::-1], original[:, ::-1], original[::-1, ::-1]]
        kinds.add(next(i for i, option in enumerate(options) if (image == option).all()))
    assert kinds == {0, 1, 2, 3}
    shifted = vary(images, rng, horizontal=False, vertical=False, shift=2)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    for image, wide in zip(shifted, padded, strict=True):
        assert any((image == wide[y : y + 8, x : x + 8]).all() for y in range(5) for x in range(5))


# ---- mistakes


def test_data_mistakes_are_told_before_the_first_step(tmp_path, images):
    run = tmp_path / "run"
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        fit(tmp_path / "nowhere", run, CONFIG, device="cpu")
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(UsageError, match="data holds 0 images"):
        fit(data, run, CONFIG, device="cpu")
    Image.fromarray(images[0]).save(data / "0.png")
    with pytest.raises(UsageError, match="data holds 1 images"):
        fit(data, run, CONFIG, device="cpu")
    (data / "broken.png").write_bytes((data / "0.png").read_bytes()[:40])
    (data / "empty.jpg").write_bytes(b"")
    with pytest.raises(ImageError, match=r"2 of 3 training images cannot be read: .*broken\.png.*empty\.jpg"):
        fit(data, run, CONFIG, device="cpu")
    with pytest.raises(UsageError, match="at least 2 images"):
        fit(images[:1], run, CONFIG, device="cpu")
    with pytest.raises(UsageError, match="must be uint8"):
        ArraySource(images.astype(np.float32))
    with pytest.raises(UsageError, match="7 x 7 pixels do not fit"):
        fit(images[:, :7, :7], run, CONFIG, device="cpu")
    with pytest.raises(UsageError, match="too small for crops"):
        CropSource(images[0], (16, 16))
    assert not run.exists()


def test_a_run_folder_is_neither_overwritten_nor_mixed_up(tmp_path, images):
    run = tmp_path / "run"
    with pytest.raises(UsageError, match="without --resume"):
        fit(images, run, CONFIG, device="cpu", resume=True)
    fit(images, run, CONFIG, device="cpu")
    with pytest.raises(UsageError, match="already holds a training run"):
        fit(images, run, CONFIG, device="cpu")
    with pytest.raises(UsageError, match=r"learning_rate = 0\.0004, not 0\.1"):
        fit(images, run, replace(CONFIG, learning_rate=0.1), device="cpu", resume=True)
    with pytest.raises(UsageError, match="other images"):
        fit(255 - images, run, CONFIG, device="cpu", resume=True)
    (run / CHECKPOINT).write_bytes((run / CHECKPOINT).read_bytes()[:500])
    with pytest.raises(UsageError, match=r"checkpoint\.pt cannot be read"):
        fit(images, run, CONFIG, device="cpu", resume=True)


def test_settings_that_cannot_be_meant_are_named(tmp_path, images):
    for setting, value in (("steps", 0), ("ema", 1.5), ("low_share", -1), ("shift", -2), ("minutes", 0.0)):
        with pytest.raises(UsageError, match=f"{setting} is {value}"):
            replace(CONFIG, **{setting: value})
    with pytest.raises(UsageError, match="multiple of 32"):
        small_network(base=40)
    with pytest.raises(UsageError, match="unknown device 'tpu9000'"):
        fit(images, tmp_path / "run", CONFIG, device="tpu9000")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA device"):
            fit(images, tmp_path / "run", CONFIG, device="cuda")
    assert TrainingConfig.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG


def test_a_loss_that_is_no_number_stops_the_run_and_spares_the_checkpoint(tmp_path, images):
    config = replace(CONFIG, learning_rate=1e30, warmup=0)
    with pytest.raises(MdpsError, match="lower the learning rate") as caught:
        fit(images, tmp_path / "run", config, device="cpu")
    assert "is nan at step" in str(caught.value) or "is inf at step" in str(caught.value)
    if (tmp_path / "run" / CHECKPOINT).exists():
        network = torch.load(tmp_path / "run" / CHECKPOINT, weights_only=True)["network"]
        assert all(math.isfinite(float(v.sum())) for v in network.values())


def test_the_demo_trains_from_the_command_line(tmp_path, capsys):
    from mdps.benchmarks.train_demo import main
    from mdps.models.checkpoints import load_denoiser

    out = tmp_path / "new" / "demo.safetensors"
    options = ["--steps", "2", "--batch", "2", "--mult", "1", "1", "--every", "1", "--device", "cpu"]
    assert main(["--out", str(out), *options]) == 0
    assert "step 2  loss" in capsys.readouterr().err
    assert load_denoiser(out).config.image_size == 64
    assert main(["--out", str(out), *options, "--base", "33"]) == 2
    assert capsys.readouterr().err.startswith("error: a base width of 33")
