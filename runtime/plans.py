"""The engine plans of a bundle: what each was built from, for which library and cards."""

from dataclasses import dataclass
from typing import Literal

from mdps.runtime.records import Record


@dataclass(frozen=True)
class PlanEntry(Record):
    """One plan file.

    `engine` is its name, `version` its release: a plan runs on no other. `compute_capabilities` are the cards',
    such as "8.6". `graph` is the ONNX file it was built from; `key` a hash of that graph with its weights, the library,
    the capabilities and the build's options. `batch` is the smallest, best and largest first axis, `samples` the same
    of the second axis where the graph has one. `types` counts layers by the type of their result, as `inspected` told:
    the network that was parsed, or the engine where a card was there to load it.
    """

    role: str
    file: str
    engine: str
    version: str
    compute_capabilities: tuple[str, ...]
    precision: Literal["fp32", "fp16", "bf16"]
    graph: str
    key: str
    batch: tuple[int, int, int]
    samples: tuple[int, int, int] | None
    types: dict[str, int]
    inspected: Literal["network", "engine"]
