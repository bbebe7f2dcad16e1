"""Clocks: a host's and a device's, behind one call."""

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

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
