"""The doctor believes no list: providers are tried, wheels counted, faults named."""

import importlib.metadata
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from mdps.runtime import doctor
from mdps.runtime.cards import Card


class FakeSession:
    """A session that may take another provider than asked for, as the GPU wheel does, or compute nonsense."""

    active = ("CPUExecutionProvider",)
    factor = 2.0

    def __init__(self, model: bytes, providers: list[str]) -> None:
        if providers == ["TensorrtExecutionProvider"]:
            raise RuntimeError("libnvinfer.so.10: cannot open\nstack of the library")

    def run(self, _: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [feeds["x"] * self.factor]

    def get_providers(self) -> list[str]:
        return list(self.active)


def install(monkeypatch: pytest.MonkeyPatch, session: type, providers: list[str]) -> None:
    module: Any = SimpleNamespace(
        InferenceSession=session,
        get_available_providers=lambda: providers,
        set_default_logger_severity=lambda level: None,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    monkeypatch.setitem(sys.modules, "openvino", None)


def test_the_tiny_model_is_a_valid_model_that_doubles() -> None:
    model = onnx.load_model_from_string(doctor.TINY_MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert [(node.op_type, list(node.input)) for node in model.graph.node] == [("Add", ["x", "x"])]


def test_here_the_cpu_works() -> None:
    diagnosis = doctor.diagnose()
    assert diagnosis.works
    assert doctor.ProviderCheck("CPUExecutionProvider", True) in diagnosis.providers
    assert diagnosis.cpus >= 1
    assert diagnosis.versions["numpy"] == np.__version__
    assert diagnosis.to_json()["works"] is True


def test_a_provider_that_is_listed_but_falls_back_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeSession, ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"])
    tensorrt, cuda, cpu = doctor.diagnose().providers
    assert (tensorrt.usable, cuda.usable, cpu.usable) == (False, False, True)
    assert tensorrt.reason == "libnvinfer.so.10: cannot open"
    assert "took CPUExecutionProvider" in cuda.reason


def test_a_provider_that_computes_nonsense_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, type("Wrong", (FakeSession,), {"factor": 3.0}), ["CPUExecutionProvider"])
    diagnosis = doctor.diagnose()
    assert not diagnosis.works
    assert "where [2.0, 5.0] is right" in diagnosis.providers[0].reason


def test_two_wheels_at_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("onnxruntime", "onnxruntime-gpu"):
            return "1.30.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (problem,) = doctor.diagnose().problems
    assert problem.startswith("onnxruntime and onnxruntime-gpu are installed together")
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in problem


def test_an_emptied_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "openvino", None)
    diagnosis = doctor.diagnose()
    assert not diagnosis.works
    assert "installed but empty" in diagnosis.problems[0]


def test_a_missing_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "openvino", None)
    diagnosis = doctor.diagnose()
    assert not diagnosis.works
    assert "pip install 'mdps[cpu]'" in diagnosis.problems[0]


def test_cards_are_listed_with_their_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(0, "GPU-1", "NVIDIA H100", "9.0", 80 * 10**9, 85_520_809_984, "580.1")
    monkeypatch.setattr(doctor, "cards", lambda: (card,))
    assert doctor.diagnose().to_json()["cards"] == (asdict(card),)
    monkeypatch.setattr(doctor, "cards", tuple)
    assert doctor.diagnose().cards == ()
