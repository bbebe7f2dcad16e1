"""Files that a run leaves in its folder, and its progress while it runs."""

import io
import json
import os
import re
import select
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mdps.runtime.schedule import NoiseSchedule
from mdps.training import ArraySource, TrainingConfig, fit
from mdps.training.folder import CONFIG, CURVE, LOG, draw_curve, open_board
from mdps.training.progress import Progress, Reconstructions, progress_of, reconstruct


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config):
    """A finished run of eight steps on files, resumed once, that samples every four."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "good").mkdir()
    for index, image in enumerate(np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(image).save(folder / "good" / f"{index}.png")
    config = replace(tiny_config, samples=3, sample_every=4)

    class BrokenError(Exception):
        pass

    def break_off(row):
        if row["step"] == 7:
            raise BrokenError

    with pytest.raises(BrokenError):
        fit(folder / "good", folder / "run", config, device="cpu", on_log=break_off)
    fit(folder / "good", folder / "run", config, device="cpu", resume=True)
    return folder / "run"


def test_the_configuration_says_all_that_decides(run, tiny_config):
    content = json.loads((run / CONFIG).read_text())
    config = TrainingConfig.from_json(content["training"])
    assert replace(config, samples=0, sample_every=1000) == tiny_config
    assert content["images"]["count"] == 10
    assert [name.rsplit("/", 1)[-1] for name in content["images"]["files"]] == [f"{n}.png" for n in range(10)]
    assert content["preprocessing"]["image_size"] == [8, 8]
    assert [session["from_step"] for session in content["sessions"]] == [0, 6]
    assert content["sessions"][0]["versions"]["torch"] == torch.__version__.split("+")[0]
    assert (content["sessions"][0]["device"], content["sessions"][0]["processes"]) == ("cpu", 1)
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    assert checkpoint["images"] == content["images"]["sha256"]


def test_the_log_has_the_loss_by_timestep_that_makes_the_loss(run, tiny_config):
    rows = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        parts = [part for part in row["loss_by_quarter"] if part is not None]
        assert len(row["loss_by_quarter"]) == 4
        assert min(parts) - 1e-6 <= row["loss"] <= max(parts) + 1e-6
        assert row["images_per_s"] > 0


def test_tensorboard_reads_the_curves_and_pictures(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    logged = {row["step"]: row["loss"] for row in map(json.loads, (run / LOG).read_text().splitlines())}
    assert losses == pytest.approx(logged)
    assert {"learning_rate", "images_per_s", "loss_by_timestep/quarter_1"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Images("reconstructions")] == [4, 8]


def test_pictures_show_the_images_over_what_is_made_of_them(run):
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["step_0000004.png", "step_0000008.png"]
    picture = np.asarray(Image.open(run / "samples" / "step_0000008.png"))
    assert picture.shape == (3 * 8, 3 * 8, 3)
    files = json.loads((run / CONFIG).read_text())["images"]["files"]
    for place, index in enumerate((0, 4, 9)):
        np.testing.assert_array_equal(picture[:8, 8 * place : 8 * place + 8], np.asarray(Image.open(files[index])))
    assert Image.open(run / CURVE).size[0] > 300


def test_reconstructions_step_as_diffusers_ddim_does():
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDIMScheduler(
        beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False, timestep_spacing="leading"
    )
    scheduler.set_timesteps(50)
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(2, 3, 8, 8, generator=generator) for _ in range(2))

    def network(x, t):
        return torch.tanh(x + float(t) / 1000)

    x = scheduler.add_noise(clean, noise, torch.tensor([199, 199]))
    for t in range(199, 0, -20):
        x = scheduler.step(network(x, t), t, x).prev_sample
    ours = reconstruct(network, clean, noise, NoiseSchedule.linear())
    torch.testing.assert_close(ours, x, atol=1e-4, rtol=1e-4)


def test_the_same_images_and_noise_are_shown_each_time(tiny_config, tiny_images):
    def made():
        shown = Reconstructions(
            replace(tiny_config, samples=2), ArraySource(tiny_images), NoiseSchedule.linear(), torch.device("cpu")
        )
        return shown.picture(lambda x, t: torch.zeros_like(x))

    first = made()
    torch.manual_seed(7)
    np.testing.assert_array_equal(made(), first)


# ---- what is missing


def test_without_tensorboard_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(UserWarning, match="will not be written: pip install tensorboard"):
        assert open_board(tmp_path / "tensorboard", 0) is None


def test_without_matplotlib_there_is_no_curve(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / LOG).write_text('{"step": 1, "loss": 0.5}\n')
    draw_curve(tmp_path / LOG, tmp_path / CURVE)
    assert not (tmp_path / CURVE).exists()


def test_a_log_of_an_older_version_still_draws(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / LOG).write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.4, "loss_by_quarter": [0.1, null]}\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curve(tmp_path / LOG, tmp_path / CURVE)
    assert (tmp_path / CURVE).exists()


# ---- progress


PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np, torch
from mdps.training import TrainingConfig, fit
torch.set_num_threads(1)
images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
fit(images, Path(sys.argv[1]), TrainingConfig.from_json(json.loads(sys.argv[2])), device="cpu")
"""


@pytest.mark.parametrize(("minutes", "size"), [(None, (24, 120)), (0.01, (24, 120)), (None, (0, 0))])
def test_a_terminal_sees_rate_and_time_left_and_a_pipe_nothing(tmp_path, tiny_config, minutes, size):
    config = json.dumps(replace(tiny_config, steps=30, minutes=minutes, log_every=100, checkpoint_every=30).to_json())
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)  # 0 x 0: `script` in a pipe
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), config]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}  # so short a run learns nothing
    with subprocess.Popen(command, stderr=theirs, stdout=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        seen = b""
        while select.select([ours], [], [], 120)[0]:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        assert process.wait() == 0
        assert process.stdout.read() == b""
    os.close(ours)
    assert b"images/s" in seen
    assert b"loss" in seen
    first = next(part for part in seen.split(b"\r") if b"loss" in part)  # long before a line of the log
    assert re.search(rb"<\d\d:\d\d.*step 1, loss \d", first), first  # elapsed<left
    if minutes is None:
        assert b"30/30" in seen
        quiet = subprocess.run([*command[:3], str(tmp_path / "again"), config], capture_output=True, env=environment)
        assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"", b"")


def test_the_log_begins_at_once(tmp_path, tiny_images, tiny_config):
    fit(tiny_images, tmp_path / "run", replace(tiny_config, steps=24, log_every=12), device="cpu")
    rows = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 10, 12, 24]


@pytest.mark.parametrize("minutes", [None, 30.0])
def test_a_resumed_run_says_the_time_that_is_left_from_where_it_is(monkeypatch, minutes):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(TrainingConfig(steps=100, minutes=minutes), 60, 0.6, True) as bar:
        time.sleep(0.2)
        bar.update(61, 0.61, lambda: (0.5, 1.0))
        shown = terminal.getvalue().split("\r")[-1]
    assert "61%" in shown
    assert "step 61, loss 0.5000, 1.0 images/s" in shown
    (left,) = re.findall(r"<(\d\d):(\d\d)", shown)
    assert 4 <= 60 * int(left[0]) + int(left[1]) < 60  # 39 such steps, not the rate of 61 in 0.2 s


def test_progress_is_by_steps_or_by_the_clock_whichever_is_further():
    config = TrainingConfig(steps=100, minutes=1)
    assert progress_of(config, 30, 6.0) == pytest.approx(0.3)
    assert progress_of(config, 30, 45.0) == pytest.approx(0.75)
    assert progress_of(config, 300, 0.0) == 1.0
