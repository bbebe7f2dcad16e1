"""Plans of TensorRT and TensorRT-RTX on a card: both libraries have the same names, so one module serves them.

A context has its shapes and addresses fixed when it is bound, so that its runs may be recorded in graphs. All contexts
share one piece of memory for what lies between layers: they run one after another on one stream.
"""

import importlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mdps.runtime.atomic import write_bytes
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.cards import Card
from mdps.runtime.device import cuda
from mdps.runtime.device.pipeline import DevicePipeline, check_settings, open_loop
from mdps.runtime.device.seam import Buffer, DeviceEngine, Driver, Stream
from mdps.runtime.engines import DEFAULT, Engine, named
from mdps.runtime.engines.interface import Check, GraphFile
from mdps.runtime.errors import BackendError, BackendWarning, BundleError, MdpsError, first_line
from mdps.runtime.manifest import Manifest, PlanEntry
from mdps.runtime.session import Port, Session
from mdps.runtime.user_cache import cache_folder


def open(row: Engine, graph: GraphFile, options: LoadOptions) -> Session:
    """Refuse a single graph: a plan is of a whole bundle's loop."""
    raise BackendError(f"the engine {row.name} opens plans of a bundle, not a graph such as {graph.file}")


def probe(row: Engine) -> Check:
    """Check that library, driver and card start, and that plans are for this card."""
    try:
        library = load_library(row)
        driver = cuda.open_driver()
        try:
            served = served_capabilities(library) if is_rtx(row) else ()
            if served and driver.card.compute_capability not in served:
                raise BackendError(
                    f"it has plans for compute capability {', '.join(served)}, here is {driver.card}: "
                    "pip install 'mdps[tensorrt]' and use --engine tensorrt"
                )
            with driver.current():
                _check_runtime(library)
        finally:
            driver.close()
    except MdpsError as error:
        return Check(row.name, False, str(error))
    return Check(row.name, True, f"{row.title} {library.__version__} starts on {driver.card}; no plan was run")


def _check_runtime(library: ModuleType) -> None:
    """BackendError where the library does not start in the current context."""
    log = logger(library)
    try:
        library.Runtime(log)
    except Exception as error:  # the bindings raise whatever pybind11 makes of a null pointer
        reason = log.reason() if log.errors else first_line(str(error))
        raise BackendError(f"it does not start: {reason}") from error


def open_bundle(row: Engine, bundle: Bundle, options: LoadOptions, card: Card) -> DevicePipeline:
    """Open a bundle on a card by its plans of `row`; only those that its passes and score need are loaded.

    Raises UsageError for settings that no plan serves, BundleError where the bundle lacks plans, BackendError where
    library, driver or card is missing, or a plan is for another card or release.
    """
    check_settings(bundle.settings)
    entries = _entries(row, bundle)
    library = load_library(row)
    driver = cuda.open_driver(card.ordinal or 0)
    loader = Loader(row, library, driver)

    def open_one(role: str, _: Stream) -> DeviceEngine:
        entry = entries[role]
        check_plan(entry, str(library.__version__), driver.card, bundle.path, bundle.manifest)
        return loader.open(bundle.path / entry.file)

    return open_loop(driver, bundle, options, open_one)


def _entries(row: Engine, bundle: Bundle) -> dict[str, PlanEntry]:
    """The plans of the graphs that these settings need, by role."""
    if bundle.manifest.guidance_backend == "traced":
        raise BackendError(
            f"the guided step of {bundle.path} is a torch program, which has no plan (--guidance-backend traced): use "
            f"the engine {DEFAULT}"
        )
    found = bundle.manifest.plans_of(row.name)
    if missing := [role for role in bundle.settings.roles if role not in found]:
        remedy = _rebuild(bundle.path, bundle.manifest, row)
        raise BundleError(f"{bundle.path} has no plan of {row.title} for {', '.join(missing)}: {remedy}")
    return {role: found[role] for role in bundle.settings.roles}


def check_plan(entry: PlanEntry, version: str, card: Card, path: Path, manifest: Manifest) -> None:
    """Raise BackendError for a plan of another release, or of other cards: a library says little where it loads one."""
    row = named(entry.engine)
    if entry.version != version:
        raise BackendError(
            f"{path / entry.file} was built by {row.title} {entry.version}, here is {version}: "
            + _rebuild(path, manifest, row)
        )
    if card.compute_capability not in entry.compute_capabilities:
        cards = ", ".join(entry.compute_capabilities)
        raise BackendError(
            f"{path / entry.file} was built for compute capability {cards}, here is {card}: "
            + _rebuild(path, manifest, row, card.compute_capability)
        )


def _rebuild(path: Path, manifest: Manifest, row: Engine, capability: str | None = None) -> str:
    rtx = is_rtx(row)
    option = f" --compute-capability {capability}" if capability and rtx else ""
    return (
        f"{'' if rtx else 'on this machine '}run `mdps export --ckpt {manifest.checkpoint.name} --out {path} --force "
        f"--precision {manifest.precision} --engine {row.name}{option}`, with the options of its export"
    )


def is_rtx(row: Engine) -> bool:
    """Whether its plans are for cards that need not be here, and kernels are compiled on the card."""
    return row.name == "tensorrt-rtx"


@dataclass
class Loader:
    """Opens plans of one library on one card, for one stream."""

    row: Engine
    library: Any
    driver: Driver

    def __post_init__(self) -> None:
        self.scratch = Scratch(self.driver)

    def open(self, file: Path) -> "TrtEngine":
        """One plan; BackendError where the library does not take it."""
        log = logger(self.library)
        log.errors.clear()
        runtime = self.library.Runtime(log)
        engine = runtime.deserialize_cuda_engine(file.read_bytes())
        name = f"{self.row.title} {self.library.__version__}"
        if engine is None:
            raise BackendError(f"{name} does not load {file}: {log.reason()}: export it again on this machine")
        kernels = Kernels(file, self.library, self.driver.card) if is_rtx(self.row) else None
        # The key of the plan stands in its file's name, and so in every result: a plan built again is another one.
        provider = f"{name} on {self.driver.card.name}, plan {file.stem.rpartition('.')[2]}"
        return TrtEngine(file, self.library, engine, self.scratch, provider, kernels)


class Scratch:
    """Memory for what lies between layers, one piece for all contexts: the largest any engine asks for."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._wanted = 0
        self._address: int | None = None

    def want(self, nbytes: int) -> None:
        """Before the first `take`: graphs that were recorded know its address."""
        if self._address is not None and nbytes > self._wanted:
            raise BackendError("an engine was opened after others had been bound: open all of a bundle first")
        self._wanted = max(self._wanted, nbytes)

    def take(self) -> tuple[int, int]:
        """Address and size."""
        if self._address is None:
            self._wanted = max(self._wanted, 256)
            self._address = self._driver.allocate(self._wanted)
        return self._address, self._wanted


class TrtEngine:
    """A `DeviceEngine`: one plan."""

    captures = True

    def __init__(
        self, file: Path, library: Any, engine: Any, scratch: Scratch, provider: str, kernels: "Kernels | None"
    ) -> None:
        self._file, self._library, self._scratch, self._kernels = file, library, scratch, kernels
        self._engine: Any = engine
        self.provider = provider
        self._bound: list[BoundContext] = []
        if engine.num_optimization_profiles != 1:
            raise BackendError(f"{file} has {engine.num_optimization_profiles} profiles, mdps builds one: export again")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        taken = [name for name in names if engine.get_tensor_mode(name) == library.TensorIOMode.INPUT]
        self.inputs: Sequence[Port] = [self._port(name) for name in taken]
        self.outputs: Sequence[Port] = [self._port(name) for name in names if name not in taken]
        self._ranges = {name: [tuple(shape) for shape in engine.get_tensor_profile_shape(name, 0)] for name in taken}
        self.largest: Mapping[str, tuple[int, ...]] = {name: shapes[2] for name, shapes in self._ranges.items()}
        scratch.want(int(engine.device_memory_size_v2))

    def bind(self, buffers: Mapping[str, Buffer]) -> "BoundContext":
        if self._engine is None:
            raise BackendError(f"{self._file} was closed: load the bundle again")
        bound = BoundContext(self._context(), self._file, self._reason, self._kernels)
        self._bound.append(bound)
        self._place(bound, buffers)
        return bound

    def close(self) -> None:
        """Let go of contexts, then of what was compiled for them, then of the engine, whoever else holds a binding."""
        for bound in self._bound:
            bound.close()
        self._bound.clear()
        if self._kernels is not None:
            self._kernels.close()
        self._engine = None

    def _place(self, bound: "BoundContext", buffers: Mapping[str, Buffer]) -> None:
        """Fix shapes and addresses; BackendError where they do not fit the plan."""
        for port in self.inputs:
            shape = buffers[port.name].shape
            if not self._fits(port.name, shape) or not bound.context.set_input_shape(port.name, shape):
                low, _, high = self._ranges[port.name]
                raise BackendError(
                    f"{self._file} takes {port.name!r} from {list(low)} to {list(high)}, not {list(shape)}: export it "
                    "again with that --max-batch"
                )
        for port in (*self.inputs, *self.outputs):
            if not bound.context.set_tensor_address(port.name, buffers[port.name].address):
                raise BackendError(f"{self._file} takes no address for {port.name!r}: {self._reason()}")
        if unknown := bound.context.infer_shapes():
            raise BackendError(f"{self._file} does not know the shapes of {', '.join(unknown)}: export it again")
        for port in self.outputs:
            if (given := tuple(bound.context.get_tensor_shape(port.name))) != buffers[port.name].shape:
                raise BackendError(
                    f"{self._file} gives {port.name!r} as {list(given)}, expected {list(buffers[port.name].shape)}"
                )

    def _context(self) -> Any:
        user_managed = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._kernels is None:
            context = self._engine.create_execution_context(user_managed)
        else:
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(user_managed)
            self._kernels.give(config)
            context = self._engine.create_execution_context(config)
        if context is None:
            raise BackendError(f"{self._file} gives no execution context: {self._reason()}")
        context.set_device_memory(*self._scratch.take())
        return context

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._ranges[name]
        return len(low) == len(shape) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))

    def _port(self, name: str) -> Port:
        engine, library = self._engine, self._library
        if engine.get_tensor_dtype(name) != library.DataType.FLOAT:
            raise BackendError(f"{self._file} has {name!r} in another type than float32: export it again")
        if engine.get_tensor_location(name) != library.TensorLocation.DEVICE:
            raise BackendError(f"{self._file} wants {name!r} on the host: export it again")
        lengths = tuple(None if length < 0 else int(length) for length in engine.get_tensor_shape(name))
        return Port(name, np.dtype(np.float32), lengths)

    def _reason(self) -> str:
        return str(logger(self._library).reason())


class BoundContext:
    """A `BoundEngine`: an execution context whose shapes and addresses are set."""

    def __init__(self, context: Any, file: Path, reason: Callable[[], str], kernels: "Kernels | None") -> None:
        self.context: Any = context
        self._file, self._reason, self._kernels = file, reason, kernels

    def enqueue(self, stream: Stream) -> None:
        if not self.context.execute_async_v3(stream.handle):
            raise BackendError(f"{self._file} was refused by its library: {self._reason()}")
        if self._kernels is not None:  # its first run has compiled what it will need
            self._kernels.keep()
            self._kernels = None

    def close(self) -> None:
        """Free the context; a binding of an engine that was closed is never run again."""
        self.context = self._kernels = None


class Kernels:
    """Kernels that TensorRT-RTX compiles on the card for a plan, kept in the user's cache folder."""

    def __init__(self, file: Path, library: Any, card: Card) -> None:
        self._library = library
        self._cache: Any = None
        place = f"{file.stem}-{library.__version__}-{card.compute_capability}.kernels"
        try:
            self._file: Path | None = cache_folder() / place
        except OSError:  # a user without a home
            self._file = None
        self._kept = b""

    def give(self, config: Any) -> None:
        """To a context's configuration, which also says that shapes are compiled for before they run, not while."""
        config.dynamic_shapes_kernel_specialization_strategy = (
            self._library.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        config.cuda_graph_strategy = self._library.CudaGraphStrategy.DISABLED  # the whole loop is recorded instead
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._file is not None and self._file.is_file():
                self._kept = self._file.read_bytes()
                self._cache.deserialize(self._kept)
        config.set_runtime_cache(self._cache)

    def close(self) -> None:
        """Free what was compiled; what is kept is in its file."""
        self._cache = None

    def keep(self) -> None:
        """Write down what was compiled since; a BackendWarning where that is not possible."""
        if self._cache is None or self._file is None:
            return
        data = bytes(self._cache.serialize())
        if data == self._kept:
            return
        self._kept = data
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._file, data)
        except OSError as error:
            warnings.warn(
                f"what was compiled for the card is not kept, and is compiled again at the next start: {error}",
                BackendWarning,
                stacklevel=2,
            )


def load_library(row: Engine, needed: str = "Runtime") -> ModuleType:
    """The Python module of TensorRT or TensorRT-RTX; BackendError where it is missing or lacks a class."""
    install = f"pip install 'mdps[{row.extra}]'"
    try:
        library = importlib.import_module(row.library)
    except (ImportError, OSError) as error:  # OSError: a library of it that does not load
        remedy = "Linux x86-64 or Windows" if is_rtx(row) else "NVIDIA's index has the libraries that PyPI lacks"
        raise BackendError(
            f"{row.title} cannot be imported ({first_line(str(error))}): {install} ({remedy})"
        ) from error
    if not hasattr(library, needed):
        raise BackendError(f"{row.library} is installed without its libraries: {install} again")
    return library


def served_capabilities(library: Any) -> dict[str, Any]:
    """Compute capabilities that TensorRT-RTX builds for, such as {"8.6": SM86}."""
    kinds = getattr(library, "ComputeCapability", None)
    names = {name: re.fullmatch(r"SM(\d+)(\d)", name) for name in dir(kinds)}
    found = {f"{m[1]}.{m[2]}": getattr(kinds, name) for name, m in names.items() if m}
    return dict(sorted(found.items(), key=lambda item: float(item[0])))


@cache
def logger(library: Any) -> Any:
    """The one logger that a library takes in a process; keeps what went wrong instead of printing it."""

    class Log(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.INTERNAL_ERROR, library.ILogger.ERROR):
                self.errors = [*self.errors[-9:], message]

        def reason(self) -> str:
            """The last of it."""
            return first_line(self.errors[-1] if self.errors else "it gives no reason")

    return Log()
