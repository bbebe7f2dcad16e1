"""Sessions: named arrays in, named arrays out. An engine opens a class with these members."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.errors import BackendError

Arrays = dict[str, NDArray[Any]]


class BoundRun(Protocol):
    """A session some of whose inputs were given once for many runs, as the steps of a pass share the observation."""

    def run(self, feeds: Mapping[str, NDArray[Any]], into: Mapping[str, NDArray[Any]]) -> None:
        """Run with the inputs that are still open; the outputs named in `into` are written to its arrays.

        These are C-contiguous, of the outputs' shapes and dtypes, and no input of the same run. BackendError where
        something does not fit or the engine fails.
        """


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
        """The provider that really computes, as the engine itself reports it."""

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        """The named outputs (all by default); BackendError where the feeds do not fit or the engine fails."""

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> BoundRun:
        """Give some of the inputs for many runs, in which their contents must stay; BackendError where they do not fit.

        Several bindings may be in use at once, beside `run`; a binding is for one thread.
        """

    def close(self) -> None:
        """Free the engine's memory; a later `run` is a BackendError. May be called twice."""


@dataclass(frozen=True)
class Port:
    """The type and shape that one input takes; None stands for any length of a dimension."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


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


def check_into(into: Mapping[str, NDArray[Any]], known: Sequence[str], name: str) -> None:
    """Raise BackendError unless `into` has outputs of the graph only, and arrays whose memory an engine may write."""
    check_outputs(known, list(into), name)
    for output, array in into.items():
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise BackendError(f"{name} cannot write {output!r} into an array that is read-only or not contiguous")


@dataclass(frozen=True)
class CopyingRun:
    """The binding of a session that has none of its own: each run passes all inputs, and copies what comes out."""

    session: Session
    feeds: Mapping[str, NDArray[Any]]

    def run(self, feeds: Mapping[str, NDArray[Any]], into: Mapping[str, NDArray[Any]]) -> None:
        found = self.session.run({**self.feeds, **feeds}, list(into))
        for name, array in into.items():
            array[...] = found[name]


@dataclass(frozen=True)
class ChunkedSession:
    """Cuts the batch of another session into chunks of at most `size`, so that memory does not grow with it.

    For graphs whose outputs and non-scalar inputs all share one batch dimension: the step graphs.
    """

    session: Session
    size: int

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.session.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.session.outputs

    @property
    def provider(self) -> str:
        return self.session.provider

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        cuts = self._cuts(feeds)
        if len(cuts) <= 1:
            return self.session.run(feeds, outputs)
        parts = [self.session.run(_cut(feeds, cut), outputs) for cut in cuts]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> BoundRun:
        """A binding a chunk; `feeds` has at least one input that is no scalar, which says how many there are."""
        cuts = self._cuts(feeds)
        if len(cuts) <= 1:
            return self.session.bind(feeds)
        return _ChunkedRun([(cut, self.session.bind(_cut(feeds, cut))) for cut in cuts])

    def _cuts(self, feeds: Mapping[str, NDArray[Any]]) -> list[slice]:
        total = max((len(array) for array in feeds.values() if array.ndim), default=0)
        return [slice(start, start + self.size) for start in range(0, total, self.size)]

    def close(self) -> None:
        self.session.close()


@dataclass(frozen=True)
class _ChunkedRun:
    """Bindings of one session, each with the part of the batch that it computes."""

    parts: Sequence[tuple[slice, BoundRun]]

    def run(self, feeds: Mapping[str, NDArray[Any]], into: Mapping[str, NDArray[Any]]) -> None:
        """Each chunk's outputs go straight to their part of the arrays."""
        for cut, bound in self.parts:
            bound.run(_cut(feeds, cut), _cut(into, cut))


def _cut(arrays: Mapping[str, NDArray[Any]], cut: slice) -> Arrays:
    return {name: array[cut] if array.ndim else array for name, array in arrays.items()}
