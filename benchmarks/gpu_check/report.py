"""A table, Markdown and JSON of a check, written after every piece of it."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdps.benchmarks.bench.report import number, percent
from mdps.benchmarks.gpu_check.reference import STAGES
from mdps.benchmarks.gpu_check.rows import Row, worst
from mdps.runtime.atomic import write_text
from mdps.runtime.cards import cards
from mdps.runtime.choice import cpu_model
from mdps.runtime.threads import available_cpus
from mdps.runtime.versions import versions

PACKAGES = (
    "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "tensorrt-rtx-cu13-libs", "cuda-bindings", "pycuda",
    "torch", "anomalib",
)  # fmt: skip
TARGETS = {1: 60.0, 16: 500.0}
"""ms an image of the authors' network at 256 x 256, two passes of ten steps, fp16, by N_s, on an H100."""


def machine_facts() -> dict[str, Any]:
    """Cards, processor, system, versions; JSON values."""
    return {
        "cards": [
            {"name": card.name, "compute_capability": card.compute_capability, "driver": card.driver,
             "total_mb": None if card.total is None else round(card.total / 1e6)}
            for card in cards()
        ],
        "cpu": cpu_model(),
        "cpus": available_cpus(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "versions": versions(*PACKAGES),
    }  # fmt: skip


def write_report(rows: Sequence[Row], machine: dict[str, Any], out: Path, finished: bool) -> None:
    """gpu_check.json and gpu_check.md in the folder `out`, each whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "gpu_check.json", json.dumps(to_json(rows, machine, finished), indent=1) + "\n")
    write_text(out / "gpu_check.md", markdown(rows, machine, finished))


def to_json(rows: Sequence[Row], machine: dict[str, Any], finished: bool) -> dict[str, Any]:
    """Plain JSON values."""
    return {"finished": finished, "machine": machine, "rows": [row.to_json() for row in rows]}


def markdown(rows: Sequence[Row], machine: dict[str, Any], finished: bool = True) -> str:
    """The machine, latencies, parity stage by stage, and what was skipped or failed with the reasons."""
    ran = [row for row in rows if row.median_ms is not None]
    parts = ["# mdps gpu-check" + ("" if finished else " (not finished)"), _heading(machine)]
    if ran:
        parts += ["## Latency", _table([_latency(row) for row in ran], LATENCY)]
    compared = [row for row in rows if row.findings]
    if compared:
        text = "The worst output of each stage, in shares of what is allowed (1 is the limit); the JSON has the errors."
        parts += ["## Parity with the torch oracle", text, _table([_parity(row) for row in compared], PARITY)]
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


def _table(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
