"""Engine sessions: ONNX Runtime and torch behind the same seam."""

import builtins
import pickle
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from mdps.runtime.engines.interface import open_session
from mdps.runtime.engines.torch import TracedSession
from mdps.runtime.errors import BackendError, BundleError, UsageError
from mdps.runtime.machine import available_cpus
from mdps.runtime.session import ChunkedSession
from mdps.runtime.settings import paper_settings, reference_settings

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """y = x * s + w, w in an external file beside the graph."""
    path = tmp_path_factory.mktemp("graphs") / "a gräph.onnx"
    weight = np.arange(300, dtype=np.float32)
    nodes = [helper.make_node("Mul", ["x", "s"], ["xs"]), helper.make_node("Add", ["xs", "w"], ["y"])]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [
                helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 300]),
                helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
            ],
            [
                helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 300]),
                helper.make_tensor_value_info("xs", TensorProto.FLOAT, ["N", 300]),
            ],
            [onnx.numpy_helper.from_array(weight, "w")],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    onnx.save(model, path, save_as_external_data=True, location="w.weights", size_threshold=0)
    return path


def feeds(count=2):
    return {"x": np.ones((count, 300), np.float32), "s": np.float32(2).reshape(())}


def test_a_graph_with_external_weights_runs(graph):
    session = open_session(graph, threads=1)
    assert (session.inputs, session.outputs, session.provider) == (("x", "s"), ("y", "xs"), "CPUExecutionProvider")
    found = session.run(feeds())
    np.testing.assert_array_equal(found["y"], np.tile(np.arange(300) + 2, (2, 1)))
    assert list(session.run(feeds(), ["xs"])) == ["xs"]


def test_threads_default_to_the_available_ones(graph):
    assert open_session(graph).threads == available_cpus()
    assert open_session(graph, threads=1).threads == 1
    with pytest.raises(UsageError, match="at least 1"):
        open_session(graph, threads=0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": None}, "needs the input 'x'"),
        ({"z": np.ones(1, np.float32)}, "has no input 'z'; it takes s, x"),
        ({"x": np.ones((2, 300))}, r"'x' as float32 \[any, 300\], but was given float64 \[2, 300\]"),
        ({"x": np.ones((2, 299), np.float32)}, r"given float32 \[2, 299\]"),
        ({"x": np.ones(300, np.float32)}, r"given float32 \[300\]"),
        ({"s": np.ones(1, np.float32)}, r"'s' as float32 \[\], but was given float32 \[1\]"),
    ],
)
def test_feeds_that_do_not_fit_are_named(graph, change, sentence):
    given = {name: value for name, value in {**feeds(), **change}.items() if value is not None}
    with pytest.raises(BackendError, match=sentence):
        open_session(graph).run(given)


def test_an_unknown_output_is_named(graph):
    with pytest.raises(BackendError, match="no output 'q'; it gives y, xs"):
        open_session(graph).run(feeds(), ["q"])


def test_a_closed_session_says_so(graph):
    session = open_session(graph)
    session.close()
    session.close()
    with pytest.raises(BackendError, match="was closed"):
        session.run(feeds())


def test_chunks_give_the_whole_batch(graph):
    session = open_session(graph)
    given = feeds(7) | {"x": np.random.default_rng(0).normal(size=(7, 300)).astype(np.float32)}
    whole = session.run(given)
    cut = ChunkedSession(session, 3).run(given)
    for name in whole:
        np.testing.assert_array_equal(cut[name], whole[name])


@pytest.mark.parametrize("content", [b"", b"no graph", b"\x08\x09" * 50])
def test_a_damaged_graph_is_a_sentence(tmp_path, content):
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(BackendError, match=r"bad\.onnx"):
        open_session(path)
    with pytest.raises(BackendError, match="no file"):
        open_session(tmp_path / "absent.onnx")


def test_missing_external_weights_are_a_sentence(graph, tmp_path):
    alone = tmp_path / "alone.onnx"
    alone.write_bytes(graph.read_bytes())
    with pytest.raises(BackendError, match=r"alone\.onnx cannot be loaded"):
        open_session(alone)


def test_a_failure_of_the_engine_is_a_sentence(graph):
    session = open_session(graph)
    session._session = SimpleNamespace(run=lambda *_: (_ for _ in ()).throw(RuntimeError("[E] out of memory\nmore")))
    with pytest.raises(BackendError, match=r"failed on CPUExecutionProvider: \[E\] out of memory$"):
        session.run(feeds())


def test_a_provider_this_library_lacks_is_an_error(graph):
    with pytest.raises(BackendError, match=r"has no CUDAExecutionProvider.*mdps\[gpu\]"):
        open_session(graph, "onnxruntime-cuda")
    with pytest.raises(UsageError, match="no engine 'gpu': choose one of onnxruntime, openvino"):
        open_session(graph, "gpu")


def test_a_provider_that_is_listed_but_not_active_is_an_error(graph, monkeypatch):
    """As the GPU wheel behaves on a machine without a driver: it lists CUDA, then runs on the CPU."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    real = onnxruntime.InferenceSession

    def fall_back(path, sess_options, providers, provider_options, enable_fallback):
        assert not enable_fallback
        assert providers == ["CUDAExecutionProvider"]
        assert provider_options[0]["cudnn_conv_algo_search"] == "EXHAUSTIVE"
        return real(path, sess_options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", fall_back)
    with pytest.raises(BackendError, match=r"cannot be loaded on CUDAExecutionProvider.*fallback to CPU EP has been"):
        open_session(graph, "onnxruntime-cuda")
    fall_back.get_provider_graph_assignment_info = real.get_provider_graph_assignment_info  # as newer libraries have
    with pytest.raises(BackendError, match=r"cannot be loaded on CUDAExecutionProvider: it would run on CPU"):
        open_session(graph, "onnxruntime-cuda")


def test_a_missing_library_says_what_to_install(graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendError, match=r'pip install "mdps\[cpu\]"'):
        open_session(graph)


def test_a_library_damaged_by_its_sibling_is_named(graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    with pytest.raises(BackendError, match="overwrote each other"):
        open_session(graph)


# torch


class Tiny(torch.nn.Module):
    """Six output channels, as with a learned sigma; uses the timestep."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.SiLU(), torch.nn.Conv2d(8, 6, 3, padding=1)
        )

    def forward(self, x, timestep):
        return self.inner(x * (1 + timestep / 1000))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Tiny().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def program(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "denoiser.pt2"
    batch = {0: torch.export.Dim("n")}
    exported = torch.export.export(
        network, (torch.zeros(2, 3, 8, 8), torch.tensor(1.0)), dynamic_shapes={"x": batch, "timestep": {}}
    )
    torch.export.save(exported, path)
    return path


PAPER = paper_settings().sampler
REFERENCE = reference_settings(7, 50, 100, 200, 200, 20, 0.12).sampler


def step_feeds(names, count=3):
    rng = np.random.default_rng(0)
    shaped = {name: rng.normal(size=(count, 3, 8, 8)) for name in ("x_t", "observation", "noise", "mask_noise")}
    shaped["mask"] = rng.uniform(size=(count, 1, 8, 8)) > 0.4
    shaped |= {"timestep": 180.0, "alpha_t": 0.7, "alpha_s": 0.8, "sigma_t": 0.2, "guidance_scale": 30.0}
    return {name: np.asarray(shaped[name], dtype=np.float32) for name in names}


def expected_step(network, f, settings, prediction):
    """The whole prediction inside autograd, in float64, one image at a time: nothing of the closed form is used."""
    f = {name: torch.tensor(value, dtype=torch.float64) for name, value in f.items()}
    network = network.double()
    a, b, sigma = f["alpha_t"], f["alpha_s"], f["sigma_t"]
    found = []
    for i in range(len(f["x_t"])):
        y, m, x = (f[name][i : i + 1] for name in ("observation", "mask", "x_t"))
        if settings.mask_rule != "blend":
            x = m * x + (1 - m) * (a.sqrt() * y + (1 - a).sqrt() * f["mask_noise"][i : i + 1])
        x = x.clone().requires_grad_()
        n = network(x, f["timestep"])[:, :3]
        e = {"eps": n, "v": a.sqrt() * n + (1 - a).sqrt() * x, "x0": (x - a.sqrt() * n) / (1 - a).sqrt()}[prediction]
        x0_hat = (x - (1 - a).sqrt() * (e if settings.gradient == "exact" else e.detach())) / a.sqrt()
        energy = (x0_hat - y).norm() ** (2 if settings.guidance_norm == "squared" else 1)
        if settings.gradient == "ddad":  # half the squared distance to a y_t that is held fixed
            energy = (x - (a.sqrt() * y + (1 - a).sqrt() * e).detach()).square().sum() / 2
        (gradient,) = torch.autograd.grad(energy, x)
        guided = e + f["guidance_scale"] * (1 - a).sqrt() * gradient
        if settings.mask_rule == "blend":
            guided = (1 - m) * (x - a.sqrt() * y) / (1 - a).sqrt() + m * guided
        x0 = (x - (1 - a).sqrt() * guided) / a.sqrt()
        x_s = b.sqrt() * x0 + (1 - b - sigma**2).sqrt() * guided + sigma * f["noise"][i : i + 1]
        found.append([value.detach().numpy() for value in (x_s, e, gradient)])
    network.float()
    return {
        name: np.concatenate([row[k] for row in found]) for k, name in enumerate(("x_s", "eps", "guidance_gradient"))
    }


@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
@pytest.mark.parametrize(
    "settings",
    [
        PAPER,
        REFERENCE,
        replace(PAPER, guidance_norm="squared"),
        replace(PAPER, gradient="jacobian-free"),
        replace(REFERENCE, gradient="ddad", mask_rule="inpaint"),
    ],
    ids=["blend", "replace", "squared", "jacobian-free", "ddad"],
)
def test_the_traced_step_is_autograd(network, program, settings, prediction):
    session = TracedSession(program, settings, prediction, threads=1)
    given = step_feeds(session.inputs)
    found, expected = session.run(given), expected_step(network, given, settings, prediction)
    for name in session.outputs:
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-4)


def test_a_bound_traced_run_gives_what_a_run_gives(program):
    session = TracedSession(program, PAPER, threads=1)
    given = step_feeds(session.inputs)
    fixed = {name: given.pop(name) for name in ("observation", "mask", "guidance_scale")}
    into = {"x_s": np.empty_like(given["x_t"])}
    session.bind(fixed).run(given, into)
    np.testing.assert_array_equal(into["x_s"], session.run(fixed | given)["x_s"])


def test_traced_images_do_not_see_each_other(program):
    session = TracedSession(program, PAPER, threads=1)
    given = step_feeds(session.inputs)
    whole = session.run(given)
    for i in range(3):
        one = {name: value[i : i + 1] if value.ndim else value for name, value in given.items()}
        for name, value in session.run(one).items():
            np.testing.assert_allclose(value, whole[name][i : i + 1], atol=1e-5)


def test_a_residual_of_zero_has_a_gradient_of_zero(program, network):
    session = TracedSession(program, PAPER, threads=1)
    given = step_feeds(session.inputs, 1) | {"alpha_t": np.asarray(0.5, dtype=np.float32)}
    root = torch.tensor(0.5).sqrt()
    x = torch.tensor(given["x_t"])
    eps = network(x, torch.tensor(180.0))[:, :3]
    given["observation"] = ((x - root * eps) / root).numpy()
    np.testing.assert_array_equal(session.run(given)["guidance_gradient"], 0)


def test_the_traced_session_has_the_seam_of_the_graph(program):
    session = TracedSession(program, REFERENCE, threads=1)
    assert session.inputs == (
        *("x_t", "observation", "mask", "noise", "mask_noise"),
        *("timestep", "alpha_t", "alpha_s", "sigma_t", "guidance_scale"),
    )
    assert "mask_noise" not in TracedSession(program, PAPER, threads=1).inputs
    given = step_feeds(session.inputs)
    with pytest.raises(BackendError, match="needs the input 'x_t'"):
        session.run({name: value for name, value in given.items() if name != "x_t"})
    with pytest.raises(BackendError, match=r"'mask' as float32 \[any, 1, any, any\]"):
        session.run(given | {"mask": given["x_t"]})
    with pytest.raises(BackendError, match=r"failed in torch"):
        session.run(given | {"observation": np.zeros((3, 3, 9, 9), np.float32)})
    session.close()
    with pytest.raises(BackendError, match="was closed"):
        session.run(given)


def test_traced_on_a_device_that_is_not_here(program, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="no CUDA device"):
        TracedSession(program, PAPER, provider="cuda")
    with pytest.raises(UsageError, match="cpu or cuda"):
        TracedSession(program, PAPER, provider="tensorrt")


def test_traced_without_torch_says_what_to_install(program, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.partition(".")[0] == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(BackendError, match=r'pip install "mdps\[traced\]"'):
        TracedSession(program, PAPER)


class Malicious:
    def __reduce__(self):
        return (sys.setrecursionlimit, (4321,))


@pytest.mark.parametrize(
    "entry",
    [
        "data/constants/custom_obj_0",
        "data/constants/opaque_obj_0",
        "data/weights/model.pt",
        "data/sample_inputs/model.pt",
        "data/aotinductor/model/x.so",
        "data/weights/other_config.json",
    ],
)
def test_a_program_that_could_run_code_is_refused_and_nothing_runs(program, tmp_path, entry):
    path, before = tmp_path / "evil.pt2", sys.getrecursionlimit()
    content = b'{"config": {"w": {"use_pickle": true}}}' if entry.endswith(".json") else pickle.dumps(Malicious())
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(path, "w") as new:
        root = old.namelist()[0].split("/")[0]
        for name in old.namelist():
            if name != f"{root}/{entry}":
                new.writestr(name, old.read(name))
        new.writestr(f"{root}/{entry}", content)
    with pytest.raises(BundleError, match=r"evil\.pt2 is refused"):
        TracedSession(path, PAPER)
    assert sys.getrecursionlimit() == before


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive"])
def test_a_damaged_program_is_a_sentence(tmp_path, content):
    path = tmp_path / "bad.pt2"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"bad\.pt2 is no torch\.export program"):
        TracedSession(path, PAPER)


# threads


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1),
        ("0::/../../x\n", {"cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "50000", "cpu/d/cpu.cfs_period_us": "100000"}, 1),
        (
            "4:cpu,cpuacct:/d\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("", {}, 64),
        ("nonsense", {"cpu.max": "what"}, 64),
    ],
)
def test_the_quota_of_a_container_counts(tmp_path, monkeypatch, cgroup, files, expected):
    monkeypatch.setattr("mdps.runtime.machine._affinity", lambda: 64.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, content in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    proc = tmp_path / "proc"
    proc.write_text(cgroup)
    assert available_cpus(proc, tmp_path / "fs") == expected


@pytest.mark.parametrize(("asked", "expected"), [("2", 2), ("99", 64), ("0", 64), ("many", 64), ("", 64)])
def test_omp_num_threads_limits_it(tmp_path, monkeypatch, asked, expected):
    monkeypatch.setattr("mdps.runtime.machine._affinity", lambda: 64.0)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert available_cpus(tmp_path / "absent", tmp_path / "absent") == expected


def test_some_processor_is_always_available(tmp_path):
    assert available_cpus() >= 1
    assert available_cpus(tmp_path / "absent", tmp_path / "absent") >= 1
