"""ONNX Runtime on a card, without one: FakeLibrary stands in for onnxruntime-gpu and notes what it is asked."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mdps.runtime.engines import named
from mdps.runtime.engines.onnxruntime import CardOptions, OrtSession
from mdps.runtime.errors import BackendError, BackendWarning

CUDA, TENSORRT = named("onnxruntime-cuda"), named("onnxruntime-tensorrt")


class FakeValue:
    """An OrtValue in the card's memory."""

    @classmethod
    def ortvalue_from_numpy(cls, array, kind, ordinal):
        value = cls()
        value.array, value.place = array.copy(), (kind, ordinal)
        return value


class FakeBinding:
    """An IOBinding: what is bound where, in order."""

    def __init__(self, calls):
        self.calls = calls

    def bind_cpu_input(self, name, array):
        self.calls.append(("host", name))

    def bind_ortvalue_input(self, name, value):
        self.calls.append((*value.place, name))

    def clear_binding_outputs(self):
        pass

    def bind_output(self, name, kind, ordinal, dtype, shape, address):
        self.calls.append(("out", kind, name))


class FakeLibrary:
    """onnxruntime-gpu as far as it is used: one graph y = f(x, observation); `strays` computes on the CPU."""

    OrtValue = FakeValue

    def __init__(self, strays=(), tells=True, active=None):
        library, self.calls, self.entries = self, [], {}

        class Session:
            def __init__(self, path, sess_options, providers, provider_options, enable_fallback):
                assert not enable_fallback
                library.providers, library.options = providers, provider_options
                if "session.disable_cpu_ep_fallback" in library.entries and strays:
                    raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : This session contains graph nodes on CPU EP")

            def get_providers(self):
                return [active or library.providers[0], "CPUExecutionProvider"]

            def get_inputs(self):
                return [SimpleNamespace(name=n, type="tensor(float)", shape=["N", 3]) for n in ("x", "observation")]

            def get_outputs(self):
                return [SimpleNamespace(name="y")]

            def io_binding(self):
                return FakeBinding(library.calls)

            def run_with_iobinding(self, binding, options=None):
                library.calls.append("run" if options is None else dict(options.entries))

        if tells:

            def told(self):
                rows = [(library.providers[0], "Conv"), *(("CPUExecutionProvider", kind) for kind in strays)]
                return [
                    SimpleNamespace(ep_name=name, get_nodes=lambda kind=kind: [SimpleNamespace(op_type=kind)])
                    for name, kind in rows
                ]

            Session.get_provider_graph_assignment_info = told
        self.InferenceSession = Session

    def get_available_providers(self):
        return [CUDA.provider, TENSORRT.provider, "CPUExecutionProvider"]

    def RunOptions(self):  # noqa: N802 - the library's name
        entries = {}
        return SimpleNamespace(entries=entries, add_run_config_entry=entries.__setitem__)

    def SessionOptions(self):  # noqa: N802 - the library's name
        return SimpleNamespace(add_session_config_entry=self.entries.__setitem__)


@pytest.fixture
def install(monkeypatch, tmp_path):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")

    def install(**how):
        library: Any = FakeLibrary(**how)
        monkeypatch.setitem(sys.modules, "onnxruntime", library)
        return library

    return install


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "guided_step.onnx"
    path.write_bytes(b"as if")
    return path


def test_what_cuda_is_told(install, graph):
    library = install()
    OrtSession(graph, CUDA, 1, CardOptions(ordinal=2, recorded=True, stream=4711))
    assert library.providers == ["CUDAExecutionProvider"]
    assert library.options == [
        {
            "device_id": "2",
            "user_compute_stream": "4711",
            "cudnn_conv_algo_search": "EXHAUSTIVE",
            "use_tf32": "0",
            "arena_extend_strategy": "kSameAsRequested",
            "do_copy_in_default_stream": "1",
            "enable_cuda_graph": "1",
        }
    ]
    OrtSession(graph, CUDA, 1)
    assert library.options[0]["enable_cuda_graph"] == "0"
    assert library.options[0]["device_id"] == "0"
    assert "user_compute_stream" not in library.options[0]


@pytest.mark.parametrize(("precision", "fp16", "bf16"), [("fp32", "0", None), ("fp16", "1", None), ("bf16", "0", "1")])
def test_what_tensorrt_is_told_of_each_precision(install, graph, tmp_path, precision, fp16, bf16):
    library, cache = install(), tmp_path / "kept" / "engines"
    OrtSession(graph, TENSORRT, 1, CardOptions(precision=precision, cache=cache))
    (options,) = library.options
    assert (options["trt_fp16_enable"], options.get("trt_bf16_enable")) == (fp16, bf16)
    assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"] == str(cache)
    assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "1"
    assert cache.is_dir()
    OrtSession(graph, TENSORRT, 1)
    assert not [name for name in library.options[0] if "cache" in name]


def test_tensorrts_tf32_is_said(install, graph, monkeypatch):
    install()
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    with pytest.warns(BackendWarning, match="NVIDIA_TF32_OVERRIDE=0 before this program starts"):
        OrtSession(graph, TENSORRT, 1)


def test_a_cache_that_cannot_be_written_is_a_sentence(install, graph):
    install()
    with pytest.raises(BackendError, match="engines cannot be kept in"):
        OrtSession(graph, TENSORRT, 1, CardOptions(cache=graph / "inside a file"))


@pytest.mark.parametrize("engine", [CUDA, TENSORRT], ids=lambda engine: engine.name)
def test_nodes_that_silently_went_to_the_cpu_are_an_error(install, graph, engine):
    library = install(strays=["Conv", "Shape", "Conv", "Concat", "Resize"])
    with pytest.raises(BackendError, match=rf"{engine.provider} .*leave 3 nodes of .*onnx to the CPU \(Conv, Resize\)"):
        OrtSession(graph, engine, 1)
    assert library.entries["session.record_ep_graph_assignment_info"] == "1"


def test_lengths_of_axes_may_stay_on_the_cpu(install, graph):
    install(strays=["Shape", "Gather", "Concat"])
    assert OrtSession(graph, CUDA, 1).provider == "CUDAExecutionProvider"


def test_a_library_that_does_not_tell_is_forbidden_to_fall_back(install, graph):
    library = install(tells=False)
    OrtSession(graph, CUDA, 1)
    assert library.entries["session.disable_cpu_ep_fallback"] == "1"
    install(tells=False, strays=["Conv"])
    with pytest.raises(BackendError, match=r"cannot be loaded on CUDAExecutionProvider: .*nodes on CPU EP"):
        OrtSession(graph, CUDA, 1)


def test_a_session_that_runs_elsewhere_altogether_is_an_error(install, graph):
    install(active="CPUExecutionProvider")
    with pytest.raises(BackendError, match=r"cannot be loaded on Tensorrt.*: it would run on CPUExecutionProvider"):
        OrtSession(graph, TENSORRT, 1)


def test_what_is_given_once_goes_to_the_card_once(install, graph):
    library = install()
    session = OrtSession(graph, CUDA, 1, CardOptions(ordinal=1))
    x, y = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    bound = session.bind({"observation": x})
    bound.run({"x": x}, {"y": y})
    bound.run({"x": y}, {"y": x})
    step = [("host", "x"), ("out", "cpu", "y"), "run"]
    assert library.calls == [("cuda", 1, "observation"), *step, *step]


def test_on_the_callers_stream_a_run_waits_for_nothing_and_has_its_graph(install, graph):
    library, waits_not = install(), {"disable_synchronize_execution_providers": "1"}
    for card in (CardOptions(stream=7, recorded=True), CardOptions(stream=7), CardOptions()):
        session = OrtSession(graph, CUDA, 1, card)
        session.run_bound(session.binding(), 3)
    assert library.calls == [waits_not | {"gpu_graph_id": "3"}, waits_not, "run"]


def test_here_the_library_tells_that_the_cpu_computes(tmp_path):
    """The rule rests on the real library: it names every node's provider."""
    import onnx
    import onnxruntime

    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy"]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", ends[:1], ends[1:]),
        opset_imports=[onnx.helper.make_opsetid("", 18)],
        ir_version=9,
    )
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = [(part.ep_name, node.op_type) for part in session.get_provider_graph_assignment_info()
             for node in part.get_nodes()]  # fmt: skip
    assert found == [("CPUExecutionProvider", "Relu")]
