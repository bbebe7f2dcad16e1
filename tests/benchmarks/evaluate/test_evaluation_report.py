"""The outcome of an evaluation: files, plots, page, and the command."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import mdps.benchmarks.evaluate.bundle
from mdps.benchmarks.data import find_categories
from mdps.benchmarks.evaluate import evaluate
from mdps.benchmarks.evaluate.predictions import Box, Prediction
from mdps.benchmarks.evaluate.report import best_threshold, input_cell, markdown, write_summary
from mdps.benchmarks.evaluate.results import METRICS, Evaluation
from mdps.benchmarks.metrics.pixels import PixelCounts
from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime.errors import UsageError
from mdps.runtime.preprocessing import Preprocessing

MakeCategory = Callable[..., Path]


class Bright:
    """A detailed predictor that looks for what is bright; stands in for `BundlePredictor` as well."""

    name = "bright <b>"
    provenance: dict[str, object] = {"checkpoint": {"sha256": "00ff"}, "settings": {"seed": 7}}  # noqa: RUF012
    crop: Box | None = None
    notes: tuple[str, ...] = ()

    def __init__(
        self, bundle: Path | None = None, asked: Any = None, *, threshold: float | None = 160.0, **_: Any
    ) -> None:
        self.threshold = threshold

    def __enter__(self) -> "Bright":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def covered(self, size: tuple[int, int]) -> Box:
        return (0, 0, *size)

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction | str]:
        observe = Preprocessing((16, 16))
        for index, path in enumerate(paths):
            if path.stat().st_size < 100:
                yield f"{path} is torn"
                continue
            image = observe(path)
            anomaly_map = (image.mean(axis=0) + 1) * 127.5
            yield Prediction(float(anomaly_map.max()), anomaly_map, 10.0 * (index + 1), image * 0.5)

    def __call__(self, paths: Sequence[Path]) -> Iterator[tuple[float, NDArray[np.float32]]]:
        raise AssertionError("a detailed predictor is asked for predictions")


def evaluated(root: Path, out: Path | None = None, threshold: float | None = 160.0) -> Evaluation:
    (category,) = find_categories(root)
    return evaluate(Bright(threshold=threshold), category, out=out)


def test_everything_is_written_and_belongs_together(make_category: MakeCategory, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = evaluated(make_category(), out)
    files = {path.name for path in out.iterdir()}
    assert files == {
        "results.json", "results.md", "report.html", "roc.png", "scores.png", "counts.npz", "best", "worst"
    }  # fmt: skip
    stored = json.loads((out / "results.json").read_text())
    assert {name: stored[name] for name in METRICS} == {name: found.metrics[name] for name in METRICS}
    assert [row["path"] for row in stored["rows"]] == [row.path for row in found.rows]
    assert stored["verdicts"] == found.verdicts()
    assert stored["judge"] == "bright <b>"
    assert PixelCounts.load(out / "counts.npz").auroc() == found.counts.auroc()
    table = (out / "results.md").read_text()
    assert f"| {found.metrics['pixel_auroc']:.4f} |" in table
    assert "- checkpoint.sha256: 00ff" in table
    assert found.metrics["ms_per_image"] == 40.0  # the median of 10, 20, .., 70


def test_each_kind_of_defect_is_measured_against_the_good_images(make_category: MakeCategory, tmp_path: Path) -> None:
    root = make_category(defective=6)
    for part in ("test", "ground_truth"):
        (root / part / "mark <i>").mkdir()
        for path in sorted((root / part / "spot").iterdir())[:2]:
            path.rename(root / part / "mark <i>" / path.name)
    (category,) = find_categories(root)
    found = evaluate(Bright(), category, out=tmp_path / "out")
    assert [(kind.kind, kind.images) for kind in found.defect_types] == [("mark <i>", 2), ("spot", 4)]
    for kind in found.defect_types:
        own = replace(category, test=tuple(one for one in category.test if one.kind in ("good", kind.kind)))
        alone = evaluate(Bright(), own)
        assert kind.image_auroc == alone.metrics["image_auroc"]
        assert kind.pixel_auroc == pytest.approx(alone.metrics["pixel_auroc"], abs=1e-4)
        assert not alone.defect_types
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["kinds"] == [kind.to_json() for kind in found.defect_types]
    assert (
        f"| disc | spot | 4 | {found.defect_types[1].image_auroc:.4f} |"
        in (tmp_path / "out" / "results.md").read_text()
    )
    assert [cells[-1] for cells in replace(found, threshold=1000.0).kinds()] == ["2", "4"]
    assert [cells[-1] for cells in replace(found, threshold=None).kinds()] == ["", ""]
    assert "<td>mark &lt;i&gt;</td><td>2</td>" in (tmp_path / "out" / "report.html").read_text()


def test_pictures_show_image_reconstruction_heat_and_truth(make_category: MakeCategory, tmp_path: Path) -> None:
    evaluated(make_category(), tmp_path)
    pictures = sorted((tmp_path / "best").glob("*.png")) + sorted((tmp_path / "worst").glob("*.png"))
    assert pictures
    for path in pictures:
        assert re.fullmatch(r"\d_(good|spot)_\d{3}_score_[\d.]+_(right|missed|false_alarm)", path.stem)
        pixels = np.asarray(Image.open(path)).astype(int)
        assert pixels.shape == (256, 4 * 256 + 12, 3)
        tiles = [pixels[:, 260 * index : 260 * index + 256] for index in range(4)]
        contour = (tiles[3] == (0, 255, 80)).all(axis=2)
        assert contour.any() == ("_spot_" in path.name)  # the truth is drawn, and only where there is one
        halved = (tiles[0] - 127.5) * 0.5 + 127.5
        assert np.abs(tiles[1] - halved).max() < 2  # the reconstruction that the predictor made up


def test_what_is_right_and_wrong_follows_the_threshold(make_category: MakeCategory, tmp_path: Path) -> None:
    root = make_category()
    found = evaluated(root, tmp_path / "none", threshold=1000.0)
    counted = found.verdicts() or {}
    assert [counted[name] for name in ("good", "false_alarms", "defective", "missed")] == [3, 0, 4, 4]
    sentence = "4 of 4 defective images were missed at the threshold"
    assert sentence in (tmp_path / "none" / "report.html").read_text()
    assert f"- disc: {sentence}" in (tmp_path / "none" / "results.md").read_text()
    assert sentence in json.loads((tmp_path / "none" / "results.json").read_text())["problems"]
    assert {path.stem.split("_")[-1] for path in (tmp_path / "none" / "worst").iterdir()} == {"missed"}
    evaluated(root, tmp_path / "all", threshold=0.0)
    names = [path.name for path in sorted((tmp_path / "all" / "worst").iterdir())]
    assert len(names) == 3
    assert all("_good_" in name and name.endswith("false_alarm.png") for name in names)


def test_without_a_threshold_pictures_are_named_by_what_they_are(make_category: MakeCategory, tmp_path: Path) -> None:
    evaluated(make_category(good=10, defective=10), tmp_path, threshold=None)
    for folder, names in (
        ("best", {"defective_highest", "good_lowest"}),
        ("worst", {"defective_lowest", "good_highest"}),
    ):
        assert {re.sub(r".*_score_[\d.]+_", "", path.stem) for path in (tmp_path / folder).iterdir()} == names
    page = (tmp_path / "report.html").read_text()
    assert "Defective images with the lowest scores" in page
    assert "Most wrong" not in page
    assert "no threshold applies" in page


def test_the_page_holds_all_in_one_file_and_runs_nothing_foreign(make_category: MakeCategory, tmp_path: Path) -> None:
    root = make_category("<i>disc")
    torn = root / "test" / "good" / "001.png"
    torn.write_bytes(b"torn")
    found = evaluated(root, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<i>disc" not in page
    assert "bright <b>" not in page
    assert "&lt;i&gt;disc" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    pictures = len(list(tmp_path.glob("best/*.png"))) + len(list(tmp_path.glob("worst/*.png")))
    assert page.count("data:image/jpeg") == pictures
    assert page.count("data:image/png") == 2
    assert page.count("<tr><td>test/") == 7  # every image is listed, the broken one too
    assert "is torn" in page
    assert f"{found.metrics['aupro_0.30']:.4f}" in page
    assert "At the calibrated threshold 160" in page


def test_an_earlier_run_leaves_nothing_between(make_category: MakeCategory, tmp_path: Path) -> None:
    root = make_category(good=6, defective=8)
    evaluated(root, tmp_path)
    for path in root.glob("test/spot/*.png"):
        path.unlink()
    evaluated(root, tmp_path, threshold=None)
    assert not (tmp_path / "roc.png").exists()  # no curve without defects
    assert not list(tmp_path.glob("*/*spot*"))
    assert "undefined" in (tmp_path / "report.html").read_text()


def test_several_categories_share_one_report(make_category: MakeCategory, tmp_path: Path) -> None:
    found = [evaluated(make_category(name), tmp_path / name) for name in ("a", "b")]
    write_summary(found, tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [one["category"] for one in stored["categories"]] == ["a", "b"]
    assert stored["mean"]["image_ap"] == pytest.approx(np.mean([one.metrics["image_ap"] for one in found]))
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h2>") == 3  # both, and the settings
    assert page.count("data:image/png") == 4
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:] == ["a", "b", "mean"]


def test_a_table_marks_what_uses_the_test_set(make_category: MakeCategory) -> None:
    (category,) = find_categories(make_category())
    predictor = Bright()
    predictor.notes = ("these numbers use the test set",)
    assert "- disc: these numbers use the test set" in markdown([evaluate(predictor, category)])


def test_a_row_says_what_went_in() -> None:
    given = {"image_size": [64, 96], "backbone": "resnet18", "backbone_sha256": "0123456789"}
    assert input_cell(given) == "64 x 96, resnet18 01234567"
    assert input_cell(given | {"backbone": None, "backbone_sha256": None}) == "64 x 96"
    assert input_cell({}) == ""


@pytest.mark.parametrize("seed", range(5))
def test_the_best_threshold_has_the_largest_f1(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, scores = rng.random(40) < 0.4, rng.integers(0, 15, 40).astype(float)

    def f1(threshold: float) -> float:
        hits = (labels & (scores > threshold)).sum()
        return 2 * hits / ((scores > threshold).sum() + labels.sum())

    assert f1(best_threshold(labels, scores)) == max(f1(value - 0.5) for value in range(16))


def test_a_folder_that_cannot_be_made_is_named(make_category: MakeCategory, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"--out .*file cannot be used as a folder"):
        evaluated(make_category(), tmp_path / "file")


# The command


@pytest.fixture
def bright(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdps.benchmarks.evaluate.bundle, "BundlePredictor", Bright)


@pytest.mark.usefixtures("bright")
def test_one_category_is_one_object_on_stdout(make_category: MakeCategory, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["evaluate", "bundle", str(make_category()), "--json"]) == 0
    streams = capsys.readouterr()
    obj = json.loads(streams.out)
    assert set(obj) == {*METRICS, "category", "images", "provenance", "verdicts", "regions", "problems"}
    assert (obj["verdicts"]["missed"], obj["verdicts"]["missed_by_kind"]) == (1, {"spot": 1})
    assert obj["images"] == 7
    assert streams.err == ""  # no bar where nobody predictions


@pytest.mark.usefixtures("bright")
def test_several_categories_have_a_mean_and_can_be_chosen(
    make_category: MakeCategory, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = make_category("a").parent
    make_category("b")
    make_category("c", defective=0)
    out = tmp_path / "out"
    assert run(cli, ["evaluate", "bundle", str(root), "--json", "--out", str(out), "--every", "2"]) == 0
    streams = capsys.readouterr()
    obj = json.loads(streams.out)
    assert [one["category"] for one in obj["categories"]] == ["a", "b", "c"]
    assert set(obj["mean"]) == set(METRICS)
    assert obj["categories"][2]["image_auroc"] is None
    assert streams.err == f"see {out / 'report.html'}\n"
    assert (out / "b" / "report.html").is_file()
    assert run(cli, ["evaluate", "bundle", str(root), "--category", "b", "--category", "a"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table if line.startswith("| ")][2:] == ["b", "a", "mean"]
    assert run(cli, ["evaluate", "bundle", str(root), "--category", "d"]) == 2
    assert "has no category 'd': it has a, b, c" in capsys.readouterr().err


@pytest.mark.usefixtures("bright")
def test_a_broken_image_is_named_and_the_exit_code_says_so(
    make_category: MakeCategory, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_category()
    (root / "test" / "spot" / "004.png").write_bytes(b"torn")
    assert run(cli, ["evaluate", "bundle", str(root), "--json"]) == 3
    streams = capsys.readouterr()
    assert json.loads(streams.out)["images"] == 6
    assert "disc: test/spot/004.png could not be judged" in streams.err


def test_a_real_bundle_is_measured(
    tiny_bundle: Path, make_category: MakeCategory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = make_category(good=2, defective=2), tmp_path / "out"
    command = ["evaluate", str(tiny_bundle), str(root), "--threads", "1", "--out", str(out), "--mask-range", "dataset"]
    assert run(cli, [*command, "--json", "--batch", "3", "--samples", "2"]) == 0
    obj = json.loads(capsys.readouterr().out)
    assert obj["provenance"]["settings"]["mask"]["range"] == "dataset"
    assert obj["provenance"]["settings"]["sampler"]["samples"] == 2
    assert obj["provenance"]["uses_test_set"] is True
    assert "these numbers use the test set" in (out / "report.html").read_text()
    assert len(list(out.glob("best/*.png")) + list(out.glob("worst/*.png"))) == 4


def test_what_is_no_data_set_or_bundle_is_a_sentence(
    tiny_bundle: Path, make_category: MakeCategory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, ["evaluate", str(tiny_bundle), str(tmp_path / "gone")]) == 2
    assert "gone" in capsys.readouterr().err
    assert run(cli, ["evaluate", str(tmp_path), str(make_category())]) == 2
    assert "is no bundle" in capsys.readouterr().err
