"""Training on crops of photographs at a scale: where they are cut, what is refused, and that a bundle knows of them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.export import ExportOptions, export_bundle
from mdps.models.checkpoints import describe_checkpoint
from mdps.runtime.errors import UsageError
from mdps.runtime.machine import Room
from mdps.runtime.manifest import Manifest
from mdps.training import CropsOfFiles, CropsSource, TrainingConfig, fit, outcome
from mdps.training.crops import Places, unlikeness
from mdps.training.draw import draw_batch

CPU = torch.device("cpu")
SIDE = 32
RARE = (150, 40)  # the upper left corner of a patch of 24 x 24


def grained(height: int = 256, width: int = 200, seed: int = 0) -> np.ndarray:
    """Grain throughout, and one patch of another colour."""
    image = np.random.default_rng(seed).normal(120, 20, (height, width, 1)).clip(0, 255).astype(np.uint8).repeat(3, 2)
    if height > RARE[0] + 24 and width > RARE[1] + 24:
        image[RARE[0] : RARE[0] + 24, RARE[1] : RARE[1] + 24] = (200, 40, 40)
    return image


def corners(places: Places, count: int = 2000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([places.corner(rng) for _ in range(count)])


def shows(found: np.ndarray) -> np.ndarray:
    """Whether a crop shows the middle of the patch."""
    middle = np.array(RARE) + 12
    return ((found <= middle) & (middle < found + SIDE)).all(axis=1)


def test_a_rare_place_comes_up_far_more_often_than_by_chance() -> None:
    image = grained()
    by_chance = SIDE**2 / ((256 - SIDE + 1) * (200 - SIDE + 1))
    assert shows(corners(Places(image, SIDE))).mean() > 5 * by_chance
    assert shows(corners(Places(np.full_like(image, 9), SIDE))).mean() == pytest.approx(by_chance, rel=0.35)


def test_half_of_the_crops_come_from_anywhere() -> None:
    found = corners(Places(grained(), SIDE), 4000)
    assert found.min(axis=0) == pytest.approx([0, 0], abs=2)
    assert found.max(axis=0) == pytest.approx([256 - SIDE, 200 - SIDE], abs=2)
    far = (found[:, 0] < 60) & (found[:, 1] > 100)  # shows nothing of the patch
    assert far.mean() > 0.5 * 60 * 69 / (225 * 169)


@pytest.mark.parametrize(("size", "side"), [((40, 33), 32), ((32, 32), 32), ((35, 90), 33), ((9, 9), 9)])
def test_every_corner_is_one_of_the_image(size: tuple[int, int], side: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    found = corners(Places(image, side), 300)
    assert (found >= 0).all()
    assert (found <= np.array(size) - side).all()


def test_what_is_alike_everywhere_is_unlike_nothing() -> None:
    assert not unlikeness(np.full((64, 64, 3), 80, np.uint8), 16).any()
    odd = np.full((64, 64, 3), 80, np.uint8)
    odd[32:48, 16:32] = 200
    assert np.unravel_index(unlikeness(odd, 16).argmax(), (13, 13)) == (8, 4)  # cells of four pixels


def test_a_crop_follows_from_the_seed_and_the_samples_number(tiny_config: TrainingConfig) -> None:
    images = [grained(64, 48, seed) for seed in range(3)]
    config = replace(tiny_config, crop=8, flip_horizontal=False, shift=0)
    whole = draw_batch(config, CropsSource(images, 8), range(40), 1000, CPU).clean
    part = draw_batch(config, CropsSource(images, 8), range(17, 25), 1000, CPU).clean
    assert torch.equal(part, whole[17:25])
    assert not torch.equal(
        draw_batch(replace(config, seed=1), CropsSource(images, 8), range(40), 1000, CPU).clean, whole
    )
    assert len({crop.numpy().tobytes() for crop in whole}) == 40


def test_an_epoch_has_as_many_crops_as_cover_the_images() -> None:
    images = [np.full((40, 16, 3), 1, np.uint8), np.full((17, 33, 3), 2, np.uint8)]
    source, rng = CropsSource(images, 16), np.random.default_rng(0)
    assert source.count == 3 + 2 * 3
    assert [int(source.image(index, rng)[0, 0, 0]) for index in range(9)] == [1] * 3 + [2] * 6
    assert source.fingerprint != CropsSource(images[::-1], 16).fingerprint


def photographs(folder: Path, count: int = 10, size: tuple[int, int] = (48, 40)) -> Path:
    folder.mkdir()
    for index in range(count):
        Image.fromarray(grained(*size, index)).save(folder / f"{index}.png")
    return folder


def test_photographs_are_resized_by_the_scale_as_a_detector_does(tmp_path: Path) -> None:
    path = photographs(tmp_path / "good", 2) / "0.png"
    source = CropsOfFiles([path, path], 16, 0.5)
    assert source.images[0].shape == (24, 20, 3)
    with Image.open(path) as picture:
        np.testing.assert_array_equal(
            source.images[0],
            picture.resize((20, 48), Image.Resampling.BILINEAR).resize((20, 24), Image.Resampling.BILINEAR),
        )


def test_scale_and_crop_go_from_the_command_to_the_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, out = photographs(tmp_path / "good"), tmp_path / "run"
    train = ["train", str(good), "--out", str(out), "--recipe", "small", "--batch", "2", "--device", "cpu"]
    assert run(cli, [*train, "--steps", "2", "--crop", "16", "--scale", "0.5"]) == 0
    assert "have 2 sizes" not in capsys.readouterr().err
    denoiser = out / "denoiser.safetensors"
    given = describe_checkpoint(denoiser).given
    assert (given["crop"]["value"], given["scale"]["value"]) == (16, 0.5)
    assert json.loads((out / "config.json").read_text())["preprocessing"]["image_size"] == [16, 16]
    assert run(cli, ["inspect", str(denoiser)]) == 0
    assert "scale = 0.5" in capsys.readouterr().out
    options = ExportOptions(backbone="random_tiny", noise_level=198, steps=1, mask_pass=False)
    bundle = export_bundle(denoiser, tmp_path / "bundle", options)
    tiles = Manifest.read(bundle).tiles
    assert tiles is not None
    assert tiles.scale == 0.5
    assert run(cli, ["inspect", str(bundle)]) == 0
    assert "16 x 16 tiles of photographs at a scale of 0.5" in capsys.readouterr().out
    assert run(cli, [*train, "--steps", "3", "--resume"]) == 0
    assert outcome(out).steps == 3
    assert run(cli, [*train, "--steps", "4", "--resume", "--scale", "0.4"]) == 2
    assert "begun with scale = 0.5, not 0.4" in capsys.readouterr().err


def test_arrays_are_cropped_too(tiny_config: TrainingConfig, tmp_path: Path) -> None:
    images = np.stack([grained(24, 24, seed) for seed in range(4)])
    assert fit(images, tmp_path / "run", replace(tiny_config, crop=8, steps=1), device="cpu").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--crop", "32", "--scale", "0.5"], "0.png has 20 x 24 pixels at a scale of 0.5, too few for crops of 32"),
        (["--scale", "0.5"], "scale is 0.5, which is for crops: give --crop too"),
        (["--crop", "16", "--image-size", "32"], "leave these out"),
        (["--crop", "16", "--crop-size", "8"], "leave these out"),
        (["--crop", "12"], "multiples of 8"),
        (["--crop", "16", "--scale", "1.5"], "1.5 is not in the range"),
    ],
)
def test_wrong_values_are_one_sentence(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = photographs(tmp_path / "good")
    train = ["train", str(good), "--out", str(tmp_path / "run"), "--recipe", "small", "--steps", "1", "--device", "cpu"]
    assert run(cli, [*train, *options]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_together_or_into_memory_is_refused(
    tiny_config: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="crop is 16, and the network sees images of 8"):
        replace(tiny_config, crop=16)
    paths = sorted(photographs(tmp_path / "good", 3).iterdir())
    monkeypatch.setattr("mdps.runtime.memory.rooms", lambda: [Room(3 * 3 * 48 * 40 // 4 - 1, "a test")])
    with pytest.raises(UsageError, match=r"crops of 3 photographs needs .* lower --scale"):
        CropsOfFiles(paths, 8, 0.5)
    monkeypatch.setattr("mdps.runtime.memory.rooms", lambda: [Room(3 * 3 * 48 * 40 // 4, "a test")])
    assert CropsOfFiles(paths, 8, 0.5).count == 3 * 3 * 3
