"""Training in several processes: the same run as in one; mistakes and signals end all of them."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mdps.models.unet import UNetConfig
from mdps.runtime.errors import UsageError
from mdps.training import fit, fit_in_processes
from mdps.training.folder import CHECKPOINT, CONFIG, LOG

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
TRAIN = [sys.executable, "-m", "mdps.cli", "train"]
SMALL = ["--recipe", "small", "--image-size", "32", "--batch", "2", "--set", "log-every=1", "--device", "cpu"]


@pytest.fixture
def good(tmp_path):
    """A folder of ten images for the command line."""
    folder = tmp_path / "good"
    folder.mkdir()
    for index, image in enumerate(np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)):
        Image.fromarray(image).save(folder / f"{index}.png")
    return folder


@pytest.fixture
def config(tiny_config):
    """Without dropout, whose masks are each process's own."""
    network = UNetConfig.from_json(tiny_config.network.to_json() | {"dropout": 0.0})
    return replace(tiny_config, network=network, steps=12, clip=1.0, rotate=True, sample_every=0)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rows(run):
    return [json.loads(line) for line in (run / LOG).read_text().splitlines()]


def test_two_processes_train_as_one_does_with_the_same_global_batch(tmp_path, tiny_images, config):
    one, two = tmp_path / "one", tmp_path / "two"
    fit(tiny_images, one, config, device="cpu")
    assert fit_in_processes(2, tiny_images, two, config, device="cpu").is_file()
    np.testing.assert_allclose([row["loss"] for row in rows(two)], [row["loss"] for row in rows(one)], rtol=1e-5)
    for ours, theirs in zip(rows(two), rows(one), strict=True):
        quarters = [[part or 0.0 for part in row["loss_by_quarter"]] for row in (ours, theirs)]
        np.testing.assert_allclose(*quarters, rtol=1e-4)
    a, b = (torch.load(run / CHECKPOINT, weights_only=True)["ema"] for run in (one, two))
    for name, weight in a.items():
        torch.testing.assert_close(b[name], weight, atol=1e-4, rtol=1e-4)
    assert json.loads((two / CONFIG).read_text())["sessions"][0]["processes"] == 2
    assert len(list((two / "tensorboard").iterdir())) == 1  # one process writes


def test_torchrun_starts_the_processes_as_well(tmp_path, good):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for out, program in (("one", TRAIN), ("two", [*launcher, *TRAIN[1:]])):
        command = [*program, str(good), *SMALL, "--steps", "2", "--out", str(tmp_path / out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("wrote") == 1
    losses = [[row["loss"] for row in rows(tmp_path / out)] for out in ("one", "two")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_a_batch_that_does_not_divide_is_refused(tmp_path, tiny_images, config, monkeypatch):
    with pytest.raises(UsageError, match="a batch of 4 does not divide among 3 processes"):
        fit_in_processes(3, tiny_images, tmp_path / "run", config, device="cpu")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="a batch of 4 does not divide among 3 processes"):
        fit(tiny_images, tmp_path / "run", config, device="cpu")
    with pytest.raises(UsageError, match="torchrun has started"):
        fit_in_processes(2, tiny_images, tmp_path / "run", config, device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_mistake_comes_back_as_one_error(tmp_path, config, capfd):
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        fit_in_processes(2, tmp_path / "nowhere", tmp_path / "run", config, device="cpu")
    assert "Traceback" not in capfd.readouterr().err


@POSIX
def test_a_signal_to_the_first_process_stops_all_after_the_same_step(tmp_path, good):
    run = tmp_path / "run"
    command = [*TRAIN, str(good), *SMALL, "--steps", "100000", "--processes", "2", "--out", str(run)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 120
        while not (run / LOG).exists() or len(rows(run)) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    step = torch.load(run / CHECKPOINT, weights_only=True)["step"]
    assert process.returncode == 130, err
    assert f"stopped by SIGTERM after step {step} of 100000" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert step == rows(run)[-1]["step"]


EARLY = """
import os, signal, subprocess, sys
from mdps.training.launch import Relay

with Relay() as relay:
    os.kill(os.getpid(), signal.SIGTERM)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        relay.to([process.pid])
        print(process.wait(30))
"""


@POSIX
def test_a_signal_that_comes_before_the_processes_reaches_them():
    # In a program of its own: the tests' own process may not be there any more after a signal.
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, [str(-signal.SIGTERM)]), done.stderr
