"""The engine plans of a bundle: what each was built from, for which library and cards."""

from dataclasses import dataclass
from typing import Literal

from mdps.runtime.errors import BundleError
from mdps.runtime.manifest import FILE_NAME, Manifest
from mdps.runtime.records import Record, decode

KEY = "plans"
"""Where in a manifest's `parity`, the export's report, the plans are listed: runtimes that know none read it too."""


@dataclass(frozen=True)
class PlanEntry(Record):
    """One plan file.

    `backend` is the library, `version` its release: a plan runs on no other. `compute_capabilities` are the cards',
    such as "8.6". `graph` is the ONNX file it was built from; `key` a hash of that graph with its weights, the library,
    the capabilities and the build's options. `batch` is the smallest, best and largest first axis, `samples` the same
    of the second axis where the graph has one. `types` counts layers by the type of their result, as `inspected` told:
    the network that was parsed, or the engine where a card was there to load it.
    """

    role: str
    file: str
    backend: Literal["tensorrt", "tensorrt-rtx"]
    version: str
    compute_capabilities: tuple[str, ...]
    precision: Literal["fp32", "fp16", "bf16"]
    graph: str
    key: str
    batch: tuple[int, int, int]
    samples: tuple[int, int, int] | None
    types: dict[str, int]
    inspected: Literal["network", "engine"]


def plans_of(manifest: Manifest, where: str = FILE_NAME) -> tuple[PlanEntry, ...]:
    """The plans a manifest lists, none where it was exported without; BundleError where the list is damaged."""
    entries: tuple[PlanEntry, ...] = decode(
        tuple[PlanEntry, ...], manifest.parity.get(KEY, []), f"{where}.parity.{KEY}"
    )
    for entry in entries:
        if entry.file not in manifest.files:
            raise BundleError(f"{where} lists the plan {entry.file!r}, which is not among the files: export again")
    return entries
