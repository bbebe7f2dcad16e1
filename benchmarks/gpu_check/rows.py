"""What is known of each piece of a check, every number that a table or a program wants."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from mdps.benchmarks.bench.rounds import Measurement
from mdps.benchmarks.bench.rows import SCORE_TOLERANCE, Cost
from mdps.benchmarks.bench.spec import Spec
from mdps.benchmarks.gpu_check.items import Item
from mdps.benchmarks.gpu_check.reference import Finding, Reference
from mdps.runtime.manifest import Manifest

State = Literal["ran", "skipped", "failed"]


@dataclass(frozen=True)
class Row:
    """One item. Times in ms for one image, all passes and the scoring; None where there is no such number.

    `state`: "skipped" is what cannot run here or did not fit into the minutes, "failed" what crashed, hung or
    surprised, with `reason`. `findings` compare outputs with the oracle's; `agrees` is whether all are within, None
    where nothing was compared. `clock` says what measured: "events" of the device, or the "host" until the result was
    in its memory; `device_ms` is the median by events beside a host's. `tflops` counts useful FLOPs in the passes,
    `share` divides by the matrix rate measured here in the same precision. `device_mb` is by how much the card's used
    memory grew, other processes included.
    """

    name: str
    state: State
    reason: str = ""
    network: str = ""
    precision: str = ""
    samples: int = 1
    seconds: float = 0.0
    median_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    runs: int = 0
    clock: str = ""
    device_ms: float | None = None
    passes_ms: float | None = None
    first_ms: float | None = None
    load_ms: float | None = None
    tflops: float | None = None
    share: float | None = None
    device_mb: float | None = None
    host_mb: float | None = None
    agrees: bool | None = None
    findings: tuple[Finding, ...] = ()
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self) | {"findings": [one.to_json() for one in self.findings]}


def prepared_row(item: Item, state: State, seconds: float, reason: str = "") -> Row:
    """Of something that was made, or not."""
    return Row(item.name, state, reason, item.network, seconds=seconds)


def measured_row(
    item: Item, one: Measurement, *, failed: bool, seconds: float, device_mb: float | None, rates: dict[str, float]
) -> Row:
    """Of something that was timed; `rates` are the TFLOP/s of matrix products so far."""
    same: dict[str, Any] = {
        "name": item.name, "network": item.network, "precision": item.precision, "samples": item.samples,
        "seconds": seconds, "note": one.facts.get("note", ""),
    }  # fmt: skip
    findings = _findings(item, one)
    same |= {"findings": findings, "agrees": all(finding.agrees for finding in findings) if findings else None}
    if one.skipped or not one.ms:
        reason = one.skipped or "there was no time left for a run"
        return Row(state="failed" if failed else "skipped", reason=reason, **same)
    found: dict[str, Any] = {
        "median_ms": median(one.ms),
        "p95_ms": float(np.percentile(one.ms, 95)),
        "p99_ms": float(np.percentile(one.ms, 99)),
        "runs": len(one.ms),
        "clock": "events" if item.spec is not None and _by_events(item.spec) else "host",
        "device_ms": median(one.facts["device_ms"]) if one.facts.get("device_ms") else None,
        "passes_ms": median(one.passes_ms) if one.passes_ms else None,
        "first_ms": one.facts.get("first_ms"),
        "load_ms": one.facts.get("load_ms"),
        "device_mb": device_mb,
        "host_mb": one.peak_mb,
    }
    return Row(state="ran", **same, **found, **_rate(item, one, rates))


def _by_events(spec: Spec) -> bool:
    """Torch's own work on a card (see `bench.timer`); our backends return when the result is here."""
    return spec.kind != "checked" and spec.device != "cpu"


def _findings(item: Item, one: Measurement) -> tuple[Finding, ...]:
    """Of all stages for our backends; of the score alone for torch, which is the oracle's own arithmetic."""
    findings = tuple(Finding(**found) for found in one.facts.get("findings", ()))
    spec = item.spec
    if findings or spec is None or spec.kind != "torch" or one.facts.get("score") is None or spec.reference is None:
        return findings
    reference = Reference.read(Path(spec.reference))
    name = f"whole{item.samples}.anomaly_score"
    if name not in reference.arrays:
        return ()
    wanted, score = float(reference[name][0]), float(one.facts["score"])
    allowed = reference.about["tolerances"][item.precision]["anomaly_score"] if item.precision != "fp32" else 0.0
    return (Finding("both_passes.anomaly_score", abs(score - wanted) / max(abs(wanted), 1e-2),
                    max(allowed, SCORE_TOLERANCE)),)  # fmt: skip


def _rate(item: Item, one: Measurement, rates: dict[str, float]) -> dict[str, Any]:
    spec = item.spec
    assert spec is not None
    middle = median(one.passes_ms) if one.passes_ms else median(one.ms)
    if spec.kind == "rate":
        return {"tflops": one.facts["matrix_flop"] / middle / 1e9}
    if spec.reference is None:
        return {}
    forward = Reference.read(Path(spec.reference)).about["forward_flop"]
    flop = Cost.of(Manifest.read(spec.bundle, verify=False), forward).flop
    if flop is None:
        return {}
    tflops = flop * item.samples / middle / 1e9
    rate = rates.get(item.precision)
    return {"tflops": tflops, "share": tflops / rate if rate else None}


def worst(findings: Sequence[Finding], stage: str) -> Finding | None:
    """The finding of a stage that is the furthest out, in shares of what is allowed."""
    of_stage = [one for one in findings if one.stage == stage]
    return max(of_stage, key=lambda one: _excess(one), default=None)


def _excess(one: Finding) -> float:
    if one.error is None:
        return float("inf")
    return one.error / one.tolerance if one.tolerance else (float("inf") if one.error else 0.0)
