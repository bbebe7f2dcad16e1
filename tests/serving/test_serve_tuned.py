"""A bundle with a tuned detector on its way to people: over HTTP, in a folder's results, in an evaluation."""

import io
import json
import urllib.request
from dataclasses import replace

import pytest
from PIL import Image
from server_process import serving
from tuned_bundle import TERMS, band, calibrated, pictures, tuned_bundle

from mdps.benchmarks.data import find_categories
from mdps.benchmarks.evaluate.bundle import BundlePredictor
from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import load
from mdps.runtime.manifest import Manifest
from mdps.runtime.preprocessing import Preprocessing

pytestmark = pytest.mark.filterwarnings("ignore::mdps.runtime.errors.BackendWarning")


@pytest.fixture(scope="module", params=[TERMS, TERMS[2:3]], ids=["all terms", "photograph alone"])
def bundle(request, tmp_path_factory):
    folder = tuned_bundle(tmp_path_factory.mktemp("served") / "line", request.param)
    calibrated(folder)
    return folder


def png(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_server_says_what_the_runtime_says(bundle):
    images = [png(picture) for picture in pictures(4, seed=3)]
    with load(bundle) as detector:
        wanted = detector.batch(images)
    with serving([bundle], "--threads", "1") as server:
        for image, result in zip(images, wanted, strict=True):
            answer = json.loads(urllib.request.urlopen(f"{server.url}/inspect?map=png", image).read())
            assert (answer["score"], answer["verdict"]) == (pytest.approx(result.score), result.verdict)
            assert answer["judged_by"] == "tuned"
            assert {"photograph", "score", "published"} <= answer["times_ms"].keys()


def test_a_folder_has_rows_pictures_and_a_report(bundle, tmp_path):
    (tmp_path / "in").mkdir()
    for index, picture in enumerate(pictures(3)):
        (tmp_path / "in" / f"{index}.png").write_bytes(png(picture))
    assert run(cli, ["predict", str(bundle), str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text("utf-8").splitlines()]
    with load(bundle) as detector:
        assert [row["score"] for row in rows] == [detector(tmp_path / "in" / f"{k}.png").score for k in range(3)]
        assert {row["judged_by"] for row in rows} == {"tuned"}
        tiles = 4 if detector.denoises else 3
        name = detector.tuned
    width, height = Image.open(tmp_path / "out" / "overlays" / "0.png").size
    assert width == tiles * height + (tiles - 1) * 4
    assert name in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_an_evaluation_judges_as_tuned_unless_something_is_changed(bundle, make_category):
    paths = [sample.path for sample in find_categories(make_category(good=2, defective=3))[0].test]
    with load(bundle) as tuned, load(bundle, tuned=False, calibrated=False) as published:
        ours, theirs = ([detector(path).score for path in paths] for detector in (tuned, published))
    assert ours != theirs

    def found(**how):
        with BundlePredictor(bundle, **how) as predictor:
            return [score for score, _ in predictor(paths)], predictor

    scores, predictor = found()
    manifest = Manifest.read(bundle)
    threshold = manifest.calibrations["default"].threshold
    assert (scores, predictor.threshold, predictor.notes) == (ours, threshold, ())
    assert predictor.provenance["image_size"] == list(manifest.tunings["default"].photograph.network_size)
    for how in ({"tuned": False}, {"changes": lambda settings: settings}):
        scores, predictor = found(**how)
        assert (scores, predictor.threshold) == (theirs, None)
        assert predictor.provenance["image_size"] == list(manifest.preprocessing.network_size)
        assert "calibrated for another detector" in predictor.notes[0]
    scores, _ = found(changes=lambda settings: replace(settings, sampler=replace(settings.sampler, samples=2)))
    assert scores not in (ours, theirs)


def test_an_evaluation_says_how_many_were_judged_twice(tmp_path, make_category):
    paths = [sample.path for sample in find_categories(make_category(good=2, defective=3))[0].test]
    with load(tuned_bundle(tmp_path / "plain", TERMS[2:3]), calibrated=False) as detector:
        scores = sorted(detector(path).score for path in paths)
    with BundlePredictor(band(tmp_path / "b", scores[1], scores[3])) as predictor:
        assert len([*predictor(paths)]) == len(paths)
        assert f"3 of {len(paths)} images were judged again" in predictor.notes[-1]


def test_the_crop_of_metrics_cuts_the_map_of_a_tuned_detector(tmp_path, make_category):
    folder = tuned_bundle(tmp_path / "b", TERMS[2:3])
    manifest = Manifest.read(folder)
    size = manifest.preprocessing.image_size
    replace(manifest, preprocessing=Preprocessing(size, crop="metrics", crop_size=4)).write(folder)
    paths = [sample.path for sample in find_categories(make_category(good=1, defective=1))[0].test]
    with BundlePredictor(folder) as predictor:
        assert [anomaly_map.shape for _, anomaly_map in predictor(paths)] == [(4, 4)] * len(paths)
