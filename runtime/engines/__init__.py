"""The engines that compute a bundle's graphs: one table, a row an engine, which all else reads.

A row names the module of this package (or any other) that implements it, see `interface.EngineModule`. Importing the
table imports neither these modules nor any engine's library.
"""

import importlib.util
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from mdps.runtime.errors import UsageError

AUTO = "auto"
"""In the place of a name: the fastest here of those that are `automatic`, see `mdps.runtime.choice`."""
# Each of these wheels installs the one folder `onnxruntime`: the last one installed wins, and removing one breaks it.
ORT_WHEELS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
)


@dataclass(frozen=True)
class Engine:
    """One engine, by the `name` that a user types.

    `title` names it for people, `module` implements it, `library` is what Python imports and `wheels` are the packages
    whose releases change what it computes; `extra` of mdps installs it. `arithmetic` is what it computes the steps in
    where that is less than the bundle's precision: scores differ then, so that it needs its own calibration.

    `reads` says which files: ONNX graphs; step graphs of its "own", which an export writes for it; "plans" of all
    graphs; or the torch "program" of a traced bundle. What it has no file of, the `DEFAULT` engine computes. `form`
    names the variant of the step graphs that it reads, or that its plans are built from, "" the common one; `norms`
    says how the norms of that variant are written, in the row that introduces it. `writer` is the module that an export
    writes its own files by, see `mdps.export.bundle.Writer`.

    `on_card`: it computes on an NVIDIA card. `automatic`: AUTO may choose it. `tolerance` is what the parity gate
    allows this engine's variant where that differs from all others'. `provider` is ONNX Runtime's name of it; `builds`
    says that it builds engines when it loads, which takes minutes.
    """

    name: str
    title: str
    module: str
    library: str
    wheels: tuple[str, ...]
    extra: str
    arithmetic: Literal["", "bf16"] = ""
    reads: Literal["onnx", "own", "plans", "program"] = "onnx"
    form: str = ""
    norms: Literal["", "by-channel", "by-depthwise"] = ""
    writer: str = ""
    on_card: bool = False
    automatic: bool = False
    tolerance: float | None = None
    provider: str = ""
    builds: bool = False

    @property
    def installed(self) -> bool:
        """Whether its library is there, which is not imported for that."""
        try:
            return importlib.util.find_spec(self.library) is not None
        except ValueError:  # a module put in its place that has no spec
            return sys.modules.get(self.library) is not None

    @property
    def complete(self) -> bool:
        """Whether it computes all graphs of a bundle by itself, not the steps alone."""
        return self.reads in ("onnx", "plans")


_HERE = "mdps.runtime.engines."
ENGINES = (
    Engine(
        "onnxruntime", "ONNX Runtime", _HERE + "onnxruntime", "onnxruntime", ORT_WHEELS, "cpu",
        automatic=True, provider="CPUExecutionProvider",
    ),
    Engine(
        "openvino", "OpenVINO", _HERE + "openvino", "openvino", ("openvino",), "openvino",
        form="openvino", norms="by-channel", automatic=True,
    ),
    # Winograd's sums on tiles of 6 x 6, as MNN computes, round several times as much as a plain convolution's.
    Engine(
        "mnn", "MNN", _HERE + "mnn", "MNN", ("MNN",), "mnn",
        reads="own", form="mnn", norms="by-depthwise", writer="mdps.export.mnn", automatic=True, tolerance=5e-4,
    ),
    Engine(
        "openvino-bf16", "OpenVINO in bfloat16", _HERE + "openvino", "openvino", ("openvino",), "openvino",
        arithmetic="bf16", form="openvino",
    ),
    Engine("torch", "guided step by torch", _HERE + "torch", "torch", ("torch",), "traced", reads="program"),
    Engine(
        "tensorrt-rtx", "TensorRT-RTX", _HERE + "tensorrt", "tensorrt_rtx_bindings", ("tensorrt-rtx-cu13-libs",),
        "tensorrt-rtx", reads="plans", form="openvino", on_card=True,
    ),
    Engine(
        "tensorrt", "TensorRT", _HERE + "tensorrt", "tensorrt", ("tensorrt",),
        "tensorrt", reads="plans", form="openvino", on_card=True,
    ),
    Engine(
        "onnxruntime-cuda", "ONNX Runtime, CUDA", _HERE + "onnxruntime_card", "onnxruntime",
        ("onnxruntime-gpu", "torch"), "gpu", on_card=True, provider="CUDAExecutionProvider",
    ),
    Engine(
        "onnxruntime-tensorrt", "ONNX Runtime, TensorRT", _HERE + "onnxruntime_card", "onnxruntime",
        ("onnxruntime-gpu", "tensorrt", "torch"), "gpu-tensorrt",
        on_card=True, provider="TensorrtExecutionProvider", builds=True,
    ),
)  # fmt: skip
DEFAULT = ENGINES[0].name


def named(name: str) -> Engine:
    """The engine of this name, or UsageError."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    known = ", ".join(engine.name for engine in ENGINES)
    raise UsageError(f"there is no engine {name!r}: choose one of {known}")


def wheels() -> tuple[str, ...]:
    """The packages of all engines, each once, in the order of the table."""
    return tuple(dict.fromkeys(wheel for engine in ENGINES for wheel in engine.wheels))


def clash(packages: Collection[str]) -> str:
    """Return a sentence where more than one wheel of ONNX Runtime is among the packages that are installed, else ""."""
    found = [name for name in ORT_WHEELS if name in packages]
    if len(found) < 2:
        return ""
    return (
        f"{' and '.join(found)} are installed together and overwrite each other: "
        f"run pip uninstall -y {' '.join(found)}, then install one of mdps[cpu] and mdps[gpu]"
    )
