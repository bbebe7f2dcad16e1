"""The comparison of training options: what it measures, that it goes on, and its table."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mdps.benchmarks import train_options
from mdps.benchmarks.train_options import ALL, OPTIONS, Option, held_out_errors, main, table
from mdps.models.checkpoints import load_denoiser, save_denoiser
from mdps.models.unet import UNet
from mdps.runtime.schedule import NoiseSchedule
from mdps.training import TrainingConfig, small_network, small_recipe

FEW = (Option("base"), Option("average", average=True), Option("flips", {"flip_horizontal": True}))


@pytest.fixture
def good(tmp_path):
    folder = tmp_path / "good"
    folder.mkdir()
    for index, image in enumerate(np.random.default_rng(0).integers(0, 256, (11, 16, 16, 3), dtype=np.uint8)):
        Image.fromarray(image).save(folder / f"{index:02d}.png")
    return folder


def arguments(good, out, *more):
    return [
        str(good),
        "--out",
        str(out),
        "--steps",
        "3",
        "--image-size",
        "16",
        "--batch",
        "2",
        "--device",
        "cpu",
        *more,
    ]


def test_a_comparison_is_made_once_and_goes_on(good, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_options, "OPTIONS", FEW[:2])
    out = tmp_path / "out"
    assert main(arguments(good, out)) == 0
    before = json.loads((out / "train_options.json").read_text())
    assert [row["option"] for row in before["rows"]] == ["base", "average"]
    assert before["rows"][0]["difference"] == 0
    assert sorted(path.name for path in (out / "runs").iterdir()) == ["base"]  # both from one training
    monkeypatch.setattr(train_options, "OPTIONS", FEW)
    capsys.readouterr()
    assert main(arguments(good, out)) == 0
    after = json.loads((out / "train_options.json").read_text())
    assert after["rows"][:2] == before["rows"]
    printed = capsys.readouterr().out
    assert printed == (out / "train_options.md").read_text()
    assert printed.count("\n") == 5
    assert "image AUROC" not in printed  # there were no test images
    assert main(arguments(good, out, "--seed", "1")) == 2
    assert "other settings or images" in capsys.readouterr().err


def test_the_last_weights_and_their_average_are_told_apart(good, tmp_path, monkeypatch):
    monkeypatch.setattr(train_options, "OPTIONS", FEW[:2])
    assert main(arguments(good, tmp_path / "out")) == 0
    run = tmp_path / "out" / "runs" / "base"
    content = torch.load(run / "checkpoint.pt", weights_only=True)
    for name, part in (("last_weights.safetensors", "network"), ("denoiser.safetensors", "ema")):
        weights = load_denoiser(run / name).network.state_dict()
        assert all(torch.equal(weight, content[part][key]) for key, weight in weights.items())


def test_a_network_that_predicts_nothing_has_the_noise_as_its_error(tmp_path):
    network = UNet(small_network(16))
    for parameter in network.out[-1].parameters():
        torch.nn.init.zeros_(parameter)
    save_denoiser(tmp_path / "zero.safetensors", network, NoiseSchedule.linear(), "eps")
    images = np.zeros((9, 16, 16, 3), dtype=np.uint8)
    errors = held_out_errors(tmp_path / "zero.safetensors", images, 0)
    assert errors.shape == (9,)
    np.testing.assert_allclose(errors, 1, atol=0.1)
    np.testing.assert_array_equal(errors, held_out_errors(tmp_path / "zero.safetensors", images, 0))


def test_the_table_is_in_percent_of_the_base():
    rows = [
        {"option": "base", "held_out_error": 0.02, "difference": 0.0, "standard_error": 0.0},
        {"option": "other", "held_out_error": 0.015, "difference": -0.005, "standard_error": 0.001},
    ]
    assert table(rows).splitlines()[-1] == "| other | 0.01500 | -25.0 % ± 5.0 |"
    judged = [row | {"image_auroc": 1.0, "pixel_auroc": 0.98765} for row in rows]
    assert table(judged).splitlines()[-1].endswith("| 1.0000 | 0.9877 |")


def test_all_of_them_is_the_small_recipe():
    small, base = small_recipe(), TrainingConfig()
    changed = {name for name in small.to_json() if getattr(small, name) != getattr(base, name)}
    option = next(option for option in OPTIONS if option.name == ALL)
    assert option.changes == {
        name: getattr(small, name) for name in changed - {"network", "steps", "learning_rate", "ema"}
    }


def test_too_few_images_are_refused(tmp_path, good, capsys):
    for path in sorted(good.iterdir())[5:]:
        path.unlink()
    assert main(arguments(good, tmp_path / "out")) == 2
    assert "at least 6 are needed" in capsys.readouterr().err
