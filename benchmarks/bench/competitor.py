"""The seam between the harness and what it times."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from mdps.benchmarks.bench.spec import Spec
from mdps.benchmarks.bench.timer import Timer


@dataclass(frozen=True)
class Outcome:
    """Of one run: the first image's score, and the ms its sampling passes took, where there are such things.

    `device_ms` is what a device's own events say of all of it, where the timer is the host's.
    """

    score: float | None = None
    passes_ms: float | None = None
    device_ms: float | None = None


class Competitor(Protocol):
    """Ready to judge the spec's batch again and again. `facts` are for the row: a note, counts, a device's name."""

    timer: Timer
    facts: dict[str, Any]

    def run(self) -> Outcome:
        """The whole inference on one batch of observations that lie ready in memory."""


def open_competitor(spec: Spec) -> Competitor:
    """Loads it; imports the libraries of its kind and no others. Raises SkippedError with the reason, or MdpsError."""
    if spec.kind in ("ours", "method"):
        from mdps.benchmarks.bench.ours import Ours

        return Ours(spec)
    if spec.kind == "file":
        from mdps.benchmarks.bench.one_file import OneFile

        return OneFile(spec)
    if spec.kind == "checked":
        from mdps.benchmarks.gpu_check.checked import Checked

        return Checked(spec)
    if spec.kind == "torch":
        from mdps.benchmarks.bench.eager import Eager

        return Eager(spec)
    if spec.kind == "peer":
        import_module("anomalib")  # where it is missing, that is known before torch is loaded
        from mdps.benchmarks.bench.peers import open_peer

        return open_peer(spec)
    from mdps.benchmarks.bench.rate import MatrixRate

    return MatrixRate(spec)


def missing(error: ModuleNotFoundError, kind: str) -> str:
    """What to install where a kind of competitor finds no such module: an extra of this package."""
    extra = {"torch": "export", "peer": "peers", "rate": "export"}.get(kind, "cpu")
    return f"not installed: pip install 'mdps[{extra}]' (there is no {error.name})"
