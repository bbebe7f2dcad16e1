"""A run's verdict on itself when it ends, which the export repeats."""

import json
import warnings
from dataclasses import replace

import pytest

from mdps.export import ExportOptions, export_bundle
from mdps.models.checkpoints import load_denoiser, run_warnings, save_denoiser
from mdps.models.unet import UNet, UNetConfig
from mdps.runtime.schedule import NoiseSchedule
from mdps.training import fit, outcome
from mdps.training.folder import DENOISER, LOG

TRAINED = {"steps": 1806, "loss": 0.017, "first_quarter_loss": 0.02, "late_fall": 0.7, "training": {"warmup": 100}}
# Losses after each hundred steps of the runs on circuits and tiles of 64 x 64.
PCB = (0.6882, 0.1601, 0.088, 0.0642, 0.0606, 0.0495, 0.0521, 0.051, 0.0432, 0.0451, 0.0378, 0.0362)
TILE = (0.6669, 0.0968, 0.0368, 0.0276, 0.0282, 0.0226, 0.026, 0.0274, 0.0248, 0.0257)


def log(run, *rows):
    run.mkdir(exist_ok=True)
    lines = [{"step": step, "loss": loss, "loss_by_quarter": [low, None], "seconds": step} for step, loss, low in rows]
    (run / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_trained_network_leaves_no_doubt():
    assert run_warnings(TRAINED) == []


def test_an_error_as_large_as_that_of_predicting_nothing_is_told():
    (sentence,) = run_warnings(TRAINED | {"loss": 0.8, "first_quarter_loss": 0.95})
    assert "0.95" in sentence
    assert "learned next to nothing" in sentence
    # The late timesteps are easy: a low mean over all of them hides nothing.
    assert run_warnings(TRAINED | {"loss": 0.15, "first_quarter_loss": 0.5})
    assert not run_warnings(TRAINED | {"loss": 0.15, "first_quarter_loss": 0.25})


def test_a_run_that_ended_in_its_warm_up_is_told():
    (sentence,) = run_warnings(TRAINED | {"steps": 56})
    assert "56 steps" in sentence
    assert "100" in sentence
    assert run_warnings(TRAINED | {"steps": 100})
    assert not run_warnings(TRAINED | {"steps": 101})
    assert not run_warnings({"steps": 1, "training": {"warmup": 0}})


def test_a_run_whose_loss_still_fell_fast_is_told(tmp_path):
    for name, losses in (("pcb", PCB), ("tile", TILE)):
        rows = [(100 * n, loss, loss) for n, loss in enumerate(losses, 1)]
        early = [*rows[:5], (506, losses[5], losses[5])]
        for end, told in ((early, True), (rows, False)):
            notes = outcome(log(tmp_path / name, *end)).notes()
            assert bool(run_warnings(TRAINED | notes)) == told, (name, end)
    (sentence,) = run_warnings(TRAINED | {"steps": 506, "loss": 0.063, "late_fall": 0.4})
    assert "ended too early: after 506 steps its loss (0.063)" in sentence
    assert "--resume" in sentence
    assert len(run_warnings(TRAINED | {"first_quarter_loss": 0.95, "late_fall": 0.4})) == 1  # the graver of the two


def test_the_fall_is_that_of_the_last_quarter_of_the_steps_from_the_second(tmp_path):
    # Steps 51 to 100 and 151 to 200; the second line counts with 10 of its 20 steps and with 40.
    found = outcome(
        log(tmp_path / "run", (40, 9.0, 9.0), (60, 5.0, 5.0), (100, 3.0, 3.0), (160, 8.0, 8.0), (200, 1.0, 1.0))
    )
    assert found.late_fall == pytest.approx(((8 * 10 + 1 * 40) / 50) / ((5 * 10 + 3 * 40) / 50))
    assert outcome(log(tmp_path / "run", (1, 0.5, 0.5))).late_fall == 1.0


@pytest.mark.parametrize(
    "notes",
    [
        {},
        {"late_fall": 0.1},
        {"late_fall": "x", "loss": 0.1},
        {"steps": "many", "training": 3},
        {"first_quarter_loss": None},
        {"steps": True, "training": {"warmup": 9}},
    ],
)
def test_notes_that_say_nothing_raise_no_doubt(notes):
    assert run_warnings(notes) == []


def test_the_end_is_the_mean_of_the_last_hundred_steps(tmp_path):
    assert outcome(tmp_path) is None
    found = outcome(log(tmp_path / "run", (100, 9.0, 9.0), (150, 0.4, 0.5), (199, 0.4, 0.5), (200, 0.9, 1.5)))
    assert (found.steps, found.seconds) == (200, 200)
    assert found.loss == pytest.approx((0.4 * 99 + 0.9) / 100)
    assert found.first_quarter_loss == pytest.approx((0.5 * 99 + 1.5) / 100)
    short = outcome(log(tmp_path / "run", (1, 1.0, None), (2, 0.8, 0.6)))
    assert (short.loss, short.first_quarter_loss) == (pytest.approx(0.9), pytest.approx(0.6))


def test_a_run_too_short_to_learn_warns_and_says_so_in_its_file(tmp_path, tiny_images, tiny_config):
    with pytest.warns(UserWarning, match="learned next to nothing"):
        path = fit(tiny_images, tmp_path / "run", tiny_config, device="cpu")
    extra = load_denoiser(path).extra
    rows = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert extra["loss"] == pytest.approx(sum(row["loss"] for row in rows) / len(rows))
    assert extra["first_quarter_loss"] > 0.8
    with pytest.warns(UserWarning, match="within the 20"):
        fit(tiny_images, tmp_path / "warming", replace(tiny_config, warmup=20), device="cpu")


def test_the_export_repeats_it(tmp_path):
    network = UNet(UNetConfig(image_size=16, model_channels=32, channel_mult=(1, 1), num_res_blocks=1))
    options = ExportOptions(backbone="random_tiny", noise_level=198, steps=1, mask_pass=False)
    said: dict[str, list[str]] = {}
    for name, notes in (
        ("good", TRAINED),
        ("poor", TRAINED | {"steps": 56, "first_quarter_loss": 0.95}),
        ("early", TRAINED | {"late_fall": 0.4}),
    ):
        path = tmp_path / name / DENOISER
        path.parent.mkdir()
        save_denoiser(path, network, NoiseSchedule.linear(), extra=notes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export_bundle(path, tmp_path / name / "bundle", options, say=said.setdefault(name, []).append)
    assert not [line for line in said["good"] if "Warning" in line]
    assert [line for line in said["poor"] if line.startswith("Warning: ") and "56 steps" in line]
    assert [line for line in said["early"] if line.startswith("Warning: ") and "ended too early" in line]
    assert [line for line in said["poor"] if line.startswith("Warning: ") and "learned next to nothing" in line]
