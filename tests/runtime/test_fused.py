"""A tuned detector on a real bundle of tiny graphs, held against numpy on the raw maps of its terms."""

from dataclasses import replace

import numpy as np
import pytest
import test_detector as tiny
from PIL import Image
from tuned_bundle import (
    SIDE,
    SIZE,
    TERMS,
    band,
    calibrated,
    fusion_graph,
    pictures,
    quietly,
    residual_graph,
    tuned_bundle,
)

from mdps.runtime import BundleError, CalibrationError, ImageError, LoadOptions, UsageError, load
from mdps.runtime.bundle import Bundle
from mdps.runtime.graphs import GraphEntry
from mdps.runtime.loading import open_detector
from mdps.runtime.manifest import Manifest, hash_files
from mdps.runtime.memory import bundle_need
from mdps.runtime.preprocessing import Observations, Preprocessing, observe
from mdps.runtime.settings import PassSettings
from mdps.runtime.tuning import Cascade

pytestmark = pytest.mark.filterwarnings("ignore::mdps.runtime.errors.BackendWarning")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tuned_bundle(tmp_path_factory.mktemp("tuned") / "b")


@pytest.fixture(scope="module")
def of_photograph(tmp_path_factory):
    return tuned_bundle(tmp_path_factory.mktemp("photograph") / "b", TERMS[2:3])


def with_terms(folder, detector, picture):
    """The fused map [H, W] of one picture by numpy, from the raw parts computed one by one."""
    tuning = detector.tuning
    views = observe([picture], detector.preprocessing, tuning.photograph)
    manifest = detector.manifest
    bundle = Bundle(folder, manifest, replace(manifest.settings, sampler=tuning.sampler))
    with open_detector(bundle, LoadOptions(), lambda pipeline, _: tiny.Detector(manifest, pipeline)) as few:
        found = few.inspect(views.images)
    samples, y = found.posterior_samples[None], views.images
    pooled = views.photographs[0].reshape(3, 3, 4, 3, 4).mean(axis=(0, 2, 4))
    residual = (y - samples.mean(axis=1))[0, 0].reshape(SIZE // 2, 2, SIZE // 2, 2).mean(axis=(1, 3))
    nearest = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    raw = {
        "map": found.anomaly_map[0, 0],
        "pixels": np.abs(samples - y[:, None]).mean(axis=(1, 2))[0],
        "position": pooled[nearest][:, nearest],
        "residual": np.repeat(np.repeat(residual, 2, axis=0), 2, axis=1),
    }
    return sum(t.weight * (raw[t.name] - t.low) / (t.high - t.low) for t in tuning.terms), samples[0, 0]


def test_the_fused_map_is_the_weighted_sum_of_the_scaled_terms(bundle):
    with load(bundle, calibrated=False) as detector:
        for picture in pictures():
            result = detector(picture)
            wanted, sample = with_terms(bundle, detector, picture)
            np.testing.assert_allclose(result.anomaly_map, wanted, atol=1e-5)
            assert result.score == pytest.approx(wanted.max(), abs=1e-5)
            np.testing.assert_array_equal(result.mask, result.anomaly_map > 1)
            np.testing.assert_allclose(result.posterior_sample, sample, atol=1e-6)
            assert (result.judged_by, result.early_exit) == ("tuned", False)
            assert {"photograph", "first_pass", "score", "total"} <= result.times.keys()


def test_a_result_does_not_depend_on_its_batch(bundle):
    with load(bundle, calibrated=False) as detector:
        images = pictures(5)
        for image, result in zip(images, detector.batch(images), strict=True):
            alone = detector(image)
            assert result.score == alone.score
            np.testing.assert_array_equal(result.anomaly_map, alone.anomaly_map)
            np.testing.assert_array_equal(result.posterior_sample, alone.posterior_sample)
        views = detector.observe(images)
        assert [one.score for one in detector.judge(views)] == [one.score for one in detector.batch(images)]


def test_terms_of_the_photograph_alone_open_no_denoiser(of_photograph, tmp_path):
    """Not even where its graphs are not there: the bundle is the same otherwise."""
    with load(of_photograph, calibrated=False) as detector:
        assert not detector.denoises
        assert set(detector.provenance["engines"]) == {"tuned photograph", "tuned position", "tuned fusion"}
        result = detector(pictures(1)[0])
        assert result.posterior_sample is None
        assert result.times["first_pass"] == result.times["masked_pass"] == 0


def test_only_the_graphs_that_the_terms_need_are_opened(tmp_path, bundle):
    with load(bundle, calibrated=False) as detector:
        assert {"plain_step", "features", "score"} < set(detector.provenance["engines"])
        assert "guided_step" not in detector.provenance["engines"]
    with load(tuned_bundle(tmp_path / "b", TERMS[1:3]), calibrated=False) as detector:
        assert {role for role in detector.provenance["engines"] if "tuned" not in role} == {"plain_step"}
        assert detector(pictures(1)[0]).posterior_sample.shape == (3, SIZE, SIZE)


def test_openvino_agrees(bundle):
    pytest.importorskip("openvino")
    with load(bundle, calibrated=False) as one, load(bundle, calibrated=False, engine="openvino") as other:
        assert set(other.provenance["engines"].values()).isdisjoint(one.provenance["engines"].values())
        for picture in pictures():
            a, b = one(picture), other(picture)
            np.testing.assert_allclose(a.anomaly_map, b.anomaly_map, atol=1e-5)
            assert a.score == pytest.approx(b.score, abs=1e-5)


def test_observations_without_photographs_are_refused(bundle):
    with load(bundle, calibrated=False) as detector:
        images = detector.observe(pictures(1)).images
        with pytest.raises(ImageError, match="give it what its `observe` returns"):
            detector.judge(images)
        with pytest.raises(ImageError, match=r"photographs should be \[B, 3, 12, 12\], these are \[1, 3, 8, 8\]"):
            detector.judge(Observations(images, images))
        assert detector.predicted_noise(images, tiny_step()).shape == images.shape


def tiny_step():
    from mdps.runtime.schedule import Step

    return Step(500.0, 0.5, 0.5, 0.0)


def test_the_published_method_is_still_there(bundle, tmp_path):
    plain = tiny.make_bundle(tmp_path / "plain")
    with load(bundle, tuned=False, calibrated=False) as published, load(plain, calibrated=False) as other:
        for picture in pictures():
            a, b = published(picture), other(picture)
            assert (a.score, a.judged_by) == (b.score, "published")
            np.testing.assert_array_equal(a.anomaly_map, b.anomaly_map)


def test_a_cascade_sends_exactly_its_band_to_the_published_method(of_photograph, tmp_path):
    images = pictures(8, seed=1)
    with load(of_photograph, calibrated=False) as alone:
        fused = [alone(image) for image in images]
    scores = sorted(one.score for one in fused)
    low, high = scores[2], scores[4]  # both ends belong to it
    with (
        load(band(tmp_path / "b", low, high), calibrated=False) as detector,
        load(of_photograph, calibrated=False, tuned=False) as published,
    ):
        results = detector.batch(images)
        for image, before, result in zip(images, fused, results, strict=True):
            if not low <= before.score <= high:
                assert (result.score, result.judged_by) == (before.score, "tuned")
                continue
            other, factor = published(image), (high - low) / (1.5 - 0.5)
            assert result.judged_by == "published"
            np.testing.assert_allclose(result.anomaly_map, low + factor * (other.anomaly_map - 0.5), atol=1e-5)
            assert result.score == pytest.approx(np.clip(low + factor * (other.score - 0.5), low, high), abs=1e-6)
            assert low - 1e-6 <= result.score <= high + 1e-6
            assert result.times["published"] > 0
        assert [one.judged_by for one in results].count("published") == 3
        assert detector.denoises


def test_a_cascade_of_a_frozen_range_is_calibrated_with_it(tmp_path):
    """Its mask range is that of the published method's first pass."""
    folder = tuned_bundle(
        tmp_path / "b", TERMS[2:3], Cascade(-9.0, 9.0, 0.5, 1.5), tiny.settings_of(mask_range="frozen")
    )
    with load(folder, calibrated=False) as detector:
        with pytest.raises(CalibrationError, match="no range was calibrated"):
            detector(pictures(1)[0])
        calibration = quietly(detector, pictures(6))
    with load(folder, calibrated=False, tuned=False) as published:
        maps = published.first_maps(published.observe(pictures(6)))
    assert calibration.mask_range == (maps.min(), maps.max())


def test_a_calibration_is_of_one_tuning(tmp_path):
    folder = tuned_bundle(tmp_path / "b")
    published = calibrated(folder, tuned=False)
    assert published.tuned == ""
    with pytest.raises(
        CalibrationError, match=r"calibrated before it was tuned.* run `mdps calibrate .*b GOOD_FOLDER`"
    ):
        load(folder)
    own = calibrated(folder)
    with load(folder) as detector:
        assert own.tuned == detector.tuned == detector.provenance["tuned"] != ""
        verdicts = [result.verdict for result in detector.batch(pictures(20))]
        assert verdicts.count("fail") <= 2
    with pytest.raises(CalibrationError, match=r"with a tuned detector.*calibrated=False"):
        load(folder, tuned=False)


@pytest.mark.parametrize("change", ["weight", "graph", "sampler"])
def test_a_tuning_has_another_name_where_it_judges_otherwise(tmp_path, change):
    folder = tuned_bundle(tmp_path / "b")
    calibrated(folder)
    manifest = Manifest.read(folder)
    tuning = replace(manifest.tunings["default"], evidence={"tried": 3})
    replace(manifest, tunings={"default": tuning}).write(folder)
    load(folder).close()  # what is written for people alone changes nothing
    if change == "graph":
        fusion_graph(folder / "default.fusion.onnx", (replace(TERMS[0], weight=9.0), *TERMS[1:]))
    elif change == "weight":
        tuning = replace(tuning, terms=(replace(TERMS[0], weight=9.0), *TERMS[1:]))
    else:
        tuning = replace(tuning, sampler=replace(tuning.sampler, seed=6))
    replace(manifest, tunings={"default": tuning}, files=hash_files(folder)).write(folder)
    with pytest.raises(CalibrationError, match="before it was tuned"):
        load(folder)


def test_what_the_tuning_decides_is_not_overridden(bundle):
    for options in ({"samples": 3}, {"seed": 0}):
        with pytest.raises(UsageError, match=r"was tuned for the product 'default'.*tuned=False"):
            load(bundle, calibrated=False, **options)
    load(bundle, calibrated=False, samples=2, seed=5).close()


def test_the_gradient_of_ddad_runs_its_own_step_graph(tmp_path):
    folder = tuned_bundle(tmp_path / "b", TERMS[:1])
    manifest = Manifest.read(folder)
    tuning = manifest.tunings["default"]
    sampler = replace(tuning.sampler, gradient="ddad", first_pass=PassSettings(150, 3.0, steps=2))
    manifest = replace(manifest, tunings={"default": replace(tuning, sampler=sampler)})
    manifest.write(folder)
    roles = manifest.tunings["default"].roles(manifest.settings)  # whose memory is asked for
    assert {"ddad_step", "guided_step"} & {*roles} == {"ddad_step"}
    with pytest.raises(BundleError, match="names no graph 'ddad_step'"):
        load(folder, calibrated=False)
    tiny.step_graph(folder / "ddad_step.onnx", True)
    graphs = manifest.graphs | {"ddad_step": GraphEntry("ddad_step.onnx")}
    replace(manifest, graphs=graphs, files=hash_files(folder)).write(folder)
    (folder / "guided_step.onnx").unlink()
    replace(manifest, graphs={k: v for k, v in graphs.items() if k != "guided_step"}, files=hash_files(folder)).write(
        folder
    )
    with load(folder, calibrated=False) as detector:
        assert detector(pictures(1)[0]).judged_by == "tuned"


def test_a_graph_that_asks_for_what_is_not_there_is_named(tmp_path):
    folder = tuned_bundle(tmp_path / "b", TERMS[2:3])
    manifest = Manifest.read(folder)
    residual_graph(folder / "default.position.onnx")
    replace(manifest, files=hash_files(folder)).write(folder)
    with pytest.raises(BundleError, match=r"default.position.onnx asks for 'posterior_samples'.*mdps tune"):
        load(folder, calibrated=False)


def test_a_roi_and_any_kind_of_picture_reach_both_views(tmp_path):
    folder = tuned_bundle(tmp_path / "b")
    manifest = Manifest.read(folder)
    roi = (5, 3, 20, 17)
    tuning = replace(manifest.tunings["default"], photograph=Preprocessing((SIDE, SIDE), roi=roi))
    views = replace(manifest.preprocessing, roi=roi)
    replace(manifest, preprocessing=views, tunings={"default": tuning}).write(folder)
    picture = pictures(1)[0]
    path = tmp_path / "picture.png"
    Image.fromarray(picture).save(path)
    with load(folder, calibrated=False) as detector:
        cut = detector(picture)
        for same in (path, path.read_bytes(), Image.open(path)):
            assert detector(same).score == cut.score
        Image.new("RGB", (9, 9)).save(tmp_path / "small.png")
        with pytest.raises(ImageError, match=r"small.png is 9 x 9 pixels and does not hold the region"):
            detector(tmp_path / "small.png")
    replace(manifest, tunings={"default": replace(tuning, photograph=Preprocessing((SIDE, SIDE)))}).write(folder)
    with load(folder, calibrated=False) as detector:
        x, y, width, height = roi
        assert detector(np.ascontiguousarray(picture[y : y + height, x : x + width])).score == pytest.approx(cut.score)


def test_the_one_file_says_what_the_tuned_bundle_says(tmp_path):
    """With and without the score graph, of odd pictures; a cascade is refused."""
    onnxruntime, names = pytest.importorskip("onnxruntime"), ("map", "score", "verdict", "threshold")
    from mdps.export.single_file import export_single_file

    for name, terms in {"all": TERMS, "samples": TERMS[1:2], "photograph": TERMS[2:3]}.items():
        folder = tuned_bundle(tmp_path / name, terms)
        threshold = calibrated(folder).threshold
        session = onnxruntime.InferenceSession(export_single_file(folder, tmp_path / f"{name}.onnx"))
        with load(folder) as detector:
            for picture in pictures():
                result = detector(picture)
                found = dict(zip(names, session.run(None, {"image": picture}), strict=True))
                np.testing.assert_allclose(found["map"], result.anomaly_map, atol=1e-5)
                assert found["score"] == pytest.approx(result.score, abs=1e-5)
                assert found["verdict"] == (result.verdict == "fail")
                assert found["threshold"] == pytest.approx(threshold)
    with pytest.raises(UsageError, match=r"cascade.*single file does not hold"):
        export_single_file(band(tmp_path / "cascade", 0.1, 0.2), tmp_path / "cascade.onnx")


def test_memory_is_asked_for_the_graphs_of_a_tuning_and_not_for_a_denoiser_that_is_not_opened(bundle, of_photograph):
    def need(folder):
        loaded = Bundle.read(folder)
        return bundle_need(loaded.manifest, loaded.settings, "onnxruntime", 8, loaded.tuning).parts

    sizes = [entry.bytes for name, entry in Manifest.read(of_photograph).files.items() if name.startswith("default.")]
    assert need(of_photograph)["tuning"] >= sum(sizes)
    assert need(of_photograph)["activations"] == 0 < need(bundle)["activations"]
    assert "tuning" not in need(tiny.make_bundle(bundle.parent / "plain"))
