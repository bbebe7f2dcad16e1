"""The demo: what it measures, what it promises, and what it refuses to overwrite."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mdps.benchmarks import demo
from mdps.benchmarks.data.textures import Sample, TextureSet
from mdps.runtime import MdpsError, UsageError, load
from mdps.serving.folder import Row, predict


@dataclass(frozen=True)
class Run:
    out: Path
    printed: dict[str, float | int | str]
    rows: list[dict[str, float | str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The whole demo, once, as a user runs it."""
    out = tmp_path_factory.mktemp("demo") / "report"
    command = [sys.executable, "-m", "mdps.cli", "demo", "--json", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return Run(out, json.loads(done.stdout), rows)


def test_it_prints_one_object_and_keeps_its_promises(run: Run) -> None:
    assert list(run.printed) == ["image_auroc", "pixel_auroc", "ms_per_image", "images", "report"]
    assert float(run.printed["image_auroc"]) >= 0.97
    assert float(run.printed["pixel_auroc"]) >= 0.95
    assert float(run.printed["ms_per_image"]) > 0
    assert int(run.printed["images"]) >= 60
    assert Path(str(run.printed["report"])) == run.out / "report.html"
    assert (run.out / "report.html").is_file()


@pytest.mark.slow  # needs both processors to itself
def test_an_image_takes_less_than_a_second(tmp_path: Path) -> None:
    bundle = demo.export_demo(tmp_path / "bundle")
    image = TextureSet().test()[0].image
    with load(bundle, calibrated=False) as detector:
        assert min(detector(image).times["total"] for _ in range(10)) < 1000


def test_most_defects_fail_and_most_good_parts_pass(run: Run) -> None:
    verdicts = [row["verdict"] for row in run.rows]
    good = [verdict for verdict, sample in zip(verdicts, TextureSet().test(), strict=True) if sample.kind == "good"]
    assert good.count("pass") > 0.8 * len(good)
    assert verdicts.count("fail") > 0.6 * (len(verdicts) - len(good))


def test_scores_repeat_in_another_batch_and_order(run: Run, tmp_path: Path) -> None:
    some = run.rows[::-7]
    with load(run.out / "bundle") as detector:
        again = predict(detector, [Path(str(row["path"])) for row in some], tmp_path, batch=5)
    np.testing.assert_allclose([row.score or 0 for row in again], [float(row["score"]) for row in some], atol=1e-5)


def a_sample(kind: str, defect: bool) -> Sample:
    mask = np.zeros((4, 4), bool)
    mask[1, 1] = defect
    return Sample("000", kind, np.zeros((4, 4, 3), np.uint8), mask)


def a_row(out: Path, name: str, score: float, hot: tuple[int, int]) -> Row:
    (out / "maps").mkdir(exist_ok=True)
    anomaly_map = np.zeros((4, 4), np.float32)
    anomaly_map[hot] = 1
    np.save(out / "maps" / f"{name}.npy", anomaly_map)
    return Row(f"{name}.png", score, 0.5, "pass", f"maps/{name}.npy", 10.0)


def test_metrics_compare_scores_with_kinds_and_maps_with_masks(tmp_path: Path) -> None:
    samples = [a_sample("good", False), a_sample("scratch", True)]
    right = [a_row(tmp_path, "a", 0.1, (0, 0)), a_row(tmp_path, "b", 0.9, (1, 1))]
    wrong = [a_row(tmp_path, "c", 0.9, (0, 0)), a_row(tmp_path, "d", 0.1, (2, 2))]
    best = demo.measure(samples, right, tmp_path)
    assert (best.image_auroc, best.ms_per_image, best.images) == (1.0, 10.0, 2)
    assert best.pixel_auroc > 0.98
    worst = demo.measure(samples, wrong, tmp_path)
    assert worst.image_auroc == 0.0
    assert worst.pixel_auroc < 0.5


def test_an_image_that_failed_is_not_left_out_of_the_metrics(tmp_path: Path) -> None:
    with pytest.raises(MdpsError, match=r"a\.png could not be judged"):
        demo.measure([a_sample("good", False)], [Row("a.png", verdict="error", error="torn")], tmp_path)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(UsageError, match="is not an earlier demo"):
        demo.run_demo(tmp_path)
    assert (tmp_path / "images").is_dir()


def test_a_missing_checkpoint_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CHECKPOINT", tmp_path / "denoiser.safetensors")
    with pytest.raises(MdpsError, match="is missing"):
        demo.export_demo(tmp_path / "bundle")
