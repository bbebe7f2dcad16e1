"""`mdps train` as a user meets it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.training import outcome
from mdps.training.folder import CONFIG

SMALL = ("--recipe", "small", "--image-size", "16", "--batch", "2", "--set", "log-every=1", "--device", "cpu")


def images(folder: Path, count: int = 10, size: int = 20, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    for index, image in enumerate(np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)):
        Image.fromarray(image).save(folder / f"{index}.png")
    return folder


def category(root: Path, name: str) -> Path:
    """MVTec AD's layout."""
    images(root / name / "train" / "good")
    images(root / name / "test" / "good", 2, seed=1)
    images(root / name / "test" / "hole", 2, seed=2)
    images(root / name / "ground_truth" / "hole", 2, seed=3)
    for path in (root / name / "ground_truth" / "hole").iterdir():
        path.rename(path.with_name(f"{path.stem}_mask.png"))
    return root / name


def settings(out: Path) -> dict:
    return json.loads((out / CONFIG).read_text())


def test_a_folder_becomes_a_denoiser_and_the_next_command_is_named(tmp_path, capsys):
    good, out = images(tmp_path / "good"), tmp_path / "run"
    options = ["--epochs", "1", "--ema", "0.5", "--rotate", "--shift", "2", "--set", "clip=1"]
    options += ["--set", "weighting=min-snr"]
    assert run(cli, ["train", str(good), "--out", str(out), *SMALL, *options]) == 0
    said = capsys.readouterr()
    loss = outcome(out).loss
    assert re.fullmatch(
        rf"wrote {out}/denoiser\.safetensors after 5 steps in \d+ s, loss {loss:.3f}; "
        rf"next: mdps export --ckpt {out}/denoiser\.safetensors --out BUNDLE\n",
        said.out,
    )
    warmed, learned = said.err.splitlines()
    assert warmed.startswith("Warning: the training ended after 5 steps, within the 100 of its warm-up")
    assert learned.startswith("Warning: the denoiser has learned next to nothing")
    training = settings(out)["training"]
    assert (training["steps"], training["epochs"], training["batch"]) == (5, 1, 2)
    assert (training["ema"], training["rotate"], training["shift"], training["clip"]) == (0.5, True, 2, 1)
    assert run(cli, ["train", str(good), "--out", str(out), *SMALL, *options]) == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert run(cli, ["train", str(good), "--out", str(out), *SMALL, *options, "--resume"]) == 0


def test_resume_takes_what_the_run_was_begun_with(tmp_path, capsys):
    good, out = images(tmp_path / "good"), tmp_path / "run"
    options = ["--steps", "2", "--low-share", "0.5", "--flip-vertical", "--crop-size", "8"]
    assert run(cli, ["train", str(good), "--out", str(out), *SMALL, *options]) == 0
    before = settings(out)
    assert run(cli, ["train", str(good), "--out", str(out), "--resume", "--device", "cpu"]) == 0
    after = settings(out)
    assert (after["training"], after["preprocessing"]) == (before["training"], before["preprocessing"])
    # What is given counts: the length may change, and what was learned may not.
    longer = ["--recipe", "small", "--image-size", "16", "--crop-size", "8", "--base", "32", "--steps", "3"]
    assert run(cli, ["train", str(good), "--out", str(out), "--resume", "--device", "cpu", *longer]) == 0
    assert settings(out)["training"] == before["training"] | {"steps": 3}
    assert outcome(out).steps == 3
    assert run(cli, ["train", str(good), "--out", str(out), "--resume", "--device", "cpu", "--epochs", "1"]) == 0
    assert (settings(out)["training"]["epochs"], settings(out)["training"]["steps"]) == (1, 5)
    capsys.readouterr()
    for given, words in (
        (["--recipe", "paper"], "begun with another network than that of --recipe paper"),
        (["--image-size", "32"], "begun with --image-size 16, not 32"),
        (["--crop-size", "0"], "begun with --crop-size 8, not 0"),
        (["--base", "64"], "begun with --base 32, not 64"),
        (["--set", "decay=linear"], "begun with decay = cosine, not linear"),
    ):
        assert run(cli, ["train", str(good), "--out", str(out), "--resume", "--device", "cpu", *given]) == 2
        assert words in capsys.readouterr().err
    (out / CONFIG).write_text("{")
    assert run(cli, ["train", str(good), "--out", str(out), "--resume"]) == 2
    assert "config.json does not say what the run was begun with" in capsys.readouterr().err
    assert run(cli, ["train", str(good), "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "start the run without --resume" in capsys.readouterr().err


def test_a_category_gives_its_training_images_only_and_the_papers_crop(tmp_path, capsys, monkeypatch):
    from mdps import training

    seen = {}

    def fit(given, out, config, **how):
        seen.update(given=given, config=config, **how)
        return out / "denoiser.safetensors"

    monkeypatch.setattr(training, "fit", fit)
    folder = category(tmp_path / "mvtec", "nut")
    paper = ["--recipe", "paper", "--out", str(tmp_path / "run")]
    assert run(cli, ["train", str(folder), *paper]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "nut: 10 training images (mvtec-ad)"
    assert "resized to 256 and the centre 224 is cut" in err[1]
    assert {path.parent for path in seen["given"]} == {folder / "train" / "good"}
    assert seen["config"].network.image_size == 224
    assert (seen["config"].epochs, seen["config"].steps) == (2000, None)
    assert seen["preprocessing"].network_size == (224, 224)
    assert run(cli, ["train", str(tmp_path / "mvtec" / "nut" / "train" / "good"), *paper]) == 0
    assert capsys.readouterr().err == ""
    assert seen["config"].network.image_size == 256


def test_the_papers_network_on_a_processor_is_warned_about_where_nobody_asked_for_it(tmp_path, capsys, monkeypatch):
    import torch

    from mdps import training

    monkeypatch.setattr(training, "fit", lambda *_, **__: tmp_path / "denoiser.safetensors")
    command = ["train", str(images(tmp_path / "good")), "--out", str(tmp_path / "run")]
    for card, given, warned in (
        (False, [], True),
        (False, ["--recipe", "paper"], False),
        (False, ["--recipe", "small"], False),
        (True, [], False),
        (True, ["--device", "cpu"], True),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda card=card: card)
        monkeypatch.setattr(torch.cuda, "device_count", lambda card=card: int(card))
        assert run(cli, [*command, *given]) == 0
        err = capsys.readouterr().err
        assert ("Warning: the paper's network" in err) == warned, (card, given, err)
        assert ("--recipe small" in err) == warned


def test_a_whole_data_set_is_refused_by_naming_a_category(tmp_path, capsys):
    for name in ("bolt", "nut"):
        category(tmp_path / "mvtec", name)
    assert run(cli, ["train", str(tmp_path / "mvtec"), "--out", str(tmp_path / "run")]) == 2
    assert "holds 2 categories: train on one, such as" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_odd_data_is_said_once_on_stderr(tmp_path, capsys):
    good = images(tmp_path / "good", 3)
    assert run(cli, ["train", str(good), "--out", str(tmp_path / "run"), *SMALL, "--steps", "1"]) == 0
    line, *ended = capsys.readouterr().err.splitlines()
    assert not [other for other in ended if "images" in other]
    assert line.startswith("Warning: there are only 3 training images")


def test_processes_are_asked_for_by_their_number(tmp_path, monkeypatch):
    from mdps import training

    seen = []
    monkeypatch.setattr(training, "fit_in_processes", lambda count, *_, **__: seen.append(count) or tmp_path)
    good = images(tmp_path / "good")
    assert run(cli, ["train", str(good), "--out", str(tmp_path / "run"), *SMALL, "--processes", "2"]) == 0
    assert seen == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "3", "--epochs", "2"], "--steps or so many --epochs"),
        (["--crop-size", "32"], "a crop of 32 is larger"),
        (["--crop-size", "13"], "do not fit this network"),
        (["--batch", "3", "--processes", "2"], "a batch of 3 does not divide among 2 processes"),
        (["--precision", "fp16"], "fp16 needs a GPU"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, options, words):
    good = images(tmp_path / "good")
    assert run(cli, ["train", str(good), "--out", str(tmp_path / "run"), *SMALL, *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_accelerate_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "accelerate", None)
    assert run(cli, ["train", str(images(tmp_path / "good")), "--out", str(tmp_path / "run"), *SMALL]) == 1
    assert "pip install 'mdps[train]'" in capsys.readouterr().err
