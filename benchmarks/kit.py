"""The kit of all studies: tables, plots and reports, facts of the machine, hashes to resume by, rounds and progress."""

import hashlib
import io
import json
import math
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from mdps.runtime.atomic import write_bytes, write_text
from mdps.runtime.choice import cpu_model
from mdps.runtime.errors import MdpsError
from mdps.runtime.machine import available_cpus, installed
from mdps.runtime.manifest import Manifest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Say = Callable[[str], None]
PACKAGES = ("mdps", "numpy", "onnxruntime", "onnxruntime-gpu", "openvino", "MNN", "torch", "timm", "anomalib")


def quiet(text: str) -> None:
    """Say nothing."""


def say_on_stderr(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def exit_code(work: Callable[[], object]) -> int:
    """Do `work`; a mistake of the user's is one sentence on stderr and the error's exit code."""
    try:
        work()
    except MdpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a process wrote to stderr; empty where it wrote none."""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return said[-1] if said else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return a Markdown table; columns in `left` (negative: from the end) are aligned left, the others right."""
    rule = ["---" if {index, index - len(head)} & {*left} else "---:" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in (head, rule, *rows))


def number(value: float | None) -> str:
    """Return three digits, or all before the point; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figure_png(figure: "Figure", dpi: int = 120) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def write_report(out: Path, name: str, data: object, text: str, plot: bytes | None = None) -> None:
    """Write NAME.json, .md and, with a plot, .png into the folder `out`, each whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{name}.json", json.dumps(data, indent=1) + "\n")
    write_text(out / f"{name}.md", text)
    if plot is not None:
        write_bytes(out / f"{name}.png", plot)


def write_arrays(path: Path, **arrays: Any) -> None:
    """Write arrays by name into one compressed npz file, which appears whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, buffer.getvalue())


def digest(value: object) -> str:
    """Return sixteen hexadecimal digits that stand for a value, as `plain` writes it."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Return options as JSON values, to hash and to record."""
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    return str(value) if isinstance(value, Path) else value


class Fields:
    """Mixin for dataclasses: `to_json` gives the fields as JSON values, null for what is no finite number."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}


def given(options: Any) -> dict[str, Any]:
    """Return the options that are not None, as JSON values."""
    return {key: value for key, value in plain(options).items() if value is not None}


def orders(items: Sequence[T], rounds: int) -> Iterable[list[T]]:
    """Yield the items shuffled anew for each round, the same in every run: none always follows the same other."""
    stream = random.Random(0)
    for _ in range(rounds):
        yield stream.sample(items, len(items))


def machine_facts() -> dict[str, Any]:
    """Return processor, cores, load and system as JSON values."""
    return {
        "cpu": cpu_model(),
        "cpus": available_cpus(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
    }


def measured_with(manifest: Manifest) -> dict[str, Any]:
    """Return the facts of the machine with memory and versions, and which bundle with which settings."""
    return machine_facts() | {
        "cpus_of_host": os.cpu_count(),
        "memory_mb": _memory_mb(),
        "python": platform.python_version(),
        "versions": installed(*PACKAGES),
        "bundle": manifest.name,
        "bundle_sha256": manifest.files_sha256,
        "checkpoint_sha256": manifest.checkpoint.sha256,
        "parameters": manifest.network.get("parameters"),
        "image_size": list(manifest.preprocessing.network_size),
        "sampler": manifest.settings.sampler.to_json(),
    }


def _memory_mb() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6)
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None
