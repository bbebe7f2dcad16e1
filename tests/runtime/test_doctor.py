"""The doctor believes no list: providers are tried, wheels counted, faults named."""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import doctor, engines
from mdps.runtime.cards import Card
from mdps.runtime.device import cuda
from mdps.runtime.engines import ENGINES
from mdps.runtime.engines.interface import TINY_MODEL, Check
from mdps.runtime.engines.tensorrt import served_capabilities
from mdps.runtime.errors import BackendError, BackendWarning
from mdps.runtime.loading import load


class FakeSession:
    """A session that may take another provider than asked for, as the GPU wheel does, or compute nonsense.

    It falls back as the real one does, on stdout, where that is not forbidden.
    """

    active = ("CPUExecutionProvider",)
    factor = 2.0

    def __init__(self, model: bytes, providers: list[str], enable_fallback: int = 1) -> None:
        if providers == ["TensorrtExecutionProvider"]:
            if not enable_fallback:
                raise RuntimeError("libnvinfer.so.10: cannot open\nstack of the library")
            print("*************** EP Error ***************")

    def run(self, _: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [feeds["x"] * self.factor]

    def get_providers(self) -> list[str]:
        return list(self.active)


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where neither TensorRT nor TensorRT-RTX is installed."""
    monkeypatch.setattr(engines, "ENGINES", tuple(engine for engine in ENGINES if engine.reads != "plans"))


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)


def install(monkeypatch: pytest.MonkeyPatch, session: type, providers: list[str]) -> None:
    module: Any = SimpleNamespace(
        InferenceSession=session,
        get_available_providers=lambda: providers,
        set_default_logger_severity=lambda level: None,
        preload_dlls=lambda: print("Failed to load libcublasLt.so.13"),
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    hide(monkeypatch, "openvino", "MNN", "torch")


def test_the_tiny_model_is_a_valid_model_that_doubles() -> None:
    model = onnx.load_model_from_string(TINY_MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert [(node.op_type, list(node.input)) for node in model.graph.node] == [("Add", ["x", "x"])]


def test_here_the_cpu_works() -> None:
    diagnosis = doctor.diagnose()
    assert diagnosis.works
    assert Check("onnxruntime", True) in diagnosis.engines
    assert diagnosis.cpus >= 1
    assert diagnosis.versions["numpy"] == np.__version__
    assert diagnosis.to_json()["works"] is True


def test_what_keeps_from_using_all_processors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    found = doctor.diagnose()
    assert (found.cpus, found.cpus_of_host, found.cpus_limited_by) == (1, 64, "OMP_NUM_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert doctor.diagnose().cpus_limited_by == "the processors it may run on"
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert doctor.diagnose().cpus_limited_by is None


def test_a_provider_that_is_listed_but_falls_back_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeSession, ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"])
    cpu, cuda, tensorrt = doctor.diagnose().engines
    assert (tensorrt.usable, cuda.usable, cpu.usable) == (False, False, True)
    assert tensorrt.reason == "libnvinfer.so.10: cannot open"
    assert "would run on CPUExecutionProvider" in cuda.reason


_ORT = {"missing": None, "damaged": SimpleNamespace(), "cpu": ["CPUExecutionProvider"]}
_ORT["gpu"] = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]


@pytest.mark.parametrize("ort", _ORT)
def test_the_report_is_json_whatever_is_installed(
    ort: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of every other library: whether it is missing, or there and broken."""
    others = ("openvino", "MNN", "torch", "tensorrt", "tensorrt_rtx_bindings")
    monkeypatch.setattr(engines, "ENGINES", ENGINES)
    for there in product((False, True), repeat=len(others)):
        if isinstance(_ORT[ort], list):
            install(monkeypatch, FakeSession, _ORT[ort])
        else:
            monkeypatch.setitem(sys.modules, "onnxruntime", _ORT[ort])
        for name, broken in zip(others, there, strict=True):
            monkeypatch.setitem(sys.modules, name, ModuleType(name) if broken else None)
        code = run(cli, ["doctor", "--json"])
        found = json.loads(capfd.readouterr().out)
        assert any(check["usable"] for check in found["engines"]) == (ort in ("cpu", "gpu")), there
        assert code == int(not found["works"])


def test_a_provider_that_computes_nonsense_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, type("Wrong", (FakeSession,), {"factor": 3.0}), ["CPUExecutionProvider"])
    diagnosis = doctor.diagnose()
    assert not diagnosis.works
    assert "where [2.0, 5.0] is right" in diagnosis.engines[0].reason


@pytest.fixture
def two_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after pip install 'mdps[cpu]' 'mdps[gpu]'."""

    def version(name: str) -> str:
        if name in ("onnxruntime", "onnxruntime-gpu"):
            return "1.30.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_bundle_is_not_loaded_by_two_wheels_in_silence(two_wheels: None, line_bundle: Path) -> None:
    with pytest.warns(BackendWarning, match="onnxruntime and onnxruntime-gpu are installed together"):
        load(line_bundle, threads=1).close()


def test_two_wheels_at_once_are_found(two_wheels: None) -> None:
    (problem,) = doctor.diagnose().problems
    assert problem.startswith("onnxruntime and onnxruntime-gpu are installed together")
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in problem


def test_an_emptied_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    hide(monkeypatch, "openvino", "MNN", "torch")
    diagnosis = doctor.diagnose()
    assert not diagnosis.works
    assert "onnxruntime is damaged" in diagnosis.problems[0]


def test_a_missing_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    hide(monkeypatch, "openvino", "MNN", "torch")
    diagnosis = doctor.diagnose()
    assert not diagnosis.works
    assert "pip install 'mdps[cpu]'" in diagnosis.problems[0]


def test_cards_are_listed_with_their_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(0, "GPU-1", "NVIDIA H100", "9.0", 80 * 10**9, 85_520_809_984, "580.1")
    monkeypatch.setattr(doctor, "cards", lambda: (card,))
    assert doctor.diagnose().to_json()["cards"] == (asdict(card),)
    monkeypatch.setattr(doctor, "cards", tuple)
    assert doctor.diagnose().cards == ()


NAMED = {engine.name: engine for engine in ENGINES}


class FakePlans(ModuleType):
    """As much of TensorRT-RTX as the doctor asks for; its runtime may not start."""

    ComputeCapability = SimpleNamespace(NONE=0, CURRENT=1, SM86=86, SM89=89, SM120=120)

    class ILogger:
        ERROR, INTERNAL_ERROR = "error", "internal error"

    def __init__(self, name: str, starts: bool = True) -> None:
        super().__init__(name)
        self.__version__, self.starts = "1.7.1", starts

    def Runtime(self, log: Any) -> object:  # noqa: N802 - the library's name
        if not self.starts:
            log.log("error", "[runtime] CUDA is older than it must be.\nmore")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return object()


class FakeDriver:
    """A driver that counts how often it was closed."""

    closed = 0

    def __init__(self, capability: str) -> None:
        self.card = Card(ordinal=0, name="Fake 4090", compute_capability=capability)

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def plans_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDriver]:
    """A machine of plans alone: neither ONNX Runtime nor OpenVINO, a fake library and a fake driver."""

    def put(backend: str = "tensorrt-rtx", capability: str = "8.9", **how: Any) -> FakeDriver:
        driver = FakeDriver(capability)
        hide(monkeypatch, "onnxruntime", "openvino", "MNN", "torch")
        monkeypatch.setattr(engines, "ENGINES", (ENGINES[0], replace(NAMED[backend], library="fake_plans")))
        monkeypatch.setitem(sys.modules, "fake_plans", FakePlans("fake_plans", **how))
        monkeypatch.setattr(cuda, "open_driver", lambda: driver)
        return driver

    return put


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_where_plans_alone_are_installed_they_work(
    backend: str, plans_alone: Callable[..., FakeDriver], capsys: pytest.CaptureFixture[str]
) -> None:
    driver = plans_alone(backend)
    assert run(cli, ["doctor"]) == 0
    out = capsys.readouterr().out
    assert "works: yes" in out
    assert f"name: {backend}" in out
    assert (
        f"reason: {NAMED[backend].title} 1.7.1 starts on card 0 (Fake 4090, compute capability 8.9); no plan was run"
        in out
    )
    assert "problems: none" in out  # ONNX Runtime is missed by nobody
    assert driver.closed == 1


def test_plans_without_a_driver_do_not_work(
    plans_alone: Callable[..., FakeDriver], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> FakeDriver:
        raise BackendError("CUDA cannot be used here (no driver): install NVIDIA's driver")

    plans_alone()
    monkeypatch.setattr(cuda, "open_driver", none)
    assert run(cli, ["doctor"]) == 1
    out = capsys.readouterr().out
    assert "reason: CUDA cannot be used here (no driver): install NVIDIA's driver" in out
    assert "pip install 'mdps[cpu]'" in out


def test_a_card_the_plans_are_not_for_is_named(plans_alone: Callable[..., FakeDriver]) -> None:
    driver = plans_alone(capability="9.0")
    (check,) = doctor.diagnose().engines
    assert not check.usable
    assert "for compute capability 8.6, 8.9, 12.0, here is card 0 (Fake 4090, compute capability 9.0)" in check.reason
    assert driver.closed == 1
    plans_alone("tensorrt", capability="9.0")  # builds for the card that is there
    assert doctor.diagnose().works


def test_a_library_of_plans_that_does_not_start_is_not_usable(plans_alone: Callable[..., FakeDriver]) -> None:
    driver = plans_alone(starts=False)
    (check,) = doctor.diagnose().engines
    assert (check.name, check.usable) == ("tensorrt-rtx", False)
    assert check.reason == "it does not start: [runtime] CUDA is older than it must be"
    assert driver.closed == 1
    sys.modules["fake_plans"] = ModuleType("fake_plans")  # without its libraries
    assert "installed without its libraries" in doctor.diagnose().engines[0].reason


def test_the_real_library_of_plans_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pytest.importorskip("tensorrt_rtx_bindings")
    monkeypatch.setattr(engines, "ENGINES", ENGINES)
    (check,) = [check for check in doctor.diagnose().engines if check.name == "tensorrt-rtx"]
    assert check.usable or "NVIDIA" in check.reason
    assert {"8.6", "8.9", "12.0"} <= set(served_capabilities(real))
