"""Finds out what really works here: each execution provider and backend is tried, not believed."""

import importlib.util
import os
import platform
import sys
import warnings
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from mdps.runtime.cards import Card, cards
from mdps.runtime.errors import MdpsError, first_line
from mdps.runtime.session import PLAN_BACKENDS
from mdps.runtime.threads import available_cpus, cpus_limited_by
from mdps.runtime.versions import installed

# An ONNX model with one node, y = x + x, x float32 [2] (onnx.helper made it; a test reads it back with onnx).
TINY_MODEL = (
    b'\x08\x08:5\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x02'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x02B\x04\n\x00\x10\x11"
)
# Each of these wheels installs the one folder `onnxruntime`: the last one installed wins, and removing one breaks it.
ENGINE_WHEELS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
)
_OPENVINO = "OpenVINO on CPU"
_BFLOAT16 = f"{_OPENVINO} in bf16 (--backend openvino-bf16)"
_MNN = "MNN on CPU"
_NO_ENGINES = {"AzureExecutionProvider"}  # asks a remote service, runs no graph itself
_SHOWN = (
    "mdps",
    "numpy",
    "pillow",
    *ENGINE_WHEELS,
    "openvino",
    "MNN",
    "tensorrt",
    "tensorrt-rtx-cu13-libs",
    "cuda-bindings",
    "torch",
    "timm",
    "onnx",
    "onnxscript",
    "onnxslim",
)


@dataclass(frozen=True)
class ProviderCheck:
    """One execution provider of ONNX Runtime, OpenVINO, or a library of engine plans, and whether it can be used here.

    `reason` says why not; of a usable library of plans what started, for no plan is run.
    """

    name: str
    usable: bool
    reason: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What `mdps doctor` says. `problems` are sentences with what to do.

    `cpus_limited_by` names what makes `cpus` fewer than `cpus_of_host`; None where they are all used.
    """

    python: str
    system: str
    cpus: int
    cpus_of_host: int
    cpus_limited_by: str | None
    cards: tuple[Card, ...]
    versions: dict[str, str]
    providers: tuple[ProviderCheck, ...]
    problems: tuple[str, ...]

    @property
    def works(self) -> bool:
        """Whether at least one of them can run a bundle."""
        return any(check.usable for check in self.providers)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"works": self.works, **asdict(self)}


def diagnose() -> Diagnosis:
    """Examines engine library, providers, processors, GPUs and versions; never raises for what it finds."""
    versions = installed(*_SHOWN)
    providers, fault = _try_providers()
    others = (*_try_openvino(), *_try_mnn(), *_try_plans())
    if not _is_there("onnxruntime") and any(check.usable for check in others):
        fault = ""  # nobody needs it then
    providers += others
    problems = [*_wheel_problems(versions), *([fault] if fault else [])]
    return Diagnosis(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpus=available_cpus(),
        cpus_of_host=os.cpu_count() or 1,
        cpus_limited_by=cpus_limited_by(),
        cards=cards(),
        versions=versions,
        providers=providers,
        problems=tuple(problems),
    )


def engine_versions() -> dict[str, str]:
    """Installed versions of the libraries that can run a graph on the CPU, by the names of their wheels."""
    return installed(*ENGINE_WHEELS, "openvino", "MNN")


def _wheel_problems(versions: dict[str, str]) -> list[str]:
    wheels = [name for name in ENGINE_WHEELS if name in versions]
    if len(wheels) < 2:
        return []
    return [
        f"{' and '.join(wheels)} are installed together and overwrite each other: "
        f"run pip uninstall -y {' '.join(wheels)}, then install one of mdps[cpu] and mdps[gpu]"
    ]


def _try_providers() -> tuple[tuple[ProviderCheck, ...], str]:
    """Every provider the library lists, tried; and a sentence if there is no library to ask."""
    try:
        import onnxruntime
    except ImportError as error:
        return (), f"onnxruntime cannot be imported ({error}): pip install 'mdps[cpu]', or mdps[gpu] on an NVIDIA card"
    if not hasattr(onnxruntime, "InferenceSession"):  # what removing one of two wheels leaves behind
        return (), (
            "onnxruntime is installed but empty, as after removing one of two of its wheels: "
            "run pip install --force-reinstall onnxruntime"
        )
    onnxruntime.set_default_logger_severity(4)  # what it would print is in our sentences
    listed = [name for name in onnxruntime.get_available_providers() if name not in _NO_ENGINES]
    return tuple(_try_provider(onnxruntime, name) for name in listed), ""


def _try_provider(onnxruntime: ModuleType, name: str) -> ProviderCheck:
    """Runs the tiny model; a session that silently took another provider does not count."""
    import numpy as np

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            session = onnxruntime.InferenceSession(TINY_MODEL, providers=[name])
            (result,) = session.run(None, {"x": np.array([1.0, 2.5], np.float32)})
    except Exception as error:  # the library raises its own types, one for each way to fail
        return ProviderCheck(name, False, str(error).strip().split("\n")[0])
    active = session.get_providers()
    if name not in active:
        return ProviderCheck(name, False, f"listed, but the session took {active[0]}: its libraries do not load here")
    return _judge(name, result.tolist())


def _judge(name: str, result: list[float]) -> ProviderCheck:
    right = [2.0, 5.0]
    return ProviderCheck(name, result == right, "" if result == right else f"computed {result} where {right} is right")


def _try_openvino() -> tuple[ProviderCheck, ...]:
    """The other backend, which nobody need have: nothing where it is not installed."""
    if importlib.util.find_spec("openvino") is None:
        return ()
    import numpy as np

    try:
        import openvino

        core = openvino.Core()
        x = {"x": np.array([1.0, 2.5], np.float32)}
        result = core.compile_model(core.read_model(TINY_MODEL), "CPU")(x)[0]
    except Exception as error:  # an import that fails, or anything the library raises
        return (ProviderCheck(_OPENVINO, False, str(error).strip().split("\n")[-1]),)
    return (_judge(_OPENVINO, result.tolist()), *_try_bfloat16(core, x))


def _try_bfloat16(core: Any, x: Any) -> tuple[ProviderCheck, ...]:
    """OpenVINO's faster arithmetic, where the processor has it."""
    from mdps.runtime.openvino import compile_options, has_bfloat16

    if not has_bfloat16(core):
        return ()
    try:
        result = core.compile_model(core.read_model(TINY_MODEL), "CPU", compile_options(1, "bf16"))(x)[0]
    except Exception as error:  # anything the library raises
        return (ProviderCheck(_BFLOAT16, False, first_line(str(error))),)
    return (_judge(_BFLOAT16, result.tolist()),)


def _try_mnn() -> tuple[ProviderCheck, ...]:
    """The backend with files of its own: a sum of its own, for it reads no ONNX file."""
    if not _is_there("MNN"):
        return ()
    if not _is_there("onnxruntime"):
        return (ProviderCheck(_MNN, False, "it needs onnxruntime beside it, for features and scores"),)
    from mdps.runtime.mnn import capture_output

    try:
        with capture_output():
            import MNN.expr

            x = MNN.expr.const([1.0, 2.5], [2])
            result = (x + x).read().tolist()
    except Exception as error:  # an import that fails, or anything the library raises
        return (ProviderCheck(_MNN, False, first_line(str(error))),)
    return (_judge(_MNN, result),)


def _try_plans() -> tuple[ProviderCheck, ...]:
    """TensorRT and TensorRT-RTX, where they are installed."""
    from mdps.runtime.trt import MODULES

    return tuple(_try_library(backend) for backend in PLAN_BACKENDS if _is_there(MODULES[backend]))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module put in its place that has no spec
        return module in sys.modules


def _try_library(backend: str) -> ProviderCheck:
    """Whether library, driver and card start, and the card is one that the library's plans are for."""
    from mdps.runtime.device import cuda
    from mdps.runtime.trt import NAMES, load_library, served_capabilities

    name = NAMES[backend]
    try:
        library = load_library(backend)
        name = f"{name} {library.__version__}"
        driver = cuda.open_driver()
        try:
            served = served_capabilities(library) if backend == "tensorrt-rtx" else ()
            if served and driver.card.compute_capability not in served:
                return ProviderCheck(
                    name,
                    False,
                    f"it has plans for compute capability {', '.join(served)}, here is {driver.card}: "
                    "pip install 'mdps[tensorrt]' and use --backend tensorrt",
                )
            with driver.current():
                fault = _fault_of_runtime(library)
        finally:
            driver.close()
    except MdpsError as error:
        fault = str(error)
    if fault:
        return ProviderCheck(name, False, fault)
    return ProviderCheck(name, True, f"starts on {driver.card}; no plan was run")


def _fault_of_runtime(library: ModuleType) -> str:
    """Why the library does not start in the current context; empty where it does."""
    from mdps.runtime.trt import logger

    log = logger(library)
    try:
        library.Runtime(log)
    except Exception as error:  # the bindings raise whatever pybind11 makes of a null pointer
        return f"it does not start: {log.reason() if log.errors else first_line(str(error))}"
    return ""
