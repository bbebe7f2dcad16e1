"""The paper's tables on data at hand: the numbers as data, the variants, runs that are never made twice, the report."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdps.benchmarks.data import find_categories
from mdps.benchmarks.evaluate import evaluate
from mdps.benchmarks.evaluate.bundle import BundlePredictor
from mdps.benchmarks.metrics.bootstrap import Interval
from mdps.benchmarks.metrics.pixels import PixelCounts
from mdps.benchmarks.options import ReproduceOptions
from mdps.benchmarks.reproduce import Reproduction, _variants, checkpoint_of, reproduce
from mdps.benchmarks.reproduce.paper import AVERAGE, TABLES, paper_table, variants
from mdps.benchmarks.reproduce.tables import (
    ABSENT,
    COMPARISONS,
    NO_LIBRARY,
    Comparison,
    Difference,
    Row,
    averages,
    compare,
    differences_table,
    plot,
    published_rows,
)
from mdps.benchmarks.study import Bundles, Changes
from mdps.benchmarks.study.outcomes import Outcome
from mdps.cli import cli
from mdps.commands.terminal import run as run_command
from mdps.runtime.errors import UsageError
from mdps.runtime.settings import paper_settings

# The 32 x 32 network of the tests, with as little as an export can do.
CHOICES: dict[str, Any] = {
    "image_size": 32,
    "backbone": "random_tiny",
    "noise_level": 198,
    "steps": 2,
    "seed": 0,
    "feature_size": 32,
}
FLAGS = [
    *("--set", "image-size=32", "--set", "backbone=random_tiny", "--set", "noise_level=198", "--set", "steps=2"),
    *("--set", "feature-size=32", "--threads", "1"),
]


# The paper's numbers


def printed_pairs(tex: str, start: str, end: str) -> list[tuple[float, float]]:
    """Every "(a, b)" between two marks of the source, whatever is bold."""
    plain = tex[tex.index(start) : tex.index(end)].replace("\\textbf{", "").replace("}", "")
    return [(float(a), float(b)) for a, b in re.findall(r"\(\s*([\d.]+)\s*,\s*([\d.]+)\s*\)", plain)]


def flat(table: str, by_method: bool = False) -> list[tuple[float, ...]]:
    """All cells in per cent, row by row, or column by column."""
    found = paper_table(table)
    assert found is not None
    cells = [[found.rows[row][method] for row in found.rows] for method in found.methods]
    order = cells if by_method else list(zip(*cells, strict=True))
    return [tuple(round(100 * value, 6) for value in cell) for group in order for cell in group]


def test_tables_1_and_2_are_as_printed(shared: Path) -> None:
    tex = (shared / "paper" / "mdps.tex").read_text(encoding="utf-8")
    one = printed_pairs(tex, "performance on MVTec.", "\\label{MVTec_table}")
    two = printed_pairs(tex, "performance on BTAD.", "\\label{table_BTAD}")
    assert len(one) == 16 * 9
    assert len(two) == 9 * 4
    assert flat("1") == one
    assert flat("2", by_method=True) == two


def test_tables_3_to_5_are_as_printed(shared: Path) -> None:
    tex = (shared / "paper" / "mdps.tex").read_text(encoding="utf-8").replace("\\textbf{", "").replace("}", "")
    for table, label in (("4", "\\label{table_pixel"), ("5", "\\label{table_MS")):
        part = tex[tex.index(label) :]
        rows = [re.findall(r"[\d.]+", part[part.index(name) :].split("\\\\")[0]) for name in ("Image ", "Pixel ")]
        assert flat(table) == list(zip(*([float(value) for value in row] for row in rows), strict=True))
    times = paper_table("3")
    assert times is not None
    assert times.published(AVERAGE, "patchcore") == {"seconds_from": 0.17, "seconds_to": 0.6}
    assert "0.17-0.6 & 0.13 & 33.5     & 0.5" in tex
    assert [times.rows[AVERAGE][name][0] for name in ("draem", "autoddpm", "mdps_1")] == [0.13, 33.5, 0.5]


@pytest.mark.parametrize("table", ["1", "2"])
def test_averages_of_the_paper_are_those_of_its_rows(table: str) -> None:
    found = paper_table(table)
    assert found is not None
    for method in found.methods:
        rows = np.array([found.rows[name][method] for name in found.categories])
        assert rows.mean(axis=0) == pytest.approx(found.rows[AVERAGE][method], abs=0.0008), method  # it rounds its own


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("bottle", "bottle"),
        ("mvtec_bottle", "bottle"),
        ("Metal-Nut", "metal_nut"),
        ("metalnut", "metal_nut"),
        ("tile", "tile"),
        ("magnetic_tile", None),
        ("01", None),
    ],
)
def test_a_folder_finds_its_row_of_the_paper(name: str, row: str | None) -> None:
    found = paper_table("1")
    assert found is not None
    assert found.category(name) == row


def test_a_mean_stands_beside_the_papers_mean_over_the_same_categories() -> None:
    one, five = paper_table("1"), paper_table("5")
    assert one is not None
    assert five is not None
    mean = one.published_mean(["mvtec_bottle", "cable", "unknown"], "draem")
    assert mean["image_auroc"] == pytest.approx((0.992 + 0.918) / 2)
    assert one.published_mean(list(one.categories), "mdps_1") == {"image_auroc": 0.984, "pixel_auroc": 0.97}
    assert one.published_mean(["unknown"], "draem") == {}
    assert five.published_mean(["unknown"], "mdps_8")["image_auroc"] == pytest.approx(0.9848)


# Rows


def row(category: str, method: str = "mdps_1", **metrics: float) -> Row:
    return Row(category, method, method, "measured", metrics=metrics)


def test_a_method_that_misses_a_category_has_no_mean() -> None:
    rows = [row("a", image_auroc=0.9), row("b", image_auroc=0.7), row("a", "draem", image_auroc=1.0)]
    (mean,) = averages(rows, None)
    assert (mean.category, mean.method) == (AVERAGE, "mdps_1")
    assert mean.metrics["image_auroc"] == pytest.approx(0.8)


def test_one_category_needs_a_mean_only_where_the_paper_prints_nothing_else() -> None:
    assert averages([row("bottle")], paper_table("1")) == []
    (mean,) = averages([row("bottle")], paper_table("5"))
    assert mean.paper["pixel_auroc"] == pytest.approx(0.9696)


def test_what_was_not_measured_shows_the_published_number_and_says_why() -> None:
    paper = paper_table("1")
    assert paper is not None
    rows = published_rows(paper, ["mvtec_bottle"], [row("mvtec_bottle")], {"draem": "no GPU"})
    cells = {(one.category, one.method): one for one in rows}
    assert ("bottle", "mdps_1") not in cells
    assert len(rows) == 16 * 9 - 1
    assert all(one.kind == "published" and not one.metrics and one.reason for one in rows)
    assert cells["bottle", "draem"].reason == "no GPU"
    assert cells["bottle", "mdps_16"].reason == "not asked for"
    assert cells["cable", "draem"].reason == cells[AVERAGE, "mdps_1"].reason == ABSENT
    assert {cells["bottle", name].reason for name in ("ran", "uniad")} == {"no maintained library implements it"}
    assert set(NO_LIBRARY) >= {"ran", "uniad", "anogan", "anoseg", "vt_adl", "pyramidflow"}
    assert cells[AVERAGE, "mdps_1"].paper == {"image_auroc": 0.984, "pixel_auroc": 0.97}


# Variants and checkpoints


def test_changes_reach_both_passes_and_nothing_else() -> None:
    settings = paper_settings()
    changed = Changes(guidance_scale=7.0, samples=3)(settings).sampler
    assert [one.guidance_scale for one in changed.passes] == [7.0, 7.0]
    assert changed.samples == 3
    assert changed.first_pass.noise_level == 200
    assert Changes()(settings) == settings


def test_each_table_has_its_rows() -> None:
    names = {table: [one.method for one in _variants(ReproduceOptions(table=table))] for table in TABLES}
    assert names["1"] == ["mdps_1", "mdps_16", "anoddpm", "autoddpm"]
    assert names["3"] == ["mdps_1", "autoddpm"]
    assert names["4"] == ["pixel_only", "perceptual_only", "both"]
    assert names["5"] == [f"mdps_{count}" for count in (1, 2, 4, 8, 16)]
    assert names["rho"] == [f"rho_{scale}" for scale in (10, 20, 50, 100, 200, 300)]
    assert names["ablation"] == [
        "full", "no_mask", "no_posterior", "vanilla", "pixel_only", "perceptual_only", "mdps_16",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no table '6'"):
        variants("6", (1,), (), ())


def test_settings_chosen_for_mdps_say_nothing_of_another_method() -> None:
    (other,) = variants("3", (), ("autoddpm",), ())
    merged = {"guidance_scale": 20.0, "eta": 2.0, "image_size": 32} | dict(other.export)
    assert merged["method"] == "autoddpm"
    assert merged["guidance_scale"] is None
    assert merged["eta"] is None
    assert merged["image_size"] == 32


def test_the_checkpoint_of_a_category(tmp_path: Path) -> None:
    one, many = tmp_path / "one.pt", tmp_path / "many"
    for path in (one, many / "bottle.safetensors", many / "cable" / "denoiser.safetensors", many / "notes.txt"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert checkpoint_of(one, "bottle") == one
    assert checkpoint_of(many, "bottle") == many / "bottle.safetensors"
    assert checkpoint_of(many, "mvtec_bottle") == many / "bottle.safetensors"
    assert checkpoint_of(many, "cable") == many / "cable" / "denoiser.safetensors"
    assert checkpoint_of(many / "cable", "anything") == many / "cable" / "denoiser.safetensors"
    assert checkpoint_of(many, "notes") is None
    with pytest.raises(UsageError, match="there is no checkpoint"):
        checkpoint_of(tmp_path / "none", "bottle")


def test_a_preset_of_a_data_set_is_that_of_each_category(small_checkpoint: Path, tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, {"preset": "mvtec"}, lambda _: None)
    assert bundles._of_category("mvtec_metal-nut")["preset"] == "mvtec/metal_nut"
    assert bundles._of_category("disc")["preset"] == "mvtec/disc"  # which the export refuses, with the known ones


# Outcomes and differences


def outcome(scores: list[float], shift: float = 0.0) -> Outcome:
    """Two good images and two defective ones, a quarter of whose pixels lies `shift` above the rest."""
    rng, counts = np.random.default_rng(0), PixelCounts()
    for index in range(4):
        truth = np.zeros((8, 8), dtype=bool)
        truth[:4, :4] = index >= 2
        counts.add(truth, (rng.normal(size=(8, 8)) + shift * truth).astype(np.float32))
    labels = (False, False, True, True)
    metrics = {"image_auroc": 0.5, "pixel_auroc": counts.auroc(), "aupro_0.05": math.nan}
    return Outcome(4, metrics, labels, tuple(scores), counts, {"seed": 0}, ("one problem",))


def test_an_outcome_is_read_back_as_it_was(tmp_path: Path) -> None:
    first = outcome([0.1, 0.3, 0.2, 0.4], shift=1.0)
    first.save(tmp_path, "last")
    assert "NaN" not in (tmp_path / "last.json").read_text()
    again = Outcome.load(tmp_path, "last")
    assert math.isnan(again.metrics.pop("aupro_0.05"))
    assert again.metrics == {name: first.metrics[name] for name in again.metrics}
    assert (again.labels, again.scores, again.provenance) == (first.labels, first.scores, first.provenance)
    assert again.problems == ("one problem",)
    assert again.intervals() == first.intervals()
    (tmp_path / "last.json").write_text("{}")
    with pytest.raises(UsageError, match="is damaged"):
        Outcome.load(tmp_path, "last")


def test_differences_are_paired() -> None:
    better, worse = outcome([0.1, 0.2, 0.3, 0.4], shift=2.0), outcome([0.1, 0.3, 0.2, 0.4], shift=1.0)
    found = better.minus(worse)
    assert found["image_auroc"].value == pytest.approx(1.0 - 0.75)
    assert found["pixel_auroc"].value == pytest.approx(better.counts.auroc() - worse.counts.auroc())
    assert better.minus(better)["pixel_auroc"] == Interval(0.0, 0.0, 0.0)


def test_the_ablation_compares_what_is_there() -> None:
    better, worse = outcome([0.1, 0.2, 0.3, 0.4], shift=2.0), outcome([0.1, 0.3, 0.2, 0.4])
    found = compare("disc", {"full": better, "no_mask": worse, "vanilla": worse, "mdps_4": better})
    names = [one.comparison.name for one in found]
    assert names == ["guidance, first pass", "mask pass against none", "N_s = 4 against 1"]
    assert found[0].holds is False
    assert found[1].holds is None
    table = differences_table(found)
    assert "DOES NOT HOLD" in table
    assert "+25.00" in table


@pytest.mark.parametrize(("gain", "holds"), [(0.0031, True), (0.003, True), (0.0029, False)])
def test_guidance_must_gain_three_thousandths(gain: float, holds: bool) -> None:
    assert COMPARISONS[0] == Comparison("guidance, first pass", "no_mask", "vanilla", at_least=0.003)
    difference = Difference("disc", COMPARISONS[0], {"pixel_auroc": Interval(gain, 0.0, 0.01)})
    assert difference.holds is holds
    assert difference.to_json()["pixel_auroc"]["difference"] == gain


# The whole job


@pytest.fixture(scope="module")
def dataset(write_category: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mvtec")
    write_category(root / "bottle", good=2, defective=2)
    return root


def options(table: str, **changes: Any) -> ReproduceOptions:
    defaults: dict[str, Any] = {"samples": (1, 2), "methods": (), "threads": 1, "batch": 4, "choices": CHOICES}
    return ReproduceOptions(table=table, **(defaults | changes))


@pytest.fixture(scope="module")
def ablation(
    dataset: Path, small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Reproduction]:
    out = tmp_path_factory.mktemp("ablation")
    return out, reproduce(dataset, small_checkpoint, out, options("ablation", command="mdps reproduce ablation"))


def test_the_ablation_on_a_category(ablation: tuple[Path, Reproduction]) -> None:
    out, found = ablation
    assert [one.method for one in found.measured] == [
        "full", "no_mask", "no_posterior", "vanilla", "pixel_only", "perceptual_only", "mdps_2",
    ]  # fmt: skip
    assert all(one.images == 4 and 0 <= one.metrics["pixel_auroc"] <= 1 for one in found.measured)
    assert len(found.differences) == len(COMPARISONS) + 1
    saved = json.loads((out / "reproduce.json").read_text())
    assert saved == json.loads(json.dumps(found.to_json()))
    assert saved["settings"]["command"] == "mdps reproduce ablation"
    for one in saved["rows"]:
        provenance = one["provenance"]
        assert len(provenance["checkpoint"]["sha256"]) == 64
        assert provenance["settings"]["sampler"]["seed"] == provenance["seed"] == 0
        assert "mdps" in provenance["versions"]
    text = (out / "reproduce.md").read_text()
    assert "without posterior (rho = 0)" in text
    assert "Differences on the same images" in text
    assert (out / "reproduce.png").read_bytes().startswith(b"\x89PNG")


def test_the_unmasked_rows_are_those_of_a_run_without_a_mask_pass(
    ablation: tuple[Path, Reproduction], dataset: Path, small_checkpoint: Path, tmp_path: Path
) -> None:
    """They come from the full run's first pass; here they are computed by a bundle that has no second one."""
    rows = {one.method: one for one in ablation[1].measured}
    bundle = Bundles(tmp_path, CHOICES | {"mask_pass": False}, lambda _: None).get(small_checkpoint, "bottle", {})
    (category,) = find_categories(dataset)
    for method, changes in (("no_mask", Changes()), ("vanilla", Changes(guidance_scale=0.0))):
        with BundlePredictor(bundle, changes=changes, threads=1) as predictor:
            alone = evaluate(predictor, category).metrics
        for name in ("image_auroc", "pixel_auroc", "aupro_0.30"):
            assert rows[method].metrics[name] == pytest.approx(alone[name], abs=1e-4), (method, name)
    assert rows["full"].metrics["pixel_auroc"] != rows["no_mask"].metrics["pixel_auroc"]
    assert rows["no_mask"].metrics["pixel_auroc"] != rows["vanilla"].metrics["pixel_auroc"]


def test_what_was_computed_is_not_computed_again(
    ablation: tuple[Path, Reproduction], dataset: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by another table that has rows with the same settings: Table 4 is part of the ablation."""
    out, before = ablation

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("mdps.benchmarks.study.evaluate", refuse)
    monkeypatch.setattr("mdps.benchmarks.study.export_bundle", refuse)
    again = reproduce(dataset, small_checkpoint, out, options("ablation", command="mdps reproduce ablation"))
    assert json.dumps(again.to_json()) == json.dumps(before.to_json())
    fourth = reproduce(dataset, small_checkpoint, out, options("4"))
    measured = {one.method: one for one in fourth.measured if one.category == "bottle"}
    assert measured["both"].metrics == {one.method: one for one in before.measured}["full"].metrics
    (beside,) = [one for one in fourth.measured if (one.category, one.method) == (AVERAGE, "both")]
    assert beside.paper == {"image_auroc": 0.988, "pixel_auroc": 0.973}
    with pytest.raises(AssertionError, match="computed again"):
        reproduce(dataset, small_checkpoint, out, options("5", samples=(3,)))


def test_an_interrupted_run_goes_on_where_it_was(
    ablation: tuple[Path, Reproduction], dataset: Path, small_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "bundles").symlink_to(ablation[0] / "bundles")  # the exports are not what is tested
    calls: list[str] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append("judged")
        return evaluate(*arguments, **named)

    asked = options("rho", scales=(0.0, 20.0), choices=CHOICES | {"mask_pass": None})
    monkeypatch.setattr("mdps.benchmarks.study.evaluate", counted)
    with pytest.raises(KeyboardInterrupt):
        reproduce(dataset, small_checkpoint, tmp_path, asked)
    assert not list((tmp_path / "results").glob("*/*"))  # the first run was not whole: its first pass was missing
    monkeypatch.setattr("mdps.benchmarks.study.evaluate", evaluate)
    reproduce(dataset, small_checkpoint, tmp_path, options("rho", scales=(0.0,)))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").glob("*/*/last.json")}
    assert len(kept) == 1
    found = reproduce(dataset, small_checkpoint, tmp_path, asked)
    assert [one.method for one in found.measured] == ["rho_0", "rho_20"]
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_a_category_without_a_checkpoint_is_named(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "ckpts").mkdir()
    with pytest.raises(UsageError, match="no checkpoint for bottle"):
        reproduce(dataset, tmp_path / "ckpts", tmp_path / "out", options("4"))


def test_a_peer_that_cannot_run_gives_its_reason(
    ablation: tuple[Path, Reproduction], dataset: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skipped(*_: Any, **__: Any) -> None:
        raise UsageError("its textures are not here")

    monkeypatch.setattr("mdps.benchmarks.reproduce.peer_predictor", skipped)
    found = reproduce(dataset, small_checkpoint, ablation[0], options("1", samples=(1,), peers=("draem",)))
    cells = {(one.category, one.method): one for one in found.rows}
    assert cells["bottle", "draem"].reason == "its textures are not here"
    assert cells["bottle", "draem"].paper == {"image_auroc": 0.992, "pixel_auroc": 0.991}
    assert cells["bottle", "mdps_1"].kind == "measured"
    text = found.markdown()
    assert "## Published, not measured here" in text
    assert "- DRAEM: its textures are not here" in text
    assert "- RAN: no maintained library implements it" in text


def test_a_peer_is_a_row(
    ablation: tuple[Path, Reproduction], dataset: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Grey:
        name, crop, provenance = "DRAEM", None, {"seed": 0}

        def __call__(self, paths: Any) -> Any:
            return ((float(index), np.eye(8, dtype=np.float32)) for index, _ in enumerate(paths))

    asked: list[Any] = []
    monkeypatch.setattr(
        "mdps.benchmarks.reproduce.peer_predictor", lambda name, category, **how: asked.append((name, how)) or Grey()
    )
    wanted = options("1", samples=(1,), peers=("draem",), peer_minutes=2.0)
    again = [reproduce(dataset, small_checkpoint, ablation[0], wanted) for _ in range(2)]
    assert [one.method for one in again[0].measured] == ["mdps_1", "draem"]
    assert again[0].measured[1].metrics["image_auroc"] == 1.0
    ((name, how),) = asked  # fitted once
    assert name == "draem"
    assert how["size"] == (32, 32)
    assert how["minutes"] == 2.0
    assert how["backbone"] == "random_tiny"


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_a_plot_and_a_text(table: str) -> None:
    metrics = {"image_auroc": 0.9, "pixel_auroc": math.nan, "ms_per_image": 1.0}
    rows = [
        Row(category, one.method, one.label, "measured", images=4, metrics=metrics)
        for category in ("bottle", "cable")
        for one in _variants(ReproduceOptions(table=table))
    ]
    assert plot(table, rows).startswith(b"\x89PNG")
    text = Reproduction(table, "caption", tuple(rows), (), (), {"command": ""}).markdown()
    assert text.count("| bottle |") == len(rows) // 2
    assert "nan" not in text


# The command


def test_the_command_prints_the_table(
    ablation: tuple[Path, Reproduction], dataset: Path, small_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["reproduce", "4", str(dataset), "--ckpt", str(small_checkpoint), "--out", str(ablation[0])]
    command += [*FLAGS, "--batch", "4", "--json"]
    assert run_command(cli, command) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["table"] == "4"
    assert "reproduce.md" in printed.err
    assert [one["method"] for one in found["rows"][:3]] == ["pixel_only", "perceptual_only", "both"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["9", "data", "--ckpt", "x"], "'9'"),
        (["5", "data", "--ckpt", "x", "--samples", "1,zero"], "neither 'none' nor a list"),
        (["5", "data", "--ckpt", "x", "--samples", "0"], "neither 'none' nor a list"),
        (["5", "nowhere", "--ckpt", "x"], "nowhere is no folder"),
        (["5", "DATA", "--ckpt", "nothing"], "there is no checkpoint"),
        (["1", "DATA", "--ckpt", "nothing", "--peers", "patchcoer"], "no peer 'patchcoer'"),
        (["5", "DATA", "--ckpt", "nothing", "--category", "cable"], "no category 'cable'"),
    ],
)
def test_wrong_requests_are_one_sentence(
    arguments: list[str], sentence: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run_command(cli, ["reproduce", *(str(dataset) if one == "DATA" else one for one in arguments)]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out
