"""One builder of engine plans for TensorRT 10, TensorRT 11 and TensorRT-RTX.

All three take strongly typed networks: precision is in the graph, and no flag changes it. TensorRT builds for the card
it runs on, which is the first one CUDA shows the process and not always nvidia-smi's first; TensorRT-RTX for the cards
it is told, without having one.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from mdps.runtime.atomic import write_bytes
from mdps.runtime.cards import cuda_capabilities
from mdps.runtime.engines import Engine
from mdps.runtime.engines.tensorrt import is_rtx, load_library, logger, served_capabilities
from mdps.runtime.errors import BackendError, UsageError, first_line, require
from mdps.runtime.user_cache import cache_folder

Profile = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
DEFAULT_CAPABILITIES = ("8.6", "8.9", "12.0")
"""Ampere, Ada and Blackwell cards, which TensorRT-RTX is made for."""
OPTIONS = {"tf32": False, "strongly_typed": True, "user_allocation": True}
"""Build options that are part of a plan's key."""
_SHOW_ONE = "show it that card alone with CUDA_VISIBLE_DEVICES=UUID, of `nvidia-smi -L`"

Types = dict[str, int]
TRT_TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}
_INSPECTOR_TYPES = {"fp32": "Float", "fp16": "Half", "bf16": "BFloat16"}
_OLD_FORMATS = {"FP32": "Float", "FP16": "Half", "BF16": "BFloat16"}
PRODUCTS = ("convolution", "deconvolution")
IN_FLOAT = ("softmax", "normalization")
"""Kinds of layers that stay in float32 whatever the rest computes in."""


@dataclass(frozen=True)
class Built:
    """A serialized plan, the types of its layers' results, and whether an engine or only the network told them."""

    plan: bytes
    types: Types
    inspected: str


@dataclass(frozen=True)
class Builder:
    """A library, ready to build for these compute capabilities; `Builder.of` makes one."""

    engine: Engine
    library: Any
    capabilities: tuple[str, ...]

    @classmethod
    def of(cls, engine: Engine, capabilities: tuple[str, ...] | None = None, precision: str = "fp32") -> "Builder":
        """Return that of an engine of plans; without capabilities those of the card, or DEFAULT_CAPABILITIES.

        Raises BackendError where the library or a card it needs is missing, UsageError for a capability that it does
        not build for or that cannot compute in `precision`, and where TensorRT is to choose among cards of several.
        """
        require(engine.reads == "plans", f"the engine {engine.name} runs no plans: choose one that does")
        library = load_library(engine, "Builder")
        chosen = _of_rtx(library, capabilities) if is_rtx(engine) else _of_card(capabilities)
        old = [one for one in chosen if precision == "bf16" and float(one) < 8]
        require(not old, f"compute capability {''.join(old[:1])} has no bf16: export with --precision fp16")
        return cls(engine, library, chosen)

    @property
    def version(self) -> str:
        """The library's release; a plan runs on no other."""
        return str(self.library.__version__)

    def build(self, path: Path, profile: Profile, precision: str) -> Built:
        """Build the plan of the ONNX graph in `path`, for the shapes of `profile` (input: smallest, best, largest).

        `precision` is what the graph's convolutions must compute in. Raises BackendError where the graph does not
        parse, does not build, or has layers of another type.
        """
        log = logger(self.library)
        log.errors.clear()
        try:
            builder = self.library.Builder(log)
        except Exception as error:  # the bindings raise whatever pybind11 makes of a null pointer
            raise BackendError(self._sentence(path, log, str(error))) from error
        network = self._parsed(builder, log, path)
        types = check_network(self.library, network, precision, path)
        config = self._config(builder, network, profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BackendError(self._sentence(path, log, "it gives no reason"))
        self._keep_timings(config)
        data = bytes(plan)
        here = _here()[:1]  # where an engine would be loaded; it loads on its card only
        found = engine_types(self.library, log, data, precision, path) if set(here) & {*self.capabilities} else None
        return Built(data, types, "network") if found is None else Built(data, found, "engine")

    def _parsed(self, builder: Any, log: Any, path: Path) -> Any:
        flag = getattr(self.library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        network = builder.create_network(0 if flag is None else 1 << int(flag))
        parser = self.library.OnnxParser(network, log)
        if not parser.parse(parseable(path).SerializeToString(), str(path)):
            error = parser.get_error(0)
            raise BackendError(
                f"{self.engine.title} {self.version} does not read {path.name}: {first_line(error.desc())} "
                f"(node {error.node_name()}, operator {error.node_operator()})"
            )
        return network

    def _config(self, builder: Any, network: Any, profile: Profile) -> Any:
        config = builder.create_builder_config()
        config.clear_flag(self.library.BuilderFlag.TF32)  # float32 asked for is float32
        config.profiling_verbosity = self.library.ProfilingVerbosity.DETAILED  # or the inspector tells no types
        if is_rtx(self.engine):
            # Without it a run may allocate memory, which is forbidden while it is recorded as a CUDA graph.
            config.set_flag(self.library.BuilderFlag.REQUIRE_USER_ALLOCATION)
            config.num_compute_capabilities = len(self.capabilities)
            for index, capability in enumerate(self.capabilities):
                config.set_compute_capability(served_capabilities(self.library)[capability], index)
        else:
            config.set_timing_cache(config.create_timing_cache(self._timings()), False)
        shapes = builder.create_optimization_profile()
        for name in (network.get_input(index).name for index in range(network.num_inputs)):
            if name in profile:
                shapes.set_shape(name, *profile[name])
        config.add_optimization_profile(shapes)
        return config

    def _timing_file(self) -> Path:
        return cache_folder() / f"timing-{self.version}-{'-'.join(self.capabilities)}.cache"

    def _timings(self) -> bytes:
        path = self._timing_file()
        return path.read_bytes() if path.is_file() else b""

    def _keep_timings(self, config: Any) -> None:
        if is_rtx(self.engine):  # it measures nothing when it builds, but compiles on the card
            return
        path = self._timing_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, bytes(config.get_timing_cache().serialize()))

    def _sentence(self, path: Path, log: Any, otherwise: str) -> str:
        reason = first_line(log.errors[-1] if log.errors else otherwise)
        kinds = ", ".join(self.capabilities)
        return f"{self.engine.title} {self.version} cannot build {path.name} for compute capability {kinds}: {reason}"


def _of_rtx(library: Any, capabilities: tuple[str, ...] | None) -> tuple[str, ...]:
    known = served_capabilities(library)
    for capability in capabilities or ():
        if capability not in known:
            raise UsageError(
                f"TensorRT-RTX {library.__version__} builds for compute capability {', '.join(known)}, not "
                f"{capability}: leave it out of --compute-capability, or use --engine tensorrt on a machine with "
                "that card"
            )
    return tuple(sorted(set(capabilities or DEFAULT_CAPABILITIES), key=float))


def _of_card(capabilities: tuple[str, ...] | None) -> tuple[str, ...]:
    here = _here()
    if not here:
        raise BackendError(
            "TensorRT builds on the card that the plan is for, and CUDA shows none: run the export on that machine, "
            "see what `mdps doctor` says there, or use --engine tensorrt-rtx"
        )
    if other := [one for one in capabilities or () if one != here[0]]:
        elsewhere = other[0] in here
        remedy = _SHOW_ONE if elsewhere else "leave out --compute-capability, or use --engine tensorrt-rtx"
        raise UsageError(
            f"TensorRT builds for the card it runs on, the first that CUDA shows, of compute capability {here[0]}, not "
            f"for {other[0]}{', which another card here has' if elsewhere else ''}: {remedy}"
        )
    require(
        bool(capabilities) or len(set(here)) == 1,
        f"TensorRT builds for one card, and here are cards of compute capability {', '.join(dict.fromkeys(here))}: "
        f"{_SHOW_ONE}, or name the first one's with --compute-capability {here[0]}",
    )
    return (here[0],)


def _here() -> tuple[str, ...]:
    """Return compute capabilities of the cards that CUDA shows this process, in its order; the first is built on."""
    try:
        return cuda_capabilities()
    except BackendError:  # no driver or no card
        return ()


def check_network(library: Any, network: Any, precision: str, path: Path) -> Types:
    """Count layers of a parsed network by the type of their result; BackendError for one of a wrong type.

    A strongly typed network binds the builder, so what is right here cannot change in the engine.
    """
    counted: Counter[str] = Counter()
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        types = [t.dtype.name for t in _tensors(layer)]
        counted[layer.get_output(0).dtype.name] += 1
        kind = layer.type.name.lower()
        wanted = TRT_TYPES[precision] if kind in PRODUCTS else TRT_TYPES["fp32"] if kind in IN_FLOAT else None
        wrong = [found for found in types if wanted and found != wanted]
        if wrong:
            raise BackendError(_mismatch(path, layer.name, str(wanted), wrong[0]))
    return dict(counted.most_common())


def engine_types(library: Any, log: Any, plan: bytes, precision: str, path: Path) -> Types | None:
    """Count those of the built engine (see `inspected_types`); the card the plan is for must be there."""
    engine = library.Runtime(log).deserialize_cuda_engine(plan)
    if engine is None:
        reason = log.errors[-1] if log.errors else "the library gives no reason"
        raise BackendError(f"the engine of {path.name} was built but does not load on this card: {reason}")
    text = engine.create_engine_inspector().get_engine_information(library.LayerInformationFormat.JSON)
    return inspected_types(text, precision, path)


def inspected_types(text: str, precision: str, path: Path) -> Types | None:
    """Count the layers in an inspector's JSON by the type of their result; BackendError for a product of a wrong type.

    None where no convolution can be seen, as in engines that are one fused layer: then the network is what binds. The
    input of a convolution counts, for a cast may be fused into its result.
    """
    counted: Counter[str] = Counter()
    seen = False
    for layer in (one for one in json.loads(text)["Layers"] if isinstance(one, dict)):
        counted.update(_type(tensor) for tensor in layer.get("Outputs", [])[:1])
        inputs = [found for found in map(_type, layer.get("Inputs", [])) if found in _INSPECTOR_TYPES.values()]
        if "conv" in str(layer.get("LayerType", "")).lower() and inputs:
            seen = True
            if inputs[0] != _INSPECTOR_TYPES[precision]:
                raise BackendError(_mismatch(path, str(layer["Name"]), _INSPECTOR_TYPES[precision], inputs[0]))
    return dict(counted.most_common()) if seen else None


def _type(tensor: dict[str, Any]) -> str:
    """Return "Half" of {"Datatype": "Half"}, or of an older {"Format/Datatype": "Channel major FP16 format .."}."""
    text = str(tensor.get("Datatype") or tensor.get("Format/Datatype") or "unknown")
    return next((name for old, name in _OLD_FORMATS.items() if old in text), text)


def _tensors(layer: Any) -> list[Any]:
    """Return a layer's data input and its result."""
    return [tensor for tensor in (layer.get_input(0), layer.get_output(0)) if tensor is not None]


def _mismatch(path: Path, layer: str, wanted: str, found: str) -> str:
    return (
        f"the engine of {path.name} computes {layer} in {found} where {wanted} was asked for: report it with the graph"
    )


def parseable(path: Path) -> ModelProto:
    """Return the graph in `path`, large weights left in their file, without what the parser refuses.

    That is layer norms over the last axis whose mean or deviation is read: it takes one output only.
    """
    model = onnx.load(path, load_external_data=False)
    read = {name for node in model.graph.node for name in node.input} | {o.name for o in model.graph.output}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "LayerNormalization" or len(node.output) == 1:
            nodes.append(node)
        elif read.isdisjoint(node.output[1:]):
            del node.output[1:]
            nodes.append(node)
        else:
            model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), f"{node.name}.axes"))
            epsilon = np.array(helper.get_node_attr_value(node, "epsilon"), dtype=np.float32)
            model.graph.initializer.append(numpy_helper.from_array(epsilon, f"{node.name}.epsilon"))
            nodes += _written_out(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _written_out(node: NodeProto) -> Iterator[NodeProto]:
    x, scale = node.input
    y, mean, rstd = node.output
    at = node.name
    for operator, inputs, output in (
        ("ReduceMean", [x, f"{at}.axes"], mean),
        ("Sub", [x, mean], f"{at}.centred"),
        ("Mul", [f"{at}.centred"] * 2, f"{at}.squares"),
        ("ReduceMean", [f"{at}.squares", f"{at}.axes"], f"{at}.variance"),
        ("Add", [f"{at}.variance", f"{at}.epsilon"], f"{at}.safe"),
        ("Sqrt", [f"{at}.safe"], f"{at}.deviation"),
        ("Reciprocal", [f"{at}.deviation"], rstd),
        ("Mul", [f"{at}.centred", rstd], f"{at}.normed"),
        ("Mul", [f"{at}.normed", scale], y),
    ):
        yield helper.make_node(operator, inputs, [output], name=f"{output}.node")
