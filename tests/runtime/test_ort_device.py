"""The loop on a card with ONNX Runtime and torch: HostDriver stands in for the card, the engines are the real ones.

Its memory is the host's, at real addresses, so that both libraries read and write it as they would a card's: what is
tested is that they share it, that the results are those of the host's pipeline, and what they are asked in which order.
"""

import ctypes
import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mdps.runtime import load
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.cards import Card
from mdps.runtime.device.seam import Buffer
from mdps.runtime.engines import named
from mdps.runtime.engines.interface import GraphFile
from mdps.runtime.engines.onnxruntime import CardOptions, OrtSession
from mdps.runtime.engines.onnxruntime_card import OrtEngine, can_stay, open_on_card
from mdps.runtime.engines.torch import TracedEngine, TracedSession
from mdps.runtime.errors import BackendError, UsageError
from mdps.runtime.manifest import Manifest

torch.set_num_threads(1)
CPU = named("onnxruntime")


class HostDriver:
    """A `Driver` that does all at once, in memory of the host; `asked` is what it was asked, in order."""

    captures = False

    def __init__(self):
        self.card = Card(ordinal=0, name="none", compute_capability="0.0")
        self.blocks, self.asked, self.closed = [], [], False

    @contextmanager
    def current(self):
        yield

    def allocate(self, nbytes):
        self.blocks.append(np.full(nbytes + 256, 0xFF, dtype=np.uint8))  # NaN, as float32
        return -(-self.blocks[-1].ctypes.data // 256) * 256

    def pinned(self, nbytes):
        return np.zeros(nbytes, dtype=np.uint8)

    def stream(self):
        return SimpleNamespace(handle=0)

    def event(self):
        return None

    def upload(self, to, array, stream):
        self._move("upload", to, array.ctypes.data, array.nbytes)

    def download(self, into, source, stream):
        self._move("download", into.ctypes.data, source, into.nbytes)

    def copy(self, to, source, nbytes, stream):
        self._move("copy", to, source, nbytes)

    def _move(self, kind, to, source, nbytes):
        self.asked.append(kind)
        ctypes.memmove(to, source, nbytes)

    def record(self, event, stream):
        pass

    def wait(self, stream, event):
        pass

    def finish(self, event):
        pass

    def synchronise(self, stream):
        pass

    def milliseconds(self, start, end):
        return 0.0

    def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def traced_bundle(small_checkpoint, tmp_path_factory):
    """Return a `tiny_bundle` with its guided step a torch program, its masked pass without guidance."""
    from mdps.export import ExportOptions, export_bundle
    from mdps.models.checkpoints import CheckpointOptions

    options = ExportOptions(
        backbone="random_tiny", noise_level=198, steps=2, load=CheckpointOptions(image_size=32),
        guidance_backend="traced", masked_guidance_scale=0.0,
    )  # fmt: skip
    return export_bundle(small_checkpoint, tmp_path_factory.mktemp("traced") / "bundle", options)


def observations(count):
    return np.random.default_rng(0).uniform(-1, 1, (count, 3, 32, 32)).astype(np.float32)


@pytest.mark.parametrize("samples", [1, 2])
def test_the_loop_gives_what_the_hosts_loop_gives(tiny_bundle, samples):
    bundle = Bundle.read(tiny_bundle, LoadOptions(samples=samples))
    pipeline = open_on_card(CPU, bundle, LoadOptions(threads=1, max_batch=4), HostDriver())
    found = pipeline.inspect(observations(3), (0.0, 1.0))
    with load(tiny_bundle, threads=1, samples=samples, calibrated=False, warm_up=False) as detector:
        expected = detector.inspect(observations(3), mask_range=(0.0, 1.0))
    for name in ("posterior_samples", "anomaly_map", "anomaly_score", "first_map", "mask"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-5, err_msg=name)
    pipeline.close()


def test_nothing_crosses_between_images_going_up_and_results_coming_down(tiny_bundle):
    driver = HostDriver()
    pipeline = open_on_card(CPU, Bundle.read(tiny_bundle), LoadOptions(threads=1), driver)
    pipeline.inspect(observations(1), (0.0, 1.0))
    driver.asked.clear()
    pipeline.inspect(observations(1), (0.0, 1.0))
    assert (driver.asked[0], driver.asked[-1]) == ("upload", "download")
    assert set(driver.asked[1:-1]) == {"copy"}
    pipeline.close()
    assert driver.closed


def test_bindings_and_their_sessions_go_before_the_card(tiny_bundle):
    """By themselves: until somebody collects garbage, the weights of before a reload would stay."""
    driver = HostDriver()
    pipeline = open_on_card(CPU, Bundle.read(tiny_bundle), LoadOptions(threads=1), driver)
    pipeline.inspect(observations(1), (0.0, 1.0))
    engines = pipeline._engines_on_card.roles.values()
    held = [weakref.ref(bound._binding._session) for engine in engines for bound in engine._bound]
    assert len(held) == len(pipeline.engines)
    left = []
    driver.close = lambda: left.append(sum(one() is not None for one in held))
    gc.disable()
    try:
        pipeline.close()
    finally:
        gc.enable()
    assert left == [0]


def test_torch_and_the_engine_share_the_loop(traced_bundle):
    pipeline = open_on_card(CPU, Bundle.read(traced_bundle), LoadOptions(threads=1), HostDriver())
    assert pipeline.engines["guided_step"].startswith("torch")
    assert pipeline.engines["plain_step"] == "CPUExecutionProvider"
    found = pipeline.inspect(observations(2), (0.0, 1.0))
    with load(traced_bundle, threads=1, calibrated=False, warm_up=False) as detector:
        expected = detector.inspect(observations(2), mask_range=(0.0, 1.0))
    np.testing.assert_allclose(found.posterior_samples, expected.posterior_samples, atol=1e-5)
    np.testing.assert_allclose(found.anomaly_map, expected.anomaly_map, atol=1e-5)
    pipeline.close()


def traced(bundle, **how):
    manifest = Manifest.read(bundle)
    return TracedSession(bundle / "denoiser.pt2", manifest.settings.sampler, manifest.prediction, threads=1, **how)


def bound(engine, driver, count=2):
    """The engine bound to new buffers, as arrays by name too."""
    buffers, arrays = {}, {}
    for port in (*engine.inputs, *engine.outputs):
        shape = tuple(count if length is None else length for length in port.shape)
        buffers[port.name] = Buffer(driver.allocate(max(4, 4 * int(np.prod(shape)))), shape)
        memory = (ctypes.c_float * int(np.prod(shape))).from_address(buffers[port.name].address)
        arrays[port.name] = np.ctypeslib.as_array(memory).reshape(shape)
    return engine.bind(buffers), buffers, arrays


def test_torchs_tensors_are_the_buffers_and_no_copies(traced_bundle):
    driver, session = HostDriver(), traced(traced_bundle)
    step, buffers, arrays = bound(TracedEngine(session, (32, 32)), driver)
    for name, tensor in step.places.items():
        assert (tensor.data_ptr(), tuple(tensor.shape)) == (buffers[name].address, buffers[name].shape)
    rng = np.random.default_rng(0)
    feeds = {name: rng.uniform(0.1, 0.9, arrays[name].shape).astype(np.float32) for name in session.inputs}
    for name, array in feeds.items():
        arrays[name][...] = array
    pointers = {name: tensor.data_ptr() for name, tensor in step.places.items()}
    for _ in range(2):
        step.enqueue(driver.stream())
    assert {name: tensor.data_ptr() for name, tensor in step.places.items()} == pointers
    for name, array in session.run(feeds).items():
        np.testing.assert_array_equal(arrays[name], array)


def test_a_compiled_network_gives_the_same_gradient(traced_bundle):
    plain, compiled = traced(traced_bundle), traced(traced_bundle, compiled="aot_eager")
    assert compiled.provider.endswith("compiled by aot_eager")
    rng = np.random.default_rng(0)
    shapes = {"mask": (1, 1, 32, 32), **dict.fromkeys(("x_t", "observation", "noise"), (1, 3, 32, 32))}
    feeds = {name: rng.uniform(0.1, 0.9, shapes.get(name, ())) for name in plain.inputs}
    feeds = {name: np.asarray(value, dtype=np.float32) for name, value in feeds.items()}
    expected = plain.run(feeds)
    for name, array in compiled.run(feeds).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5)
    with pytest.raises(UsageError, match="no back end 'faster' here: choose one of"):
        traced(traced_bundle, compiled="faster")


def test_buffers_that_do_not_fit_are_named(tiny_bundle, traced_bundle):
    engine = OrtEngine(OrtSession(tiny_bundle / "plain_step.onnx", CPU, 1))
    with pytest.raises(BackendError, match=r"takes 'x_t' as .* not None"):
        engine.bind({})
    with pytest.raises(BackendError, match=r"takes 'x_t' as \[None, 3, 32, 32\], not \(1, 3, 16, 16\)"):
        engine.bind({"x_t": Buffer(256, (1, 3, 16, 16))})
    engine.close()
    with pytest.raises(BackendError, match="a place for 'x_t'"):
        TracedEngine(traced(traced_bundle), (32, 32)).bind({})


def test_what_fails_half_way_closes_the_card(tiny_bundle):
    manifest, driver = Manifest.read(tiny_bundle), HostDriver()
    broken = replace(manifest, graphs={name: entry for name, entry in manifest.graphs.items() if name != "score"})
    with pytest.raises(UsageError, match="names no graph 'score'"):
        open_on_card(CPU, Bundle(tiny_bundle, broken, manifest.settings), LoadOptions(threads=1), driver)
    assert driver.closed


def test_settings_that_need_the_host_between_steps(tiny_bundle):
    settings = Manifest.read(tiny_bundle).settings
    assert can_stay(settings)
    assert not can_stay(replace(settings, sampler=replace(settings.sampler, mask_rule="inpaint")))
    plain = replace(settings.sampler.first_pass, guidance_scale=0.0)
    assert replace(settings, sampler=replace(settings.sampler, first_pass=plain)).roles == (
        "guided_step", "plain_step", "features", "score",
    )  # fmt: skip
    assert settings.roles == ("guided_step", "features", "score")


def test_only_steps_are_in_the_denoisers_precision_and_engines_are_kept_by_weights(tiny_bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path))
    bundle = Bundle.read(tiny_bundle)

    def options(role, **changes):
        changed = replace(bundle, manifest=replace(bundle.manifest, precision="fp16", **changes))
        graph = GraphFile(tiny_bundle / "any", role, changed, Card(ordinal=1))
        return CardOptions.of(graph, stream=5, recorded=True)

    step, score = options("guided_step"), options("score")
    assert (step.precision, score.precision) == ("fp16", "fp32")
    assert (step.ordinal, step.stream, step.recorded) == (1, 5, True)
    assert step.cache.parent == score.cache.parent != options("score", files={}, graphs={}).cache
    assert step.cache != score.cache


class FakeCudaSession:
    """An OrtSession on CUDA as far as `OrtEngine` uses one; notes what is bound where and which graph is run."""

    name, provider = "step.onnx", "CUDAExecutionProvider"
    card = CardOptions(ordinal=1, recorded=True, stream=7)

    def __init__(self):
        from mdps.runtime.session import Port

        port = lambda name: Port(name, np.dtype(np.float32), (None, 3))  # noqa: E731
        self.input_ports, self.output_ports, self.calls = [port("x_t")], [port("x_s")], []

    def binding(self):
        note = lambda kind: lambda name, *place: self.calls.append((kind, name, *place))  # noqa: E731
        return SimpleNamespace(bind_input=note("in"), bind_output=note("out"))

    def run_bound(self, binding, number):
        self.calls.append(("run", number))


def test_buffers_are_bound_once_by_address_and_each_binding_has_its_graph():
    session = FakeCudaSession()
    engine = OrtEngine(session)
    one = engine.bind({"x_t": Buffer(256, (2, 3)), "x_s": Buffer(512, (2, 3))})
    other = engine.bind({"x_t": Buffer(1024, (1, 3)), "x_s": Buffer(2048, (1, 3))})
    for step in (one, one, other, one):
        step.enqueue(SimpleNamespace(handle=7))
    assert session.calls == [
        ("in", "x_t", "cuda", 1, np.float32, [2, 3], 256),
        ("out", "x_s", "cuda", 1, np.float32, [2, 3], 512),
        ("in", "x_t", "cuda", 1, np.float32, [1, 3], 1024),
        ("out", "x_s", "cuda", 1, np.float32, [1, 3], 2048),
        ("run", 1), ("run", 1), ("run", 2), ("run", 1),
    ]  # fmt: skip
