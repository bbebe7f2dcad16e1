"""A bundle as a predictor: against a loop over its detector, with other passes, crops, mask ranges and calibrations."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from mdps.benchmarks.data import find_categories
from mdps.benchmarks.data.samples import Category
from mdps.benchmarks.evaluate import evaluate
from mdps.benchmarks.evaluate.bundle import BundlePredictor
from mdps.runtime import load
from mdps.runtime.calibration import Calibration
from mdps.runtime.errors import CalibrationError, UsageError
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.settings import Settings

Change = Callable[[Settings], Settings]


@pytest.fixture
def category(make_category: Callable[..., Path]) -> Category:
    (found,) = find_categories(make_category(good=2, defective=3))
    return found


@pytest.fixture
def copy_of(tiny_bundle: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny bundle with another manifest."""

    def make(**changes: Any) -> Path:
        folder = tmp_path / "bundle"
        shutil.copytree(tiny_bundle, folder)
        replace(Manifest.read(folder), **changes).write(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def predictor(tiny_bundle: Path) -> Iterator[BundlePredictor]:
    with BundlePredictor(tiny_bundle, threads=1, batch=2) as opened:
        yield opened


def mask_settings(**changes: Any) -> Change:
    return lambda settings: replace(settings, mask=replace(settings.mask, **changes))


def sampler(**changes: Any) -> Change:
    return lambda settings: replace(settings, sampler=replace(settings.sampler, **changes))


def score(**changes: Any) -> Change:
    return lambda settings: replace(settings, score=replace(settings.score, **changes))


def paths_of(category: Category) -> list[Path]:
    return [sample.path for sample in category.test]


def pixels(category: Category, maps: list[np.ndarray], cut: tuple[slice, slice]) -> tuple[np.ndarray, np.ndarray]:
    """Truth inside `cut` and the maps enlarged to it by torch, flat."""
    truths, values = [], []
    for sample, anomaly_map in zip(category.test, maps, strict=True):
        truth = sample.truth()[cut]
        given = torch.from_numpy(np.ascontiguousarray(anomaly_map))[None, None]
        values.append(torch.nn.functional.interpolate(given, truth.shape, mode="bilinear")[0, 0].numpy().ravel())
        truths.append(truth.ravel())
    return np.concatenate(truths), np.concatenate(values)


ALL = (slice(None), slice(None))


def test_an_evaluation_is_a_loop_over_the_detector(
    tiny_bundle: Path, predictor: BundlePredictor, category: Category
) -> None:
    found = evaluate(predictor, category)
    with load(tiny_bundle, calibrated=False, threads=1) as detector:
        results = [detector(path) for path in paths_of(category)]
    truth, values = pixels(category, [result.anomaly_map for result in results], ALL)
    labels, scores = [sample.defective for sample in category.test], [result.score for result in results]
    assert found.metrics["image_auroc"] == pytest.approx(roc_auc_score(labels, scores))
    assert found.metrics["pixel_auroc"] == pytest.approx(roc_auc_score(truth, values), abs=1e-5)
    assert found.metrics["pixel_ap"] == pytest.approx(average_precision_score(truth, values), abs=1e-5)
    np.testing.assert_allclose([row.score for row in found.rows], scores, rtol=1e-5)


def test_a_judge_gives_score_and_map_for_each_path_in_order(predictor: BundlePredictor, category: Category) -> None:
    answers = list(predictor(paths_of(category)))
    (last,) = predictor(paths_of(category)[-1:])
    assert len(answers) == 5
    assert answers[-1][0] == pytest.approx(last[0], abs=1e-5)
    np.testing.assert_allclose(answers[-1][1], last[1], atol=1e-5)


def test_a_broken_image_is_answered_with_a_sentence(predictor: BundlePredictor, category: Category) -> None:
    paths = paths_of(category)
    whole = list(predictor.predictions(paths))
    paths[1].write_bytes(b"torn")
    found = list(predictor.predictions(paths))
    assert isinstance(found[1], str)
    assert paths[1].name in found[1]
    assert [prediction.score for prediction in found if not isinstance(prediction, str)] == pytest.approx(
        [prediction.score for index, prediction in enumerate(whole) if index != 1 and not isinstance(prediction, str)],
        abs=1e-5,
    )


def test_provenance_names_what_computed(tiny_bundle: Path, predictor: BundlePredictor) -> None:
    found = predictor.provenance
    assert found["image_size"] == list(Manifest.read(tiny_bundle).preprocessing.network_size)
    assert found["backbone"] == Manifest.read(tiny_bundle).settings.score.backbone
    assert found["bundle_sha256"] == hashlib.sha256((tiny_bundle / "manifest.json").read_bytes()).hexdigest()
    assert found["checkpoint"] == Manifest.read(tiny_bundle).checkpoint.to_json()
    assert found["settings"] == Manifest.read(tiny_bundle).settings.to_json()
    assert found["seed"] == 0
    assert {"mdps", "python", "numpy", "onnxruntime", "scikit-learn"} <= set(found["versions"])  # type: ignore[call-overload]
    json.dumps(found)


# Geometry


@pytest.mark.parametrize(
    ("preprocessing", "cut_truth", "cut_map"),
    [
        (Preprocessing((40, 40), "input", 32), (slice(4, 36), slice(4, 36)), ALL),
        (Preprocessing((32, 32), "metrics", 24), (slice(5, 35), slice(5, 35)), (slice(4, 28), slice(4, 28))),
        (Preprocessing((32, 32), roi=(6, 2, 32, 36)), (slice(2, 38), slice(6, 38)), ALL),
    ],
)
def test_truth_goes_where_the_image_went(
    copy_of: Callable[..., Path],
    category: Category,
    preprocessing: Preprocessing,
    cut_truth: tuple[slice, slice],
    cut_map: tuple[slice, slice],
) -> None:
    bundle = copy_of(preprocessing=preprocessing)
    with load(bundle, calibrated=False, threads=1) as detector:
        maps = [detector(path).anomaly_map[cut_map] for path in paths_of(category)]
    truth, values = pixels(category, maps, cut_truth)
    assert truth.any()
    with BundlePredictor(bundle, threads=1) as predictor:
        found = evaluate(predictor, category)
        shown = predictor.covered((40, 40))
    assert found.metrics["pixel_auroc"] == pytest.approx(roc_auc_score(truth, values), abs=1e-5)
    box = (cut_truth[1].start, cut_truth[0].start, cut_truth[1].stop, cut_truth[0].stop)
    assert shown == pytest.approx(box)


def test_a_region_of_interest_outside_a_picture_is_that_pictures_error(
    copy_of: Callable[..., Path], category: Category
) -> None:
    from PIL import Image

    Image.new("L", (20, 20)).save(paths_of(category)[0])
    with BundlePredictor(copy_of(preprocessing=Preprocessing((32, 32), roi=(6, 2, 32, 36))), threads=1) as predictor:
        found = evaluate(predictor, category)
    assert [row.path for row in found.failed] == ["test/good/000.png"]
    assert "region of interest" in str(found.failed[0].error)


# Other settings of the passes


@pytest.mark.parametrize(
    "change",
    [
        sampler(masked_pass=None),
        sampler(seed=5),
        sampler(samples=2),
        lambda s: sampler(first_pass=replace(s.sampler.first_pass, guidance_scale=20.0, steps=2))(s),
        mask_settings(mask_lambda=0.6),
    ],
    ids=["no mask pass", "seed", "samples", "scale and steps", "lambda"],
)
def test_settings_of_the_passes_change_without_an_export(
    tiny_bundle: Path, copy_of: Callable[..., Path], predictor: BundlePredictor, category: Category, change: Change
) -> None:
    """As if the bundle had been exported so: only its manifest would differ."""
    one = paths_of(category)[-1:]
    bundle = copy_of(settings=change(Manifest.read(tiny_bundle).settings))
    with load(bundle, calibrated=False, threads=1) as detector:
        expected = detector(one[0])
    with BundlePredictor(tiny_bundle, changes=change, threads=1) as changed:
        ((value, anomaly_map),) = changed(one)
        assert changed.provenance["settings"] == Manifest.read(bundle).settings.to_json()
    assert value == pytest.approx(expected.score, rel=1e-5)
    np.testing.assert_allclose(anomaly_map, expected.anomaly_map, atol=1e-5)
    ((unchanged, _),) = predictor(one)
    assert value != pytest.approx(unchanged, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (score(eta=1.0), "score.eta"),
        (score(stages=(1, 2)), "score.stages"),
        (score(smoothing_sigma=2.0), "score.smoothing_sigma"),
        (score(top=3), "score.top"),
        (sampler(gradient="jacobian-free"), "sampler.gradient"),
        (sampler(guidance_norm="squared"), "sampler.guidance_norm"),
        (sampler(mask_rule="replace"), "sampler.mask_rule"),
    ],
)
def test_what_the_graphs_compute_cannot_be_changed(tiny_bundle: Path, change: Change, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} .* in its graphs.*export the checkpoint again"):
        BundlePredictor(tiny_bundle, changes=change)


def test_a_plan_that_does_not_fit_is_refused_before_the_first_image(tiny_bundle: Path) -> None:
    with pytest.raises(UsageError, match="not divisible by 7 steps"):
        BundlePredictor(tiny_bundle, changes=lambda s: sampler(first_pass=replace(s.sampler.first_pass, steps=7))(s))


def test_guidance_cannot_be_asked_of_a_bundle_exported_without(tiny_bundle: Path, copy_of: Callable[..., Path]) -> None:
    manifest = Manifest.read(tiny_bundle)
    plain = {role: graph for role, graph in manifest.graphs.items() if role != "guided_step"}
    with pytest.raises(UsageError, match=r"exported without guidance.*--guidance-scale"):
        BundlePredictor(copy_of(graphs=plain))


# Mask ranges


def test_the_range_of_the_whole_test_set_is_measured_and_said(tiny_bundle: Path, category: Category) -> None:
    paths = paths_of(category)
    with load(tiny_bundle, calibrated=False, threads=1) as plain:
        observations = np.stack([plain.preprocessing(path) for path in paths])
        firsts = [plain.inspect(observations[i : i + 1]).first_map for i in range(len(paths))]
    low, high = min(m.min() for m in firsts), max(m.max() for m in firsts)
    with BundlePredictor(tiny_bundle, changes=mask_settings(range="dataset", mask_lambda=0.5), threads=1) as predictor:
        found = evaluate(predictor, category)
        scores = [predictor._detector.inspect(o[None], mask_range=(low, high)).anomaly_score[0] for o in observations]
    np.testing.assert_allclose([row.score for row in found.rows], scores, rtol=1e-4)
    with BundlePredictor(tiny_bundle, changes=mask_settings(mask_lambda=0.5), threads=1) as per_image:
        others = [row.score for row in evaluate(per_image, category).rows]
    assert not np.allclose(others, scores, rtol=1e-4)
    assert found.provenance["uses_test_set"] is True
    assert [problem for problem in found.problems if "these numbers use the test set" in problem]


def test_the_range_leaves_out_what_cannot_be_read(tiny_bundle: Path, category: Category) -> None:
    paths_of(category)[0].write_bytes(b"")
    with BundlePredictor(tiny_bundle, changes=mask_settings(range="dataset"), threads=1, batch=2) as predictor:
        found = evaluate(predictor, category)
    assert len(found.failed) == 1
    assert found.images == 4


def test_a_frozen_range_needs_its_calibration(
    tiny_bundle: Path, copy_of: Callable[..., Path], category: Category
) -> None:
    bundle = copy_of(settings=mask_settings(range="frozen")(Manifest.read(tiny_bundle).settings))
    with (
        BundlePredictor(bundle, threads=1) as predictor,
        pytest.raises(CalibrationError, match=r'"frozen" .*mdps calibrate'),
    ):
        evaluate(predictor, category)
    with BundlePredictor(bundle, changes=sampler(masked_pass=None), threads=1) as predictor:
        assert evaluate(predictor, category, every=3).images == 2  # no pass runs under a mask


# Calibrations


def calibration(**changes: Any) -> Calibration:
    fields = {
        "threshold": 0.5, "false_alarm_rate": 0.1, "expected_false_alarm_rate": 0.1, "images": 9, "mask_low": 0.0,
        "mask_high": 2.0, "map_low": 0.0, "map_high": 1.0, "samples": 1, "seed": 0,
    }  # fmt: skip
    return Calibration(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_threshold_of_a_calibration_is_counted(
    predictor: BundlePredictor, copy_of: Callable[..., Path], category: Category
) -> None:
    scores = [row.score or 0.0 for row in evaluate(predictor, category).rows]
    threshold = float(np.median(scores))
    with BundlePredictor(copy_of(calibrations={"default": calibration(threshold=threshold)}), threads=1) as calibrated:
        found = evaluate(calibrated, category)
    assert found.threshold == threshold
    counted = found.verdicts() or {}
    assert counted["false_alarms"] == sum(s > threshold for s in scores[:2])
    assert counted["missed"] == sum(s <= threshold for s in scores[2:])


@pytest.mark.parametrize("change", [mask_settings(mask_lambda=0.3), sampler(samples=2)])
def test_a_threshold_of_other_settings_is_not_counted_and_that_is_said(
    copy_of: Callable[..., Path], change: Change
) -> None:
    with BundlePredictor(copy_of(calibrations={"default": calibration()}), changes=change, threads=1) as predictor:
        assert predictor.threshold is None
        assert any("calibrated with other settings" in note for note in predictor.notes)


def test_another_seed_keeps_the_threshold(copy_of: Callable[..., Path]) -> None:
    with BundlePredictor(
        copy_of(calibrations={"default": calibration()}), changes=sampler(seed=3), threads=1
    ) as predictor:
        assert predictor.threshold == 0.5
        assert not predictor.notes


def test_an_early_exit_is_counted_and_keeps_the_threshold(
    tiny_bundle: Path, copy_of: Callable[..., Path], category: Category
) -> None:
    with load(tiny_bundle, calibrated=False, threads=1) as plain:
        observations = np.stack([plain.preprocessing(path) for path in paths_of(category)])
        whole = plain.inspect(observations)
    middle = float(np.sort(whole.first_score)[2])  # of five
    known = calibration(threshold=max(middle, 0.5), first_quantiles=(middle,) * 19)
    bundle = copy_of(calibrations={"default": known})
    with BundlePredictor(bundle, early_exit=0.5, threads=1, batch=5) as predictor:
        found = evaluate(predictor, category)
        assert predictor.threshold == known.threshold
        assert evaluate(predictor, category).problems == found.problems  # counted anew
    left = whole.first_score <= middle
    expected = np.where(left, whole.first_score, whole.anomaly_score)
    np.testing.assert_allclose([row.score for row in found.rows], expected, rtol=1e-4)
    (said,) = [problem for problem in found.problems if "early exit" in problem]
    assert said.startswith("3 of 5 images skipped the masked pass (early exit 0.5)")
    with BundlePredictor(bundle, threads=1) as predictor:
        assert not predictor.notes
    with pytest.raises(CalibrationError, match="early exit"):
        BundlePredictor(tiny_bundle, early_exit=0.5)
    with pytest.raises(CalibrationError, match="early exit"):
        BundlePredictor(bundle, changes=mask_settings(mask_lambda=0.3), early_exit=0.5)


def test_a_calibrated_range_holds_for_the_same_first_pass_only(
    tiny_bundle: Path, copy_of: Callable[..., Path], category: Category
) -> None:
    frozen = mask_settings(range="frozen")(Manifest.read(tiny_bundle).settings)
    bundle = copy_of(settings=frozen, calibrations={"default": calibration()})
    one = paths_of(category)[:1]
    with load(bundle, threads=1) as detector:
        expected = detector.inspect(detector.preprocessing(one[0])[None], mask_range=(0.0, 2.0)).anomaly_score[0]
    other_second = sampler(masked_pass=frozen.sampler.masked_pass and replace(frozen.sampler.masked_pass, steps=1))
    with BundlePredictor(bundle, threads=1) as predictor:
        assert next(predictor(one))[0] == pytest.approx(expected, rel=1e-5)
    with BundlePredictor(bundle, changes=other_second, threads=1) as predictor:
        assert next(predictor(one))[0] != pytest.approx(expected, rel=1e-5)
    with pytest.raises(CalibrationError, match="another first pass"):
        BundlePredictor(bundle, changes=sampler(first_pass=replace(frozen.sampler.first_pass, steps=1)))


def test_an_unknown_product_is_refused(copy_of: Callable[..., Path]) -> None:
    bundle = copy_of(calibrations={"blue": calibration()})
    with pytest.raises(UsageError, match="no calibration for the product 'red', only for blue"):
        BundlePredictor(bundle, product="red")
