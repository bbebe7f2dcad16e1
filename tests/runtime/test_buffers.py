"""Steps of a pass on buffers that are allocated once: which memory the engines write, and that results stay."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from mdps.runtime import noise as noise_module
from mdps.runtime.engines.interface import open_session
from mdps.runtime.engines.onnxruntime import OrtSession
from mdps.runtime.engines.openvino import OpenVinoSession
from mdps.runtime.errors import BackendError
from mdps.runtime.graphs import Graphs
from mdps.runtime.noise import INITIAL, JUMP, NoiseBank
from mdps.runtime.sampler import State, posterior_sampling
from mdps.runtime.schedule import NoiseSchedule, plan_steps
from mdps.runtime.session import ChunkedSession, CopyingRun, Session
from mdps.runtime.settings import PassSettings, SamplerSettings, paper_settings

SIDE = 64
SHAPE = (3, SIDE, SIDE)
SCHEDULE = NoiseSchedule.linear()
PAPER = paper_settings().sampler
BACKENDS = ["onnxruntime", "openvino"]
IMAGES = ("x_t", "observation", "noise")
SCALARS = ("timestep", "alpha_t", "alpha_s", "sigma_t", "guidance_scale")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x_s = alpha_s x_t + (observation - x_t) mask + sigma_t noise; eps = 2 x_t, guidance_gradient = 3 x_t."""
    nodes = [
        helper.make_node(kind, inputs, [out])
        for kind, inputs, out in (
            ("Mul", ["x_t", "alpha_s"], "kept"),
            ("Sub", ["observation", "x_t"], "residual"),
            ("Mul", ["residual", "mask"], "pulled"),
            ("Add", ["kept", "pulled"], "moved"),
            ("Mul", ["noise", "sigma_t"], "jitter"),
            ("Add", ["moved", "jitter"], "x_s"),
            ("Mul", ["x_t", "two"], "eps"),
            ("Mul", ["x_t", "three"], "guidance_gradient"),
        )
    ]

    def value(name: str, shape: tuple[Any, ...]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))

    shapes: dict[str, tuple[Any, ...]] = dict.fromkeys(IMAGES, ("N", 3, "H", "W")) | {"mask": ("N", 1, "H", "W")}
    inputs = [value(name, shape) for name, shape in (shapes | dict.fromkeys(SCALARS, ())).items()]
    outputs = [value(name, ("N", 3, "H", "W")) for name in ("x_s", "eps", "guidance_gradient")]
    constants = [
        onnx.numpy_helper.from_array(np.float32(n).reshape(()), name) for n, name in ((2, "two"), (3, "three"))
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "step", inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    path = tmp_path_factory.mktemp("steps") / "step.onnx"
    onnx.save(model, path)
    return path


def opened(graph: Path, backend: str) -> Session:
    if backend == "openvino":
        pytest.importorskip("openvino")
    return open_session(graph, threads=1, engine=backend)


def arrays(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    stream = np.random.default_rng(seed)
    found = {name: stream.normal(size=(count, *SHAPE)).astype(np.float32) for name in IMAGES}
    found["mask"] = (stream.uniform(size=(count, 1, SIDE, SIDE)) > 0.5).astype(np.float32)
    return found | {name: np.asarray(stream.uniform(), dtype=np.float32) for name in SCALARS}


def split(given: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    fixed = {name: given[name] for name in ("observation", "mask", "guidance_scale")}
    return fixed, {name: array for name, array in given.items() if name not in fixed}


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def sampled(session: Session, settings: SamplerSettings, count: int, **options: Any) -> Iterator[State]:
    y, m = arrays(count)["observation"], arrays(count)["mask"]
    bank = options.pop("bank", None) or NoiseBank(0, SHAPE)
    return posterior_sampling(Graphs(session, None), SCHEDULE, settings, y, m, 0, bank, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bound_run_gives_what_a_run_gives(graph: Path, backend: str) -> None:
    session, into = opened(graph, backend), {"x_s": np.empty((2, *SHAPE), np.float32)}
    bound, given = session.bind(split(arrays(2))[0]), arrays(2)
    for seed in (0, 1, 2):
        given = arrays(2, seed) | split(arrays(2))[0]
        given["noise"].setflags(write=False)
        bound.run(split(given)[1], into)
        np.testing.assert_array_equal(into["x_s"], session.run(given)["x_s"])
    every = into | {name: np.empty_like(into["x_s"]) for name in ("eps", "guidance_gradient")}
    bound.run(split(given)[1], every)
    for name, found in session.run(given).items():
        np.testing.assert_array_equal(every[name], found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_written_before_stays(graph: Path, backend: str) -> None:
    """Neither a run without a binding, nor another binding of the same shapes, writes where an earlier one did."""
    session, given, other = opened(graph, backend), arrays(2), arrays(2, 1)
    first, second = ({"x_s": np.empty((2, *SHAPE), np.float32)} for _ in range(2))
    bound = session.bind(split(given)[0])
    bound.run(split(given)[1], first)
    wanted = first["x_s"].copy()
    unbound = session.run(other)["x_s"]
    session.bind(split(other)[0]).run(split(other)[1], second)
    np.testing.assert_array_equal(first["x_s"], wanted)
    np.testing.assert_array_equal(second["x_s"], unbound)
    bound.run(split(given)[1], second)
    np.testing.assert_array_equal(second["x_s"], wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_write_into_their_part(graph: Path, backend: str) -> None:
    session, given = opened(graph, backend), arrays(5)
    fixed, changing = split(given)
    into = {"x_s": np.full((5, *SHAPE), np.nan, np.float32)}
    ChunkedSession(session, 2).bind(fixed).run(changing, into)
    np.testing.assert_array_equal(into["x_s"], session.run(given)["x_s"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_a_binding_is_a_sentence(graph: Path, backend: str) -> None:
    session, (fixed, changing) = opened(graph, backend), split(arrays(2))
    into = {"x_s": np.empty((2, *SHAPE), np.float32)}
    with pytest.raises(BackendError, match=r"has no input 'z'"):
        session.bind(fixed | {"z": fixed["mask"]})
    with pytest.raises(BackendError, match=r"'mask' as float32 \[any, 1, any, any\]"):
        session.bind(fixed | {"mask": fixed["mask"][0]})
    bound = session.bind(fixed)
    with pytest.raises(BackendError, match=r"needs the input 'noise'"):
        bound.run({name: array for name, array in changing.items() if name != "noise"}, into)
    with pytest.raises(BackendError, match=r"no output 'q'"):
        bound.run(changing, {"q": into["x_s"]})
    for spoilt in (into["x_s"][:, ::-1], np.broadcast_to(np.float32(0), into["x_s"].shape)):
        with pytest.raises(BackendError, match=r"cannot write 'x_s' into an array that is read-only or not contiguous"):
            bound.run(changing, {"x_s": spoilt})
    for shape in ((1, *SHAPE), (3, *SHAPE)):
        with pytest.raises(BackendError):
            bound.run(changing, {"x_s": np.empty(shape, np.float32)})
    with pytest.raises(BackendError):
        bound.run(changing, {"x_s": np.empty((2, *SHAPE), np.float64)})
    session.close()
    with pytest.raises(BackendError, match="was closed"):
        bound.run(changing, into)


@pytest.mark.parametrize(("kind", "count"), [(OrtSession, 1), (OrtSession, 3), (OpenVinoSession, 1)])
def test_no_step_allocates_or_copies(graph: Path, kind: type[Any], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine writes each x_s where the x_t before the last one was; from the second image on no noise is made.

    NumPy tells tracemalloc of every array it makes; what the engine would return by itself comes only out of `run`.
    """
    session = opened(graph, "openvino" if kind is OpenVinoSession else "onnxruntime")
    bank = NoiseBank(0, SHAPE)
    wanted = [state.x for state in sampled(session, PAPER, count, bank=bank)]
    monkeypatch.setattr(kind, "run", None)
    states = sampled(session, PAPER, count, bank=bank, reuse=True)
    places = [address(next(states).x)]
    tracemalloc.start()
    try:
        for expected in wanted[1:]:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            state = next(states)
            allocated = tracemalloc.get_traced_memory()[1] - before
            places.append(address(state.x))
            assert (state.eps, state.guidance_gradient) == (None, None)
            np.testing.assert_array_equal(state.x, expected)
            assert allocated < expected.nbytes / 2
    finally:
        tracemalloc.stop()
    assert len(set(places)) == 2
    assert places == [places[0], places[1]] * 5 + [places[0]]


def test_states_are_the_callers_own_unless_buffers_are_reused(graph: Path) -> None:
    session = opened(graph, "onnxruntime")
    kept, copies = [], []
    for state in sampled(session, PAPER, 2):
        kept.append(state)
        copies.append([None if a is None else a.copy() for a in (state.x, state.eps, state.guidance_gradient)])
    for state, (x, eps, gradient) in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(state.x, x)
        if state.step is not None:
            np.testing.assert_array_equal(state.eps, eps)
            np.testing.assert_array_equal(state.guidance_gradient, gradient)
    owned = [a for s in kept for a in (s.x, s.eps, s.guidance_gradient) if a is not None]
    assert len({address(array) for array in owned}) == len(owned) == 11 + 10 + 10
    for last, eps in zip(kept[:-1], [state.eps for state in kept[1:]], strict=True):
        np.testing.assert_array_equal(eps, 2 * last.x)
    *_, first = sampled(session, PAPER, 2, reuse=True)
    *_, second = sampled(session, replace(PAPER, seed=1), 2, reuse=True, bank=NoiseBank(1, SHAPE))
    np.testing.assert_array_equal(first.x, kept[-1].x)  # a pass has its own buffers
    assert (first.x != second.x).any()


@pytest.mark.parametrize("reuse", [False, True])
def test_steps_made_again_are_those_of_plain_arithmetic(graph: Path, reuse: bool) -> None:
    """Each state of a pass with resamples, N_s = 2, from `Session.run` and fresh arrays: equal to the bit."""
    session, bank = opened(graph, "onnxruntime"), NoiseBank(0, SHAPE)
    one = PassSettings(200, 100.0, steps=4, resamples=2)
    settings = replace(PAPER, first_pass=one, samples=2)
    y, m = (np.repeat(arrays(2)[name], 2, axis=0) for name in ("observation", "mask"))
    alpha, steps = plan_steps(SCHEDULE, "paper", one, 1.0)

    def mix(image: np.ndarray, a: float, index: int) -> np.ndarray:
        noise = np.concatenate([bank.draw(0, index, 2)] * 2)
        return np.asarray(np.sqrt(np.float32(a)) * image + np.sqrt(np.float32(1 - a)) * noise)

    states = sampled(session, settings, 2, reuse=reuse)
    x = mix(y, alpha, INITIAL)
    np.testing.assert_array_equal(next(states).x, x)
    for n, step in enumerate(steps):
        noise = np.concatenate([bank.draw(0, n, 2)] * 2) if step.sigma_t else np.zeros_like(y)
        numbers = (step.timestep, step.alpha_t, step.alpha_s, step.sigma_t, 100.0)
        scalars = {name: np.asarray(v, dtype=np.float32) for name, v in zip(SCALARS, numbers, strict=True)}
        x = session.run({"x_t": x, "observation": y, "mask": m, "noise": noise, **scalars})["x_s"]
        np.testing.assert_array_equal(next(states).x, x)
        if step.again:
            x = mix(x, step.alpha_t / step.alpha_s, JUMP + n)
    assert next(states, None) is None
    assert sum(step.again for step in steps) == 3


def test_noise_for_many_images_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, one = NoiseBank(0, SHAPE), NoiseBank(0, SHAPE).draw(0, 0, 2)
    four = bank.draw(0, 0, 2, images=4)
    np.testing.assert_array_equal(four, np.concatenate([one] * 4))
    assert bank.draw(0, 0, 2, images=4) is four
    for images in (1, 3):
        fewer = bank.draw(0, 0, 2, images=images)
        assert (address(fewer), len(fewer), fewer.flags.writeable) == (address(four), 2 * images, False)
    monkeypatch.setattr(noise_module, "KEPT_BYTES", 3 * one.nbytes)
    small = NoiseBank(0, SHAPE)
    kept = small.draw(0, 0, 2)
    np.testing.assert_array_equal(small.draw(0, 0, 2, images=4), four)
    assert small.draw(0, 0, 2) is kept  # the numbers are not drawn again where only their copies do not fit


def test_a_session_without_a_binding_of_its_own_copies(graph: Path) -> None:
    session, (fixed, changing) = opened(graph, "onnxruntime"), split(arrays(2))
    into = {"eps": np.empty((2, *SHAPE), np.float32)}
    CopyingRun(session, fixed).run(changing, into)
    np.testing.assert_array_equal(into["eps"], 2 * changing["x_t"])
