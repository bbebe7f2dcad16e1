"""Training in several processes: the same run as in one; mistakes and signals end all of them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from mdps.models.unet import UNetConfig
from mdps.runtime.errors import UsageError
from mdps.training import StoppedError, fit, fit_in_processes
from mdps.training.folder import CHECKPOINT, CONFIG, LOG
from mdps.training.launch import Relay


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


def test_torchrun_starts_the_processes_as_well(tmp_path, tiny_images, config):
    from PIL import Image

    (tmp_path / "good").mkdir()
    for index, image in enumerate(np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)):
        Image.fromarray(image).save(tmp_path / "good" / f"{index}.png")
    command = ["train", str(tmp_path / "good"), "--recipe", "small", "--image-size", "32", "--steps", "2"]
    command += ["--batch", "2", "--log-every", "1", "--device", "cpu"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for out, prefix in (("one", []), ("two", launcher)):
        done = subprocess.run(
            [sys.executable, *prefix, "-m", "mdps.cli", *command, "--out", str(tmp_path / out)],
            capture_output=True,
            text=True,
            timeout=300,
        )
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


@pytest.mark.slow  # on loaded cores the signal once came when nobody listened, and ended the test's own process
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_signal_to_the_first_process_stops_all_after_the_same_step(tmp_path, tiny_images, config):
    run = tmp_path / "run"

    def interrupt():
        while not (run / LOG).exists() or len(rows(run)) < 3:
            time.sleep(0.05)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # or it would end the tests
            os.kill(os.getpid(), signal.SIGTERM)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(StoppedError, match=r"stopped by SIGTERM after step \d+ of 100000; .*--resume"):
        fit_in_processes(2, tiny_images, run, replace(config, steps=100_000), device="cpu")
    waiting.join()
    assert torch.load(run / CHECKPOINT, weights_only=True)["step"] == rows(run)[-1]["step"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_signal_that_comes_before_the_processes_reaches_them():
    with Relay() as relay:
        os.kill(os.getpid(), signal.SIGTERM)
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            relay.to([process.pid])
            assert process.wait(30) == -signal.SIGTERM
