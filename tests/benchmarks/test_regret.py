"""The regret of a tuning: true values are those of an evaluation, and what was chosen is compared with the best."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mdps.benchmarks.data import find_categories
from mdps.benchmarks.evaluate import evaluate
from mdps.benchmarks.evaluate.bundle import BundlePredictor
from mdps.benchmarks.regret import Row, compared, main, measure
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.errors import UsageError
from mdps.tuning.candidates import Candidate
from mdps.tuning.options import TuneOptions
from mdps.tuning.photographs import Seen
from mdps.tuning.search import Search
from mdps.tuning.tune import tune

FIRST = TuneOptions(budget_ms=1e6, per_kind=1, minutes=1e-9)  # the first view of the photograph alone
ONE = LoadOptions(threads=1)


@pytest.fixture
def category(make_category: Callable[..., Path]) -> Path:
    """Twelve images to train on, and test images with masks."""
    root = make_category(good=4, defective=5)
    rng = np.random.default_rng(0)
    for index in range(1, 12):
        pixels = 90 + 30 * np.sin(np.arange(40) / 7 + index) + rng.normal(0, 6, (40, 40))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / "train" / "good" / f"{index:03d}.png")
    return root


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


@pytest.fixture(autouse=True)
def _few_images() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def row(name: str, synthetic: float, true: float, eligible: bool = True) -> Row:
    return Row(name, 1.0, eligible, synthetic, true, true, true)


def test_the_choice_is_compared_with_the_best_within_the_budget() -> None:
    rows = [row("a", 0.9, 0.7), row("b", 0.8, 0.75), row("slow", 0.7, 0.95, eligible=False), row("c", 0.6, 0.6)]
    found = compared(rows, "a")
    assert (found.best.name, found.regret, found.within) == ("b", pytest.approx(0.05), False)
    assert [one.name for one in found.candidates] == ["slow", "b", "a", "c"]
    assert compared(rows, "b").regret == 0
    assert compared(rows[:2], "a").rank_correlation == pytest.approx(-1)


def test_one_candidate_is_the_best(bundle: Path, category: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mdps.tuning.tune.KINDS", ("shared",))
    monkeypatch.setattr("mdps.tuning.search.BLURS", (0.0,))
    found = measure(bundle, category, category / "train" / "good", FIRST, ONE, tmp_path / "out")
    assert len(found.candidates) == 1
    assert (found.regret, found.within) == (0, True)
    assert found.to_json()["rank_correlation"] is None


def test_values_are_those_of_tune_and_of_an_evaluation(
    bundle: Path, category: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    good = category / "train" / "good"
    monkeypatch.setattr("mdps.tuning.tune.crossfitted", _fitted_to_its_part)
    outcome = tune(bundle, good, FIRST, ONE, 0.05)
    found = measure(bundle, category, good, FIRST, ONE, tmp_path / "out")
    assert {one.name: one.synthetic for one in found.candidates} == {
        one.candidate.name: pytest.approx(one.value, abs=1e-3) for one in outcome.search.tried
    }
    mine = next(one for one in found.candidates if one.name == found.stored == outcome.chosen.candidate.name)
    with BundlePredictor(bundle, threads=1, force=True) as predictor:
        metrics = evaluate(predictor, find_categories(category)[0]).metrics
    assert mine.image == pytest.approx(metrics["image_auroc"], abs=1e-6)
    assert mine.pixel == pytest.approx(metrics["pixel_auroc"], abs=1e-3)


def _fitted_to_its_part(search: Search, candidate: Candidate, seen: Seen) -> tuple[Candidate, list[Any]]:
    """Fit terms to the images of the search alone, as a regret values them, in the place of all."""
    missing = len(seen.images) - len(candidate.raws[0].good)
    raws = tuple(
        replace(raw, good=np.concatenate([raw.good, raw.good[:1].repeat(missing, 0)])) for raw in candidate.raws
    )
    modules = [search.fit(raw, search.inputs(raw, search.images.fit)) for raw in candidate.raws]
    return replace(candidate, raws=raws), modules


def test_the_command_leaves_a_report_and_nothing_in_the_bundle(bundle: Path, category: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    arguments = [str(bundle), str(category), "--budget-ms", "1e6", "--minutes", "1e-9", "--threads", "1"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["regret.json", "regret.md"]
    found = json.loads((tmp_path / "out" / "regret.json").read_text())
    assert found["regret"] == found["best"]["true"] - found["chosen"]["true"] >= 0
    assert all(one["name"] in (tmp_path / "out" / "regret.md").read_text() for one in found["candidates"])


def test_test_images_and_a_set_without_defects_are_refused(bundle: Path, category: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="belongs to a test set"):
        measure(bundle, category, category / "test" / "good", FIRST, ONE, tmp_path / "out")
    shutil.rmtree(category / "test" / "spot")
    with pytest.raises(UsageError, match="should hold good and defective test images"):
        measure(bundle, category, category / "train" / "good", FIRST, ONE, tmp_path / "out")
