"""Evaluations of made-up judges against scikit-learn on maps that torch enlarged, and what is odd about data sets."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

from mdps.benchmarks.data import find_categories
from mdps.benchmarks.data.samples import Category, enlarged, truth_in_box
from mdps.benchmarks.evaluate import evaluate, evaluate_in_turn
from mdps.benchmarks.evaluate.gallery import Example, Gallery
from mdps.benchmarks.evaluate.predictions import Box, Prediction
from mdps.benchmarks.evaluate.report import markdown
from mdps.benchmarks.evaluate.results import METRICS, Evaluation, mean_metrics
from mdps.runtime.errors import MdpsError, UsageError

MakeCategory = Callable[..., Path]


def brightness(path: Path, size: tuple[int, int] = (20, 20)) -> NDArray[np.float32]:
    """A map that finds the discs, more or less."""
    with Image.open(path) as image:
        return np.asarray(image.convert("F").resize(size, Image.Resampling.BOX))


class Bright:
    """A predictor that predictions for what is bright, one picture at a time."""

    name = "bright"
    provenance: dict[str, object] = {"seed": 7}  # noqa: RUF012 - never changed
    crop: Box | None = None

    def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
        for path in paths:
            found = brightness(path)
            yield float(found.max()), found


class Fails(Bright):
    """Cannot predictor one picture, and judges in groups: the error comes before the answers of the whole group."""

    def __init__(self, name: str, group: int, error: type[MdpsError] = MdpsError) -> None:
        self._bad, self._group, self._error, self.calls = name, group, error, 0

    def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
        self.calls += 1
        for start in range(0, len(paths), self._group):
            group = paths[start : start + self._group]
            if any(path.name == self._bad for path in group):
                raise self._error(f"something in {len(group)} pictures is too much")
            yield from super().__call__(group)


def category_of(root: Path) -> Category:
    (found,) = find_categories(root)
    return found


def torch_enlarged(anomaly_map: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    given = torch.from_numpy(np.array(anomaly_map))[None, None]
    return torch.nn.functional.interpolate(given, shape, mode="bilinear", align_corners=False)[0, 0].numpy()


def independent(pairs: list[tuple[NDArray[np.bool_], NDArray[np.float32], float]]) -> dict[str, float]:
    """Return scikit-learn's metrics of truths, maps of the same size and scores, all pixels at once."""
    labels, scores = [truth.any() for truth, _, _ in pairs], [score for *_, score in pairs]
    truth, values = (np.concatenate([pair[i].ravel() for pair in pairs]) for i in (0, 1))
    precision, recall, _ = precision_recall_curve(labels, scores)
    return {
        "image_auroc": roc_auc_score(labels, scores),
        "image_ap": average_precision_score(labels, scores),
        "image_f1max": float(np.max(2 * precision * recall / (precision + recall + 1e-16))),
        "pixel_auroc": roc_auc_score(truth, values),
        "pixel_ap": average_precision_score(truth, values),
    }


def test_metrics_are_those_of_maps_enlarged_to_the_truth(make_category: MakeCategory) -> None:
    category = category_of(make_category(good=5, defective=6))
    found = evaluate(Bright(), category)
    pairs = []
    for sample in category.test:
        anomaly_map, truth = brightness(sample.path), sample.truth()
        pairs.append((truth, torch_enlarged(anomaly_map, truth.shape), float(anomaly_map.max())))
    for name, value in independent(pairs).items():
        assert found.metrics[name] == pytest.approx(value, abs=1e-5), name
    assert 0.5 < found.metrics["image_auroc"] < 1  # or nothing was tested
    assert 0.5 < found.metrics["pixel_auroc"] < 1
    assert 0 < found.metrics["aupro_0.05"] < found.metrics["aupro_0.30"] <= 1
    assert found.metrics["ms_per_image"] > 0
    assert (found.images, found.problems, found.threshold, found.verdicts()) == (11, (), None, None)
    assert found.counts.auroc() == pytest.approx(found.metrics["pixel_auroc"], abs=1e-3)


def test_a_result_is_an_object_with_the_keys_that_were_promised(make_category: MakeCategory) -> None:
    obj = evaluate(Bright(), category_of(make_category())).to_json()
    assert set(obj) == {*METRICS, "category", "images", "provenance", "verdicts", "regions", "problems"}
    assert obj["verdicts"] is None
    assert obj["problems"] == ["no threshold applies, so that neither missed defects nor false alarms are counted"]
    assert obj["category"] == "disc"
    assert obj["provenance"]["seed"] == 7
    assert obj["provenance"]["data"] == {"layout": "mvtec-ad", "every": 1, "test_images": 7}


def test_rows_are_in_the_order_of_the_category_and_name_files_below_it(make_category: MakeCategory) -> None:
    category = category_of(make_category(good=3, defective=4))
    found = evaluate(Bright(), category, every=2)
    assert [row.path for row in found.rows] == [
        "test/good/000.png", "test/good/002.png", "test/spot/004.png", "test/spot/006.png"
    ]  # fmt: skip
    assert [row.defective for row in found.rows] == [False, False, True, True]
    assert found.images == 4


# Geometry


def test_a_large_truth_is_reduced_by_averaging_to_at_least_half() -> None:
    truth = np.zeros((64, 32), dtype=bool)
    truth[:2, :4], truth[8:11, 8:12], truth[20:22, 20:22] = True, True, True
    means = truth.reshape(16, 4, 8, 4).mean(axis=(1, 3))
    reduced = truth_in_box(truth, (0, 0, 32, 64), 16)
    assert reduced.shape == (16, 8)
    np.testing.assert_array_equal(reduced, means >= 0.5)
    assert reduced[0, 0]  # exactly half
    assert not reduced[5, 5]  # a quarter
    np.testing.assert_array_equal(truth_in_box(truth, (0, 0, 32, 64), None), truth)
    np.testing.assert_array_equal(truth_in_box(truth, (0, 0, 32, 64), 64), truth)


def test_a_box_of_the_truth_is_cut_out_whole() -> None:
    truth = np.random.default_rng(0).random((20, 30)) > 0.5
    np.testing.assert_array_equal(truth_in_box(truth, (3, 2, 23, 12), 256), truth[2:12, 3:23])


def test_maps_are_enlarged_as_torch_does() -> None:
    anomaly_map = np.random.default_rng(0).random((6, 5), dtype=np.float32)
    np.testing.assert_allclose(enlarged(anomaly_map, (24, 17)), torch_enlarged(anomaly_map, (24, 17)), atol=1e-6)
    assert enlarged(anomaly_map, (6, 5)) is anomaly_map


def test_resolution_changes_the_pixels_compared(make_category: MakeCategory) -> None:
    category = category_of(make_category(size=(96, 64)))
    reduced = evaluate(Bright(), category, largest=48)
    pairs = []
    for sample in category.test:
        truth = sample.truth().reshape(32, 2, 48, 2).mean(axis=(1, 3)) >= 0.5
        pairs.append((truth, torch_enlarged(brightness(sample.path), (32, 48)), 0.0))
    truth, values = (np.concatenate([pair[i].ravel() for pair in pairs]) for i in (0, 1))
    assert reduced.metrics["pixel_auroc"] == pytest.approx(roc_auc_score(truth, values), abs=1e-5)
    assert reduced.metrics["pixel_auroc"] != pytest.approx(
        evaluate(Bright(), category).metrics["pixel_auroc"], abs=1e-5
    )
    assert reduced.provenance["resolution"] == 48
    assert evaluate(Bright(), category, largest=None).provenance["resolution"] == "full"


def test_a_judge_that_shows_a_part_is_compared_inside_it(make_category: MakeCategory) -> None:
    class Centre(Bright):
        crop = (0.25, 0.25, 0.75, 0.75)

        def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
            for path in paths:
                found = brightness(path)[5:15, 5:15]
                yield float(found.max()), found

    category = category_of(make_category())
    pairs = [
        (s.truth()[10:30, 10:30], torch_enlarged(brightness(s.path)[5:15, 5:15], (20, 20)), 0.0) for s in category.test
    ]
    truth, values = (np.concatenate([pair[i].ravel() for pair in pairs]) for i in (0, 1))
    found = evaluate(Centre(), category)
    assert found.metrics["pixel_auroc"] == pytest.approx(roc_auc_score(truth, values), abs=1e-5)


# What is odd about data sets and judges


def test_without_defects_metrics_are_undefined_and_the_reason_is_told(make_category: MakeCategory) -> None:
    found = evaluate(Bright(), category_of(make_category(defective=0)))
    assert {name for name in METRICS if math.isnan(found.metrics[name])} == set(METRICS) - {"ms_per_image"}
    assert found.to_json()["image_auroc"] is None
    assert any("all 3 judged images are good" in problem for problem in found.problems)
    assert any("pixel metrics are undefined" in problem for problem in found.problems)


def test_without_masks_the_image_metrics_remain(make_category: MakeCategory) -> None:
    found = evaluate(Bright(), category_of(make_category(masks=False)))
    assert math.isnan(found.metrics["pixel_auroc"])
    assert math.isnan(found.metrics["aupro_0.30"])
    assert math.isfinite(found.metrics["image_auroc"])
    assert any("test/spot/003.png" in problem and "mask" in problem for problem in found.problems)


def test_an_empty_mask_is_named_and_left_out_of_the_pixel_metrics(make_category: MakeCategory) -> None:
    root = make_category()
    whole = evaluate(Bright(), category_of(root))
    Image.new("L", (40, 40)).save(root / "ground_truth" / "spot" / "004_mask.png")
    found = evaluate(Bright(), category_of(root))
    assert found.metrics["image_auroc"] == whole.metrics["image_auroc"]
    assert len(found.counts) == len(whole.counts) - 1
    assert [problem for problem in found.problems if "004_mask.png" in problem]


def test_a_mask_that_vanishes_when_reduced_is_named(make_category: MakeCategory) -> None:
    root = make_category()
    mask = np.zeros((40, 40), dtype=np.uint8)
    mask[3, 3] = 255
    Image.fromarray(mask).save(root / "ground_truth" / "spot" / "004_mask.png")
    found = evaluate(Bright(), category_of(root), largest=20)
    assert [p for p in found.problems if "test/spot/004.png" in p and "nothing left" in p]
    assert not evaluate(Bright(), category_of(root), largest=40).problems


@pytest.mark.parametrize("broken", ["000.png", "002.png", "006.png"])
def test_a_broken_image_is_a_row_and_the_others_go_on(make_category: MakeCategory, broken: str) -> None:
    root = make_category()
    (path,) = root.glob(f"test/*/{broken}")
    path.write_bytes(path.read_bytes()[:60])
    found = evaluate(Bright(), category_of(root))
    assert [row.path for row in found.failed] == [path.relative_to(root).as_posix()]
    assert found.failed[0].score is None
    assert found.images == 6
    assert [problem for problem in found.problems if broken in problem and "could not be judged" in problem]
    rest = [row.score for row in found.rows if row.error is None]
    others = [sample.path for sample in category_of(root).test if sample.path.name != broken]
    assert rest == [float(brightness(other).max()) for other in others]


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("bad", ["000.png", "003.png", "006.png"])
def test_a_judge_that_fails_at_one_picture_is_asked_for_the_rest(
    make_category: MakeCategory, bad: str, group: int
) -> None:
    category = category_of(make_category())
    predictor = Fails(bad, group)
    found = evaluate(predictor, category)
    assert [row.path[-7:] for row in found.failed] == [bad]
    assert found.failed[0].error == "something in 1 pictures is too much"
    assert [row.score for row in found.rows if row.error is None] == [
        float(brightness(sample.path).max()) for sample in category.test if sample.path.name != bad
    ]


def test_judges_take_turns_at_each_picture_and_find_what_each_finds_alone(make_category: MakeCategory) -> None:
    turns: list[tuple[str, Path]] = []

    class Told(Bright):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
            for path in paths:
                turns.append((self.name, path))
                yield from super().__call__([path])

    category = category_of(make_category(good=5, defective=6))
    found = evaluate_in_turn([(Told("a"), None), (Told("b"), None), (Dark(), None)], category)
    assert [one.predictor for one in found] == ["a", "b", "bright"]
    assert [one.metrics["image_auroc"] for one in found[1:]] == [
        evaluate(judge, category).metrics["image_auroc"] for judge in (Bright(), Dark())
    ]
    rounds = [turns[start : start + 2] for start in range(0, len(turns), 2)]
    assert [{path for _, path in one} for one in rounds] == [{sample.path} for sample in category.test]
    assert {tuple(name for name, _ in one) for one in rounds} == {("a", "b"), ("b", "a")}


def test_what_would_be_the_same_for_every_picture_ends_the_run(make_category: MakeCategory) -> None:
    predictor = Fails("003.png", 1, UsageError)
    with pytest.raises(UsageError, match="too much"):
        evaluate(predictor, category_of(make_category()))
    assert predictor.calls == 1


def test_no_picture_that_could_be_judged_is_an_error(make_category: MakeCategory) -> None:
    root = make_category()
    for path in root.glob("test/*/*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(MdpsError, match=r"none of 7 test images could be judged: .*000\.png"):
        evaluate(Bright(), category_of(root))


def test_a_map_that_is_no_number_is_a_row_with_an_error(make_category: MakeCategory) -> None:
    class Odd(Bright):
        def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
            for index, (score, found) in enumerate(super().__call__(paths)):
                yield score, found * np.float32("nan") if index == 1 else found

    found = evaluate(Odd(), category_of(make_category()))
    assert [row.path for row in found.failed] == ["test/good/001.png"]
    assert "no finite number" in str(found.failed[0].error)


def test_a_judge_that_answers_too_little_is_an_error(make_category: MakeCategory) -> None:
    class Lazy(Bright):
        def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
            yield from super().__call__(paths[:2])

    with pytest.raises(MdpsError, match="gave 2 answers to 7 pictures"):
        evaluate(Lazy(), category_of(make_category()))


@pytest.mark.parametrize(("options", "sentence"), [({"every": 0}, "every 0"), ({"largest": 0}, "resolution 0")])
def test_options_out_of_range_are_refused(make_category: MakeCategory, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        evaluate(Bright(), category_of(make_category()), **options)


def test_the_mean_is_over_the_categories_where_a_metric_is_defined(make_category: MakeCategory) -> None:
    found = [
        evaluate(Bright(), category_of(make_category("a"))),
        evaluate(Bright(), category_of(make_category("b", size=(48, 40)))),
        evaluate(Bright(), category_of(make_category("c", masks=False))),
    ]
    mean = mean_metrics(found)
    assert mean["pixel_auroc"] == pytest.approx(
        np.mean([found[0].metrics["pixel_auroc"], found[1].metrics["pixel_auroc"]])
    )
    assert mean["image_auroc"] == pytest.approx(np.mean([one.metrics["image_auroc"] for one in found]))
    assert mean_metrics(found[2:])["pixel_auroc"] is None


# The gallery


def test_the_gallery_keeps_the_extremes_whatever_the_order() -> None:
    rng = np.random.default_rng(1)
    scores = rng.permutation(200)
    gallery = Gallery(keep=3)
    for score in scores:
        prediction = Prediction(float(score), np.zeros((2, 2), np.float32), 1.0)
        gallery.add(Example(Path("x.png"), "k", bool(score % 2), prediction, None))
    assert [e.prediction.score for e in gallery.best(100.5)] == [199, 197, 195, 0, 2, 4]
    assert [e.prediction.score for e in gallery.worst(100.6)] == [1, 3, 198, 5, 196, 194]
    assert gallery.worst(100.5)[0].margin(100.5) == -99.5


def verdicts_of(threshold: float, rows: Sequence[Any]) -> Any:
    return Evaluation("j", "c", len(rows), {}, tuple(rows), None, {}, (), threshold).verdicts()  # type: ignore[arg-type]


def test_verdicts_count_a_score_at_the_threshold_as_passed() -> None:
    from mdps.benchmarks.evaluate.results import ScoredImage

    rows = [ScoredImage("p", "good", False, s) for s in (1.0, 2.0, 2.5)]
    rows += [ScoredImage("p", "spot", True, s) for s in (2.0, 3.0)] + [ScoredImage("p", "spot", True, error="torn")]
    rows += [ScoredImage("p", "crack", True, s) for s in (0.5, 1.5)]
    assert verdicts_of(2.0, rows) == {
        "threshold": 2.0, "good": 3, "false_alarms": 1, "false_alarm_rate": 1 / 3,
        "defective": 4, "missed": 3, "miss_rate": 3 / 4, "missed_by_kind": {"crack": 2, "spot": 1},
    }  # fmt: skip
    only_good = verdicts_of(2.0, rows[:3])
    assert (only_good["miss_rate"], only_good["missed_by_kind"]) == (None, {})


class Dark(Bright):
    """Takes what is dark for a defect, which the discs are not."""

    notes: tuple[str, ...] = ("a note",)
    threshold = 300.0

    def covered(self, size: tuple[int, int]) -> Box:
        return (0, 0, *size)

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction | str]:
        for score, found in self(paths):
            yield Prediction(-score, -found, 1.0)


class Listing(Dark):
    """Lists what is bright as regions."""

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction | str]:
        for score, found in self(paths):
            yield Prediction(score, found, 1.0, limit=float(found.max()) - 0.5)


def test_regions_that_a_detector_lists_are_held_against_the_defects(make_category: MakeCategory) -> None:
    found = evaluate(Listing(), category_of(make_category(good=3, defective=4)))
    assert found.regions is not None
    counted = found.regions["all"]
    assert (counted["defects"], found.regions["good"], found.regions["good_with_regions"]) == (4, 3, 3)
    assert 0 < counted["right"] < counted["regions"]
    assert found.to_json()["regions"] == found.regions
    assert evaluate(Dark(), category_of(make_category())).regions is None
    page = markdown([found])
    assert f"| {counted['precision']:.3f} |" in page


def test_what_a_detector_gets_wrong_is_said_in_words(make_category: MakeCategory) -> None:
    found = evaluate(Dark(), category_of(make_category(good=3, defective=4)))
    assert found.metrics["image_auroc"] < 0.55
    assert list(found.said()) == [
        "a note",
        "4 of 4 defective images were missed at the threshold",
        f"the scores rank defects no better than chance (image AUROC {found.metrics['image_auroc']:.2f})",
        f"the maps locate defects no better than chance (pixel AUROC {found.metrics['pixel_auroc']:.2f})",
    ]
    assert found.problems == ("a note",)  # what a study repeats for each of its rows
    alarmed = evaluate(type("Loud", (Dark,), {"threshold": -1000.0, "notes": ()})(), category_of(make_category("b")))
    assert next(iter(alarmed.said())) == "3 of 3 good images were called defective at the threshold"


def test_a_detector_that_works_is_not_blamed(make_category: MakeCategory) -> None:
    found = evaluate(Bright(), category_of(make_category(good=5, defective=6)))
    assert not [sentence for sentence in found.said() if "chance" in sentence]


def test_an_unreadable_picture_is_a_sentence(tmp_path: Path) -> None:
    from mdps.benchmarks.evaluate.predictions import predictions_of

    (tmp_path / "a.png").write_bytes(b"")
    (answer,) = predictions_of(Bright(), [tmp_path / "a.png"])
    assert isinstance(answer, str)
    assert "a.png" in answer
