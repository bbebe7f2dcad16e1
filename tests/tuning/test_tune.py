"""A bundle is tuned on images of good parts alone: what is chosen, what is written, and what is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import load
from mdps.runtime.bundle import LoadOptions
from mdps.runtime.errors import CalibrationError, ImageError, UsageError
from mdps.runtime.manifest import FILE_NAME, Manifest
from mdps.serving.calibrate import calibrate_folder, fingerprint
from mdps.tuning.options import TuneOptions
from mdps.tuning.tune import Outcome, refuse_tests, tune

ALL = TuneOptions(budget_ms=1e6, per_kind=1)
FIRST = replace(ALL, minutes=1e-9)  # the first view of the photograph alone


def photographs(folder: Path, count: int, side: int = 40) -> Path:
    """Write smooth grey images that differ a little."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    columns = np.arange(side)[None, :]
    for index in range(count):
        pixels = 110 + 40 * np.sin(columns / 5) + rng.normal(0, 5, (side, side)) + rng.normal(0, 4)
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert("RGB").save(folder / f"{index:02d}.png")
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("parts") / "good", 10)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def tuned(bundle: Path, good: Path, options: TuneOptions = FIRST, **more: Any) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tune(bundle, good, options, LoadOptions(threads=1), 0.05, **more)


@pytest.fixture(scope="module")
def whole(tiny_bundle: Path, good: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A bundle for which everything was tried, and what came of it."""
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("whole") / "bundle"))
    return bundle, tuned(bundle, good, ALL)


def test_a_tuned_bundle_judges_with_what_was_chosen(whole: tuple[Path, Outcome], good: Path) -> None:
    bundle, found = whole
    manifest = Manifest.read(bundle)
    assert manifest.tunings["default"].evidence["chosen"] == found.chosen.candidate.name
    assert manifest.calibrations["default"].images == 10
    with load(bundle, threads=1, force=True) as detector:
        assert detector(good / "00.png").judged_by == "tuned"
    assert not bundle.with_name("bundle.tune").exists()


def test_every_kind_of_candidate_is_tried(whole: tuple[Path, Outcome]) -> None:
    tried = whole[1].search.tried
    kinds = {(raw.kind, raw.of) for one in tried for raw in one.candidate.raws}
    assert kinds == {
        ("map", "reconstruction"), ("pixels", "reconstruction"),
        *((kind, of) for kind in ("position", "shared", "bank") for of in ("photograph", "residual")),
    }  # fmt: skip
    samplers = {raw.sampler for one in tried for raw in one.candidate.raws if raw.sampler}
    assert {"one call, T = 50", "noise pair, T = 200", "DiffusionAD", "DDAD, 5 calls"} <= samplers
    assert {len(one.candidate.raws) for one in tried} == {1, 2}


def test_the_evidence_is_json_and_small(whole: tuple[Path, Outcome]) -> None:
    told = json.dumps(whole[1].to_json(), allow_nan=False)
    assert len(told) < 100_000
    evidence = json.loads(told)
    assert evidence["images"] == {"fit": 6, "scale": 2, "defects put in": 2}
    assert {"name", "value", "ms", "eligible", "kinds"} == set(evidence["candidates"][0])
    assert evidence["left_out"] == []


def test_a_run_that_was_killed_goes_on_to_the_same_choice(
    whole: tuple[Path, Outcome], bundle: Path, good: Path
) -> None:
    program = (
        "import os, signal; from pathlib import Path; from mdps.runtime.bundle import LoadOptions;"
        "from mdps.tuning.options import TuneOptions; from mdps.tuning.tune import tune\n"
        "def progress(said, share):\n    if said.startswith('DDAD, 3'): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"tune(Path({str(bundle)!r}), Path({str(good)!r}), TuneOptions(budget_ms=1e6, per_kind=1),"
        "LoadOptions(threads=1), 0.05, progress)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not Manifest.read(bundle).tunings
    assert len(list(bundle.with_name("bundle.tune").glob("*.npz"))) == 3 + 6  # views and samplers
    found = tuned(bundle, good, ALL)
    ours, theirs = ({one.candidate.name: one.value for one in run.search.tried} for run in (found, whole[1]))
    assert ours == theirs


def test_the_page_shows_every_defect_and_the_choice(whole: tuple[Path, Outcome]) -> None:
    bundle, found = whole
    page = bundle.with_name("bundle.tune.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == len(found.search.images.truth.kinds) == page.count("data:image/jpeg")
    missed = sum(float(score) <= found.calibration.threshold for score in found.shown.scores)
    assert page.count(">missed<") == missed
    assert f"Chosen: {found.chosen.candidate.name}." in page
    assert page.count("<circle") == len(found.search.tried)
    assert found.calibration.doubt in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_a_calibration_goes_by_scores_that_no_image_took_part_in(
    whole: tuple[Path, Outcome], good: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(whole[0], tmp_path / "bundle"))
    apart = whole[1].evidence["fitted"]
    assert set(apart) == {fingerprint(path) for path in good.iterdir()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = calibrate_folder(bundle, good, 0.05, threads=1)
        assert (found.threshold, found.fitness) == (max(apart.values()), whole[1].calibration.fitness)
        others = photographs(tmp_path / "others", 12)
        more = calibrate_folder(bundle, others, 0.5, threads=1)  # the first ten are the same
    with load(bundle, threads=1, force=True, tuned=True) as detector:
        new = [detector(others / f"{index}.png").score for index in (10, 11)]
    assert more.threshold == pytest.approx(sorted([*apart.values(), *new])[6])


def test_the_command_tells_what_it_chose(bundle: Path, good: Path, capsys: Any) -> None:
    keys = ["--set", "minutes=1e-9", "--set", "per-kind=1", "--set", f"report={bundle.parent / 'page.html'}"]
    asked = ["tune", str(bundle), str(good), "--budget-ms", "1e6", "--threads", "1", *keys]
    assert run(cli, [*asked, "--json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["tried"], told["defects"], len(told["fitted"])) == (15, 14, 10)
    assert f"wrote {bundle.parent / 'page.html'}" in said.err
    assert run(cli, asked) == 0
    said = capsys.readouterr()
    assert re.search(r"chosen: (shared|position|bank), 32 pixels.*\ntime: \d+ ms an image", said.out)
    assert "cascade: none: no time was left" in said.out


def test_candidates_that_no_time_is_left_for_are_named(bundle: Path, good: Path) -> None:
    found = tuned(bundle, good)
    assert found.search.left_out[-1] == "DDAD, 10 calls"
    assert {raw.of for one in found.search.tried for raw in one.candidate.raws} == {"photograph"}
    assert Manifest.read(bundle).tunings["default"].evidence["left_out"] == found.search.left_out


def test_nothing_is_written_where_nothing_fits_the_budget(bundle: Path, good: Path) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    with pytest.raises(UsageError, match=r"no detector fits in 1e-06 ms .* the quickest takes \d+ ms"):
        tuned(bundle, good, replace(FIRST, budget_ms=1e-6))
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


def test_images_that_cannot_be_read_are_named(bundle: Path, good: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(good, tmp_path / "broken"))
    (broken / "03.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"1 of 10 images cannot be read.*03\.png"):
        tuned(bundle, broken)


def test_too_few_images_are_refused_and_few_are_doubted(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="4 good images are too few to tune on: give at least 5"):
        tuned(bundle, photographs(tmp_path / "four", 4))
    with pytest.warns(UserWarning, match="5 good images are few: the choice among candidates rests on 2 of them"):
        tune(bundle, photographs(tmp_path / "five", 5), FIRST, LoadOptions(threads=1), 0.05)


@pytest.mark.parametrize("name", ["test/good", "test", "ground_truth/spot", "."])
def test_a_test_set_is_refused(name: str, tmp_path: Path) -> None:
    for folder in ("train/good", "test/good", "ground_truth/spot"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(UsageError, match=r"test"):
        refuse_tests(tmp_path / name)
    refuse_tests(tmp_path / "train" / "good")


def test_a_folder_that_may_be_a_test_set_is_doubted(tmp_path: Path) -> None:
    (tmp_path / "test" / "mine").mkdir(parents=True)
    with pytest.warns(UserWarning, match="lies in a folder called test"):
        refuse_tests(tmp_path / "test" / "mine")


def test_a_bundle_that_cannot_be_written_is_said_before_the_work(bundle: Path, good: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(Exception, match=rf"{FILE_NAME} cannot be written: No space left on device"):
        tuned(bundle, good)


def test_weights_that_are_not_the_bundles_are_refused(bundle: Path, good: Path) -> None:
    manifest = Manifest.read(bundle)
    replace(manifest, network={**manifest.network, "backbone_weights_sha256": "0" * 64}).write(bundle)
    with pytest.raises(UsageError, match=r"are not those in .* --set backbone-weights=FILE"):
        tuned(bundle, good)
