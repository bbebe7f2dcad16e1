"""The detector on a real bundle of tiny graphs: a step that moves half-way to a constant picture, an L1 score."""

import json
import shutil
import threading
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import mdps.runtime
from mdps.runtime import BackendError, BundleError, CalibrationError, ImageError, UsageError, calibrate, load
from mdps.runtime.detector import Detector
from mdps.runtime.graphs import GraphEntry
from mdps.runtime.manifest import FILE_NAME, SCHEMA_VERSION, CheckpointEntry, Manifest, hash_files
from mdps.runtime.noise import NoiseBank
from mdps.runtime.pipeline import mask_scalars
from mdps.runtime.preprocessing import Preprocessing
from mdps.runtime.schedule import NoiseSchedule
from mdps.runtime.settings import MaskSettings, PassSettings, paper_settings

SIZE = 8
IMAGE, MASK = ("N", 3, SIZE, SIZE), ("N", 1, SIZE, SIZE)
SCALARS = ("timestep", "alpha_t", "alpha_s", "sigma_t", "guidance_scale")
LEVEL = 0.25
"""The level of a good part."""


def value(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def save(path, inputs, outputs, constants, nodes):
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node(op, ins, [out], **options) for op, ins, out, options in nodes],
            path.stem,
            [value(*item) for item in inputs],
            [value(*item) for item in outputs],
            [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    onnx.checker.check_model(model)
    onnx.save(model, path)


def step_graph(path, guided):
    """x_s = m (x_t + LEVEL) / 2 + (1 - m) y + 0.01 noise."""
    inputs = [("x_t", IMAGE), ("observation", IMAGE), ("mask", MASK), ("noise", IMAGE)]
    inputs += [(name, ()) for name in SCALARS[: 5 if guided else 4]]
    nodes = [
        ("Add", ["x_t", "level"], "sum", {}),
        ("Mul", ["sum", "half"], "moved", {}),
        ("Mul", ["moved", "mask"], "inside", {}),
        ("Sub", ["one", "mask"], "rest", {}),
        ("Mul", ["observation", "rest"], "outside", {}),
        ("Add", ["inside", "outside"], "clean", {}),
        ("Mul", ["noise", "little"], "jitter", {}),
        ("Add", ["clean", "jitter"], "x_s", {}),
        ("Identity", ["x_t"], "eps", {}),
    ]
    constants = {"level": np.float32(LEVEL), "half": np.float32(0.5), "one": np.float32(1), "little": np.float32(0.01)}
    outputs = [("x_s", IMAGE), ("eps", IMAGE)]
    if guided:
        nodes.append(("Identity", ["x_t"], "guidance_gradient", {}))
        outputs.append(("guidance_gradient", IMAGE))
    save(path, inputs, outputs, constants, nodes)


def score_graph(path):
    """Map: L1 over channels, averaged over samples; score: its largest; mask as in the paper, or frozen."""
    batch = ("B", 1, SIZE, SIZE)
    inputs = [("posterior_samples", ("B", "S", 3, SIZE, SIZE)), ("observation", ("B", 3, SIZE, SIZE))]
    inputs += [("observation_features_1", ("B", 3, 4, 4))]
    inputs += [(name, ()) for name in ("mask_lambda", "mask_low", "mask_high", "mask_frozen")]
    nodes = [
        ("Unsqueeze", ["observation", "axis1"], "y", {}),
        ("Sub", ["posterior_samples", "y"], "r", {}),
        ("Abs", ["r"], "l1", {}),
        ("ReduceSum", ["l1", "axis2"], "per_sample", {"keepdims": 0}),
        ("ReduceMean", ["per_sample", "axis1"], "anomaly_map", {"keepdims": 1}),
        ("ReduceMax", ["anomaly_map", "axes"], "anomaly_score", {"keepdims": 0}),
        ("ReduceMax", ["anomaly_map", "axes"], "max", {"keepdims": 1}),
        ("ReduceMin", ["anomaly_map", "axes"], "min", {"keepdims": 1}),
        ("Cast", ["mask_frozen"], "frozen", {"to": TensorProto.BOOL}),
        ("Where", ["frozen", "mask_low", "min"], "low", {}),
        ("Where", ["frozen", "mask_high", "max"], "high", {}),
        ("Sub", ["high", "low"], "range", {}),
        ("Mul", ["range", "mask_lambda"], "part", {}),
        ("Add", ["low", "part"], "limit", {}),
        ("Greater", ["anomaly_map", "limit"], "above", {}),
        ("Cast", ["above"], "mask", {"to": TensorProto.FLOAT}),
    ]
    constants = {
        "axis1": np.array([1]),
        "axis2": np.array([2]),
        "axes": np.array([1, 2, 3]),
    }
    save(path, inputs, [("anomaly_map", batch), ("anomaly_score", ("B",)), ("mask", batch)], constants, nodes)


def settings_of(samples=1, mask_range="per-image", first=100.0, masked=100.0):
    settings = paper_settings((SIZE, SIZE))
    sampler = replace(
        settings.sampler,
        first_pass=PassSettings(200, first, steps=10),
        masked_pass=None if masked is None else PassSettings(200, masked, steps=10),
        samples=samples,
    )
    return replace(settings, sampler=sampler, mask=MaskSettings(0.3, mask_range))


def make_bundle(folder, settings=None, without=()):
    folder.mkdir()
    step_graph(folder / "guided_step.onnx", True)
    step_graph(folder / "plain_step.onnx", False)
    score_graph(folder / "score.onnx")
    features = [("AveragePool", ["image"], "observation_features_1", {"kernel_shape": [2, 2], "strides": [2, 2]})]
    save(folder / "features.onnx", [("image", IMAGE)], [("observation_features_1", ("N", 3, 4, 4))], {}, features)
    for role in without:
        (folder / f"{role}.onnx").unlink()
    Manifest(
        schema_version=SCHEMA_VERSION,
        name="bottle",
        settings=settings or settings_of(),
        precision="fp32",
        network={},
        schedule=NoiseSchedule.linear(),
        prediction="eps",
        preprocessing=Preprocessing((SIZE, SIZE)),
        calibrations={},
        files=hash_files(folder),
        graphs={path.stem: GraphEntry(path.name) for path in folder.glob("*.onnx")},
        plans=(),
        versions={"mdps": "0.1.0"},
        parity={},
        checkpoint=CheckpointEntry("bottle.pt", "0" * 64),
        guidance_backend="onnx",
    ).write(folder)
    return folder


def good(count, seed=0):
    level = (LEVEL + 1) * 127.5
    noise = np.random.default_rng(seed).normal(0, 3, (count, SIZE, SIZE, 3))
    return list(np.clip(level + noise, 0, 255).astype(np.uint8))


def bad(seed=9):
    image = good(1, seed)[0]
    image[2:4, 5:7] = 0
    return image


def calibrated(folder, product="default", **options):
    with load(folder, calibrated=False, threads=1, **options) as detector:
        calibration = calibrate(detector, good(60), false_alarm_rate=0.05)
    Manifest.read(folder).with_calibration(product, calibration).write(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return calibrated(make_bundle(tmp_path_factory.mktemp("b") / "a bündle #1"))


@pytest.fixture(scope="module")
def detector(bundle):
    with load(bundle, threads=1) as detector:
        yield detector


def test_good_parts_pass_and_bad_parts_fail(detector):
    results = detector.batch(good(100, seed=5))
    assert sum(result.verdict == "pass" for result in results) >= 85
    found = detector(bad())
    assert found.verdict == "fail"
    assert found.score > found.threshold == detector.calibration.threshold
    assert found.mask[2:4, 5:7].all()
    assert not found.mask[:2].any()
    assert found.anomaly_map[2:4, 5:7].min() > found.anomaly_map[:2].max()


def test_a_result_is_what_it_says(detector):
    result = detector(bad())
    assert (result.anomaly_map.shape, result.anomaly_map.dtype) == ((SIZE, SIZE), np.float32)
    assert (result.mask.shape, result.mask.dtype) == ((SIZE, SIZE), bool)
    assert result.posterior_sample.shape == result.observation.shape == (3, SIZE, SIZE)
    np.testing.assert_allclose(result.observation, Preprocessing((SIZE, SIZE))(bad()))
    assert isinstance(result.score, float)
    assert list(result.times) == ["preprocess", "first_pass", "masked_pass", "score", "total"]
    assert all(value > 0 for value in result.times.values())
    assert sum(list(result.times.values())[:-1]) <= result.times["total"] * 1.001


def test_who_fails_has_a_region_where_its_defect_is_on_the_photograph(detector):
    large = np.kron(bad(), np.ones((10, 20, 1), np.uint8))
    result = detector(large)
    assert result.box == (0, 0, 20 * SIZE, 10 * SIZE)
    assert [region.box for region in result.regions] == [(100, 20, 40, 20)]
    assert result.regions[0].peak == pytest.approx(result.score)
    for one in detector.batch(good(60, seed=5)):
        assert bool(one.regions) == (one.verdict == "fail")
    assert detector.judge(detector.preprocessing(large)[None])[0].regions[0].box == (5, 2, 2, 2)  # of the map


def test_a_score_that_is_no_value_of_the_map_leaves_the_hottest_good_pixel_as_the_limit(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "b")
    manifest = Manifest.read(bundle)
    score = replace(manifest.settings.score, image_score="softmax_top_sum")
    replace(manifest, settings=replace(manifest.settings, score=score)).write(tmp_path / "b")
    with load(tmp_path / "b", threads=1) as detector:
        calibration = detector.calibration
        assert detector(bad()).pixel_limit == calibration.map_high != calibration.threshold
    with load(bundle, threads=1) as detector:
        assert detector(bad()).pixel_limit == calibration.threshold


def test_the_passes_are_those_of_the_step_graph(detector):
    """Recomputed here in numpy: first pass unmasked, mask from its map, second pass under the mask, its own noise."""
    y = Preprocessing((SIZE, SIZE))(bad())[None]
    bank, alpha = NoiseBank(0, (3, SIZE, SIZE)), NoiseSchedule.linear().alphas_cumprod[199]

    def one_pass(index, m):
        x = np.sqrt(alpha) * y + np.sqrt(1 - alpha) * bank.draw(index, -1, 1)
        for n in range(10):
            noise = bank.draw(index, n, 1) if n < 9 else 0
            x = m * (x + LEVEL) / 2 + (1 - m) * y + 0.01 * noise
        return x

    def difference(x):
        return np.abs(x - y).sum(axis=1, keepdims=True)

    first = difference(one_pass(0, 1))
    mask = first > first.min() + np.float32(0.3) * (first.max() - first.min())
    expected = difference(one_pass(1, mask))
    found = detector.inspect(y)
    np.testing.assert_allclose(found.first_map, first, atol=1e-5)
    np.testing.assert_allclose(found.first_score, first.max(), atol=1e-5)
    np.testing.assert_array_equal(found.mask > 0.5, mask)
    np.testing.assert_allclose(found.anomaly_map, expected, atol=1e-5)
    np.testing.assert_allclose(found.anomaly_score, expected.max(), atol=1e-5)


def test_a_picture_gets_the_same_result_alone_and_in_any_batch(bundle):
    images = [*good(9, seed=3), bad()]
    with load(bundle, threads=1, max_batch=4) as detector:
        together = detector.batch(images)
        for image, result in zip(images[::-1], detector.batch(images[::-1]), strict=True):
            np.testing.assert_array_equal(result.anomaly_map, detector(image).anomaly_map)
        for image, result in zip(images, together, strict=True):
            alone = detector(image)
            assert result.score == alone.score  # to the bit: the threshold is the score of a good part
            np.testing.assert_array_equal(result.anomaly_map, alone.anomaly_map)
            np.testing.assert_array_equal(result.posterior_sample, alone.posterior_sample)


@pytest.mark.parametrize("samples", [2, 5, 16])
def test_the_map_averages_over_samples(bundle, samples):
    y = np.stack([Preprocessing((SIZE, SIZE))(image) for image in (bad(), good(1)[0])])
    with load(bundle, samples=samples, calibrated=False, threads=1, max_batch=3) as detector:
        found = detector.inspect(y)
        assert found.posterior_samples.shape == (2 * samples, 3, SIZE, SIZE)
        per_sample = np.abs(found.posterior_samples.reshape(2, samples, 3, SIZE, SIZE) - y[:, None]).sum(axis=2)
        np.testing.assert_allclose(found.anomaly_map[:, 0], per_sample.mean(axis=1), atol=1e-5)
        for index, result in enumerate(detector.batch([bad(), good(1)[0]])):
            first = found.posterior_samples[index * samples]
            np.testing.assert_allclose(result.posterior_sample, first, atol=1e-5)


def test_who_scores_as_the_limit_leaves_early_and_who_scores_as_the_threshold_passes(detector):
    """Both are scores of good parts, and those parts themselves must not be on the wrong side."""
    y = detector.preprocessing(bad())[None]
    found = detector.inspect(y)
    for limit, leaves in ((found.first_score[0], True), (np.nextafter(found.first_score[0], np.float32(0)), False)):
        assert detector._pipeline.inspect(y, None, float(limit)).early_exit.tolist() == [leaves]
    score = found.anomaly_score[0]
    for threshold, verdict in ((score, "pass"), (np.nextafter(score, np.float32(0)), "fail")):
        calibration = replace(detector.calibration, threshold=float(threshold))
        assert Detector(detector.manifest, detector._pipeline, calibration)(bad()).verdict == verdict


def test_a_mask_per_image_takes_no_range_from_elsewhere():
    """Warming up and the gate of an export give one to whatever is loaded."""
    for kind, frozen in (("per-image", 0.0), ("frozen", 1.0), ("dataset", 1.0)):
        told = mask_scalars(MaskSettings(0.3, kind), (0.25, 0.75))
        assert told == {"mask_lambda": 0.3, "mask_low": 0.25, "mask_high": 0.75, "mask_frozen": frozen}
    assert mask_scalars(MaskSettings(0.3, "per-image"), None)["mask_frozen"] == 0.0


# Early exit


def marked(size, seed=0):
    """A good part with a square of 2 x 2 pixels that is `size` levels darker."""
    image = good(1, seed)[0].astype(int)
    image[2:4, 5:7] -= size
    return np.clip(image, 0, 255).astype(np.uint8)


MIXED = [marked(size, seed) for seed, size in enumerate([0, 160, 3, 12, 150, 0, 6, 90])]
ARRAYS = ("anomaly_map", "anomaly_score", "mask", "first_map", "first_score")


def observed(detector, pictures):
    return np.stack([detector.preprocessing(picture) for picture in pictures])


def exiting(folder, **options):
    """A detector that lets out who scores as half of the good parts, without regard to the threshold."""
    manifest = Manifest.read(folder)
    calibration = manifest.calibrations["default"]
    raised = replace(calibration, threshold=max(calibration.threshold, calibration.first_quantiles[-1]))
    manifest.with_calibration("default", raised).write(folder)
    return load(folder, early_exit=0.5, threads=1, **options)


@pytest.fixture(scope="module")
def exit_bundle(tmp_path_factory):
    return calibrated(make_bundle(tmp_path_factory.mktemp("exit") / "b", settings_of(samples=2)))


def test_who_looks_good_skips_the_masked_pass_and_nobody_else_notices(exit_bundle):
    with exiting(exit_bundle) as detector, load(exit_bundle, threads=1) as full:
        y = observed(detector, MIXED)
        limit = detector.calibration.first_quantiles[9]
        found, wanted = detector.inspect(y), full.inspect(y)
        left = wanted.first_score <= limit
        assert 2 <= left.sum() <= 6
        np.testing.assert_array_equal(found.early_exit, left)
        for name in ("first_map", "first_score", "mask"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
        for name in ("anomaly_map", "anomaly_score"):
            np.testing.assert_array_equal(getattr(found, name)[~left], getattr(wanted, name)[~left])
        np.testing.assert_array_equal(found.anomaly_score[left], wanted.first_score[left])
        np.testing.assert_array_equal(found.anomaly_map[left], wanted.first_map[left])
        assert (found.anomaly_map[left] != wanted.anomaly_map[left]).any()
        samples, all_samples = (f.posterior_samples.reshape(8, 2, 3, SIZE, SIZE) for f in (found, wanted))
        np.testing.assert_array_equal(samples[~left], all_samples[~left])
        per_sample = np.abs(samples[left] - y[left, None]).sum(axis=2).mean(axis=1)  # the first pass's
        np.testing.assert_allclose(per_sample, wanted.first_map[left, 0], atol=1e-5)
        assert not wanted.early_exit.any()


def test_an_early_exit_depends_on_no_other_image_of_the_batch(exit_bundle):
    for options in ({"max_batch": 16}, {"max_batch": 6}):
        with exiting(exit_bundle, **options) as detector:
            together = detector.batch(MIXED)
            for image, result in zip(MIXED, together, strict=True):
                alone = detector(image)
                for name in ("score", "verdict", "early_exit"):
                    assert getattr(alone, name) == getattr(result, name)
                np.testing.assert_array_equal(alone.anomaly_map, result.anomaly_map)
                np.testing.assert_array_equal(alone.posterior_sample, result.posterior_sample)
                assert (alone.times["masked_pass"] == 0) == alone.early_exit
            assert {result.verdict for result in together if result.early_exit} == {"pass"}


def test_only_the_remaining_images_go_on(exit_bundle):
    sizes = []
    with exiting(exit_bundle, max_batch=16) as detector:
        real = detector._pipeline.graphs.guided.bind

        def bind(feeds):
            sizes.append(len(feeds["observation"]))
            return real(feeds)

        object.__setattr__(detector._pipeline.graphs.guided, "bind", bind)
        gone = sum(result.early_exit for result in detector.batch(MIXED))
        assert sizes == [2] * (8 + 8 - gone)
        sizes.clear()
        calm = [image for image in MIXED if detector(image).early_exit]
        sizes.clear()
        assert all(result.early_exit for result in detector.batch(calm))
        assert sizes == [2] * len(calm)


def test_without_an_early_exit_nothing_changes(exit_bundle):
    with load(exit_bundle, threads=1) as plain, load(exit_bundle, early_exit=0.0, threads=1) as off:
        y = observed(plain, MIXED)
        with exiting(exit_bundle) as detector:
            for name in (*ARRAYS, "posterior_samples"):
                wanted = getattr(plain.inspect(y), name)
                np.testing.assert_array_equal(getattr(off.inspect(y), name), wanted)
                np.testing.assert_array_equal(getattr(detector.inspect(y, early_exit=False), name), wanted)
            rate = {"false_alarm_rate": 0.05}
            assert calibrate(detector, good(20), **rate) == calibrate(plain, good(20), **rate)
        assert not any(result.early_exit for result in off.batch(MIXED))


def test_a_threshold_below_the_good_parts_lets_nobody_out(exit_bundle, tmp_path):
    manifest = Manifest.read(exit_bundle)
    low = replace(manifest.calibrations["default"], threshold=0.0)
    folder = make_bundle(tmp_path / "b", settings_of(samples=2))
    Manifest.read(folder).with_calibration("default", low).write(folder)
    with load(folder, early_exit=0.95, threads=1) as detector:
        assert not any(result.early_exit for result in detector.batch(MIXED))


def test_an_early_exit_is_in_the_provenance_or_refused(exit_bundle, tmp_path):
    with exiting(exit_bundle) as detector:
        assert detector.provenance["settings"]["sampler"]["early_exit"] == 0.5
    with pytest.raises(CalibrationError, match=r"early exit compares .*b has no calibration .*mdps calibrate"):
        load(exit_bundle, early_exit=0.5, calibrated=False)
    for share in (0.33, 1.0, -0.05):
        with pytest.raises(UsageError, match=r"multiple of 0\.05"):
            load(exit_bundle, early_exit=share)
    single = calibrated(make_bundle(tmp_path / "single", settings_of(masked=None)))
    with pytest.raises(UsageError, match="skips the masked pass, and these settings have none"):
        load(single, early_exit=0.5)
    manifest = Manifest.read(exit_bundle)
    old = replace(manifest.calibrations["default"], first_quantiles=())
    folder = make_bundle(tmp_path / "old", settings_of(samples=2))
    Manifest.read(folder).with_calibration("default", old).write(folder)
    with pytest.raises(CalibrationError, match="old has no scores of the first pass"):
        load(folder, early_exit=0.5)


def test_another_seed_is_another_noise(bundle, detector):
    with load(bundle, seed=1, threads=1) as other:
        assert other.settings.sampler.seed == 1
        assert other(bad()).score != detector(bad()).score
        assert other.provenance["settings"]["sampler"]["seed"] == 1


def test_the_detector_repeats_itself_from_a_new_load(bundle, detector):
    with load(bundle, threads=1) as again:
        assert again(bad()).score == detector(bad()).score


def test_pictures_of_every_kind(detector, tmp_path):
    path = tmp_path / "part.png"
    Image.fromarray(bad()).save(path)
    scores = {detector(picture).score for picture in (path, str(path), bad(), Image.open(path), path.read_bytes())}
    assert len(scores) == 1
    assert detector.batch([]) == []


def test_a_bad_picture_names_itself(detector, tmp_path):
    (tmp_path / "cut.png").write_bytes(b"\x89PNG")
    with pytest.raises(ImageError, match=r"cut\.png"):
        detector.batch([bad(), tmp_path / "cut.png"])


@pytest.mark.parametrize(
    ("observations", "sentence"),
    [
        (np.zeros((3, SIZE, SIZE), np.float32), r"\[B, 3, 8, 8\]"),
        (np.zeros((1, 3, SIZE, 9), np.float32), r"these are \[1, 3, 8, 9\]"),
        (np.zeros((0, 3, SIZE, SIZE), np.float32), r"these are \[0"),
        (np.zeros((1, 3, SIZE, SIZE)), "float64"),
        (np.full((1, 3, SIZE, SIZE), np.nan, np.float32), "NaN"),
    ],
)
def test_wrong_observations_are_named(detector, observations, sentence):
    with pytest.raises(ImageError, match=sentence):
        detector.inspect(observations)


def test_without_a_calibration_there_is_no_verdict(tmp_path):
    folder = make_bundle(tmp_path / "b")
    with pytest.raises(CalibrationError, match=r"run `mdps calibrate .*b GOOD_FOLDER`"):
        load(folder)
    with load(folder, calibrated=False) as detector:
        result = detector(bad())
    assert (result.verdict, result.threshold, result.regions) == (None, None, ())
    assert result.score > 0


def test_products_have_their_own_calibration(tmp_path):
    folder = calibrated(make_bundle(tmp_path / "b"), product="cap")
    with pytest.raises(CalibrationError, match=r"'default' \(it has cap\): run"):
        load(folder)
    with pytest.raises(CalibrationError, match=r"--product lid`"):
        load(folder, product="lid")
    with load(folder, product="cap") as detector:
        assert detector(bad()).verdict == "fail"
        assert detector.provenance["product"] == "cap"


def test_a_threshold_for_other_samples_is_not_used(bundle):
    with pytest.raises(CalibrationError, match="calibrated with 1 samples an image, not 4"):
        load(bundle, samples=4)


def test_a_frozen_mask_range_needs_a_calibration(tmp_path):
    folder = make_bundle(tmp_path / "b", settings_of(mask_range="frozen"))
    with load(folder, calibrated=False) as detector:
        with pytest.raises(CalibrationError, match="mdps calibrate BUNDLE GOOD_FOLDER"):
            detector(bad())
        y = detector.preprocessing(bad())[None]
        assert detector.first_maps(y).shape == (1, 1, SIZE, SIZE)
        assert not detector.inspect(y, mask_range=(100.0, 200.0)).mask.any()
    with load(calibrated(folder)) as detector:
        low, high = detector.calibration.mask_range
        found = detector.inspect(y)
        np.testing.assert_array_equal(found.mask > 0.5, found.first_map > low + 0.3 * (high - low))
        assert detector(bad()).verdict == "fail"


def test_a_dataset_range_is_never_the_calibrated_one(tmp_path):
    folder = calibrated(make_bundle(tmp_path / "b", settings_of(mask_range="dataset")))
    with load(folder) as detector, pytest.raises(CalibrationError, match='mask range is "dataset"'):
        detector(bad())


def test_only_the_graphs_that_the_passes_need_are_opened(tmp_path):
    plain = make_bundle(tmp_path / "plain", settings_of(first=0.0, masked=None), without=["guided_step"])
    with load(plain, calibrated=False) as detector:
        times = detector(bad()).times
        assert times["masked_pass"] == 0 < times["first_pass"]
    load(make_bundle(tmp_path / "guided", without=["plain_step"]), calibrated=False).close()
    mixed = make_bundle(tmp_path / "mixed", settings_of(masked=0.0), without=["plain_step"])
    with pytest.raises(BundleError, match=r"manifest\.json names no graph 'plain_step'"):
        load(mixed, calibrated=False)


def test_nan_is_never_a_verdict(tmp_path):
    folder = calibrated(make_bundle(tmp_path / "b"))
    with load(folder) as detector:
        score = detector._pipeline.graphs.score
        run = score.run
        spoiled = detector.preprocessing(bad())

        def spoil(feeds, outputs=None):
            found = run(feeds, outputs)
            found["anomaly_map"][(feeds["observation"] == spoiled).all(axis=(1, 2, 3)), 0, 0, 0] = np.inf
            return found

        score.run = spoil
        with pytest.raises(BackendError, match="NaN or infinite values for image 1 of the batch"):
            detector.batch([good(1)[0], bad()])
        with pytest.raises(BackendError, match="NaN"):
            detector.first_maps(detector.preprocessing(bad())[None])


def test_a_damaged_bundle_does_not_load(tmp_path):
    folder = make_bundle(tmp_path / "b")
    (folder / "score.onnx").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"score\.onnx has 1 bytes"):
        load(folder, calibrated=False)


def test_a_plan_beyond_the_schedule_does_not_load(tmp_path):
    folder = make_bundle(tmp_path / "b")
    obj = json.loads((folder / FILE_NAME).read_text())
    obj["schedule"]["steps"] = 100
    (folder / FILE_NAME).write_text(json.dumps(obj))
    with pytest.raises(UsageError, match="beyond the 100 steps"):
        load(folder, calibrated=False)


def test_sessions_are_closed_when_loading_fails(bundle, monkeypatch):
    closed = []
    monkeypatch.setattr("mdps.runtime.engines.onnxruntime.OrtSession.close", lambda self: closed.append(self))
    monkeypatch.setattr("mdps.runtime.detector.Detector.warm_up", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(bundle)
    assert len(closed) == 3


def test_a_closed_detector_says_so(bundle):
    with load(bundle) as detector:
        pass
    detector.close()
    with pytest.raises(BackendError, match="was closed"):
        detector(bad())


def test_the_warm_up_runs_every_graph_once(bundle, monkeypatch):
    runs = []
    kind = mdps.runtime.engines.onnxruntime.OrtSession
    run, bind = kind.run, kind.bind
    monkeypatch.setattr(kind, "run", lambda self, *args: runs.append(self) or run(self, *args))
    monkeypatch.setattr(kind, "bind", lambda self, *args: runs.append(self) or bind(self, *args))
    load(bundle, warm_up=False).close()
    assert not runs
    load(bundle).close()
    assert len(set(map(id, runs))) == 3


def test_calls_from_several_threads_agree(detector):
    images = good(4, seed=8)
    expected, found = [detector(image).score for image in images], {}

    def work(index):
        found[index] = [detector(image).score for image in images]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(4)] == [expected] * 4


def test_provenance_says_what_made_the_result(detector):
    found = detector.provenance
    assert found["checkpoint"] == {"name": "bottle.pt", "sha256": "0" * 64}
    assert found["calibration"]["images"] == 60
    assert json.loads(json.dumps(found)) == found


def test_wrong_options(bundle):
    for options in ({"samples": 0}, {"seed": -1}, {"threads": 0}, {"max_batch": 0}, {"engine": "gpu"}):
        with pytest.raises(UsageError):
            load(bundle, calibrated=False, **options)


def test_no_provider_is_replaced_by_another(bundle):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(BackendError, match=r"NVIDIA's driver|CUDAExecutionProvider"):  # without a card, with one
        load(bundle, engine="onnxruntime-cuda")
