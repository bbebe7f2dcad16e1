"""The sweep of open settings: its maps and passes against a bundle's own, its choice, and what it keeps."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdps.benchmarks.data import category_of, find_categories
from mdps.benchmarks.evaluate import evaluate
from mdps.benchmarks.evaluate.bundle import BundlePredictor
from mdps.benchmarks.options import SweepOptions
from mdps.benchmarks.study import Bundles
from mdps.benchmarks.study.sweep import (
    PLAIN_TERMS,
    Setting,
    Sweep,
    Trial,
    _best,
    markdown,
    plot,
    run_sweep,
    sweep,
)
from mdps.benchmarks.study.terms import Scoring, Terms, draw, load_test_set, masks, scores
from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import load
from mdps.runtime.errors import UsageError

CHOICES: dict[str, Any] = {
    "image_size": 32, "backbone": "random_tiny", "noise_level": 198, "steps": 2, "seed": 0, "feature_size": 32,
}  # fmt: skip
SCORING = Scoring(eta=0.7, smoothing=2.0, top=2000.0)  # a blur of one pixel at 32 x 32, of 31 pixels the mean


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("bundles"), CHOICES, lambda _: None)


@pytest.fixture(scope="module")
def plain(bundles: Bundles, small_checkpoint: Path) -> Path:
    return bundles.get(small_checkpoint, "disc", PLAIN_TERMS)


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (3, 3, 32, 32)).astype(np.float32)


def test_terms_weighted_are_what_a_bundle_with_these_weights_gives(
    bundles: Bundles, plain: Path, small_checkpoint: Path, images: np.ndarray
) -> None:
    """Maps, scores, mask and second pass, against the score graph and the pipeline of an export of its own."""
    size = (32, 32)
    asked = {"eta": 0.7, "smoothing_sigma": SCORING.sigma(size), "top": SCORING.pixels(size), "guidance_scale": 30.0}
    with load(bundles.get(small_checkpoint, "disc", asked), calibrated=False, threads=1) as detector:
        found = detector.inspect(images)
    first = draw(plain, 30.0, images, None, 1).maps(SCORING)
    np.testing.assert_allclose(first, found.first_map[:, 0], atol=1e-5)
    np.testing.assert_allclose(scores(first, SCORING), found.first_score, atol=1e-5)
    made = masks(first, 0.1)
    assert np.mean(made == found.mask[:, 0]) > 0.998  # a pixel on the threshold may flip
    last = draw(plain, 30.0, images, found.mask[:, 0], 1).maps(SCORING)
    np.testing.assert_allclose(last, found.anomaly_map[:, 0], atol=1e-5)
    np.testing.assert_allclose(scores(last, SCORING), found.anomaly_score, atol=1e-5)
    assert np.abs(last - first).max() > 1e-3


def test_several_samples_are_averaged(plain: Path, small_checkpoint: Path, images: np.ndarray) -> None:
    several = Bundles(plain.parent, CHOICES | {"samples": 3}, lambda _: None)
    drawn = draw(several.get(small_checkpoint, "disc", PLAIN_TERMS), 100.0, images[:2], None, 1)
    with load(plain, calibrated=False, threads=1, samples=3) as detector:
        found = detector.inspect(images[:2])
    np.testing.assert_allclose(drawn.features, found.first_map[:, 0], atol=1e-5)


def test_units_mean_the_same_at_every_size() -> None:
    scoring = Scoring(eta=0.3, smoothing=1.0, top=500.0)
    assert scoring.sigma((64, 64)) == 1.0
    assert scoring.sigma((256, 256)) == 4.0
    assert scoring.pixels((256, 256)) == 500
    assert scoring.pixels((64, 64)) == 31
    assert Scoring(0.3, 0.0, 1.0).pixels((8, 8)) == 1
    assert Scoring(0.3, 0.0, 1e9).pixels((8, 8)) == 64
    assert Scoring.top_of(500, (256, 256)) == Scoring.top_of(31, (64, 64)) == 500


def test_a_mask_is_what_lies_above_the_share_of_each_maps_range() -> None:
    maps = np.array([[[0.0, 1.0], [2.0, 10.0]], [[5.0, 5.0], [5.0, 6.0]]], dtype=np.float32)
    np.testing.assert_array_equal(masks(maps, 0.1), [[[0, 0], [1, 1]], [[0, 0], [0, 1]]])


def trial(image: float, pixel: float, scale: float = 20.0, eta: float = 0.3, top: float = 500.0) -> Trial:
    return Trial(Setting(scale, Scoring(eta, 0.0, top)), image, pixel)


def test_finalists_are_the_best_weightings_and_the_default() -> None:
    trials = [
        trial(1.0, 0.9, scale=20.0),
        trial(0.9, 0.99, scale=20.0, top=125.0),
        trial(1.0, 0.95, scale=50.0),
        trial(0.8, 0.7, scale=100.0),
    ]
    usual = Setting(100.0, Scoring(0.3, 0.0, 500.0), 0.1)
    best = _best(trials, 2, usual)
    # The first two differ in the top pixels alone: their masks are the same, one of them goes on.
    assert [(one.scale, one.scoring.top) for one in best] == [(50.0, 500.0), (20.0, 500.0), (100.0, 500.0)]
    assert len(_best(trials, 3, usual)) == 3  # the default is among them


def test_of_equal_means_the_better_pixels_win() -> None:
    assert max(trial(1.0, 0.9), trial(0.9, 1.0), key=lambda one: one.merit).pixel_auroc == 1.0


# The whole job


@pytest.fixture(scope="module")
def dataset(write_category: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_category(tmp_path_factory.mktemp("data") / "disc", good=2, defective=3)


OPTIONS = SweepOptions(
    scales=(0.0, 30.0), etas=(0.3, 1.0), smoothings=(0.0, 2.0), tops=(500.0,), lambdas=(0.1, 0.5), finalists=1,
    threads=1, choices=CHOICES, command="mdps sweep",
)  # fmt: skip


@pytest.fixture(scope="module")
def swept(dataset: Path, small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sweep]:
    out = tmp_path_factory.mktemp("sweep")
    return out, run_sweep(small_checkpoint, dataset, out, OPTIONS, (dataset, small_checkpoint))


def test_every_setting_is_tried(swept: tuple[Path, Sweep]) -> None:
    out, found = swept
    tried = {(one.setting.scale, one.setting.scoring.eta, one.setting.scoring.smoothing) for one in found.first}
    assert tried == {(scale, eta, blur) for scale in (0.0, 30.0, 100.0) for eta in (0.3, 1.0) for blur in (0.0, 2.0)}
    assert len(found.first) == 12
    assert {one.setting.mask_lambda for one in found.masked} == {0.1, 0.5}
    assert found.chosen in found.masked
    assert found.chosen.merit == max(one.merit for one in found.masked)
    assert found.default.setting == Setting(100.0, Scoring(0.3, 0.0, 500.0), 0.1)
    saved = json.loads((out / "sweep.json").read_text())
    assert saved["chosen"] == found.chosen.to_json()
    assert saved["provenance"]["command"] == "mdps sweep"
    assert len(saved["provenance"]["checkpoint"]["sha256"]) == 64
    assert saved["confirmed"]["default"]["pixel_auroc"] == found.default.pixel_auroc  # on the same data here
    assert "## The same on disc, 5 test images" in (out / "sweep.md").read_text()
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_default_is_what_an_evaluation_of_a_default_export_measures(
    swept: tuple[Path, Sweep], dataset: Path, bundles: Bundles, small_checkpoint: Path
) -> None:
    (category,) = find_categories(dataset)
    with BundlePredictor(bundles.get(small_checkpoint, "disc", {}), threads=1) as judge:
        alone = evaluate(judge, category).metrics
    assert swept[1].default.image_auroc == pytest.approx(alone["image_auroc"], abs=1e-9)
    assert swept[1].default.pixel_auroc == pytest.approx(alone["pixel_auroc"], abs=1e-4)


def test_samples_are_drawn_once(
    swept: tuple[Path, Sweep], dataset: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Terms:
        raise AssertionError("drawn again")

    monkeypatch.setattr("mdps.benchmarks.study.terms.draw", refuse)
    again = sweep(small_checkpoint, dataset, swept[0], OPTIONS)
    assert again.trials == swept[1].trials
    with pytest.raises(AssertionError, match="drawn again"):
        sweep(small_checkpoint, dataset, swept[0], replace(OPTIONS, scales=(31.0,)))


def test_a_report_without_confirmation(swept: tuple[Path, Sweep]) -> None:
    alone = replace(swept[1], confirmed=None)
    assert "The same on" not in markdown(alone)
    assert plot(alone).startswith(b"\x89PNG")


def test_several_categories_need_a_choice(make_category: Callable[..., Path], plain: Path) -> None:
    root = make_category("a", good=1, defective=1).parent
    make_category("b", good=1, defective=1)
    from mdps.runtime.preprocessing import Preprocessing

    with pytest.raises(UsageError, match="has a, b: give the folder of one"):
        category_of(root, None)
    found = load_test_set(category_of(root, "b"), Preprocessing(image_size=(32, 32)), 1, 256)
    assert found.observations.shape == (2, 3, 32, 32)
    assert found.labels.tolist() == [False, True]


@pytest.mark.parametrize("second", [False, True])
def test_a_data_set_that_is_none_is_told_before_anything_is_exported(
    second: bool, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    first, other = (dataset, tmp_path / "empty") if second else (tmp_path / "empty", dataset)
    with pytest.raises(UsageError, match="empty"):
        run_sweep(tmp_path / "gone.pt", first, tmp_path / "out", OPTIONS, (other, tmp_path / "gone.pt"))


def test_a_preset_cannot_be_swept(dataset: Path, small_checkpoint: Path, tmp_path: Path) -> None:
    frozen = replace(OPTIONS, choices=CHOICES | {"mask_range": "frozen"})
    with pytest.raises(UsageError, match="leave out the preset and the mask range"):
        sweep(small_checkpoint, dataset, tmp_path, frozen)


def test_the_command(
    swept: tuple[Path, Sweep], dataset: Path, small_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", str(small_checkpoint), str(dataset), "--out", str(swept[0]), "--json", "--threads", "1"]
    command += ["--rho", "0,30", "--eta", "0.3,1", "--smoothing", "0,2", "--top", "500", "--lambda", "0.1,0.5"]
    command += ["--set", "finalists=1", "--set", "image-size=32", "--set", "backbone=random_tiny"]
    command += ["--set", "noise-level=198", "--set", "steps=2", "--set", "feature-size=32"]
    assert run(cli, command) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["trials"] == [one.to_json() for one in swept[1].trials]
    assert "sweep.md" in printed.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--rho", "-1"], "neither 'none' nor a list"), (["--confirm", "data"], "--confirm-ckpt belong together")],
)
def test_wrong_requests_are_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, ["sweep", "x.pt", "data", "--out", str(tmp_path), *arguments]) == 2
    assert sentence in capsys.readouterr().err
