"""The value of a millisecond: the ways compared, agreement of maps, times, less precision, and the whole study."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.stats import pearsonr, spearmanr

from mdps.benchmarks.data import find_categories
from mdps.benchmarks.data.samples import Category
from mdps.benchmarks.evaluate.bundle import BundlePredictor
from mdps.benchmarks.metrics import auroc
from mdps.benchmarks.metrics.pixels import PixelCounts
from mdps.benchmarks.options import TradeOptions
from mdps.benchmarks.study import Changes, with_steps
from mdps.benchmarks.study.outcomes import Outcome
from mdps.benchmarks.trade import Clock, Way, _check, _Study, bundles, steps_within, trade
from mdps.benchmarks.trade.report import markdown
from mdps.benchmarks.trade.rows import ENGINE_OF, Exits, Trade, agreement, choices
from mdps.cli import cli
from mdps.commands import terminal
from mdps.export import ExportOptions
from mdps.runtime import UsageError, load
from mdps.runtime.manifest import Manifest
from mdps.runtime.settings import PassSettings, paper_settings, reference_settings

CHOICES: dict[str, Any] = {"image_size": 32, "backbone": "random_tiny", "noise_level": 10, "feature_size": 32}


@pytest.fixture(scope="module")
def category(write_category: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Category:
    root = tmp_path_factory.mktemp("data") / "bottle"
    write_category(root, good=2, defective=2)
    (found,) = find_categories(root)
    return found


# Ways


def test_the_reference_comes_first_and_no_way_twice() -> None:
    equal = {"jacobian-free": [6, 10, 20], "ddad": [5, 10, 20]}
    found = choices((3, 5, 10), equal, {"ddad": 4.0}, ("bf16-steps",), (0.5,))
    assert (found[0].name, found[0].label) == ("exact_10", "exact, N = 10")
    assert len({choice.name for choice in found}) == len(found) == 2 * (3 + 5 + 4) + 3
    names = {choice.name: choice for choice in found}
    assert names["ddad_20_one_pass"].variant.first_pass
    assert names["ddad_20"].variant.changes == Changes(guidance_scale=4.0, steps=20)
    scales = {"guidance_scale": 4.0, "masked_guidance_scale": 4.0}
    assert names["ddad_20"].variant.export == {"gradient": "ddad", **scales}
    assert names["jacobian-free_6"].variant.changes.guidance_scale is None
    half = names["exact_10_bf16-steps"]
    assert (half.engine, half.variant.export) == ("openvino-bf16", {"gradient": "exact"})
    assert {choice.engine for choice in found if choice is not half} == {None}
    assert names["exact_10_seed_1"].variant.changes.seed == 1
    exit_ = names["exact_10_exit_0.5"]
    assert (exit_.label, exit_.variant.changes) == ("exact, N = 10, early exit 0.5", Changes(steps=10, early_exit=0.5))
    assert exit_.variant.export == {"gradient": "exact", "calibrated": 10}


def test_steps_that_do_not_divide_the_noise_level_lower_it_a_little() -> None:
    one = PassSettings(noise_level=200, guidance_scale=1.0, steps=10)
    assert [(with_steps(one, n).noise_level, with_steps(one, n).steps) for n in (3, 5, 10, 300)] == [
        (198, 3), (200, 5), (200, 10), (300, 300),
    ]  # fmt: skip
    reference = reference_settings(1, 0, 2, 200, 250, 20, 0.1)
    changed = Changes(steps=3, seed=7)(reference).sampler
    assert [(one.noise_level, one.skip) for one in changed.passes] == [(200, 67), (250, 84)]
    assert changed.seed == 7
    both = Changes(steps=4)(paper_settings()).sampler.passes
    assert [one.steps for one in both] == [4, 4]


def test_steps_of_equal_time_come_from_a_line_through_two_measurements() -> None:
    assert steps_within(100.0, (3, 19.0), (10, 54.0), 200) == 20  # 19.2 steps; 20 divides 200 and is near
    assert steps_within(40.0, (3, 19.0), (10, 54.0), 200) == 8  # 7.2 steps; 8 takes a tenth more
    assert steps_within(40.0, (3, 19.0), (10, 54.0), 199) == 7
    assert steps_within(1.0, (3, 19.0), (10, 54.0), 199) == 1


# Agreement


def test_agreement_is_the_mean_of_scipys_correlations_of_each_image() -> None:
    rng = np.random.default_rng(0)
    one = rng.normal(size=(5, 6, 7)).astype(np.float32)
    other = (one + rng.normal(size=one.shape)).astype(np.float32)
    other[2, :2] = one[2, :2] = 0.5  # ties
    one[3], other[4, 0, 0] = 1.0, np.nan  # one map says nothing, one was not made
    found = agreement(one, other)
    assert found is not None
    used = [(one[i].ravel(), other[i].ravel()) for i in range(3)]
    assert found.pearson == pytest.approx(np.mean([pearsonr(a, b).statistic for a, b in used]))
    assert found.spearman == pytest.approx(np.mean([spearmanr(a, b).statistic for a, b in used]))
    assert found.lowest == pytest.approx(min(pearsonr(a, b).statistic for a, b in used))
    assert found.images == 3
    assert agreement(one[3:4], one[3:4]) is None
    with pytest.raises(UsageError, match="only maps of the same images"):
        agreement(one, other[:2])


# Times


def test_every_way_is_timed_once_a_round_on_the_same_image_with_its_own_settings(
    tiny_bundle: Path, category: Category, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[int | None, bytes]] = []

    def note(detector: Any, image: np.ndarray) -> float:
        seen.append((detector.settings.sampler.first_pass.steps, image.tobytes()))
        return float(len(seen))

    monkeypatch.setattr("mdps.benchmarks.trade._ms", note)
    settings = Manifest.read(tiny_bundle).settings
    ways = [Way(f"{n}", tiny_bundle, Changes(steps=n)(settings)) for n in (1, 2, 3)]
    pictures = [sample.path for sample in category.test[:2]]
    clock = Clock(pictures, 4, "onnxruntime", 1)
    found = clock.kept(ways, tmp_path / "times.json")
    rounds = [seen[3 * i : 3 * i + 3] for i in range(5)]
    assert all(sorted(n for n, _ in one if n) == [1, 2, 3] and len({image for _, image in one}) == 1 for one in rounds)
    assert [one[0][1] == rounds[1][0][1] for one in rounds[1:]] == [True, False, True, False]
    assert sorted(value for values in found.values() for value in values) == list(range(4, 16))
    assert clock.kept(ways, tmp_path / "times.json") == found
    assert len(seen) == 15
    replace(clock, rounds=1).kept(ways, tmp_path / "times.json")
    assert len(seen) == 21


def test_shared_graphs_compute_what_a_bundle_of_its_own_does(tiny_bundle: Path, category: Category) -> None:
    settings = Changes(steps=2)(Manifest.read(tiny_bundle).settings)
    path = category.test[-1].path
    with contextlib.ExitStack() as opened:
        clock = Clock([path], 1, "onnxruntime", 1)
        ways = [Way("other", tiny_bundle, Manifest.read(tiny_bundle).settings), Way("two", tiny_bundle, settings)]
        detectors = clock._open(ways, opened)
        found = detectors["two"](path).score
    with BundlePredictor(tiny_bundle, changes=Changes(steps=2), threads=1) as judge:
        ((wanted, _),) = judge([path])
    assert found == pytest.approx(wanted, rel=1e-5)


# Less precision


def test_a_way_on_another_backend_is_opened_on_it(tiny_bundle: Path, category: Category) -> None:
    settings = Manifest.read(tiny_bundle).settings
    ways = [Way("usual", tiny_bundle, settings), Way("other", tiny_bundle, settings, "openvino")]
    with contextlib.ExitStack() as opened:
        detectors = Clock([category.test[0].path], 1, "onnxruntime", 1)._open(ways, opened)
        engines = {name: set(one._engines.values()) for name, one in detectors.items()}
    assert engines["usual"] == {"CPUExecutionProvider"}
    assert all(engine.startswith("OpenVINO") for engine in engines["other"])


def test_arithmetic_that_the_processor_lacks_is_left_out_and_told(
    small_checkpoint: Path, category: Category, options: TradeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mdps.runtime.engines.openvino.has_bfloat16", lambda core: False)
    asked = replace(options, precisions=("bf16-steps",))
    one = _Study(small_checkpoint, category, tmp_path, asked, lambda _: None)
    assert one._possible() == []
    assert one._notes[0].startswith("steps in bfloat16: left out, this processor computes no bfloat16")


# The whole study


@pytest.fixture(scope="module")
def options() -> TradeOptions:
    return TradeOptions(
        steps=(1, 2),
        precisions=("bf16-steps",),
        exits=(0.95,),
        rounds=2,
        threads=1,
        choices=CHOICES,
        command="mdps trade x",
    )


@pytest.fixture(scope="module")
def found(
    small_checkpoint: Path, category: Category, options: TradeOptions, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Trade]:
    out = tmp_path_factory.mktemp("trade")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINE_OF, "bf16-steps", "openvino")  # which every processor has
        return out, trade(small_checkpoint, category, out, options)


def test_the_study_measures_every_way(found: tuple[Path, Trade]) -> None:
    out, result = found
    reference, *others = result.rows
    assert (reference.name, reference.passes, reference.ratio_to_reference) == ("exact_2", 2, 1.0)
    assert reference.agreement is not None
    assert reference.agreement.pearson == pytest.approx(1.0)
    by_name = {row.name: row for row in result.rows}
    assert {"exact_1_one_pass", "jacobian-free_2", "ddad_1", "exact_2_bf16-steps", "exact_2_seed_1"} <= set(by_name)
    assert "exact_2_exit_0.95" in by_name
    assert by_name["exact_2_seed_1"].median_ms is None
    for row in others:
        assert row.images == 4
        assert row.provenance["checkpoint"] == reference.provenance["checkpoint"]
        assert 0 <= row.metrics["image_auroc"] <= 1
        assert row.intervals["pixel_auroc"][0] <= row.metrics["pixel_auroc"] <= row.intervals["pixel_auroc"][1]
        assert row.runs == (0 if row.name.endswith("seed_1") else 2)
    other = by_name["exact_2_bf16-steps"]
    assert other.agreement is not None
    assert other.agreement.pearson > 0.99
    assert all(engine.startswith("OpenVINO") for engine in other.provenance["engines"].values())
    saved = json.loads((out / "trade.json").read_text())
    assert saved == json.loads(json.dumps(result.to_json()))
    assert "| exact, N = 2 |" in (out / "trade.md").read_text()
    assert (out / "trade.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_pass_of_a_run_is_the_way_without_a_mask(
    found: tuple[Path, Trade], small_checkpoint: Path, category: Category
) -> None:
    out, result = found
    (row,) = [row for row in result.rows if row.name == "jacobian-free_2_one_pass"]
    bundle = next(
        path.parent
        for path in (out / "bundles").glob("*/manifest.json")
        if Manifest.read(path.parent).settings.sampler.gradient == "jacobian-free"
    )
    one_pass = lambda s: replace(s, sampler=replace(Changes(steps=2)(s).sampler, masked_pass=None))  # noqa: E731
    with BundlePredictor(bundle, changes=one_pass, threads=1) as judge:
        scores = [score for score, _ in judge([sample.path for sample in category.test])]
    assert row.metrics["image_auroc"] == pytest.approx(auroc([s.defective for s in category.test], scores))


def test_pairs_compare_at_equal_steps_and_at_equal_time(found: tuple[Path, Trade]) -> None:
    _, result = found
    kinds = [pair.kind for pair in result.pairs]
    assert kinds.count("equal steps") == 2 * 2
    assert kinds.count("equal time") == 2 * 2
    assert {"fewer steps", "no mask pass", "less precision", "early exit", "another seed"} <= set(kinds)
    by_label = {row.label: row for row in result.rows}
    for pair in result.pairs:
        one, other = by_label[pair.one], by_label[pair.other]
        difference = one.metrics["pixel_auroc"] - other.metrics["pixel_auroc"]
        assert pair.found["pixel_auroc"].value == pytest.approx(difference, abs=2e-3)  # counts are binned
        if pair.time is not None and one.median_ms and other.median_ms:
            assert pair.time == pytest.approx(one.median_ms / other.median_ms)


def test_who_exits_early_has_the_first_pass_score_and_time_and_the_others_those_of_both(
    found: tuple[Path, Trade], category: Category
) -> None:
    out, result = found
    by_name = {row.name: row for row in result.rows}
    row = by_name["exact_2_exit_0.95"]
    (bundle,) = (out / "bundles").glob("*-calibrated-2-*")
    with load(bundle, early_exit=0.95, threads=1, warm_up=False) as detector:
        results = [detector(sample.path) for sample in category.test]
    labels = [sample.defective for sample in category.test]
    left = [one.early_exit for one in results]
    assert row.exits is not None
    assert row.exits.good == sum(gone for gone, bad in zip(left, labels, strict=True) if not bad) / 2
    assert row.exits.defective == sum(gone for gone, bad in zip(left, labels, strict=True) if bad) / 2
    assert row.metrics["image_auroc"] == pytest.approx(auroc(labels, [one.score for one in results]))
    times = json.loads((out / "times.json").read_text())["ms"]
    each = zip(times["exact_2_one_pass"], times["exact_2"], strict=True)
    assert row.median_ms == pytest.approx(np.median([row.exits.good * a + (1 - row.exits.good) * b for a, b in each]))


def test_the_share_that_exits_and_its_time(tiny_bundle: Path, tmp_path: Path) -> None:
    good = pictures_of_noise(tmp_path, 7)
    bundles.write_calibrated(tiny_bundle, tmp_path / "c", Changes(steps=1), good, 1)
    manifest = Manifest.read(tmp_path / "c")
    assert manifest.settings.sampler.first_pass.steps == 1
    known = manifest.calibrations["default"]
    limit = min(known.first_quantiles[9], known.threshold)
    scores = (limit - 1, limit, limit + 1e9, limit + 1e9, limit + 1e9)
    labels = (False, False, False, True, True)
    first = Outcome(5, {}, labels, scores, PixelCounts(), {}, ())
    exits = Exits.of(first, tmp_path / "c", 0.5)
    assert (exits.good, exits.defective) == (pytest.approx(2 / 3), 0.0)
    assert exits.ms([3.0, 6.0], [6.0, 12.0]) == pytest.approx([4.0, 8.0])
    with pytest.raises(UsageError, match="no good training images"):
        bundles.write_calibrated(tiny_bundle, tmp_path / "d", Changes(), (), 1)


def pictures_of_noise(folder: Path, count: int) -> list[Path]:
    """Pictures of noise."""
    paths = [folder / f"{index}.png" for index in range(count)]
    for index, path in enumerate(paths):
        pixels = np.random.default_rng(index).integers(90, 160, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


def test_a_study_that_was_made_is_not_made_again(
    found: tuple[Path, Trade], small_checkpoint: Path, category: Category, options: TradeOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out, result = found

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("computed again")

    monkeypatch.setattr("mdps.benchmarks.study.evaluate", never)
    monkeypatch.setattr(Clock, "measure", never)
    monkeypatch.setitem(ENGINE_OF, "bf16-steps", "openvino")
    again = trade(small_checkpoint, category, out, options)
    assert [row.metrics for row in again.rows] == [row.metrics for row in result.rows]
    assert [row.median_ms for row in again.rows] == [row.median_ms for row in result.rows]


def test_what_the_study_cannot_do_is_refused(small_checkpoint: Path, category: Category, tmp_path: Path) -> None:
    for wrong, words in (
        ({"steps": (5,)}, "at least two"),
        ({"steps": (0, 5)}, "at least 1"),
        ({"precisions": ("int4",)}, "no precision 'int4'"),
        ({"exits": (0.52,)}, "multiple of 0.05"),
    ):
        with pytest.raises(UsageError, match=words):
            TradeOptions(**wrong)  # type: ignore[arg-type]
    for chosen in (ExportOptions(guidance_scale=0.0), ExportOptions(mask_pass=False)):
        with pytest.raises(UsageError, match="lacks one"):
            _check(chosen.settings((32, 32)))
    with pytest.raises(UsageError, match="no test images"):
        trade(small_checkpoint, replace(category, test=()), tmp_path, TradeOptions())


def test_the_command_asks_for_what_was_given(
    category: Category, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    found: tuple[Path, Trade], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr("mdps.benchmarks.trade.trade", lambda *given, **_: asked.append(given) or found[1])
    command = ["trade", str(small_checkpoint), str(category.root), "--out", str(tmp_path), "--steps", "2,5"]
    assert terminal.run(cli, [*command, "--reduced", "none", "--set", "eta=1", "--set", "ddad-w=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["name"] == "exact_2"
    ((ckpt, chosen, out, options),) = asked
    assert (ckpt, chosen.name, out) == (small_checkpoint, "bottle", tmp_path)
    assert (options.steps, options.precisions, options.ddad_scale) == ((2, 5), (), 3.0)
    assert options.choices["eta"] == 1.0
    assert not {"gradient", "steps", "mask_pass", "method"} & options.choices.keys()
    assert terminal.run(cli, command) == 0
    assert asked[1][3].precisions == ("bf16-steps",)
    assert markdown(found[1]).startswith("# What a millisecond buys")
