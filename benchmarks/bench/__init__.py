"""`mdps bench`: our engines beside what a user would run instead, in one interleaved run.

Here is the interface between the harness and what it times. Each competitor lives in a process of its own (`worker`),
so that none shares threads, allocator or peak memory with another; the parent (`run`) asks them in turns.
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdps.benchmarks.kit import Fields

Kind = Literal["ours", "method", "file", "checked", "torch", "peer", "rate"]


class SkippedError(Exception):
    """A competitor that cannot run here; the text is the reason its row gives."""


@dataclass(frozen=True)
class Spec(Fields):
    """One competitor. `variant` is an engine, a way of running torch, a peer's name, or the one file's path.

    The rest is the same for all. Another method on our runtime has a `bundle` of its own, and so has ours at another
    image size.

    On the device "cuda" the process sees `card` (a UUID) and no other, or all where it is None.

    `samples` (N_s) and `batch` are those of this row; `bank_images` made-up images make a peer's memory. What is
    "checked" is ours, beside the oracle's arrays in the file `reference` first.
    """

    name: str
    kind: Kind
    variant: str
    bundle: str
    threads: int
    device: str = "cpu"
    card: str | None = None
    batch: int = 1
    samples: int | None = None
    ckpt: str | None = None
    backbone_weights: str | None = None
    bank_images: int = 200
    matrix_side: int = 2048
    reference: str | None = None
    max_batch: int = 8


T = TypeVar("T")


class Timer(Protocol):
    """Runs work and gives its result and the ms it took."""

    def __call__(self, work: Callable[[], T]) -> tuple[T, float]: ...


class WallTimer:
    """For work that is done when it returns."""

    def __call__(self, work: Callable[[], T]) -> tuple[T, float]:
        start = time.perf_counter()
        result = work()
        return result, (time.perf_counter() - start) * 1000


class EventTimer:
    """For work that a CUDA stream still does after the call returned: events on the stream itself.

    `cuda` is torch.cuda, or something with its `Event` and `synchronize`.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def __call__(self, work: Callable[[], T]) -> tuple[T, float]:
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda.synchronize()  # what was queued before is not this work's
        start.record()
        result = work()
        end.record()
        end.synchronize()
        return result, float(start.elapsed_time(end))


def torch_timer(device: str) -> Timer:
    """The clock for torch's work on `device`, "cpu" or "cuda"."""
    if device == "cpu":
        return WallTimer()
    import torch

    return EventTimer(torch.cuda)


def observation(size: tuple[int, int], index: int = 0) -> NDArray[np.float32]:
    """float32 [3, H, W] in (-1, 1), the same for the same index everywhere."""
    stream = np.random.RandomState(index)
    layers = [_enlarged(stream.standard_normal((3, side, side)).astype(np.float32), size) for side in (3, 9, 31)]
    return np.tanh(np.float32(0.5) * np.sum(layers, axis=0, dtype=np.float32))


def _enlarged(grid: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    height, width = size
    planes = [Image.fromarray(plane).resize((width, height), Image.Resampling.BILINEAR) for plane in grid]
    return np.stack([np.asarray(plane, dtype=np.float32) for plane in planes])


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_mb() -> float | None:
    """Most resident memory in 10^6 bytes since the start or the last `forget_peak`; None where nothing tells.

    Linux's own high-water mark comes first: what getrusage gives a child begins at the size of its parent.
    """
    if _STATUS.is_file():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest * (1 if sys.platform == "darwin" else 1024) / 1e6


def forget_peak() -> bool:
    """Starts anew, so that what preparation took does not count; False where the system cannot."""
    gc.collect()
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


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


def missing(error: ModuleNotFoundError, kind: str) -> str:
    """Return the extra of this package to install where a kind of competitor finds no such module."""
    extra = {"torch": "export", "peer": "peers", "rate": "export"}.get(kind, "cpu")
    return f"not installed: pip install 'mdps[{extra}]' (there is no {error.name})"
