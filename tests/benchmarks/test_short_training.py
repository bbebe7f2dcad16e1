"""The study of short trainings: its rows, that it goes on where it stopped, and what its numbers are."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mdps.benchmarks import short_training
from mdps.benchmarks.short_training import main, measure
from mdps.models.checkpoints import load_denoiser
from mdps.runtime.calibration import linear_error, signal_step
from mdps.training import TrainingConfig, fit


@pytest.fixture
def category(make_category: Callable[..., Path]) -> Path:
    root = make_category(good=8, defective=4, size=(32, 32))
    for path in (root / "test" / "good").iterdir():
        shutil.copy(path, root / "train" / "good" / f"1{path.name}")
    return root


@pytest.fixture
def config(tiny_config: TrainingConfig) -> TrainingConfig:
    return replace(tiny_config, network=replace(tiny_config.network, image_size=16))


def test_every_stop_is_a_row_and_a_stopped_study_goes_on(
    category: Path, config: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure(category, tmp_path / "out", config, [2])
    rows = measure(category, tmp_path / "out", config, [2, 4])
    assert [row["steps"] for row in rows] == [2, 4]
    assert rows[0] == first[0]
    assert rows[1]["core_seconds"] > rows[0]["core_seconds"] > 0
    assert json.loads((tmp_path / "out" / "short_training.json").read_text())["rows"] == rows
    assert "| 4 |" in (tmp_path / "out" / "short_training.md").read_text()
    monkeypatch.setattr(short_training, "_trained", None)  # nothing is left to train
    assert measure(category, tmp_path / "out", config, [2, 4]) == rows
    with pytest.raises(TypeError):
        measure(category, tmp_path / "out", replace(config, seed=1), [2])


def test_a_network_that_predicts_nothing_errs_by_one(category: Path, config: TrainingConfig, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)
    denoiser = load_denoiser(fit(images, tmp_path / "run", replace(config, steps=1), device="cpu"))
    for parameter in denoiser.network.out[-1].parameters():
        parameter.zero_()
    held = short_training._pictures(short_training.category_of(category), 16, 1).held
    assert len(held) == 2
    assert short_training._low_loss(denoiser, held) == pytest.approx(1, abs=0.05)
    filters = linear_error(held, signal_step(denoiser.schedule).alpha_t)
    assert short_training._of_filter(denoiser, held) * filters == pytest.approx(1, abs=0.1)
    # The call then gives the noised image, scaled: x0 = y + noise sqrt((1 - a) / a).
    a = denoiser.schedule.alphas_cumprod[19]
    clean, samples = short_training._reconstructed(denoiser, held, 20)
    assert (samples[:, 0] - clean).std() == pytest.approx(((1 - a) / a) ** 0.5, rel=0.1)
    assert torch.equal(samples[0, 0] - clean[0] > 0, samples[1, 0] - clean[1] > 0)  # one noise for all images


def test_another_runs_denoiser_is_valued(category: Path, config: TrainingConfig, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)
    path = fit(images, tmp_path / "run", replace(config, steps=3), device="cpu")
    assert main([str(category), "--ckpt", str(path), "--out", str(tmp_path / "out")]) == 0
    (row,) = json.loads((tmp_path / "out" / "short_training.json").read_text())["rows"]
    assert row["steps"] == 3
    assert [value["level"] for value in row["values"]] == [20, 50]
    assert main([str(category), "--out", str(tmp_path / "other"), "--change", "speed=3"]) == 2
