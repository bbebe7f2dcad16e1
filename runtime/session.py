"""The seam to an engine: named arrays in, named arrays out; a new engine is one more class with these members."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import BackendError, require

BACKENDS = ("onnxruntime", "openvino")
Arrays = dict[str, NDArray[Any]]


class Session(Protocol):
    """One graph an engine has loaded."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names `run` needs, in the graph's order."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names `run` returns."""

    @property
    def provider(self) -> str:
        """What really computes, as the engine itself reports it."""

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        """The named outputs (all by default); BackendError where the feeds do not fit or the engine fails."""

    def close(self) -> None:
        """Free the engine's memory; a later `run` is a BackendError. May be called twice."""


@dataclass(frozen=True)
class Port:
    """What one input takes; None stands for any length of a dimension."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


def open_session(
    path: Path | str, provider: str = "cpu", threads: int | None = None, backend: str = "onnxruntime"
) -> Session:
    """The graph in an `.onnx` file on one of BACKENDS, BackendError where it cannot be had; see `check_backend`."""
    check_backend(backend, provider)
    if backend == "openvino":
        from mdps.runtime.openvino import OpenVinoSession

        return OpenVinoSession(path, threads)
    from mdps.runtime.ort import OrtSession

    return OrtSession(path, provider, threads)


def check_backend(backend: str, provider: str) -> None:
    """Raise UsageError for a backend that does not exist, or one that would not run on `provider` (ONNX Runtime's)."""
    require(backend in BACKENDS, f"there is no backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    require(
        backend == "onnxruntime" or provider == "cpu",
        f"the backend {backend} runs on the cpu, {provider!r} is a provider of onnxruntime: choose one of the two",
    )


def check_feeds(ports: Sequence[Port], feeds: Mapping[str, NDArray[Any]], name: str) -> None:
    """Raise BackendError unless `feeds` has exactly the names, dtypes and shapes of `ports`."""
    expected = {port.name for port in ports}
    if missing := expected - feeds.keys():
        raise BackendError(f"{name} needs the input {sorted(missing)[0]!r}, which was not given")
    if unknown := feeds.keys() - expected:
        raise BackendError(f"{name} has no input {sorted(unknown)[0]!r}; it takes {', '.join(sorted(expected))}")
    for port in ports:
        array = feeds[port.name]
        fits = len(array.shape) == len(port.shape) and all(
            want is None or have == want for have, want in zip(array.shape, port.shape, strict=True)
        )
        if not fits or array.dtype != port.dtype:
            wanted = ", ".join("any" if length is None else str(length) for length in port.shape)
            raise BackendError(
                f"{name} takes {port.name!r} as {port.dtype} [{wanted}], "
                f"but was given {array.dtype} {list(array.shape)}"
            )


def check_outputs(known: Sequence[str], asked: Sequence[str] | None, name: str) -> list[str]:
    """The names to return, all by default; BackendError for one the graph lacks."""
    for output in asked or ():
        if output not in known:
            raise BackendError(f"{name} has no output {output!r}; it gives {', '.join(known)}")
    return list(known if asked is None else asked)


@dataclass(frozen=True)
class ChunkedSession:
    """Cuts the batch of another session into chunks of at most `size`, so that memory does not grow with it.

    For graphs whose outputs and non-scalar inputs all share one batch dimension: the step graphs.
    """

    session: Session
    size: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """As the wrapped session."""
        return self.session.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """As the wrapped session."""
        return self.session.outputs

    @property
    def provider(self) -> str:
        """As the wrapped session."""
        return self.session.provider

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        """What the wrapped session would return for the whole batch."""
        total = max((len(array) for array in feeds.values() if array.ndim), default=0)
        if total <= self.size:
            return self.session.run(feeds, outputs)
        parts = [
            self.session.run(
                {name: array[start : start + self.size] if array.ndim else array for name, array in feeds.items()},
                outputs,
            )
            for start in range(0, total, self.size)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def close(self) -> None:
        """Close the wrapped session."""
        self.session.close()
