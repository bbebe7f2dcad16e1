"""The graphs of a bundle, by their roles: three steps, features and score."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, Self, TypeVar

from mdps.runtime.errors import BackendError
from mdps.runtime.records import Record

T = TypeVar("T")
GUIDED, PLAIN, FEATURES, SCORE, DDAD = "guided_step", "plain_step", "features", "score", "ddad_step"
STEPS = (GUIDED, PLAIN, DDAD)
"""The graphs of a step. DDAD is a guided one of the gradient "ddad", for tuned samplers: as published none runs it."""


def step_role(guidance_scale: float) -> str:
    """The step graph of a pass: the plain one at scale 0, at half the cost of the guided one."""
    return GUIDED if guidance_scale else PLAIN


@dataclass(frozen=True)
class GraphEntry(Record):
    """Which file holds a graph, and which session opens it: "ort" an ONNX file, "traced" a torch.export program.

    `variants` maps a form (see `mdps.runtime.engines.Engine.form`) to the file of the same graph in that form.
    """

    file: str
    session: Literal["ort", "traced"] = "ort"
    variants: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Graphs(Generic[T]):
    """Something for each graph; None for one that is not there."""

    guided: T | None = None
    plain: T | None = None
    features: T | None = None
    score: T | None = None
    ddad: T | None = None

    @classmethod
    def of(cls, roles: Mapping[str, T]) -> Self:
        """From the names of the bundle's graphs."""
        return cls(*(roles.get(role) for role in (GUIDED, PLAIN, FEATURES, SCORE, DDAD)))

    @property
    def roles(self) -> dict[str, T]:
        """Those that are there, by the names of the bundle's graphs."""
        named = {GUIDED: self.guided, PLAIN: self.plain, FEATURES: self.features, SCORE: self.score, DDAD: self.ddad}
        return {role: one for role, one in named.items() if one is not None}

    @property
    def steps(self) -> list[T]:
        """The step graphs that are there, the guided one first."""
        return [one for one in (self.guided, self.plain, self.ddad) if one is not None]

    def need(self, role: str) -> T:
        """The one of this role; BackendError where it was not loaded."""
        if role not in (there := self.roles):
            raise BackendError(f"no {role.replace('_', ' ')} graph was loaded for this")
        return there[role]

    def step(self, guidance_scale: float) -> T:
        """The one that runs a pass of this guidance scale; BackendError where it was not loaded."""
        return self.need(step_role(guidance_scale))
