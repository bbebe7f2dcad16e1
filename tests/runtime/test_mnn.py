"""MNN behind the same seam: a bundle's step graphs as its own files, which say the same as ONNX Runtime's."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tuned_bundle import add_tuning

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.export import ExportOptions, export_bundle
from mdps.models.checkpoints import CheckpointOptions
from mdps.runtime import BackendError, Detector, UsageError, choice, load
from mdps.runtime.choice import installed
from mdps.runtime.engines import named
from mdps.runtime.engines.interface import open_session
from mdps.runtime.errors import BackendWarning
from mdps.runtime.machine import available_cpus
from mdps.runtime.manifest import Manifest
from mdps.runtime.settings import PassSettings

pytest.importorskip("MNN")

from mdps.export import mnn as converter
from mdps.runtime.engines.mnn import WEIGHTS, MnnSession

TINY = ExportOptions(
    backbone="random_tiny", noise_level=198, steps=3, load=CheckpointOptions(image_size=32), engine="mnn"
)


@pytest.fixture(scope="module")
def bundle(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bundle(small_checkpoint, tmp_path_factory.mktemp("mnn") / "bundle", TINY)


@pytest.fixture(scope="module")
def pictures() -> list[NDArray[np.uint8]]:
    return list(np.random.default_rng(1).integers(80, 170, (3, 40, 40, 3), np.uint8))


@pytest.fixture(scope="module", params=[1, 3], ids=["N_s=1", "N_s=3"])
def detectors(bundle: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Detector, Detector]]:
    options: Any = {"samples": request.param, "threads": 1, "warm_up": False, "calibrated": False}
    with load(bundle, **options) as ort, load(bundle, engine="mnn", **options) as mnn:
        yield ort, mnn


def test_both_backends_say_the_same(detectors: tuple[Detector, Detector], pictures: list[Any]) -> None:
    y = np.stack([detectors[0].preprocessing(picture) for picture in pictures])
    expected, found = (detector.inspect(y, mask_range=(0.0, 1.0)) for detector in detectors)
    np.testing.assert_allclose(found.anomaly_score, expected.anomaly_score, atol=1e-3)
    np.testing.assert_allclose(found.anomaly_map, expected.anomaly_map, atol=1e-3)
    np.testing.assert_allclose(found.posterior_samples, expected.posterior_samples, atol=1e-3)
    assert np.abs(expected.first_map - expected.anomaly_map).max() > 0.01, "one pass would satisfy the test"


def test_a_tuned_detector_is_the_same_on_every_engine(bundle: Path, tmp_path: Path, pictures: list[Any]) -> None:
    """Its steps run on MNN and OpenVINO, DDAD's among them, and what MNN has no file of on ONNX Runtime."""
    guided = PassSettings(198, 3.0, steps=3)
    folder = add_tuning(Path(shutil.copytree(bundle, tmp_path / "b")), gradient="ddad", first_pass=guided)
    found = {}
    for engine in [name for name in ("onnxruntime", "openvino", "mnn") if named(name).installed]:
        with load(folder, engine=engine, threads=1, calibrated=False) as detector:
            found[engine] = detector.batch(pictures)
            engines = detector.provenance["engines"]
            assert isinstance(engines, dict)
            assert ("MNN" in engines["guided_step"]) == (engine == "mnn")
    for results in found.values():
        for result, wanted in zip(results, found["onnxruntime"], strict=True):
            np.testing.assert_allclose(result.anomaly_map, wanted.anomaly_map, atol=1e-3)
            assert result.score == pytest.approx(wanted.score, abs=1e-3)


def test_results_repeat_to_the_bit_in_any_batch(detectors: tuple[Detector, Detector], pictures: list[Any]) -> None:
    detector = detectors[1]
    alone = [detector(picture) for picture in pictures]
    for result, single in zip(detector.batch(pictures), alone, strict=True):
        assert result.score == single.score
        np.testing.assert_array_equal(result.anomaly_map, single.anomaly_map)
    assert detector(pictures[0]).score == alone[0].score


def test_onnxruntime_runs_what_mnn_has_no_file_of(detectors: tuple[Detector, Detector]) -> None:
    provenance = detectors[1].provenance
    engines: Any = provenance["engines"]
    assert provenance["engine"] == "mnn"
    assert engines.pop("guided_step").startswith("MNN 3")
    assert engines == {"features": "CPUExecutionProvider", "score": "CPUExecutionProvider"}


def test_the_export_says_what_it_wrote_and_how_far_it_is_off(bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    assert {role: graph.variants.get("mnn") for role, graph in manifest.graphs.items()} == {
        "plain_step": "plain_step.mnn", "guided_step": "guided_step.mnn", "ddad_step": "ddad_step.mnn",
        "features": None, "score": None,
    }  # fmt: skip
    assert {"guided_step.mnn", "guided_step.mnn" + WEIGHTS} <= set(manifest.files)
    assert 0 < manifest.parity["checks"]["mnn"]["error"] < 1e-4
    assert "GlobalAveragePool" in manifest.parity["nodes"]["guided_step.mnn"]


@pytest.mark.parametrize("gradient", ["exact", "ddad"])
def test_every_rule_and_kind_of_network_converts(gradient: Any, small_checkpoint: Path, tmp_path: Path) -> None:
    options = replace(TINY, gradient=gradient, guidance_scale=4.0, preset=None, samples=2)
    checks = Manifest.read(export_bundle(small_checkpoint, tmp_path / "bundle", options)).parity["checks"]
    assert checks["mnn"]["error"] < 1e-4


def test_equal_exports_give_equal_files(bundle: Path, small_checkpoint: Path, tmp_path: Path) -> None:
    again = Manifest.read(export_bundle(small_checkpoint, tmp_path / "again", TINY))
    assert again.files == Manifest.read(bundle).files


# The session


def feeds(count: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    images = {name: rng.normal(size=(count, 3, 32, 32)) for name in ("x_t", "observation", "noise")}
    scalars = {"timestep": 99.0, "alpha_t": 0.6, "alpha_s": 0.7, "sigma_t": 0.1, "guidance_scale": 5.0}
    given = images | {"mask": np.ones((count, 1, 32, 32))} | scalars
    return {name: np.asarray(value, np.float32) for name, value in given.items()}


def test_rows_are_computed_alone(bundle: Path) -> None:
    session, reference = MnnSession(bundle / "guided_step.mnn", 1), open_session(bundle / "guided_step.onnx", threads=1)
    given = feeds(3)
    found, expected = session.run(given), reference.run(given)
    assert set(found) == set(expected) == {"x_s", "eps", "guidance_gradient"}
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() < 1e-4 * np.abs(array).max()
    for row in range(3):
        one = session.run({name: array[row : row + 1] if array.ndim else array for name, array in given.items()})
        np.testing.assert_array_equal(one["x_s"], found["x_s"][row : row + 1])
    into = {"x_s": np.empty((3, 3, 32, 32), np.float32)}
    fixed = {name: given.pop(name) for name in ("observation", "mask")}
    session.bind(fixed).run(given, into)
    np.testing.assert_array_equal(into["x_s"], found["x_s"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"noise": None}, "needs the input 'noise'"),
        ({"z": np.ones(1, np.float32)}, "has no input 'z'"),
        ({"x_t": np.ones((1, 3, 16, 32), np.float32)}, r"'x_t' as float32 \[any, 3, 32, 32\]"),
        ({"alpha_t": np.ones(1, np.float32)}, r"'alpha_t' as float32 \[\], but was given float32 \[1\]"),
        ({"x_t": np.ones((2, 3, 32, 32), np.float32)}, "batches of 1 and 2 at once"),
    ],
)
def test_feeds_that_do_not_fit_are_named(bundle: Path, change: dict[str, Any], sentence: str) -> None:
    given = {name: array for name, array in {**feeds(1), **change}.items() if array is not None}
    with pytest.raises(BackendError, match=sentence):
        MnnSession(bundle / "guided_step.mnn", 1).run(given)


def test_an_unknown_output_a_wrong_thread_count_and_a_closed_session_are_named(bundle: Path) -> None:
    session = MnnSession(bundle / "plain_step.mnn")
    assert session.threads == available_cpus()
    with pytest.raises(BackendError, match="no output 'q'; it gives eps, x_s"):
        session.run({name: array for name, array in feeds(1).items() if name != "guidance_scale"}, ["q"])
    session.close()
    session.close()
    with pytest.raises(BackendError, match="was closed"):
        session.run({name: array for name, array in feeds(1).items() if name != "guidance_scale"})
    with pytest.raises(UsageError, match="at least 1"):
        open_session(bundle / "plain_step.mnn", "mnn", 0)


def test_a_damaged_file_is_a_sentence(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mnn").write_bytes(b"no graph" * 100)
    with pytest.raises(BackendError, match=r"a\.mnn cannot be loaded by MNN: there is no file .*a\.mnn\.weight"):
        MnnSession(tmp_path / "a.mnn")
    (tmp_path / f"a.mnn{WEIGHTS}").write_bytes(b"")
    with pytest.raises(BackendError, match=r"a\.mnn cannot be loaded by MNN: \w") as caught:
        MnnSession(tmp_path / "a.mnn")
    assert "\n" not in str(caught.value)
    with pytest.raises(BackendError, match="there is no file"):
        MnnSession(tmp_path / "absent.mnn")


def test_calls_from_several_threads_do_not_mix(bundle: Path) -> None:
    session, found = MnnSession(bundle / "guided_step.mnn", 1), {}
    wanted = [session.run(feeds(1 + seed % 2, seed))["x_s"] for seed in range(3)]

    def work(seed: int) -> None:
        found[seed] = [session.run(feeds(1 + seed % 2, seed))["x_s"] for _ in range(5)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, arrays in found.items():
        for array in arrays:
            np.testing.assert_array_equal(array, wanted[seed])


LOADED = """
import sys
print("first")
from mdps.runtime.engines.mnn import MnnSession
MnnSession(sys.argv[1], 1).close()
try:
    MnnSession(sys.argv[2], 1)
except Exception as error:
    assert "cannot be loaded" in str(error)
print("last")
"""


def test_what_the_library_prints_does_not_reach_stdout(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.mnn").write_bytes(b"bad")
    (tmp_path / f"bad.mnn{WEIGHTS}").write_bytes(b"")
    arguments = [str(bundle / "guided_step.mnn"), str(tmp_path / "bad.mnn")]
    done = subprocess.run([sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["first", "last"]


MEMORY = """
import gc, sys
import numpy as np
from mdps.runtime.engines.mnn import MnnSession

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

def use():
    session = MnnSession(sys.argv[1], 1)
    names = session.inputs
    shape = {"mask": (1, 1, 32, 32)}
    shape |= dict.fromkeys(("x_t", "observation", "noise"), (1, 3, 32, 32))
    feeds = {name: np.ones(shape.get(name, ()), np.float32) for name in names}
    for _ in range(20):
        session.run(feeds)
    held = resident()
    session.close()
    return held

for _ in range(12):  # the allocator keeps what it has for the next one, and takes no more after some
    use()
before = resident()
for _ in range(12):
    use()
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
def test_closed_sessions_leave_their_memory_to_the_next(bundle: Path) -> None:
    graph = str(bundle / "guided_step.mnn")
    done = subprocess.run([sys.executable, "-c", MEMORY, graph], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 5, "twelve sessions hold more than ten times that"


# What a user gets wrong


def test_a_bundle_without_its_files_says_what_to_do(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"has no step graphs for the engine mnn: export it again with --engine mnn"):
        load(tiny_bundle, engine="mnn", calibrated=False)
    assert run(cli, ["predict", str(tiny_bundle), "x.png", "--out", "out", "--engine", "mnn"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    "change",
    [{"precision": "fp16"}, {"guidance_backend": "traced"}, {"compute_capability": ("8.6",)}],
)
def test_what_it_cannot_export_is_refused_before_it_starts(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--engine"):
        replace(TINY, **change)


def test_a_missing_library_says_what_to_install(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "MNN", None)
    with pytest.raises(BackendError, match=r'pip install "mdps\[mnn\]"'):
        load(bundle, engine="mnn", calibrated=False)
    with pytest.raises(BackendError, match=r'pip install "mdps\[mnn\]"'):
        converter.check_library()
    assert "mnn" not in installed()


def test_a_graph_that_does_not_convert_is_a_sentence(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    node = helper.make_node("GroupNormalization", ["x", "a", "a"], ["y"], num_groups=1)
    scale = onnx.numpy_helper.from_array(np.ones(1, np.float32), "a")
    ends = ([value("x", TensorProto.FLOAT, ["N", 4, 8, 8])], [value("y", TensorProto.FLOAT, ["N", 4, 8, 8])])
    graph = helper.make_graph([node], "g", *ends, [scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    with pytest.raises(BackendError, match=r"MNN does not convert g: \w"):
        converter.write(model, tmp_path / "g.mnn")


# The choice


def test_auto_measures_it_too_where_the_bundle_has_its_files(
    bundle: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path))
    measured = []

    def measure(names: Any, open_probe: Any) -> dict[str, float]:
        measured.append(tuple(names))
        return {name: float(name != names[-1]) for name in names}

    monkeypatch.setattr(choice, "measure", measure)
    for folder in (bundle, tiny_bundle):
        with load(folder, engine="auto", calibrated=False, threads=1, warm_up=False) as detector:
            assert detector.provenance["engine"] == measured[-1][-1]
    assert "mnn" in measured[0]
    assert "mnn" not in measured[1]


def test_auto_opens_the_files_of_each(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "MEASURED_SECONDS", 0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **_: pytest.fail(str(args[0])) if BackendWarning in args else None)
        load(bundle, engine="auto", calibrated=False, threads=1, warm_up=False).close()
    (entry,) = json.loads((tmp_path / "engines.json").read_text()).values()
    assert set(entry["step_ms"]) == set(installed())
