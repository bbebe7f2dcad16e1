"""One file against the bundle it was made from, its resize against Pillow, and its commands."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from PIL import Image

from mdps.cli import cli
from mdps.commands.export import export
from mdps.commands.options import ONE_FILE
from mdps.commands.terminal import run
from mdps.export import ExportOptions, export_bundle
from mdps.export import single_file as module
from mdps.export.detector_graph import resize
from mdps.export.merge import Merger
from mdps.export.single_file import FILE_NAME, export_single_file
from mdps.models.checkpoints import CheckpointOptions
from mdps.runtime import BackendError, CalibrationError, Detector, UsageError, load
from mdps.runtime.calibration import Calibration
from mdps.runtime.manifest import Manifest

ROOT = Path(__file__).resolve().parents[2]
TINY = ExportOptions(backbone="random_tiny", noise_level=198, steps=3, load=CheckpointOptions(image_size=32))
# Graphs that differ from the tiny bundle's are exported; what only the settings say is changed in the manifest.
EXPORTS = {
    "pixels": replace(TINY, stages=()),
    "half": replace(TINY, precision="fp16"),
    "reference": replace(TINY, preset="mvtec/cable", steps=None, noise_level=60),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("tiny", {}),
    "no mask pass": ("tiny", {"masked": None}),
    "unguided, frozen range": (
        "tiny",
        {"first": {"guidance_scale": 0.0}, "masked": {"guidance_scale": 0.0}, "range": "frozen"},
    ),
    "two samples, cut": ("tiny", {"samples": 2, "image_size": (40, 36), "crop": "input", "crop_size": 32}),
    "guided by the first pass": ("tiny", {"masked": {"target": "previous"}, "samples": 2}),
    "pixels only, region of interest": ("pixels", {"roi": (3, 2, 20, 18)}),
    "reference": ("reference", {}),
    "reference, passes of two kinds": ("reference", {"first": {"noise_level": 40}, "masked": {"guidance_scale": 0.0}}),
}
SIZES = [(32, 32), (21, 24), (50, 77), (33, 140)]
Pixels = NDArray[np.uint8]


def picture(size: tuple[int, int], seed: int = 0) -> Pixels:
    """Smooth colours with some noise, [H, W, 3]."""
    stream = np.random.RandomState(seed)
    coarse = Image.fromarray(stream.randint(40, 216, (4, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size[::-1], Image.Resampling.BICUBIC), dtype=np.int64)
    return np.clip(smooth + stream.randint(-12, 13, smooth.shape), 0, 255).astype(np.uint8)


def horizontal_first(image: Pixels, height: int, width: int) -> Pixels:
    """Pillow's resize, one axis at a time: its order for both at once differs between its versions."""
    wide = Image.fromarray(image).resize((width, image.shape[0]), Image.Resampling.BILINEAR)
    return np.asarray(wide.resize((width, height), Image.Resampling.BILINEAR))


def changed(manifest: Manifest, changes: dict[str, Any]) -> Manifest:
    """The manifest with other settings of the same graphs."""
    sampler, rest = manifest.settings.sampler, dict(changes)
    first = replace(sampler.first_pass, **rest.pop("first", {}))
    masked = rest.pop("masked", {})
    masked = None if masked is None or sampler.masked_pass is None else replace(sampler.masked_pass, **masked)
    sampler = replace(sampler, first_pass=first, masked_pass=masked, samples=rest.pop("samples", sampler.samples))
    mask = replace(manifest.settings.mask, range=rest.pop("range", manifest.settings.mask.range))
    settings = replace(manifest.settings, sampler=sampler, mask=mask)
    return replace(manifest, settings=settings, preprocessing=replace(manifest.preprocessing, **rest))


def calibrated(bundle: Path, copy: Path, changes: dict[str, Any] | None = None) -> Path:
    """A copy whose threshold lies amid the scores of `picture`s, and whose frozen range is their maps'."""
    shutil.copytree(bundle, copy)
    manifest = changed(Manifest.read(copy), changes or {})
    manifest.write(copy)
    with load(copy, calibrated=False, threads=1, warm_up=False) as detector:
        observations = np.stack([detector.preprocessing(picture(size)) for size in SIZES])
        maps = detector.first_maps(observations)
        low, high = float(maps.min()), float(maps.max())
        scores = detector.inspect(observations, mask_range=(low, high)).anomaly_score
    threshold, samples = float(np.sort(scores)[1:3].mean()), manifest.settings.sampler.samples
    manifest.with_calibration("default", Calibration(threshold, 0.5, 0.5, 4, low, high, low, high, samples, 0)).write(
        copy
    )
    return copy


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options)


def judge(opened: Any, image: Pixels) -> dict[str, Any]:
    names = [output.name for output in opened.get_outputs()]
    return dict(zip(names, opened.run(None, {"image": image}), strict=True))


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(tiny_bundle, tmp_path_factory.mktemp("calibrated") / "bundle")


@pytest.fixture(scope="module")
def detector_file(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_single_file(bundle, tmp_path_factory.mktemp("file") / "alone.onnx")


# The graph


@pytest.fixture(scope="module")
def exported(
    tiny_bundle: Path, small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A bundle of the name, exported once; without the oracle's word, which has its own tests."""
    made = {"tiny": tiny_bundle}

    def bundle(name: str) -> Path:
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("mdps.export.bundle.check_parity", lambda *_: {})
                made[name] = export_bundle(small_checkpoint, tmp_path_factory.mktemp(name) / "made", EXPORTS[name])
        return made[name]

    return bundle


@pytest.mark.parametrize("case", CASES)
def test_it_says_what_the_bundle_says(case: str, exported: Callable[[str], Path], tmp_path: Path) -> None:
    name, changes = CASES[case]
    made = calibrated(exported(name), tmp_path / "bundle", changes)
    opened = session(export_single_file(made))
    verdicts = set()
    with load(made, threads=1, warm_up=False) as detector:
        for size in SIZES:
            wanted, found = detector(picture(size)), judge(opened, picture(size))
            assert abs(found["anomaly_score"] - wanted.score) < 1e-4 * min(1, wanted.score)
            assert found["anomaly_map"].shape == wanted.anomaly_map.shape
            assert np.abs(found["anomaly_map"] - wanted.anomaly_map).max() < 1e-4
            assert bool(found["verdict"]) == (wanted.verdict == "fail")
            verdicts.add(wanted.verdict)
            assert found["threshold"] == np.float32(wanted.threshold)
    assert verdicts == {"pass", "fail"}, "a threshold that all or none exceed proves nothing"


def test_tall_pictures_too(bundle: Path, detector_file: Path) -> None:
    opened = session(detector_file)
    with load(bundle, threads=1, warm_up=False) as detector:
        for size in [(300, 40), (47, 33), (500, 20)]:
            wanted = detector(horizontal_first(picture(size), 32, 32))
            found = judge(opened, picture(size))
            assert abs(found["anomaly_score"] - wanted.score) < 1e-4
            assert np.abs(found["anomaly_map"] - wanted.anomaly_map).max() < 1e-4


def test_the_file_holds_each_weight_once_and_nothing_outside(bundle: Path, detector_file: Path) -> None:
    weights = sum((bundle / name).stat().st_size for name in ("denoiser.weights", "features.weights"))
    noises = 2 * (3 + 2) * 3 * 32 * 32 * 4  # of each pass: three steps, the first x_t, and z
    assert detector_file.stat().st_size < weights + noises + 400_000
    model = onnx.load(detector_file, load_external_data=False)
    assert {node.domain for node in model.graph.node} == {""}
    assert {value.name for value in model.graph.input} == {"image"}
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    assert {prop.key for prop in model.metadata_props} >= {"bundle", "settings", "calibration", "checkpoint"}


def test_features_of_the_picture_are_computed_once(detector_file: Path) -> None:
    model = onnx.load(detector_file)
    (passes,) = [node for node in model.graph.node if node.op_type == "Loop"]
    assert sum(node.op_type == "Conv" for node in model.graph.node) > 0
    (steps,) = [node for node in passes.attribute[0].g.node if node.op_type == "Loop"]
    assert sum(node.op_type == "Conv" for node in steps.attribute[0].g.node) > 20


def test_broken_numbers_never_pass_a_part(bundle: Path, tmp_path: Path) -> None:
    """One weight of the output convolution becomes NaN, as in a half-precision network that overflows."""
    model = onnx.load(export_single_file(bundle, tmp_path / "broken.onnx"))
    (passes,) = [node for node in model.graph.node if node.op_type == "Loop"]
    (steps,) = [node for node in passes.attribute[0].g.node if node.op_type == "Loop"]
    weight = next(t for t in steps.attribute[0].g.initializer if list(t.dims)[:1] == [3] and len(t.dims) == 4)
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[0] = np.nan
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "broken.onnx")
    found = judge(session(tmp_path / "broken.onnx"), picture((32, 32)))
    assert np.isnan(found["anomaly_score"])
    assert found["verdict"]


def test_a_picture_without_the_region_of_interest_is_an_error(bundle: Path, tmp_path: Path) -> None:
    made = calibrated(bundle, tmp_path / "bundle", {"masked": None, "roi": (3, 2, 20, 18)})
    opened = session(export_single_file(made))
    with pytest.raises(Exception, match="Reshape"):
        judge(opened, picture((19, 40)))


# The resize


def resizer(height: int, width: int) -> Callable[[Pixels], Pixels]:
    add = Merger()
    output = helper.make_tensor_value_info(resize(add, "image", height, width), TensorProto.UINT8, None)
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["h", "w", 3])
    graph = helper.make_graph(add.nodes, "resize", [image], [output], add.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    opened = onnxruntime.InferenceSession(model.SerializeToString())
    return lambda pixels: np.asarray(opened.run(None, {"image": pixels})[0])


@pytest.mark.parametrize("target", [(32, 32), (97, 128), (1, 5)])
def test_the_resize_is_pillows(target: tuple[int, int]) -> None:
    stream, ours = np.random.RandomState(0), resizer(*target)
    sizes = [tuple(stream.randint(1, limit, 2)) for limit in (12, 60, 400) for _ in range(20)]
    for size in [(1, 1), target, (1, 400), (400, 1), *sizes]:
        image = stream.randint(0, 256, (*size, 3), dtype=np.uint8)
        np.testing.assert_array_equal(ours(image), horizontal_first(image, *target))
        both = np.asarray(Image.fromarray(image).resize(target[::-1], Image.Resampling.BILINEAR))
        assert np.abs(ours(image).astype(int) - both).max() <= 1
    white = np.full((90, 70, 3), 255, dtype=np.uint8)
    assert (ours(white) == 255).all()


# What is refused, and what is written


def test_a_path_that_is_no_bundle_is_blamed_and_not_the_file_that_would_be_in_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone is no bundle"):
        export_single_file(tmp_path / "gone")


def test_without_a_calibration_it_says_what_to_run(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=f"mdps calibrate {tiny_bundle} GOOD_FOLDER"):
        export_single_file(tiny_bundle, tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def test_a_traced_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    manifest = Manifest.read(copy)
    traced = replace(manifest.graphs["guided_step"], session="traced")
    replace(manifest, graphs={**manifest.graphs, "guided_step": traced}).write(copy)
    with pytest.raises(UsageError, match="--guidance-backend onnx"):
        export_single_file(copy)


@pytest.fixture(scope="module")
def half(exported: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(exported("half"), tmp_path_factory.mktemp("half") / "bundle")


def test_an_fp16_bundle_becomes_a_file_with_its_verdicts(half: Path, tmp_path: Path) -> None:
    """Not to the last digits: every node rounds to fp16."""
    opened = session(export_single_file(half, tmp_path / "half.onnx"))
    with load(half, threads=1, warm_up=False) as detector:
        pairs = [(detector(picture(size)), judge(opened, picture(size))) for size in SIZES]
    scores = np.array([[wanted.score, float(found["anomaly_score"])] for wanted, found in pairs])
    off = np.abs(scores[:, 1] / scores[:, 0] - 1)
    # a mask pixel right on its threshold may fall to either side, and moves the score of that image
    assert np.median(off) < 5e-3
    assert off.max() < 0.1
    clear = [(wanted, found) for wanted, found in pairs if abs(wanted.score / wanted.threshold - 1) > 0.015]
    assert {wanted.verdict for wanted, _ in clear} == {"pass", "fail"}
    for wanted, found in clear:
        assert ("fail" if found["verdict"] else "pass") == wanted.verdict


def test_an_fp16_file_that_disagrees_is_not_written(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_the_mask(monkeypatch)
    with pytest.raises(BackendError, match="disagrees"):
        export_single_file(half, tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def test_a_bf16_bundle_is_refused(half: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(half, tmp_path / "bundle"))
    manifest = Manifest.read(copy)
    replace(manifest, precision="bf16").write(copy)
    with pytest.raises(UsageError, match=r"computes in bf16, .* --precision fp16 or fp32"):
        export_single_file(copy, tmp_path / "x.onnx")


def test_a_bundle_that_lets_images_out_early_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    manifest = Manifest.read(copy)
    sampler = replace(manifest.settings.sampler, early_exit=0.5)
    replace(manifest, settings=replace(manifest.settings, sampler=sampler)).write(copy)
    with pytest.raises(UsageError, match=r"skip the masked pass.*set it to 0 in the manifest"):
        export_single_file(copy, tmp_path / "alone.onnx")
    assert not (tmp_path / "alone.onnx").exists()


def test_more_than_one_file_can_hold_is_refused(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1_000_000)
    with pytest.raises(UsageError, match="at most 2 GB"):
        export_single_file(bundle, tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def forget_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composes a file with another threshold of the mask than the bundle's."""
    whole = module.compose

    def forgetful(folder: Path, detector: Detector) -> onnx.ModelProto:
        mask = replace(detector.settings.mask, mask_lambda=0.9)
        monkeypatch.setattr(detector, "_settings", replace(detector.settings, mask=mask))
        return whole(folder, detector)

    monkeypatch.setattr(module, "compose", forgetful)


def test_a_file_that_disagrees_is_not_written(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_mask(monkeypatch)
    with pytest.raises(BackendError, match="disagrees"):
        export_single_file(bundle, tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def test_in_the_bundle_it_is_listed_and_can_be_made_again(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    for _ in range(2):
        assert export_single_file(copy) == copy / FILE_NAME
        assert FILE_NAME in Manifest.read(copy).files  # checks its hash
    assert {path.name for path in copy.iterdir()} == {*Manifest.read(copy).files, "manifest.json"}
    with pytest.raises(UsageError, match="a graph of the bundle"):
        export_single_file(copy, copy / "score.onnx")
    Manifest.read(copy)


# The commands


@pytest.fixture
def good(tmp_path: Path) -> Path:
    (tmp_path / "good").mkdir()
    for seed in range(3):
        Image.fromarray(picture((40, 40), seed)).save(tmp_path / "good" / f"{seed}.png")
    return tmp_path / "good"


def test_the_command_and_the_warning_after_a_new_calibration(
    bundle: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    assert FILE_NAME == ONE_FILE
    assert run(cli, ["single-file", str(copy), "--product", "blue"]) == 2
    assert "mdps calibrate" in capsys.readouterr().err
    assert run(cli, ["single-file", str(copy)]) == 0
    assert f"wrote {copy / FILE_NAME}" in capsys.readouterr().out
    assert run(cli, ["calibrate", str(copy), str(good), "--json"]) == 0
    streams = capsys.readouterr()
    assert f"mdps single-file {copy}" in streams.err
    threshold = json.loads(streams.out)["threshold"]
    assert run(cli, ["single-file", str(copy)]) == 0
    assert judge(session(copy / FILE_NAME), picture((32, 32)))["threshold"] == np.float32(threshold)


def test_export_with_everything(
    small_checkpoint: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    options = ["--ckpt", str(small_checkpoint), "--out", str(out), "--image-size", "32", "--backbone", "random_tiny"]
    options += ["--noise-level", "198", "--steps", "3", "--single-file"]
    assert run(export, options) == 2
    assert "--calibrate GOOD_FOLDER" in capsys.readouterr().err
    assert run(export, [*options, "--calibrate", str(tmp_path / "nowhere")]) == 2
    assert run(export, [*options, "--calibrate", str(good), "--guidance-backend", "traced"]) == 2
    assert not out.exists(), "these are said before the work"
    assert run(export, [*options, "--calibrate", str(good)]) == 0
    assert FILE_NAME in Manifest.read(out).files
