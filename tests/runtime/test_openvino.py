"""OpenVINO behind the seam: as ONNX Runtime computes, with the same manners."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from PIL import Image

from mdps.benchmarks.evaluate.bundle import BundlePredictor
from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import BackendError, CalibrationError, Detector, UsageError, calibrate, load
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.doctor import diagnose
from mdps.runtime.engines.interface import Check, open_session
from mdps.runtime.engines.openvino import COMPILED_AT_ONCE, OpenVinoSession, has_bfloat16
from mdps.runtime.loading import choose_engine
from mdps.runtime.machine import available_cpus
from mdps.runtime.manifest import FILE_NAME, Manifest, hash_files

library = pytest.importorskip("openvino")
needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(library.Core()), reason="this processor has no bfloat16: AMX and AVX512_BF16 are missing"
)


def value(name: str, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def save(path: Path, nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], weights: Any) -> Path:
    """A graph whose weights lie in an external file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path, save_as_external_data=True, location="w.weights", size_threshold=0)
    return path


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = x * s + w and xs = x * s; same = y under another name; nothing reads `unused`."""
    nodes = [
        helper.make_node("Mul", ["x", "s"], ["xs"]),
        helper.make_node("Add", ["xs", "w"], ["y"]),
        helper.make_node("Identity", ["y"], ["same"]),
    ]
    inputs = [value("x", ["N", 300]), value("s", []), value("unused", ["N", 3])]
    outputs = [value(name, ["N", 300]) for name in ("y", "xs", "same")]
    path = tmp_path_factory.mktemp("graphs") / "a gräph.onnx"
    return save(path, nodes, inputs, outputs, {"w": np.arange(300, dtype=np.float32)})


def feeds(count: int = 2, level: float = 1) -> dict[str, NDArray[np.float32]]:
    x = np.full((count, 300), level, np.float32)
    return {"x": x, "s": np.float32(2).reshape(()), "unused": np.zeros((count, 3), np.float32)}


def test_a_graph_with_external_weights_runs(graph: Path) -> None:
    session = open_session(graph, threads=1, engine="openvino")
    assert (session.inputs, session.outputs) == (("x", "s", "unused"), ("y", "xs", "same"))
    assert session.provider.startswith("OpenVINO 20")
    found = session.run(feeds())
    for name in ("y", "same"):
        np.testing.assert_array_equal(found[name], np.tile(np.arange(300) + 2, (2, 1)))
    np.testing.assert_array_equal(found["xs"], 2)
    assert list(session.run(feeds(), ["xs"])) == ["xs"]


def test_a_result_is_not_overwritten_by_the_next_run(graph: Path) -> None:
    session = OpenVinoSession(graph, 1)
    first = session.run(feeds(level=1))
    session.run(feeds(level=5))
    np.testing.assert_array_equal(first["xs"], 2)


def test_strided_and_read_only_feeds_are_taken(graph: Path) -> None:
    wide = np.arange(1200, dtype=np.float32).reshape(2, 600)
    given = feeds() | {"x": wide[:, ::2]}
    for array in given.values():
        array.setflags(write=False)
    np.testing.assert_array_equal(OpenVinoSession(graph, 1).run(given)["xs"], 2 * wide[:, ::2])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": None}, "needs the input 'x'"),
        ({"z": np.ones(1, np.float32)}, "has no input 'z'; it takes s, unused, x"),
        ({"x": np.ones((2, 300))}, r"'x' as float32 \[any, 300\], but was given float64 \[2, 300\]"),
        ({"s": np.ones(1, np.float32)}, r"'s' as float32 \[\], but was given float32 \[1\]"),
    ],
)
def test_feeds_that_do_not_fit_are_named(graph: Path, change: dict[str, Any], sentence: str) -> None:
    given = {name: array for name, array in {**feeds(), **change}.items() if array is not None}
    with pytest.raises(BackendError, match=sentence):
        OpenVinoSession(graph).run(given)


def test_an_unknown_output_and_a_wrong_thread_count_are_named(graph: Path) -> None:
    with pytest.raises(BackendError, match="no output 'q'; it gives y, xs, same"):
        OpenVinoSession(graph).run(feeds(), ["q"])
    with pytest.raises(UsageError, match="at least 1"):
        open_session(graph, "openvino", 0)
    assert OpenVinoSession(graph).threads == available_cpus()


def test_a_closed_session_says_so(graph: Path) -> None:
    session = OpenVinoSession(graph)
    session.close()
    session.close()
    with pytest.raises(BackendError, match="was closed"):
        session.run(feeds())


@pytest.mark.parametrize("content", [b"", b"no graph", b"\x08\x09" * 50])
def test_a_damaged_graph_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(BackendError, match=r"bad\.onnx cannot be loaded by OpenVINO: \w") as caught:
        OpenVinoSession(path)
    assert "\n" not in str(caught.value)
    assert ".cpp" not in str(caught.value)
    with pytest.raises(BackendError, match="no file"):
        OpenVinoSession(tmp_path / "absent.onnx")


def test_missing_external_weights_are_a_sentence(graph: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.onnx"
    alone.write_bytes(graph.read_bytes())
    with pytest.raises(BackendError, match=r"alone\.onnx cannot be loaded by OpenVINO"):
        OpenVinoSession(alone)


def test_a_failure_of_the_engine_is_a_sentence(graph: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Exception from src/a.cpp:7:\nCheck 'false' failed at src/b.cpp:8:\nout of memory\n")

    session = OpenVinoSession(graph)
    session._core = SimpleNamespace(compile_model=fail)
    with pytest.raises(BackendError, match=r"gräph\.onnx failed on OpenVINO .* on CPU: out of memory$"):
        session.run(feeds())


def test_a_missing_library_says_what_to_install(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendError, match=r'pip install "mdps\[openvino\]"'):
        open_session(graph, engine="openvino")


def test_each_set_of_shapes_is_compiled_once_and_the_last_used_are_kept(graph: Path) -> None:
    session, compiled = OpenVinoSession(graph, 1), []
    core = session._core
    session._core = SimpleNamespace(
        compile_model=lambda model, *rest: compiled.append(model.inputs[0].shape[0]) or core.compile_model(model, *rest)
    )
    for count in (1, 4, 1, 4, 2, 1, 3, 1, 4):  # 3 drives out 4, the one not used for longest, and 4 then 2
        np.testing.assert_array_equal(session.run(feeds(count))["xs"], np.full((count, 300), 2))
    assert compiled == [1, 4, 2, 3, 4]
    assert len(session._requests) == COMPILED_AT_ONCE


def test_it_computes_in_float32_on_the_threads_asked_for(graph: Path) -> None:
    session = OpenVinoSession(graph, 1)
    session.run(feeds())
    (request,) = session._requests.values()
    model = request.get_compiled_model()
    assert model.get_property("INFERENCE_PRECISION_HINT").to_dtype() == np.float32
    assert model.get_property("INFERENCE_NUM_THREADS") == 1
    assert model.get_property("EXECUTION_DEVICES") == ["CPU"]


def bfloat16(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded as ml_dtypes rounds."""
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


@needs_bfloat16
def test_in_bfloat16_the_factors_of_a_product_are_rounded_and_its_sum_is_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 512), (512, 64)))
    ports = [value("x", ["N", 512])], [value("y", ["N", 64])]
    path = save(tmp_path / "g.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], *ports, {"w": w})
    session = OpenVinoSession(path, 1, "bf16")
    assert session.provider.endswith(" on CPU in bf16")
    found = session.run({"x": x})["y"]
    assert found.dtype == np.float32
    exact = x.astype(np.float64) @ w
    rounded = bfloat16(x).astype(np.float64) @ bfloat16(w)
    assert np.abs(found - exact).max() > 0.01, "it was computed in float32"
    np.testing.assert_allclose(found, rounded, rtol=2**-8, atol=1e-4)  # what comes out is rounded once more


def test_without_bfloat16_in_the_processor_it_is_refused(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdps.runtime.engines.openvino.has_bfloat16", lambda core: False)
    with pytest.raises(BackendError, match=r"computes no bfloat16 .*: choose --engine openvino$"):
        open_session(graph, threads=1, engine="openvino-bf16")
    open_session(graph, threads=1, engine="openvino").close()


def test_calls_from_several_threads_do_not_mix(graph: Path) -> None:
    session, found = OpenVinoSession(graph, 1), {}

    def work(level: int) -> None:
        found[level] = [session.run(feeds(1 + level % 2, level))["xs"].max() for _ in range(50)]

    threads = [threading.Thread(target=work, args=(level,)) for level in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {level: [2 * level] * 50 for level in range(4)}


MEMORY = """
import gc, sys
import numpy as np
from mdps.runtime.engines.openvino import OpenVinoSession

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

def use():
    session = OpenVinoSession(sys.argv[1], 1)
    for count in (1, 2):
        session.run({"x": np.ones((count, 3000), np.float32)})
    held = resident()
    session.close()
    return held, resident()

use()
before = resident()
print(*(value - before for value in use()))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
def test_closing_frees_the_memory(tmp_path: Path) -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(3000, 3000)).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = save(tmp_path / "big.onnx", nodes, [value("x", ["N", 3000])], [value("y", ["N", 3000])], weights)
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    held, left = map(float, done.stdout.split())
    assert held > 30, "the test would not see the weights"
    assert left < 5


@pytest.mark.parametrize("reduce", ["ReduceMean", "ReduceSum", "ReduceMax"])
@pytest.mark.parametrize("follow", ["Mul", "Add"])
def test_what_follows_a_reduction_takes_the_right_channels(reduce: str, follow: str, tmp_path: Path) -> None:
    """The end of attention's group norms; joined into one kernel, a batch above 1 gets the wrong channels."""
    nodes = [
        helper.make_node(reduce, ["x", "axes"], ["r"], keepdims=1),
        helper.make_node(follow, ["r", "w"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(1, 16, 1)).astype(np.float32), "axes": np.array([2])}
    path = save(tmp_path / "g.onnx", nodes, [value("x", ["N", 16, 64])], [value("y", ["N", 16, 1])], weights)
    x = rng.normal(size=(3, 16, 64)).astype(np.float32)
    reduced = {"ReduceMean": np.mean, "ReduceSum": np.sum, "ReduceMax": np.max}[reduce](x, axis=2, keepdims=True)
    expected = reduced * weights["w"] if follow == "Mul" else reduced + weights["w"]
    session = OpenVinoSession(path, 1)
    assert session.outputs == ("y",)
    found = session.run({"x": x})
    assert list(found) == ["y"]
    np.testing.assert_allclose(found["y"], expected, rtol=1e-4, atol=1e-5)


# A real bundle


@pytest.fixture(scope="module")
def pictures() -> list[NDArray[np.uint8]]:
    return list(np.random.default_rng(1).integers(80, 170, (3, 40, 40, 3), np.uint8))


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, pictures: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle, calibrated by ONNX Runtime with one and (product "four") with four samples."""
    folder = tmp_path_factory.mktemp("openvino") / "bundle"
    shutil.copytree(tiny_bundle, folder)
    for product, samples in (("default", 1), ("four", 4)):
        with load(folder, calibrated=False, threads=1, samples=samples, warm_up=False) as detector:
            calibration = calibrate(detector, pictures, false_alarm_rate=0.4)
            scores = np.sort([result.score for result in detector.batch(pictures)])
        widest = int(np.argmax(np.diff(scores)))  # far from every score, and some fail
        calibration = replace(calibration, threshold=float(scores[widest : widest + 2].mean()))
        Manifest.read(folder).with_calibration(product, calibration).write(folder)
    return folder


@pytest.fixture(scope="module", params=[("default", 1), ("four", 4)], ids=["N_s=1", "N_s=4"])
def detectors(bundle: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Detector, Detector]]:
    product, samples = request.param
    options = {"product": product, "samples": samples, "threads": 1, "warm_up": False}
    with load(bundle, **options) as ort, load(bundle, engine="openvino", **options) as openvino:
        yield ort, openvino


def test_both_backends_say_the_same_of_one_image(detectors: tuple[Detector, Detector], pictures: list[Any]) -> None:
    expected, found = (detector(pictures[0]) for detector in detectors)
    assert found.verdict == expected.verdict
    assert found.score == pytest.approx(expected.score, abs=1e-3)
    np.testing.assert_allclose(found.anomaly_map, expected.anomaly_map, atol=1e-3)
    np.testing.assert_allclose(found.posterior_sample, expected.posterior_sample, atol=1e-3)
    assert (found.mask == expected.mask).mean() > 0.99


def test_both_backends_say_the_same_of_a_batch(detectors: tuple[Detector, Detector], pictures: list[Any]) -> None:
    expected, found = (detector.batch(pictures) for detector in detectors)
    assert {result.verdict for result in expected} == {"pass", "fail"}
    assert [result.verdict for result in found] == [result.verdict for result in expected]
    np.testing.assert_allclose([r.score for r in found], [r.score for r in expected], atol=1e-3)


def test_both_passes_agree(detectors: tuple[Detector, Detector], pictures: list[Any]) -> None:
    y = np.stack([detectors[0].preprocessing(picture) for picture in pictures])
    expected, found = (detector.inspect(y) for detector in detectors)
    np.testing.assert_allclose(found.first_map, expected.first_map, atol=1e-3)
    np.testing.assert_allclose(found.anomaly_map, expected.anomaly_map, atol=1e-3)
    assert np.abs(expected.first_map - expected.anomaly_map).max() > 0.01, "one pass would satisfy the test"


def test_the_detector_says_what_computes(detectors: tuple[Detector, Detector]) -> None:
    ort, openvino = (detector.provenance for detector in detectors)
    assert (ort["engine"], openvino["engine"]) == ("onnxruntime", "openvino")
    assert set(ort["engines"].values()) == {"CPUExecutionProvider"}
    assert all(engine.startswith("OpenVINO") for engine in openvino["engines"].values())
    assert set(openvino["engines"]) == {"guided_step", "features", "score"}
    assert json.loads(json.dumps(openvino)) == openvino


def test_a_backend_takes_its_own_form_of_a_graph(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    shutil.copy(folder / "guided_step.onnx", folder / "other.onnx")
    manifest = Manifest.read(folder)
    guided = replace(manifest.graphs["guided_step"], variants={"openvino": "other.onnx"})
    replace(manifest, graphs=manifest.graphs | {"guided_step": guided}, files=hash_files(folder)).write(folder)
    assert step_file(folder, "openvino") == "other.onnx"
    assert step_file(folder, "onnxruntime") == "guided_step.onnx"
    obj = json.loads((folder / FILE_NAME).read_text())
    obj["graphs"]["guided_step"]["variants"] = {}
    (folder / FILE_NAME).write_text(json.dumps(obj))
    assert step_file(folder, "openvino") == "guided_step.onnx"


def step_file(folder: Path, backend: str) -> str:
    with load(folder, engine=backend, threads=1, warm_up=False) as detector:
        return str(detector._pipeline.graphs.guided.session._path.name)


def test_scores_in_other_arithmetic_need_a_calibration_of_their_own(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    command = "run `mdps calibrate .* GOOD_FOLDER --engine openvino-bf16`$"
    with pytest.raises(CalibrationError, match=f"calibrated with steps in fp32, not bf16.*: {command}"):
        load(folder, engine="openvino-bf16", threads=1)
    with BundlePredictor(folder, threads=1) as judge:
        assert judge.threshold is not None
    manifest = Manifest.read(folder)
    half = replace(manifest.calibrations["default"], arithmetic="bf16")
    manifest.with_calibration("default", half).write(folder)
    for backend in ("onnxruntime", "openvino"):
        with pytest.raises(CalibrationError, match="calibrated with steps in bf16, not fp32, so its threshold"):
            load(folder, engine=backend, threads=1)
    with BundlePredictor(folder, threads=1) as judge:
        assert judge.threshold is None
        assert "in other arithmetic" in judge.notes[0]


@needs_bfloat16
def test_a_bundle_in_bfloat16_computes_its_steps_in_it_and_nothing_else(
    bundle: Path, pictures: list[Any], tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    options: dict[str, Any] = {"threads": 1, "warm_up": False}
    with load(folder, engine="openvino-bf16", calibrated=False, **options) as detector:
        engines = detector.provenance["engines"]
        assert isinstance(engines, dict)
        reduced = {role: engine.endswith(" in bf16") for role, engine in engines.items()}
        assert reduced == {"guided_step": True, "features": False, "score": False}
        calibration = calibrate(detector, pictures, false_alarm_rate=0.4)
    assert calibration.arithmetic == "bf16"
    Manifest.read(folder).with_calibration("default", calibration).write(folder)
    with load(folder, engine="openvino-bf16", **options) as ours, load(bundle, **options) as exact:
        found, expected = ours.batch(pictures), exact.batch(pictures)
        alone = ours(pictures[1])
    np.testing.assert_array_equal(alone.anomaly_map, found[1].anomaly_map)
    for one, other in zip(found, expected, strict=True):
        assert one.score == pytest.approx(other.score, abs=0.05)
        # Noise through an untrained network: where a rounding is amplified, and not by how much, is chance.
        assert 1e-4 < np.abs(one.posterior_sample - other.posterior_sample).mean() < 0.05


def test_torch_computes_in_float32_whatever_the_backend(bundle: Path) -> None:
    opened = Bundle.read(bundle)
    traced = replace(opened, manifest=replace(opened.manifest, guidance_backend="traced"))
    with pytest.raises(UsageError, match="guides in torch, which computes in float32"):
        choose_engine(traced, LoadOptions(engine="openvino-bf16"))


def test_what_is_in_half_precision_is_not_reduced_again(bundle: Path) -> None:
    opened = Bundle.read(bundle)
    half = replace(opened, manifest=replace(opened.manifest, precision="fp16"))
    with pytest.raises(UsageError, match="is in fp16 already: choose another engine"):
        choose_engine(half, LoadOptions(engine="openvino-bf16"))
    assert choose_engine(half, LoadOptions(engine="openvino")).name == "openvino"


def test_the_command_line_takes_the_backend(
    bundle: Path, pictures: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(pictures[0]).save(tmp_path / "part.png")
    rows = []
    for backend in ("onnxruntime", "openvino"):
        out = tmp_path / backend
        options = ["--out", str(out), "--json", "--threads", "1", "--engine", backend]
        assert run(cli, ["predict", str(bundle), str(tmp_path / "part.png"), *options]) == 0
        rows.append(json.loads(capsys.readouterr().out))
        assert f"{backend}" in (out / "report.html").read_text()
    assert rows[0]["verdict"] == rows[1]["verdict"]
    assert rows[0]["score"] == pytest.approx(rows[1]["score"], abs=1e-3)


def test_calibrating_hands_the_backend_on(
    bundle: Path, pictures: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(pictures[0]).save(tmp_path / "part.png")
    asked: list[str] = []

    def refuse(bundle: Bundle, options: LoadOptions) -> Detector:
        asked.append(options.engine)
        raise UsageError("enough")

    monkeypatch.setattr("mdps.serving.calibrate.load_bundle", refuse)
    assert run(cli, ["calibrate", str(bundle), str(tmp_path), "--engine", "openvino"]) == 2
    assert asked == ["openvino"]


def test_the_doctor_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import openvino

    assert Check("openvino", True) in diagnose().engines
    assert (Check("openvino-bf16", True) in diagnose().engines) == has_bfloat16(openvino.Core())
    assert "openvino" in diagnose().versions
    monkeypatch.setattr(openvino, "Core", lambda: (_ for _ in ()).throw(RuntimeError("no plugin\nCPU is absent")))
    assert Check("openvino", False, "no plugin: CPU is absent") in diagnose().engines
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert not [check for check in diagnose().engines if "openvino" in check.name]
