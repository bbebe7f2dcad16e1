"""Training that is cut short: exceptions, kill -9, signals, a full disk; and that it goes on to the same bits."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from mdps.runtime import atomic
from mdps.runtime.errors import MdpsError, UsageError
from mdps.training import fit
from mdps.training.config import rate_factor
from mdps.training.folder import CHECKPOINT, CONFIG, DENOISER, LOG

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")


class KilledError(Exception):
    pass


def kill_at(step):
    def on_log(row):
        if row["step"] == step:
            raise KilledError

    return on_log


def tensors(path):
    content = torch.load(path, weights_only=True)
    parts = {f"{part}.{k}": v for part in ("network", "ema") for k, v in content[part].items()}
    for index, moments in content["optimizer"]["state"].items():
        parts |= {f"optimizer.{index}.{k}": torch.as_tensor(v) for k, v in moments.items()}
    return parts | {"step": content["step"]}


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items())


def log_of(run):
    rows = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    return [(row["step"], row["loss"], row["loss_by_quarter"]) for row in rows]


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"optimizer": "adam", "ema": 0.0, "clip": 0.1}])
def test_a_run_that_broke_off_resumes_to_the_same_bits(tmp_path, tiny_images, tiny_config, changes):
    config = replace(tiny_config, **changes)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(tiny_images, whole, config, device="cpu")
    with pytest.raises(KilledError):
        fit(tiny_images, cut, config, device="cpu", on_log=kill_at(5))
    assert torch.load(cut / CHECKPOINT, weights_only=True)["step"] == 4
    torch.manual_seed(99)  # another process would not have our global generator's state
    fit(tiny_images, cut, config, device="cpu", resume=True)
    assert same(tensors(whole / CHECKPOINT), tensors(cut / CHECKPOINT))
    assert (whole / DENOISER).read_bytes() == (cut / DENOISER).read_bytes()
    assert [step for step, *_ in log_of(cut)] == list(range(1, 9))
    assert log_of(whole) == log_of(cut)


def test_a_checkpoint_is_written_by_the_clock_where_that_comes_before_its_number_of_steps(
    tmp_path, tiny_images, tiny_config
):
    config = replace(tiny_config, checkpoint_every=1000, checkpoint_minutes=0.2 / 60)

    def slow_until_killed(row):
        time.sleep(0.15)
        if row["step"] == 5:
            raise KilledError

    with pytest.raises(KilledError):
        fit(tiny_images, tmp_path / "cut", config, device="cpu", on_log=slow_until_killed)
    assert 2 <= torch.load(tmp_path / "cut" / CHECKPOINT, weights_only=True)["step"] <= 4
    fit(tiny_images, tmp_path / "cut", replace(config, checkpoint_minutes=5.0), device="cpu", resume=True)
    fit(tiny_images, tmp_path / "whole", tiny_config, device="cpu")
    assert same(tensors(tmp_path / "whole" / CHECKPOINT), tensors(tmp_path / "cut" / CHECKPOINT))
    with pytest.raises(KilledError):
        fit(tiny_images, tmp_path / "rare", replace(config, checkpoint_minutes=5.0), device="cpu", on_log=kill_at(5))
    assert not (tmp_path / "rare" / CHECKPOINT).exists()


def test_training_leaves_the_callers_random_numbers_alone(tmp_path, tiny_images, tiny_config):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    fit(tiny_images, tmp_path / "run", tiny_config, device="cpu")
    assert torch.equal(torch.rand(1), expected)


def test_another_seed_gives_other_weights(tmp_path, tiny_images, tiny_config):
    for seed in (0, 1):
        fit(tiny_images, tmp_path / str(seed), replace(tiny_config, seed=seed), device="cpu")
    assert not same(tensors(tmp_path / "0" / CHECKPOINT), tensors(tmp_path / "1" / CHECKPOINT))


def test_a_finished_run_resumed_writes_the_same_denoiser(tmp_path, tiny_images, tiny_config):
    path = fit(tiny_images, tmp_path / "run", tiny_config, device="cpu")
    before = path.read_bytes()
    path.unlink()
    assert fit(tiny_images, tmp_path / "run", tiny_config, device="cpu", resume=True).read_bytes() == before


@pytest.mark.parametrize("decay", ["constant", "cosine"])
def test_a_run_may_be_made_longer_and_shorter(tmp_path, tiny_images, tiny_config, decay):
    run, config = tmp_path / "run", replace(tiny_config, decay=decay)
    fit(tiny_images, run, config, device="cpu")
    longer = replace(config, steps=12, minutes=45.0)
    fit(tiny_images, run, longer, device="cpu", resume=True)
    rows = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    # The rate's decay is that of the new length, from where the run is.
    expected = [config.learning_rate * rate_factor(longer, step, step / 12) for step in range(8, 12)]
    assert [row["learning_rate"] for row in rows[8:]] == pytest.approx(expected, rel=1e-3)
    settings = json.loads((run / CONFIG).read_text())["training"]
    assert (settings["steps"], settings["minutes"]) == (12, 45.0)
    cut = tmp_path / "cut"
    with pytest.raises(KilledError):
        fit(tiny_images, cut, config, device="cpu", on_log=kill_at(5))
    fit(tiny_images, cut, replace(config, steps=6), device="cpu", resume=True)
    assert torch.load(cut / CHECKPOINT, weights_only=True)["step"] == 6


def test_a_finished_run_says_that_nothing_was_trained(tmp_path, tiny_images, tiny_config):
    run = tmp_path / "run"
    fit(tiny_images, run, tiny_config, device="cpu")
    with pytest.warns(UserWarning, match="finished already, after 8 steps, so .* more --steps"):
        fit(tiny_images, run, tiny_config, device="cpu", resume=True)
    with pytest.warns(UserWarning, match="finished already, after 8 steps in its 1e-06 minutes, so .* more --minutes"):
        fit(tiny_images, run, replace(tiny_config, steps=100, minutes=1e-6), device="cpu", resume=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tiny_images, run, replace(tiny_config, steps=9), device="cpu", resume=True)
    assert not [warning for warning in caught if "finished already" in str(warning.message)]


def test_a_checkpoint_from_before_a_setting_existed_goes_on(tmp_path, tiny_images, tiny_config):
    run = tmp_path / "run"
    with pytest.raises(KilledError):
        fit(tiny_images, run, tiny_config, device="cpu", on_log=kill_at(5))
    content = torch.load(run / CHECKPOINT, weights_only=True)
    settings = json.loads(content["config"])
    del settings["weighting"], settings["clip"]
    torch.save(content | {"config": json.dumps(settings)}, run / CHECKPOINT)
    fit(tiny_images, run, tiny_config, device="cpu", resume=True)


def test_a_run_folder_is_neither_overwritten_nor_mixed_up(tmp_path, tiny_images, tiny_config):
    run = tmp_path / "run"
    with pytest.raises(UsageError, match="without --resume"):
        fit(tiny_images, run, tiny_config, device="cpu", resume=True)
    fit(tiny_images, run, tiny_config, device="cpu")
    with pytest.raises(UsageError, match="already holds a training run"):
        fit(tiny_images, run, tiny_config, device="cpu")
    with pytest.raises(UsageError, match=r"learning_rate = 0\.0004, not 0\.1"):
        fit(tiny_images, run, replace(tiny_config, learning_rate=0.1), device="cpu", resume=True)
    with pytest.raises(UsageError, match="other images"):
        fit(255 - tiny_images, run, tiny_config, device="cpu", resume=True)
    (run / CHECKPOINT).write_bytes((run / CHECKPOINT).read_bytes()[:500])
    with pytest.raises(UsageError, match=r"checkpoint\.pt cannot be read"):
        fit(tiny_images, run, tiny_config, device="cpu", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        fit(tiny_images, tmp_path / "file", tiny_config, device="cpu")


# ---- other processes, really ended


PROGRAM = """
import json, sys, time
from pathlib import Path
import numpy as np, torch
from mdps.training import TrainingConfig, fit
from mdps.runtime.errors import MdpsError
out, config, pause, resume, limit = Path(sys.argv[1]), json.loads(sys.argv[2]), *map(float, sys.argv[3:])
images = np.load(out.parent / "images.npy")

def on_log(row):
    time.sleep(pause)
    if limit and row["step"] == 5:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))

torch.set_num_threads(1)
try:
    fit(images, out, TrainingConfig.from_json(config), device="cpu", resume=bool(resume), on_log=on_log)
except MdpsError as error:
    sys.exit(f"{error.exit_code} {error}")
"""


def start(run, config, images, *, pause=0.0, resume=False, limit=0):
    np.save(run.parent / "images.npy", images)
    arguments = [str(run), json.dumps(config.to_json()), str(pause), str(int(resume)), str(limit)]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for(condition, process, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


def steps_logged(run):
    return len((run / LOG).read_bytes().splitlines()) if (run / LOG).exists() else 0


@POSIX
def test_a_process_killed_with_sigkill_resumes_to_the_same_bits(tmp_path, tiny_images, tiny_config):
    config = replace(tiny_config, steps=40, checkpoint_every=1, sample_every=0)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(tiny_images, whole, config, device="cpu")
    for steps, resume in ((5, False), (18, True)):
        with start(cut, config, tiny_images, pause=0.02, resume=resume) as process:
            wait_for(lambda steps=steps: steps_logged(cut) >= steps, process)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode == -signal.SIGKILL
        assert not (cut / DENOISER).exists()
        torch.load(cut / CHECKPOINT, weights_only=True)
    with start(cut, config, tiny_images, resume=True) as process:
        assert process.wait() == 0, process.communicate()
    assert same(tensors(whole / CHECKPOINT), tensors(cut / CHECKPOINT))
    assert (whole / DENOISER).read_bytes() == (cut / DENOISER).read_bytes()
    assert log_of(whole) == log_of(cut)


@POSIX
@pytest.mark.parametrize(("number", "minutes"), [(signal.SIGINT, 45.0), (signal.SIGTERM, None)])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, tiny_images, tiny_config, number, minutes):
    run = tmp_path / "run"
    config = replace(tiny_config, steps=10_000, checkpoint_every=10_000, sample_every=0, minutes=minutes)
    with start(run, config, tiny_images, pause=0.01) as process:
        wait_for(lambda: steps_logged(run) >= 3, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    step = torch.load(run / CHECKPOINT, weights_only=True)["step"]
    assert process.returncode == 1
    bound = f"{step}, 0.0 of its 45 minutes" if minutes else f"{step} of 10000"
    assert f"130 stopped by {number.name} after step {bound}; " in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert (out, log_of(run)[-1][0]) == ("", step)
    assert not (run / DENOISER).exists()


@POSIX
def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, tiny_images, tiny_config):
    run = tmp_path / "run"
    with start(run, replace(tiny_config, sample_every=0), tiny_images, limit=4000) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "1 " in err
    assert "run cannot be written (File too large)" in err
    assert "--resume" in err
    assert torch.load(run / CHECKPOINT, weights_only=True)["step"] == 4
    assert not [path for path in run.iterdir() if path.name.startswith(".mdps")]
    fit(tiny_images, run, replace(tiny_config, sample_every=0), device="cpu", resume=True)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "choose a folder that can be written to"),
        (errno.EACCES, "choose a folder that can be written to"),
        (errno.EIO, "see to that"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_what_cannot_be_written_says_what_is_left_and_what_to_do(
    tmp_path, tiny_images, tiny_config, monkeypatch, number, advice, begun
):
    run = tmp_path / "run"
    if begun:
        fit(tiny_images, run, replace(tiny_config, steps=2), device="cpu")

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(atomic, "write_bytes", refuse)
    with pytest.raises(MdpsError) as caught:
        fit(tiny_images, run, tiny_config, device="cpu", resume=begun)
    said = str(caught.value)
    assert f"{run} cannot be written ({os.strerror(number)})" in said
    assert ("make the folder writable" if begun and advice.startswith("choose") else advice) in said
    assert ("make room" in said) == (advice == "make room")
    assert ("its last checkpoint is whole" in said, "--resume" in said) == (begun, begun)
    assert ("holds no checkpoint yet" in said) != begun


def test_an_unwritable_folder_is_one_sentence(tmp_path, tiny_images, tiny_config):
    (tmp_path / "file").write_text("")
    with pytest.raises(MdpsError, match="cannot be written"):
        fit(tiny_images, tmp_path / "file" / "run", tiny_config, device="cpu")
