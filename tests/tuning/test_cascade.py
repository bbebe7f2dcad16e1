"""The published method judges again what is near the threshold where that finds clearly more, and within the budget."""

import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import binomtest

from mdps.runtime import load
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.image_files import find_images
from mdps.runtime.manifest import Manifest
from mdps.runtime.pipeline import Inspection, Pipeline
from mdps.runtime.preprocessing import Observations
from mdps.serving.calibrate import calibrate_folder
from mdps.tuning.cascade import FIRST, MOST, Found, Judged, Published, bands, chance, look
from mdps.tuning.options import TuneOptions
from mdps.tuning.outcome import Outcome
from mdps.tuning.photographs import Seen
from mdps.tuning.search import Search
from mdps.tuning.tune import tune
from mdps.tuning.work import Work

GOOD = np.arange(1, 100, dtype=np.float32) / 100  # whose highest is the threshold
BAD = np.linspace(0.92, 1.06, 24, dtype=np.float32)  # 12 on either side of it, all in the band of a tenth
MISSED = GOOD[-1] >= BAD

Array = NDArray[np.float32]


class Answers:
    """A detector that reads the score of an image in it."""

    def __init__(self, ms: float = 500.0, stop: int = 1000) -> None:
        self.ms, self.stop, self.asked, self.ranges = ms, stop, 0, set[Any]()

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def inspect(self, image: Array, *, mask_range: Any, early_exit: bool) -> Any:
        if self.asked == self.stop:
            raise KeyboardInterrupt
        self.asked += 1
        self.ranges.add(mask_range)
        maps, times = score(image)[:, None], {"first_pass": self.ms - 1, "score": 1.0}
        return SimpleNamespace(anomaly_map=maps, anomaly_score=maps[:, 0, 0, 0], times=times)

    def first_maps(self, images: Array) -> Array:
        return score(images)[:, None]


def pictures(scores: Any) -> Seen:
    """Return pictures of 2 x 1 pixels that hold a score in four bytes."""
    held = np.asarray(scores, np.float32)[:, None].view(np.uint8).reshape(-1, 2, 1, 2)
    return Seen(np.concatenate([held, held[..., :1]], axis=3), np.zeros(0, np.uint8))


def score(images: Array) -> Array:
    """Return the scores [n, 1, 1] that were put into pictures."""
    held = np.rint((images[:, :2] + 1) * 127.5).astype(np.uint8).transpose(0, 2, 3, 1)
    found: Array = np.ascontiguousarray(held.reshape(len(images), -1)).view(np.float32)[:, None]
    return found


def looked(
    folder: Path, again: Any, answers: Any = None, *, bad: Array = BAD, rate: float = 0.01, ms: float = 50.0,
    seconds: float = 3600.0, mask_range: str = "per-image", good: Array = GOOD,
) -> Found:  # fmt: skip
    """Look with 100 ms an image, where the published method scores the good images and the defects so."""
    answers = answers or Answers()
    seen = [pictures(one) for one in (good, again)]
    published = Published(lambda: answers, *seen, mask_range, Work(folder / "work", {}), lambda said: None)
    return look(Judged(GOOD, bad, rate, ms), published, 100.0, seconds)


@pytest.mark.parametrize("room", [0.0, 0.019, 0.02, 0.1, 0.33, 1.0])
def test_the_band_is_the_widest_that_the_budget_allows(room: float) -> None:
    found = next(bands(GOOD, float(GOOD[-1]), room), None)
    if room < 0.02:
        assert found is None
        return
    assert found is not None
    inside = len(found.rows(GOOD))
    assert found.share == inside / 100 <= room
    assert inside == 99 or (inside + 1) / 100 > room
    assert found.high - GOOD[-1] == pytest.approx(GOOD[-1] - found.low)


def test_the_band_holds_no_more_of_further_good_parts_than_promised() -> None:
    rng, shares = np.random.default_rng(0), []
    for _ in range(2000):
        scores = rng.random(49).astype(np.float32)
        found = next(bands(scores, float(scores.max()), 0.1))
        assert found.share == 0.1
        shares.append(min(found.high, 1.0) - found.low)  # of scores between 0 and 1
    assert np.mean(shares) == pytest.approx(0.1, abs=0.004)  # four standard errors


def test_scores_of_one_value_have_no_band() -> None:
    assert not list(bands(np.ones(50, np.float32), 1.0, 0.5))
    assert not list(bands(np.array([0.5] * 20 + [1.0], np.float32), 1.0, 0.5))


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (5, 0), (4, 0), (7, 1), (3, 9)])
def test_chance_is_that_of_a_sign_test(gained: int, lost: int) -> None:
    wanted = binomtest(gained, gained + lost, alternative="greater").pvalue if gained + lost else 1.0
    assert chance(gained, lost) == pytest.approx(wanted)


def test_a_published_method_that_finds_clearly_more_is_chosen(tmp_path: Path) -> None:
    found = looked(tmp_path, np.where(np.arange(24) < 3, 0.5, 2.0))
    assert found.cascade is not None
    low, high = found.cascade.low, found.cascade.high
    assert (low, high) == (float(GOOD[89]), 2 * float(GOOD[-1]) - float(GOOD[89]))
    assert found.told == {
        "said": found.told["said"], "band": [low, high], "share": 0.1, "ms": 100.0, "published_ms": 500.0,
        "gained": 9, "lost": 0, "chance": round(0.5**9, 4),
        "missed": {"without": 12, "with": 3, "of": 24}, "false_alarms": {"without": 0, "with": 0, "of": 99},
    }  # fmt: skip
    assert "with it 3 of 24 synthetic defects are missed, 12 without; of 99 good images 0 fail" in found.told["said"]
    np.testing.assert_array_equal(found.judged.bad, np.float32([low] * 3 + [high] * 21))
    assert [float(one[0, 0]) for one in found.maps.values()] == [0.5] * 3 + [2.0] * 21


def test_both_thresholds_meet_on_the_scale_of_the_tuned_one(tmp_path: Path) -> None:
    """The published one lets as many good images near it fail as the tuned one, here one."""
    found = looked(tmp_path, np.full(24, 6.0), rate=0.02, good=3 * GOOD)
    cascade, threshold = found.cascade, float(GOOD[-2])
    assert cascade is not None
    scale = (cascade.high - cascade.low) / (cascade.published_high - cascade.published_low)
    assert cascade.low + scale * (3 * threshold - cascade.published_low) == pytest.approx(threshold)
    assert cascade.low - scale * cascade.published_low == pytest.approx(0.0, abs=1e-6)
    np.testing.assert_allclose(found.judged.good, GOOD, rtol=1e-6)
    assert found.told["false_alarms"] == {"without": 1, "with": 1, "of": 99}


@pytest.mark.parametrize(
    ("again", "why"),
    [
        (BAD, "alone is right about 0, the tuned detector alone about 0: no clear gain"),
        (np.where(MISSED, 2.0, 0.5), "ranks a defective part above a good one in 50% of pairs"),
        (np.where(np.arange(24) < 4, 2.0, BAD), "alone is right about 4, the tuned detector alone about 0"),
        (np.where(np.arange(24) % 12 < 5, 2.6 - BAD - 1.0 * ~MISSED, BAD), "is right about 5, .* alone about 5"),
    ],
)
def test_one_that_does_not_is_not(tmp_path: Path, again: Any, why: str) -> None:
    found = looked(tmp_path, again)
    assert found.cascade is None
    assert re.match(f"none: .*{why}", found.told["said"])


def test_one_that_is_too_slow_for_the_budget_is_asked_no_further(tmp_path: Path) -> None:
    answers = Answers(ms=2600.0)
    found = looked(tmp_path, np.full(24, 2.0), answers)
    assert (found.cascade, answers.asked) == (None, FIRST)
    assert "takes 2600 ms, so that the budget lets it judge 1.9% of good parts again" in found.told["said"]
    assert looked(tmp_path / "whole", BAD, ms=100.0).told["said"].endswith("takes the whole budget")


def test_it_is_asked_about_a_bounded_number_of_images(tmp_path: Path) -> None:
    """The band is narrower where many defects lie in it, and all of them are asked about."""
    many, again, answers = np.linspace(0.91, 1.06, 200, dtype=np.float32), np.full(200, 2.0), Answers()
    found = looked(tmp_path / "a", again, answers, bad=many)
    assert found.cascade is not None
    inside = sum(found.cascade.low <= float(one) <= found.cascade.high for one in many)
    assert answers.asked == 20 + inside <= MOST < 20 + inside + 28  # so many more for each good image
    answers = Answers()
    looked(tmp_path / "b", again, answers, bad=many, seconds=50.0)
    assert answers.asked <= 20  # half a second each, a fifth of the time left
    assert "no time was left" in looked(tmp_path / "c", BAD, seconds=5.0).told["said"]
    answers = Answers()
    assert "no time was left" in looked(tmp_path / "d", BAD, answers, seconds=-1.0).told["said"]
    assert not answers.asked


def test_a_look_that_was_stopped_goes_on(tmp_path: Path) -> None:
    again = np.full(24, 2.0)
    with pytest.raises(KeyboardInterrupt):
        looked(tmp_path, again, Answers(stop=35))
    rest = Answers()
    found = looked(tmp_path, again, rest)
    assert (rest.asked, rest.closed) == (20 + 24 - 35, True)
    assert found.told == looked(tmp_path / "other", again).told


def test_a_frozen_mask_range_is_that_of_good_images(tmp_path: Path) -> None:
    answers = Answers()
    looked(tmp_path, np.full(24, 2.0), answers, mask_range="frozen")
    assert answers.ranges == {(float(GOOD[0]), float(GOOD[84]))}
    assert "whole data set" in looked(tmp_path, BAD, mask_range="dataset").told["said"]


def test_one_that_finds_no_more_of_all_together_is_dropped(tmp_path: Path) -> None:
    """It is right about six false alarms, and no defect was missed."""
    good = np.where(GOOD[85] > GOOD, 5.0, 0.5)
    found = looked(tmp_path, np.full(8, 2.0), Answers(ms=357.0), bad=np.full(8, 0.95, np.float32), rate=0.07, good=good)
    assert found.cascade is None
    assert found.told["said"] == "none: with it 0 of 8 synthetic defects are missed, 0 without"


# A whole tuning


def parts(folder: Path, count: int, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for index in range(count):
        pixels = 110 + 40 * np.sin(np.arange(40)[None, :] / 5) + rng.normal(0, 5, (40, 40)) + rng.normal(0, 4)
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert("RGB").save(folder / f"{index:02d}.png")
    return folder


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return parts(tmp_path / "good", 20)


def tuned(
    bundle: Path, good: Path, monkeypatch: pytest.MonkeyPatch, *, sees: bool, **options: Any
) -> tuple[Outcome, Manifest]:
    """Tune for the first view of the photograph, beside a published method that sees every change of these images."""
    manifest = Manifest.read(bundle)
    known = np.stack([manifest.preprocessing(path) for path in find_images([good])])

    def inspect(self: Pipeline, observations: Any, mask_range: Any, exit_limit: Any = None) -> Inspection:
        images = Observations.of(observations).images
        maps = np.stack([np.abs(known - image).max(axis=1, keepdims=True) for image in images])
        maps = maps[range(len(images)), maps.max(axis=(2, 3, 4)).argmin(axis=1)] + np.float32(0.01)
        scores = maps.max(axis=(1, 2, 3)) if sees else np.ones(len(images), np.float32)
        times = {"first_pass": 1e6, "masked_pass": 0.0, "score": 0.0}
        return Inspection(maps, scores, maps * 0, maps, scores, images, times, np.zeros(len(images), np.bool_))

    monkeypatch.setattr(Pipeline, "inspect", inspect)
    monkeypatch.setattr(Search, "run", lambda self, views: self._photographs(views[0]))
    how = replace(TuneOptions(budget_ms=4.1e5, per_kind=5, minutes=1e9), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tune(bundle, good, how, LoadOptions(threads=1), 0.05)
    return found, Manifest.read(bundle)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def test_a_tuning_with_a_cascade_judges_again_what_it_promised(
    bundle: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, manifest = tuned(bundle, good, monkeypatch, sees=True)
    tuning = manifest.tunings["default"]
    told = tuning.evidence["cascade"]
    assert tuning.cascade is not None, told
    assert told["band"] == [tuning.cascade.low, tuning.cascade.high]
    assert told["ms"] <= 4.1e5
    calibration = manifest.calibrations["default"]
    missed = int((found.shown.scores <= calibration.threshold).sum())
    assert missed == told["missed"]["with"] < told["missed"]["without"]
    fitted = np.array([*tuning.evidence["fitted"].values()])
    assert int((fitted > calibration.threshold).sum()) == told["false_alarms"]["with"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert calibrate_folder(bundle, good, 0.05, threads=1) == calibration
    others = find_images([parts(good.with_name("others"), 60, seed=1)])
    with load(bundle, threads=1, force=True) as detector:
        again = [one.judged_by for one in detector.batch(others)].count("published")
    assert 0 < again / 60 <= told["share"] == round(8 / 21, 4)
    page = bundle.with_name("bundle.tune.html").read_text(encoding="utf-8")
    assert f"Cascade: {told['said']}." in page
    assert found.told()["cascade"] == told["said"]


@pytest.mark.parametrize(
    ("sees", "options", "why"),
    [(False, {}, "none: near the threshold"), (True, {"cascade": False}, "none: it was not asked for")],
)
def test_a_tuning_without_one_says_why(
    bundle: Path, good: Path, monkeypatch: pytest.MonkeyPatch, sees: bool, options: Any, why: str
) -> None:
    found, manifest = tuned(bundle, good, monkeypatch, sees=sees, **options)
    tuning = manifest.tunings["default"]
    assert tuning.cascade is None
    assert tuning.evidence["cascade"]["said"].startswith(why)
    assert found.told()["cascade"].startswith(why)
