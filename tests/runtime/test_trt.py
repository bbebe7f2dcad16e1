"""Plans on a card: how they are found, refused, bound and closed, with a fake library; and that its names are real."""

import gc
import importlib
import importlib.util
import json
import os
import re
import shutil
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from mdps import cli
from mdps.export.engine import Built
from mdps.export.plans import add_plans
from mdps.runtime import load
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.cards import Card
from mdps.runtime.device import cuda as cuda_module
from mdps.runtime.device.seam import Buffer
from mdps.runtime.engines import ENGINES, Engine, named
from mdps.runtime.engines import tensorrt as trt_module
from mdps.runtime.engines.tensorrt import Loader, Scratch, TrtEngine, check_plan, open_bundle
from mdps.runtime.errors import BackendError, BackendWarning, BundleError, UsageError
from mdps.runtime.manifest import Manifest, PlanEntry
from mdps.runtime.placement import Placement

RTX = "tensorrt-rtx"
ROW = named(RTX)
CARD = Card(ordinal=0, name="Fake 4090", compute_capability="8.9")


@dataclass
class FakeBuilder:
    """Its plans name the graph they come from and the shapes it was built for."""

    engine: Engine = ROW
    version: str = "1.7"
    capabilities: tuple[str, ...] = ("8.6", "8.9")
    options: dict = field(default_factory=dict)

    def build(self, path, profile, precision):
        facts = {"graph": str(path), "profile": dict(profile), "version": self.version}
        return Built(json.dumps(facts).encode(), {"FLOAT": 3}, "network")


class FakeLibrary:
    """As much of TensorRT as its module calls; its engines run the plan's ONNX graph at the end of a queue."""

    def __init__(self, fake_card, driver, version="1.7"):
        self.__version__, self.driver, self.fake_card = version, driver, fake_card
        self.contexts, self.engines, self.refuses = [], [], set()
        self.TensorIOMode = SimpleNamespace(INPUT="in", OUTPUT="out")
        self.DataType = SimpleNamespace(FLOAT="float", HALF="half")
        self.TensorLocation = SimpleNamespace(DEVICE="device", HOST="host")
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="ours")
        self.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")
        self.CudaGraphStrategy = SimpleNamespace(DISABLED="disabled")
        library = self

        class ILogger:
            ERROR, INTERNAL_ERROR, WARNING = "error", "internal error", "warning"

        class Runtime:
            def __init__(self, log):
                self.log = log

            def deserialize_cuda_engine(self, serialized_engine):
                if "deserialize" in library.refuses:
                    self.log.log(ILogger.WARNING, "a warning")
                    self.log.log(ILogger.ERROR, "[runtime] the magic tag does not match.\nmore")
                    return None
                library.engines.append(FakeCudaEngine(library, json.loads(bytes(serialized_engine)), self.log))
                return library.engines[-1]

        self.ILogger, self.Runtime = ILogger, Runtime


class FakeCudaEngine:
    num_optimization_profiles = 1

    def __init__(self, library, plan, log):
        self.library, self.plan, self.log = library, plan, log
        self.engine = library.fake_card.FakeEngine(library.driver, Path(plan["graph"]))
        self.ports = {port.name: port for port in (*self.engine.inputs, *self.engine.outputs)}
        self.num_io_tensors = len(self.ports)
        self.device_memory_size_v2 = 1000 * len(self.ports)
        self.odd_type = self.odd_place = None

    def get_tensor_name(self, index):
        return list(self.ports)[index]

    def get_tensor_mode(self, name):
        modes = self.library.TensorIOMode
        return modes.INPUT if name in {port.name for port in self.engine.inputs} else modes.OUTPUT

    def get_tensor_dtype(self, name):
        return self.library.DataType.HALF if name == self.odd_type else self.library.DataType.FLOAT

    def get_tensor_location(self, name):
        return self.library.TensorLocation.HOST if name == self.odd_place else self.library.TensorLocation.DEVICE

    def get_tensor_shape(self, name):
        return [-1 if length is None else length for length in self.ports[name].shape]

    def get_tensor_profile_shape(self, name, profile_index):
        assert profile_index == 0
        return self.plan["profile"].get(name, [self.ports[name].shape] * 3)

    def create_runtime_config(self):
        return FakeConfig()

    def create_execution_context(self, how):
        strategy = how.strategy if isinstance(how, FakeConfig) else how
        assert strategy == self.library.ExecutionContextAllocationStrategy.USER_MANAGED
        assert self.library.driver._inside.depth
        if "context" in self.library.refuses:
            self.log.log(self.library.ILogger.ERROR, "out of everything")
            return None
        self.library.contexts.append(FakeContext(self, how))
        return self.library.contexts[-1]


class FakeConfig:
    dynamic_shapes_kernel_specialization_strategy = cuda_graph_strategy = strategy = cache = None

    def set_execution_context_allocation_strategy(self, strategy):
        self.strategy = strategy

    def create_runtime_cache(self):
        return FakeCache()

    def set_runtime_cache(self, cache):
        self.cache = cache


class FakeCache:
    def __init__(self):
        self.kernels = set()

    def deserialize(self, data):
        self.kernels = set(json.loads(bytes(data)))
        return True

    def serialize(self):
        return json.dumps(sorted(self.kernels)).encode()


class FakeContext:
    def __init__(self, engine, config):
        self.engine, self.config = engine, config
        self.shapes, self.addresses, self.memory = {}, {}, None
        self.bound = None

    def set_device_memory(self, memory, size):
        assert memory % 256 == 0
        assert size >= self.engine.device_memory_size_v2
        self.memory = memory

    def set_input_shape(self, name, shape):
        low, _, high = self.engine.get_tensor_profile_shape(name, 0)
        self.shapes[name] = tuple(shape)
        return all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name, memory):
        self.addresses[name] = memory
        return "address" not in self.engine.library.refuses

    def infer_shapes(self):
        return ["x_t"] if "shapes" in self.engine.library.refuses else []

    def get_tensor_shape(self, name):
        first = next(shape for shape in self.shapes.values() if shape)[0]
        return [first if n is None else n for n in self.engine.ports[name].shape]

    def execute_async_v3(self, stream_handle):
        library = self.engine.library
        if "run" in library.refuses:
            self.engine.log.log(library.ILogger.ERROR, "a kernel is missing")
            return False
        (stream,) = [stream for stream in library.driver.streams if stream.handle == stream_handle]
        if isinstance(self.config, FakeConfig):
            self.config.cache.kernels.add(str(sorted(self.shapes.items())))
        if self.bound is None:
            shapes = self.shapes | {
                port.name: tuple(self.get_tensor_shape(port.name)) for port in self.engine.engine.outputs
            }
            self.bound = self.engine.engine.bind({n: Buffer(a, shapes[n]) for n, a in self.addresses.items()})
        self.bound.enqueue(stream)
        return True


FAKED = {
    "ICudaEngine": FakeCudaEngine,
    "IExecutionContext": FakeContext,
    "IRuntimeConfig": FakeConfig,
    "IRuntimeCache": FakeCache,
}


def names_called(text):
    """Every name after a dot that is called, set or read on what the libraries give."""
    parts = r"(?:engine|_?context|config|_cache|library|_engine|_library|runtime)"
    return set(re.findall(rf"\b{parts}\.(\w+)", text))


def real_library():
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        reason = "TensorRT-RTX is not installed: pip install 'mdps[tensorrt-rtx]'"
        pytest.fail(reason) if os.environ.get("MDPS_CI") else pytest.skip(reason)
    return importlib.import_module("tensorrt_rtx_bindings")


def test_every_name_that_is_called_is_one_of_the_real_library():
    real = real_library()
    known = {name for kind in (*FAKED, "Runtime") for name in dir(getattr(real, kind))} | set(dir(real))
    lines = Path(trt_module.__file__).read_text(encoding="utf-8").splitlines()
    called = names_called("\n".join(line for line in lines if not line.startswith(("from", "import")))) - {"close"}
    assert {"execute_async_v3", "set_tensor_address", "create_runtime_cache", "Runtime", "deserialize"} <= called
    assert not called - known
    for path in (("TensorLocation", "DEVICE"), ("TensorIOMode", "INPUT"), ("DataType", "FLOAT"),
                 ("ExecutionContextAllocationStrategy", "USER_MANAGED"), ("CudaGraphStrategy", "DISABLED"),
                 ("DynamicShapesKernelSpecializationStrategy", "EAGER"), ("ILogger", "INTERNAL_ERROR")):  # fmt: skip
        assert hasattr(getattr(real, path[0]), path[1])
    assert tuple(real.Dims((2, 3, -1))) == (2, 3, -1)
    assert tuple(real.Dims(())) == ()


def test_the_fakes_have_no_name_that_the_real_library_lacks():
    real = real_library()
    for kind, fake in FAKED.items():
        methods = {name for name, value in vars(fake).items() if callable(value) and not name.startswith("__")}
        assert methods <= set(dir(getattr(real, kind))), kind


@pytest.fixture(autouse=True)
def any_card(monkeypatch):
    """Which card, and whether there is room, is asked of the machine: tests/runtime/test_placement.py."""
    monkeypatch.setattr("mdps.runtime.placement.place", lambda *given: Placement(CARD) if given[-1].on_card else None)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bundle(line_bundle, tmp_path, cache):
    return Path(shutil.copytree(line_bundle, tmp_path / "bundle"))


def planned(bundle, **how):
    engine = named(how.pop("engine", RTX))
    add_plans(bundle, Manifest.read(bundle), FakeBuilder(engine, **how)).write(bundle)
    return Manifest.read(bundle)


@pytest.fixture
def here(fake_card, monkeypatch):
    """Puts a fake card and a fake library into this machine."""

    def put(card=CARD, version="1.7", **how):
        driver = fake_card.FakeDriver(card, **how)
        library = FakeLibrary(fake_card, driver, version)
        monkeypatch.setattr(cuda_module, "open_driver", lambda device=0: driver)
        real = importlib.import_module
        fakes = {engine.library: library for engine in ENGINES if engine.reads == "plans"}
        monkeypatch.setattr(importlib, "import_module", lambda name, *more: fakes.get(name) or real(name, *more))
        return library

    return put


PIXELS = np.random.default_rng(5).integers(0, 256, (5, 24, 24, 3), dtype=np.uint8)


@pytest.mark.parametrize("backend", [RTX, "tensorrt"])
def test_a_bundle_runs_by_its_plans(bundle, here, backend):
    planned(bundle, engine=backend)
    here()
    with load(bundle, threads=1) as on_cpu, load(bundle, engine=backend) as on_card:
        for have, want in zip(on_card.batch(list(PIXELS)), on_cpu.batch(list(PIXELS)), strict=True):
            assert have.verdict == want.verdict
            assert have.score == pytest.approx(want.score, rel=1e-4)
            np.testing.assert_allclose(have.anomaly_map, want.anomaly_map, rtol=0, atol=1e-3)
            assert set(have.times) == set(want.times)
        assert on_card.engine == backend
        said = on_card.provenance["engines"]
        assert set(said) == {"guided_step", "features", "score"}
        assert all("1.7 on Fake 4090" in text for text in said.values())


def test_what_is_stored_tells_one_build_of_a_plan_from_another(bundle, here):
    """A plan that is built again may give other numbers; the key of each is in what every result carries."""
    manifest = planned(bundle)
    here()
    with load(bundle, engine=RTX) as detector:
        said = detector.provenance["engines"]
    for entry in manifest.plans:
        if entry.role in said:
            assert entry.key[:16] in said[entry.role]


def test_the_command_line_predicts_by_plans(bundle, here, line_images, tmp_path):
    planned(bundle)
    here()
    folder = tmp_path / "in"
    folder.mkdir()
    for index, data in enumerate(line_images[:3]):
        (folder / f"{index}.png").write_bytes(data)
    rows = {}
    for backend in ("onnxruntime", RTX):
        out = tmp_path / backend
        ran = CliRunner().invoke(
            cli.cli, ["predict", str(bundle), str(folder), "--out", str(out), "--engine", backend, "--json"]
        )
        assert ran.exit_code in (0, 1), ran.output
        rows[backend] = [
            (line["path"], line["verdict"]) for line in map(json.loads, ran.stdout.splitlines()) if "verdict" in line
        ]
    assert rows[RTX] == rows["onnxruntime"] != []


def test_a_card_of_another_capability_is_refused_with_both_named(bundle, here):
    planned(bundle)
    library = here(Card(ordinal=0, name="NVIDIA RTX 5090", compute_capability="12.0"))
    with pytest.raises(BackendError) as caught:
        load(bundle, engine=RTX)
    text = str(caught.value)
    assert "built for compute capability 8.6, 8.9, here is card 0 (NVIDIA RTX 5090, compute capability 12.0)" in text
    assert f"mdps export --ckpt line.safetensors --out {bundle} --force --precision fp32 --engine {RTX}" in text
    assert "--compute-capability 12.0" in text
    assert library.driver.closed


def test_another_release_is_refused_with_both_named(bundle, here):
    planned(bundle, engine="tensorrt", version="10.9", capabilities=("8.9",))
    here(version="11.0")
    with pytest.raises(BackendError, match=r"built by TensorRT 10\.9, here is 11\.0: on this machine run `mdps export"):
        load(bundle, engine="tensorrt")


def test_a_plan_is_for_its_very_release_and_for_its_cards():
    shapes = {"batch": (1, 1, 8), "samples": None, "types": {}, "inspected": "network"}
    of = {"role": "score", "file": "score.plan", "precision": "fp32", "graph": "score.onnx", "key": "0" * 64}
    entry = PlanEntry(engine="tensorrt", version="10.9.0", compute_capabilities=("8.6", "8.9"), **of, **shapes)
    manifest = SimpleNamespace(precision="fp32", checkpoint=SimpleNamespace(name="line.pt"))
    check_plan(entry, "10.9.0", CARD, Path("b"), manifest)
    with pytest.raises(BackendError, match=r"built by TensorRT 10\.9\.0, here is 10\.10\.0"):
        check_plan(entry, "10.10.0", CARD, Path("b"), manifest)
    with pytest.raises(BackendError, match=r"for compute capability 8\.6, 8\.9, here is card 0"):
        check_plan(entry, "10.9.0", Card(ordinal=0, name="NVIDIA H200", compute_capability="9.0"), Path("b"), manifest)


def test_a_bundle_without_plans_names_the_export(bundle, here):
    here()
    with pytest.raises(BundleError, match=rf"no plan of TensorRT-RTX for guided_step, .*--engine {RTX}`"):
        load(bundle, engine=RTX)
    planned(bundle, engine="tensorrt")
    with pytest.raises(BundleError, match="no plan of TensorRT-RTX"):
        load(bundle, engine=RTX)


def test_what_no_plan_serves_is_refused_before_a_card_is_opened(bundle, monkeypatch):
    monkeypatch.setattr(cuda_module, "open_driver", lambda _: pytest.fail("a card was opened"))
    manifest = planned(bundle)
    traced = replace(manifest, guidance_backend="traced")
    with pytest.raises(BackendError, match="torch program, which has no plan"):
        open_bundle(ROW, Bundle(bundle, traced, manifest.settings), LoadOptions(), CARD)
    sampler = manifest.settings.sampler
    stitched = replace(sampler, masked_pass=replace(sampler.masked_pass, start="stitched"))
    changed = replace(manifest.settings, sampler=stitched)
    with pytest.raises(UsageError, match=r"masked_pass\.start"):
        open_bundle(ROW, Bundle(bundle, manifest, changed), LoadOptions(), CARD)


@pytest.mark.parametrize("backend", [RTX, "tensorrt"])
def test_a_missing_library_is_named_with_its_remedy(bundle, backend, monkeypatch):
    planned(bundle, engine=backend)

    real = importlib.import_module

    def missing(name, *more):
        if name.startswith("mdps."):
            return real(name, *more)
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BackendError, match=rf"pip install 'mdps\[{backend}\]'"):
        load(bundle, engine=backend)


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        ("deserialize", r"does not load .*\.plan: \[runtime\] the magic tag does not match: export it again"),
        ("context", "gives no execution context: out of everything"),
        ("address", "takes no address for"),
        ("shapes", "does not know the shapes of x_t"),
        ("run", "was refused by its library: a kernel is missing"),
    ],
)
def test_what_the_library_refuses_is_one_sentence_and_nothing_stays_open(bundle, here, refuses, words):
    planned(bundle)
    library = here()
    library.refuses.add(refuses)
    with pytest.raises(BackendError, match=words) as caught:
        load(bundle, engine=RTX)
    assert "\n" not in str(caught.value)
    assert library.driver.closed


def test_contexts_kernels_and_engines_go_before_their_card(bundle, here):
    """In this order, and by themselves: until somebody collects garbage, the weights of before a reload would stay."""
    planned(bundle)
    library, gone = here(), []
    detector = load(bundle, engine=RTX, max_batch=4)
    detector.batch(list(PIXELS[:4]))
    caches = {id(context.config.cache): context.config.cache for context in library.contexts}
    named_things = {"context": library.contexts, "kernels": list(caches.values()), "engine": library.engines}
    held = [
        weakref.ref(one, lambda _, kind=kind: gone.append(kind)) for kind, ones in named_things.items() for one in ones
    ]
    assert len(held) == 6 + 3 + 3
    close = library.driver.close
    library.driver.close = lambda: (gone.append("card"), close())
    library.contexts.clear(), library.engines.clear()
    del caches, named_things
    gc.disable()
    try:
        detector.close()
    finally:
        gc.enable()
    assert gone == ["context", "context", "kernels", "engine"] * 3 + ["card"]


def test_a_context_is_made_once_a_batch_size_and_none_a_call(bundle, here):
    planned(bundle)
    library = here()
    with load(bundle, engine=RTX, max_batch=4) as detector:
        for count in (1, 4):
            detector.batch(list(PIXELS[:1]) * count)
        made, blocks = len(library.contexts), len(library.driver.blocks)
        assert made == 2 * 3
        for _ in range(20):
            detector.batch(list(PIXELS[:4]))
            detector(PIXELS[0])
        assert (len(library.contexts), len(library.driver.blocks)) == (made, blocks)
    assert {context.memory for context in library.contexts} == {library.contexts[0].memory}
    size = max(engine.device_memory_size_v2 for engine in library.engines)
    assert len(library.driver.blocks[library.contexts[0].memory]) == size


@pytest.mark.parametrize("fault", ["odd_type", "odd_place", "num_optimization_profiles"])
def test_a_plan_that_is_none_of_ours_is_refused(bundle, here, fault):
    entry = planned(bundle).plans[0]
    library = here()
    engine = FakeCudaEngine(library, json.loads((bundle / entry.file).read_text()), None)
    setattr(engine, fault, 2 if fault.startswith("num") else "x_t")
    words = {"odd_type": "another type than float32", "odd_place": "on the host"}.get(fault, "2 profiles")
    with pytest.raises(BackendError, match=words):
        TrtEngine(bundle / entry.file, library, engine, Scratch(library.driver), "x", None)


def test_shapes_beyond_the_plan_are_named(bundle, here):
    manifest = planned(bundle)
    library = here()
    (entry,) = [one for one in manifest.plans if one.role == "features"]
    with library.driver.current():
        engine = Loader(ROW, library, library.driver).open(bundle / entry.file)
        buffers = {port.name: Buffer(4096, (9, *port.shape[1:])) for port in (*engine.inputs, *engine.outputs)}
        with pytest.raises(BackendError, match=r"takes 'image' from \[1, 3, 16, 16\] to \[8, 3, 16, 16\], not \[9, 3,"):
            engine.bind(buffers)
        engine.close()
        with pytest.raises(BackendError, match="was closed"):
            engine.bind(buffers)


def test_what_was_compiled_for_the_card_is_kept(bundle, here, cache):
    planned(bundle)
    here()
    with load(bundle, engine=RTX) as detector:
        detector(PIXELS[0])
    files = {path.name: path.read_bytes() for path in cache.glob("*.kernels")}
    assert len(files) == 3
    assert all("-1.7-8.9.kernels" in name for name in files)
    library = here()
    with load(bundle, engine=RTX):
        assert all(context.config.cache.kernels for context in library.contexts)
    assert {path.name: path.read_bytes() for path in cache.glob("*.kernels")} == files


def test_a_cache_that_cannot_be_written_is_only_warned_of(bundle, here, cache):
    planned(bundle)
    here()
    cache.write_text("a file where the folder should be")
    with pytest.warns(BackendWarning, match="compiled again at the next start"), load(bundle, engine=RTX) as detector:
        assert np.isfinite(detector(PIXELS[0]).score)


# The real drivers, without a card


def test_every_function_of_the_bindings_takes_what_it_is_given():
    """Without a driver each function converts its arguments and then misses the driver."""
    cuda = pytest.importorskip("cuda.bindings.driver")
    from cuda import pathfinder

    try:
        cuda.cuInit(0)
    except pathfinder.DynamicLibNotFoundError:
        pass
    else:
        pytest.skip("there is a driver here, which would do what it is asked")
    event, context = cuda.CUevent(5), cuda.CUcontext(1)
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    major = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    calls = {
        "cuInit": (0,), "cuDeviceGetCount": (), "cuDeviceGet": (0,), "cuDeviceGetName": (128, 0),
        "cuDeviceGetAttribute": (major, 0), "cuDevicePrimaryCtxRetain": (0,), "cuDevicePrimaryCtxRelease": (0,),
        "cuCtxPushCurrent": (context,), "cuCtxPopCurrent": (), "cuMemGetInfo": (), "cuMemAlloc": (512,),
        "cuMemHostAlloc": (512, 1), "cuMemFree": (512,), "cuMemFreeHost": (512,), "cuStreamCreate": (1,),
        "cuStreamSynchronize": (7,), "cuStreamDestroy": (7,), "cuEventCreate": (0,), "cuEventRecord": (event, 7),
        "cuStreamWaitEvent": (7, event, 0), "cuEventSynchronize": (event,), "cuEventElapsedTime": (event, event),
        "cuEventDestroy": (event,), "cuMemcpyHtoDAsync": (512, 1024, 4, 7), "cuMemcpyDtoHAsync": (512, 1024, 4, 7),
        "cuMemcpyDtoDAsync": (512, 1024, 4, 7), "cuStreamBeginCapture": (7, mode), "cuStreamEndCapture": (7,),
        "cuGraphInstantiate": (cuda.CUgraph(4), 0), "cuGraphDestroy": (cuda.CUgraph(4),),
        "cuGraphLaunch": (cuda.CUgraphExec(4), 7), "cuGraphExecDestroy": (cuda.CUgraphExec(4),),
        "cuGetErrorString": (cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY,),
    }  # fmt: skip
    text = Path(cuda_module.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"\b(cu[A-Z]\w+)", text)) == set(calls)
    for name, arguments in calls.items():
        with pytest.raises(pathfinder.DynamicLibNotFoundError):
            getattr(cuda, name)(*arguments)


class FakeCuda:
    """The functions of cuda.bindings.driver by name: each call is written down and answered from `answers`."""

    class CUdevice_attribute:  # noqa: N801
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = "major", "minor"

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = "thread"

    def __init__(self, **answers):
        self.calls = []
        self.answers = {
            "cuDeviceGetCount": (0, 1), "cuDeviceGet": (0, 0), "cuDeviceGetName": (0, b"Fake\0\0"),
            "cuDevicePrimaryCtxRetain": (0, "context"), "cuMemAlloc": (0, 4096), "cuStreamCreate": (0, 7),
            "cuEventCreate": (0, "event"), "cuMemGetInfo": (0, 3 * 2**20, 2**30), "cuStreamEndCapture": (0, "graph"),
            "cuGraphInstantiate": (0, "ready"), "cuGetErrorString": (0, b"it is so"),
            "cuEventElapsedTime": (0, 1.5), "cuCtxPopCurrent": (0, "context"),
        } | answers  # fmt: skip

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            if name == "cuDeviceGetAttribute":
                return 0, {"major": 8, "minor": 9}[arguments[0]]
            return self.answers.get(name, (0,))

        return call


@pytest.fixture
def fake_cuda(monkeypatch):
    def put(**answers):
        cuda = FakeCuda(**answers)
        monkeypatch.setattr(cuda_module, "_bindings", lambda: cuda)
        return cuda

    return put


def test_the_context_is_pushed_in_the_thread_that_calls_and_popped_again(fake_cuda):
    cuda = fake_cuda()
    driver = cuda_module.CudaDriver()
    assert driver.card == Card(ordinal=0, name="Fake", compute_capability="8.9")
    cuda.calls.clear()
    with driver.current():
        assert driver.allocate(512) == 4096
    assert [name for name, *_ in cuda.calls] == ["cuCtxPushCurrent", "cuMemAlloc", "cuCtxPopCurrent"]
    cuda.calls.clear()
    with driver.current():
        stream, event = driver.stream(), driver.event()
        driver.begin_capture(stream)
        driver.copy(512, 1024, 4, stream)
        driver.launch(driver.end_capture(stream), stream)
        assert driver.milliseconds(event, event) == 1.5
    assert [name for name, *_ in cuda.calls[3:-2]] == [
        "cuStreamBeginCapture", "cuMemcpyDtoDAsync", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy",
        "cuGraphLaunch",
    ]  # fmt: skip
    cuda.calls.clear()
    driver.close()
    driver.close()
    assert [name for name, *_ in cuda.calls] == [
        "cuCtxPushCurrent", "cuGraphExecDestroy", "cuEventDestroy", "cuStreamDestroy", "cuMemFree", "cuCtxPopCurrent",
        "cuDevicePrimaryCtxRelease",
    ]  # fmt: skip
    with pytest.raises(BackendError, match="was closed"), driver.current():
        pass


def test_what_cuda_refuses_is_one_sentence_with_a_remedy(fake_cuda):
    with pytest.raises(BackendError, match=r"refused cuInit: it is so \(CUDA error 100\): install NVIDIA's driver"):
        fake_cuda(cuInit=(100,)) and cuda_module.CudaDriver()
    fake_cuda()
    with pytest.raises(BackendError, match="no card 3, this process sees 1 card: look at CUDA_VISIBLE_DEVICES"):
        cuda_module.CudaDriver(3)
    fake_cuda(cuMemAlloc=(2, 0))
    driver = cuda_module.CudaDriver()
    with driver.current(), pytest.raises(BackendError, match=r"no room for 512\.0 MiB more, 3 MiB are free: load with"):
        driver.allocate(2**29)
    cuda = fake_cuda(cuStreamSynchronize=(719,))
    driver = cuda_module.CudaDriver()
    with driver.current(), pytest.raises(BackendError, match="context is lost, start the process again"):
        driver.synchronise(driver.stream())
    cuda.answers["cuCtxPopCurrent"] = (719,)
    driver.close()  # a card that is lost can still be let go


def test_without_a_driver_there_is_one_sentence(monkeypatch):
    pytest.importorskip("cuda.bindings.driver")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a driver here")
    with pytest.raises(BackendError, match=r"CUDA cannot be used here .*install NVIDIA's driver") as caught:
        cuda_module.open_driver()
    assert "\n" not in str(caught.value)


def fake_pycuda(events, room=True):
    class Error(Exception):
        pass

    class OutOfMemoryError(Error):
        pass

    class Context:
        def push(self):
            events.append("push")

        def pop(self):
            events.append("pop")

    class Device:
        def __init__(self, index):
            pass

        @staticmethod
        def count():
            return 1

        name = staticmethod(lambda: "Fake")
        compute_capability = staticmethod(lambda: (8, 9))

        def retain_primary_context(self):
            events.append("retain")
            return Context()

    class Memory:
        def __int__(self):
            return 4096

        def free(self):
            events.append("free")

    def mem_alloc(nbytes):
        if not room:
            raise OutOfMemoryError("cuMemAlloc failed: out of memory")
        return Memory()

    return SimpleNamespace(
        Error=Error, MemoryError=OutOfMemoryError, Device=Device, init=lambda: None, mem_alloc=mem_alloc,
        mem_get_info=lambda: (3 * 2**20, 2**30), Stream=lambda flags: SimpleNamespace(handle=7),
        memcpy_dtod_async=lambda to, source, nbytes, stream: events.append("copy"),
    )  # fmt: skip


def test_pycuda_serves_and_records_through_the_bindings(monkeypatch, fake_cuda):
    events, cuda = [], fake_cuda()
    monkeypatch.setattr(cuda_module, "_PYCUDA_CONTEXTS", {})
    monkeypatch.setattr(cuda_module, "_pycuda", lambda: fake_pycuda(events))
    driver = cuda_module.open_driver(library="pycuda")
    again = cuda_module.open_driver(library="pycuda")
    assert isinstance(driver, cuda_module.PyCudaDriver)
    assert driver.card == Card(ordinal=0, name="Fake", compute_capability="8.9")
    assert driver.captures
    with driver.current():
        assert driver.allocate(512) == 4096
        stream = driver.stream()
        driver.begin_capture(stream)
        driver.copy(512, 1024, 4, stream)
        driver.launch(driver.end_capture(stream), stream)
    driver.close()
    assert events == ["retain", "push", "copy", "pop", "push", "free", "pop"]
    assert ("cuStreamBeginCapture", 7, "thread") in cuda.calls
    assert ("cuGraphLaunch", "ready", 7) in cuda.calls
    with pytest.raises(BackendError, match="was closed"), driver.current():
        pass
    with again.current():
        assert again.free_memory() == 3 * 2**20


def test_pycuda_without_the_bindings_records_nothing(monkeypatch):
    def missing():
        raise BackendError("cuda-bindings cannot be imported")

    monkeypatch.setattr(cuda_module, "_bindings", missing)
    monkeypatch.setattr(cuda_module, "_PYCUDA_CONTEXTS", {})
    monkeypatch.setattr(cuda_module, "_has_pycuda", lambda: True)
    monkeypatch.setattr(cuda_module, "_pycuda", lambda: fake_pycuda([], room=False))
    driver = cuda_module.open_driver()
    assert not driver.captures
    with driver.current():
        with pytest.raises(BackendError, match="pip install cuda-bindings"):
            driver.begin_capture(driver.stream())
        with pytest.raises(BackendError, match="has no room for"):
            driver.allocate(2**20)


def test_the_library_is_chosen_by_name(monkeypatch):
    monkeypatch.setenv("MDPS_CUDA", "rocm")
    with pytest.raises(UsageError, match="no CUDA library 'rocm': choose one of cuda-bindings, pycuda"):
        cuda_module.open_driver()


def test_a_missing_wheel_is_named_with_its_remedy(monkeypatch):
    real = __import__

    @contextmanager
    def without(name, sentence):
        def refuse(asked, *more, **named):
            if asked.split(".")[0] == name:
                raise ImportError(sentence)
            return real(asked, *more, **named)

        with monkeypatch.context() as patch:
            patch.setattr("builtins.__import__", refuse)
            yield

    with (
        without("cuda", "No module named 'cuda'"),
        pytest.raises(BackendError, match=r"pip install \"mdps\[tensorrt\]"),
    ):
        cuda_module.CudaDriver()
    with without("pycuda", "No module named 'pycuda'"), pytest.raises(BackendError, match="a compiler and CUDA's"):
        cuda_module.PyCudaDriver()
    with without("pycuda", "libcuda.so.1: cannot open"), pytest.raises(BackendError, match="install NVIDIA's driver"):
        cuda_module.PyCudaDriver()
