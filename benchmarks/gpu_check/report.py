"""Rows, Markdown and JSON of a check, written after every piece of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from mdps.benchmarks.bench import Spec
from mdps.benchmarks.bench.report import SCORE_TOLERANCE, Cost, percent
from mdps.benchmarks.bench.rounds import Measurement
from mdps.benchmarks.gpu_check.checked import STAGES, Finding, Reference
from mdps.benchmarks.gpu_check.items import Item
from mdps.benchmarks.kit import Fields, machine_facts, number, table, write_report
from mdps.runtime.cards import cards
from mdps.runtime.machine import versions
from mdps.runtime.manifest import Manifest

State = Literal["ran", "skipped", "failed"]


@dataclass(frozen=True)
class Row(Fields):
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
    """Torch's own work on a card (see `bench.timer`); our engines return when the result is here."""
    return spec.kind != "checked" and spec.device != "cpu"


def _findings(item: Item, one: Measurement) -> tuple[Finding, ...]:
    """Of all stages for our engines; of the score alone for torch, which is the oracle's own arithmetic."""
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


PACKAGES = (
    "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "tensorrt-rtx-cu13-libs", "cuda-bindings", "pycuda",
    "torch", "anomalib",
)  # fmt: skip
TARGETS = {1: 60.0, 16: 500.0}
"""ms an image of the authors' network at 256 x 256, two passes of ten steps, fp16, by N_s, on an H100."""


def facts() -> dict[str, Any]:
    """Return cards, processor, system and versions as JSON values."""
    return {"cards": [asdict(card) for card in cards()]} | machine_facts() | {"versions": versions(*PACKAGES)}


@dataclass(frozen=True)
class Check(Fields):
    """Rows of a check, and the machine they were measured on."""

    finished: bool
    machine: dict[str, Any]
    rows: list[Row]


def write(check: Check, out: Path) -> None:
    """Write gpu_check.json and gpu_check.md into the folder `out`, each whole or not at all."""
    write_report(out, "gpu_check", check.to_json(), markdown(check))


def markdown(check: Check) -> str:
    """The machine, latencies, parity stage by stage, and what was skipped or failed with the reasons."""
    rows = check.rows
    ran = [row for row in rows if row.median_ms is not None]
    parts = ["# mdps gpu-check" + ("" if check.finished else " (not finished)"), _heading(check.machine)]
    if ran:
        parts += ["## Latency", table(LATENCY, map(_latency, ran))]
    compared = [row for row in rows if row.findings]
    if compared:
        text = "The worst output of each stage, in shares of what is allowed (1 is the limit); the JSON has the errors."
        parts += ["## Parity with the torch oracle", text, table(PARITY, map(_parity, compared))]
    if targets := _targets(ran):
        parts += ["## Targets", targets]
    for state, title in (("failed", "Failed"), ("skipped", "Skipped")):
        if lines := _reasons([row for row in rows if row.state == state]):
            parts += [f"## {title}", lines]
    return "\n\n".join(parts) + "\n"


def _reasons(rows: Sequence[Row]) -> str:
    """A line a reason, with all it holds for."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.reason, []).append(row.name)
    return "\n".join(f"- {'; '.join(each)}: {reason}" for reason, each in names.items())


def _heading(machine: dict[str, Any]) -> str:
    found = [f"{card['name']}, compute capability {card['compute_capability']}, driver {card['driver']}"
             for card in machine["cards"]]  # fmt: skip
    lines = [
        *(found or ["no NVIDIA card"]),
        f"{machine['cpu']}, {machine['cpus']} processors, load {machine['load_average']}, {machine['system']}",
        ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
    ]
    return "  \n".join(lines)


LATENCY = ("", "median ms", "p95", "p99", "runs", "clock", "device ms", "TFLOP/s", "of matrix rate", "card MB",
           "host MB", "first ms", "parity")  # fmt: skip
PARITY = ("", *(stage.replace("_", " ") for stage in STAGES))


def _latency(row: Row) -> list[str]:
    verdict = {None: "", True: "agrees", False: "DISAGREES"}[row.agrees]
    values = (row.median_ms, row.p95_ms, row.p99_ms)
    return [
        row.name, *(number(value) for value in values), str(row.runs), row.clock, number(row.device_ms),
        number(row.tflops), percent(row.share), number(row.device_mb), number(row.host_mb), number(row.first_ms),
        verdict,
    ]  # fmt: skip


def _parity(row: Row) -> list[str]:
    return [row.name, *(_stage(row, stage) for stage in STAGES)]


def _stage(row: Row, stage: str) -> str:
    found = worst(row.findings, stage)
    if found is None:
        return ""
    if found.error is None:
        return "**NaN**"
    if not found.tolerance:
        return "same" if not found.error else f"**{found.error:.0%} differ**"
    text = number(found.error / found.tolerance)
    return text if found.agrees else f"**{text}**"


def _targets(ran: Sequence[Row]) -> str:
    """For the authors' network in half precision: the fastest of ours beside what was aimed at."""
    lines = []
    for samples, target in TARGETS.items():
        ours = [row for row in ran if (row.network, row.precision, row.samples) == ("authors", "fp16", samples)
                and row.agrees and not row.name.startswith("torch")]  # fmt: skip
        if ours:
            best = min(ours, key=lambda row: row.median_ms or 0.0)
            met = "met" if (best.median_ms or 0.0) <= target else "not met"
            lines.append(f"- N_s {samples}: {number(best.median_ms)} ms ({best.name}); {target:g} ms on an H100 {met}")
    return "\n".join(lines)
