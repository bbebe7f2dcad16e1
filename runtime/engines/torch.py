"""Torch, for the guided step of a traced bundle: the denoiser is a torch.export program and its gradient is autograd's.

The oracle for the exported gradient, and the way for networks whose backward cannot be lowered to ONNX. On a card it
works in the memory of the engines that run the other graphs. The only module of the runtime that knows torch, and only
once a session is opened.
"""

import ctypes
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.bundle import LoadOptions
from mdps.runtime.device.seam import Buffer, Stream
from mdps.runtime.engines import DEFAULT, Engine
from mdps.runtime.engines.interface import Check, GraphFile, tried
from mdps.runtime.errors import BackendError, BundleError, UsageError, first_line, require
from mdps.runtime.machine import available_cpus
from mdps.runtime.session import Arrays, BoundRun, CopyingRun, Port, check_feeds, check_outputs
from mdps.runtime.settings import SamplerSettings

Prediction = Literal["eps", "v", "x0"]
_IMAGE, _SCALAR = (None, 3, None, None), ()

_CODE_FOLDERS = ("data/aotinductor/", "data/executorch/")
_PICKLED_OBJECTS = ("data/constants/custom_obj_", "data/constants/opaque_obj_")


def open(engine: Engine, graph: GraphFile, options: LoadOptions) -> "TracedSession":
    """Open on the graph's card, or on the processor where it has none."""
    require(graph.bundle is not None, f"{graph.file} needs its bundle: load that")
    assert graph.bundle is not None
    return TracedSession(
        graph.file, graph.bundle.settings.sampler, graph.bundle.manifest.prediction,
        "cuda" if graph.card else "cpu", options.threads, (graph.card.ordinal if graph.card else 0) or 0,
        options.torch_compile,
    )  # fmt: skip


def probe(engine: Engine) -> Check:
    return tried(engine, lambda x: (_library().tensor(x) * 2).tolist())


class TracedSession:
    """Same inputs and outputs as `guided_step.onnx`, from a `denoiser.pt2`.

    `provider` is "cpu" or "cuda", `ordinal` then CUDA's number of the card; `threads` (default: the processors
    available) sets torch's, for the whole process, as TF32 is switched off for it on a card. `compiled` names a back
    end of torch.compile that the network goes through, forwards and backwards, such as "inductor".
    Raises BackendError where torch is missing or lacks the device, BundleError for a file that is damaged or could run
    code. The check covers what the archive pickles; a program from strangers should still not be loaded.
    """

    outputs = ("x_s", "eps", "guidance_gradient")

    def __init__(
        self,
        path: Path | str,
        settings: SamplerSettings,
        prediction: Prediction = "eps",
        provider: str = "cpu",
        threads: int | None = None,
        ordinal: int = 0,
        compiled: str | None = None,
    ) -> None:
        self._path, self._settings, self._prediction = Path(path), settings, prediction
        self._torch = _library()
        self._device = _device(self._torch, provider, ordinal)
        self.provider = f"torch {self._torch.__version__} on {provider}"
        self._torch.set_num_threads(threads or available_cpus())
        self._network: Any = _load(self._torch, self._path, self._device)
        if compiled is not None:
            self._network = _compiled(self._torch, self._network, compiled)
            self.provider += f", compiled by {compiled}"
        replace = ("mask_noise",) if settings.mask_rule != "blend" else ()
        shapes: dict[str, tuple[int | None, ...]] = dict.fromkeys(("x_t", "observation"), _IMAGE)
        shapes |= {"mask": (None, 1, None, None), "noise": _IMAGE} | dict.fromkeys(replace, _IMAGE)
        shapes |= dict.fromkeys(("timestep", "alpha_t", "alpha_s", "sigma_t", "guidance_scale"), _SCALAR)
        self._ports = [Port(name, np.dtype(np.float32), shape) for name, shape in shapes.items()]
        self.inputs = tuple(shapes)

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        check_feeds(self._ports, feeds, str(self._path))
        names = check_outputs(self.outputs, outputs, str(self._path))
        tensors = {name: self._torch.tensor(feeds[name], device=self._device) for name in self.inputs}
        values = self.compute(tensors)
        return {name: values[name].detach().cpu().numpy() for name in names}

    def compute(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs as tensors of its device, from the inputs as such; BackendError where torch fails."""
        if self._network is None:
            raise BackendError(f"{self._path} was closed: open it again")
        try:
            return dict(zip(self.outputs, self._step(tensors), strict=True))
        except RuntimeError as error:
            raise BackendError(f"{self._path} failed in torch: {first_line(str(error))}") from error

    def tensor(self, address: int, shape: tuple[int, ...]) -> Any:
        """The float32 array at an address of its device's memory as a tensor, which it is and no copy of it."""
        torch = self._torch
        if self._device.type == "cpu":
            memory = (ctypes.c_float * prod(shape)).from_address(address)
            return torch.frombuffer(memory, dtype=torch.float32).reshape(shape)
        tensor = torch.as_tensor(_OnCard(address, shape), device=self._device)
        if tensor.data_ptr() != address:
            raise BackendError(f"torch {torch.__version__} copied memory of the card that it was to share: update it")
        return tensor

    def on_stream(self, handle: int) -> Any:
        """A context in which torch asks this stream for its work."""
        if self._device.type == "cpu":
            return nullcontext()
        return self._torch.cuda.stream(self._torch.cuda.ExternalStream(handle, self._device))

    @property
    def input_ports(self) -> list[Port]:
        return list(self._ports)

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> BoundRun:
        """Bind; torch allocates its results, so each run copies them."""
        return CopyingRun(self, feeds)

    def close(self) -> None:
        self._network = None

    def _step(self, f: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Algorithm 1, lines 5 to 12; names as in docs/develop/architecture.md, "One step"."""
        m, y, a_t, a_s, sigma = f["mask"], f["observation"], f["alpha_t"], f["alpha_s"], f["sigma_t"]
        root_a, root_noise = a_t.sqrt(), (1 - a_t).sqrt()
        x = f["x_t"]
        if self._settings.mask_rule != "blend":
            x = m * x + (1 - m) * (root_a * y + root_noise * f["mask_noise"])
        e, gradient = self._eps_and_gradient(x, y, f["timestep"], root_a, root_noise)
        e_phi = e + f["guidance_scale"] * root_noise * gradient
        if self._settings.mask_rule == "blend":
            e_phi = (1 - m) * (x - root_a * y) / root_noise + m * e_phi
        x0 = (x - root_noise * e_phi) / root_a
        x_s = a_s.sqrt() * x0 + (1 - a_s - sigma**2).clamp(min=0).sqrt() * e_phi + sigma * f["noise"]
        return x_s, e, gradient

    def _eps_and_gradient(self, x: Any, y: Any, timestep: Any, root_a: Any, root_noise: Any) -> tuple[Any, Any]:
        torch, exact = self._torch, self._settings.gradient == "exact"
        if self._settings.gradient == "ddad":
            with torch.no_grad():
                e = self._eps(x, timestep, root_a, root_noise)
            return e, x - (root_a * y + root_noise * e)
        with torch.enable_grad() if exact else torch.no_grad():
            x = x.detach().requires_grad_(exact)
            e = self._eps(x, timestep, root_a, root_noise)
            u = self._direction(((x - root_noise * e) / root_a - y).detach())
            if not exact:
                return e, u / root_a
            (pulled,) = torch.autograd.grad(e, x, u)  # J^T u, J = d eps / d x
        return e.detach(), (u - root_noise * pulled) / root_a

    def _eps(self, x: Any, timestep: Any, root_a: Any, root_noise: Any) -> Any:
        n = self._network(x, timestep)[:, :3]  # a learned sigma comes after the first three channels
        if self._prediction == "v":
            return root_a * n + root_noise * x
        if self._prediction == "x0":
            return (x - root_a * n) / root_noise
        return n

    def _direction(self, r: Any) -> Any:
        """Gradient of the norm of r with respect to r, for each image; 0 where r is 0."""
        if self._settings.guidance_norm == "squared":
            return 2 * r
        norm = r.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
        return self._torch.where(norm > 0, r / norm, self._torch.zeros_like(r))


class _OnCard:
    """An array of the card's memory, in the form that torch, CuPy and others take without a copy."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<f4", "data": (address, False), "version": 3, "strides": None, "stream": None,
        }  # fmt: skip


class TracedEngine:
    """A `DeviceEngine`: the guided step by torch, in the memory and on the stream of the engines beside it."""

    captures = False  # autograd allocates as it goes

    def __init__(self, session: TracedSession, size: tuple[int, int]) -> None:
        self._session, self.provider = session, session.provider
        self.inputs: Sequence[Port] = [_sized(port, size) for port in session.input_ports]
        image = Port("", np.dtype(np.float32), (None, 3, *size))
        self.outputs: Sequence[Port] = [Port(name, image.dtype, image.shape) for name in session.outputs]
        self.largest: Mapping[str, tuple[int, ...]] = {}

    def bind(self, buffers: Mapping[str, Buffer]) -> "BoundTraced":
        missing = [port.name for port in (*self.inputs, *self.outputs) if port.name not in buffers]
        if missing:
            raise BackendError(f"the traced step needs a place for {missing[0]!r}, which was not given")
        places = {name: self._session.tensor(buffer.address, buffer.shape) for name, buffer in buffers.items()}
        return BoundTraced(self._session, places)

    def close(self) -> None:
        self._session.close()


class BoundTraced:
    """A `BoundEngine`: tensors over the buffers."""

    def __init__(self, session: TracedSession, places: Mapping[str, Any]) -> None:
        self._session, self.places = session, places

    def enqueue(self, stream: Stream) -> None:
        with self._session.on_stream(stream.handle):
            for name, value in self._session.compute(self.places).items():
                self.places[name].copy_(value.detach())


def _sized(port: Port, size: tuple[int, int]) -> Port:
    return Port(port.name, port.dtype, (*port.shape[:2], *size) if port.shape else ())


def _library() -> Any:
    try:
        import torch
        import torch.export
    except ImportError as error:
        raise BackendError(
            f'this bundle\'s guidance runs in torch, which cannot be imported ({error}): pip install "mdps[traced]"'
        ) from error
    return torch


def _device(torch: Any, provider: str, ordinal: int) -> Any:
    if provider not in ("cpu", "cuda"):
        raise UsageError(f"the traced guidance backend runs on cpu or cuda, not on {provider!r}")
    if provider == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            f"a card was asked for, but torch finds no CUDA device here: repair it, or ask for the engine {DEFAULT}"
        )
    if provider == "cpu":
        return torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = False  # on by default: ten bits of mantissa are no float32
    torch.backends.cudnn.benchmark = True  # shapes stay the same, so the search for an algorithm pays
    return torch.device("cuda", ordinal)


def _compiled(torch: Any, network: Any, name: str) -> Any:
    if name not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise UsageError(f"torch.compile has no back end {name!r} here: choose one of {', '.join(known)}")
    return torch.compile(network, backend=name)


def _load(torch: Any, path: Path, device: Any) -> Any:
    check_program(path, torch)
    try:
        network = torch.export.load(str(path)).module()
    except Exception as error:  # torch raises nearly every type on an archive it cannot read
        reason = first_line(str(error), type(error).__name__)
        raise BundleError(f"{path} cannot be loaded by torch {torch.__version__}: {reason}") from error
    return network.to(device).requires_grad_(False)


def check_program(path: Path, torch: Any) -> None:
    """Raise BundleError unless every entry of a torch.export archive is plain numbers or JSON.

    `torch.export.load` itself unpickles code.
    Refused are native code, pickled objects and weights, and example inputs that need more than `weights_only`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                inner = name.split("/", 1)[-1]
                if not _is_plain(inner, archive.read(name) if _must_read(inner) else b"", torch):
                    raise BundleError(
                        f"{path} is refused because loading its entry {inner} could run code: "
                        "export the bundle again with `mdps export`"
                    )
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        raise BundleError(f"{path} is no torch.export program ({error}): export the bundle again") from error


def _must_read(inner: str) -> bool:
    return inner.startswith("data/") and inner.endswith((".json", ".pt"))


def _is_plain(inner: str, content: bytes, torch: Any) -> bool:
    if inner.startswith(_CODE_FOLDERS + _PICKLED_OBJECTS) or inner.endswith((".so", ".pyd", ".dll", ".pkl")):
        return False
    if inner.startswith("data/sample_inputs/"):
        return not content or _loads_as_numbers(content, torch)
    if inner.startswith("data/") and inner.endswith(".pt"):  # the layout of old archives, which is a pickle
        return False
    if inner.startswith("data/") and inner.endswith(".json"):
        return not any(entry.get("use_pickle") for entry in json.loads(content).get("config", {}).values())
    return True


def _loads_as_numbers(content: bytes, torch: Any) -> bool:
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # whatever torch raises, it did not load as numbers
        return False
    return True
