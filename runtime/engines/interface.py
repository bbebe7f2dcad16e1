"""An engine's module: `open` for a graph, `open_bundle` for a whole loop on a card, `probe` for the doctor.

What was opened has its own `close`.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.engines import DEFAULT, Engine, named
from mdps.runtime.errors import first_line
from mdps.runtime.graphs import GUIDED, STEPS
from mdps.runtime.pipeline import Inspector
from mdps.runtime.session import Session

if TYPE_CHECKING:
    from mdps.runtime.cards import Card

# An ONNX model with one node, y = x + x, x float32 [2] (onnx.helper made it; a test reads it back with onnx).
TINY_MODEL = (
    b'\x08\x08:5\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x02'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x02B\x04\n\x00\x10\x11"
)


@dataclass(frozen=True)
class GraphFile:
    """A file that holds a graph; `role` and `bundle` where it is one of a bundle's, `card` where that computes it."""

    file: Path
    role: str = GUIDED
    bundle: Bundle | None = None
    card: "Card | None" = None

    @property
    def precision(self) -> str:
        """The graph's own: only the steps in the bundle's own precision, features and score in fp32."""
        return self.bundle.manifest.precision if self.bundle and self.role in STEPS else "fp32"


@dataclass(frozen=True)
class Check:
    """Whether an engine, by its `name` in the table, can be used here.

    `reason` says why not; of a usable engine of plans what started, for no plan is run.
    """

    name: str
    usable: bool
    reason: str = ""


class EngineModule(Protocol):
    """One engine, or several rows of the table."""

    def open(self, engine: Engine, graph: GraphFile, options: LoadOptions) -> Session:
        """Open one graph; BackendError where the library is missing or refuses it, UsageError for wrong options."""

    def probe(self, engine: Engine) -> Check | None:
        """Say whether it really computes here; None where nobody would expect it to. Never raises."""


class CardModule(EngineModule, Protocol):
    """The module of an engine that is `on_card`."""

    def open_bundle(self, engine: Engine, bundle: Bundle, options: LoadOptions, card: "Card") -> Inspector | None:
        """Open a bundle whose whole loop stays on the card; None where its settings need the host between the steps."""


def module_of(engine: Engine) -> EngineModule:
    """Return the module that implements it; its library is imported when something is opened."""
    return cast(EngineModule, importlib.import_module(engine.module))


def card_module_of(engine: Engine) -> CardModule:
    """Return the module of an engine on a card."""
    return cast(CardModule, importlib.import_module(engine.module))


def open_session(path: Path | str, engine: str = DEFAULT, threads: int | None = None) -> Session:
    """Open the graph in a file that belongs to no bundle; UsageError or BackendError where that cannot be."""
    row = named(engine)
    return module_of(row).open(row, GraphFile(Path(path)), LoadOptions(engine=engine, threads=threads))


def tried(engine: Engine, double: Callable[[NDArray[Any]], Sequence[float]]) -> Check:
    """Let an engine compute x + x, and compare."""
    right = [2.0, 5.0]
    try:
        found = [float(value) for value in double(np.array([1.0, 2.5], np.float32))]
    except Exception as error:  # each library raises its own types, one for each way to fail
        return Check(engine.name, False, first_line(str(error), type(error).__name__))
    return Check(engine.name, found == right, "" if found == right else f"computed {found} where {right} is right")
