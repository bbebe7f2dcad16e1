"""How many processors this process may really use: affinity, the quota of a container, and OMP_NUM_THREADS."""

import math
import os
from pathlib import Path

from mdps.runtime.cgroups import PROC, ROOT, groups, read


def available_cpus(proc: Path = PROC, root: Path = ROOT) -> int:
    """The smallest of the processors this process may run on, its cgroup quota (version 1 or 2) and OMP_NUM_THREADS.

    At least 1. The variable is how processes that share a machine are told to keep to their part, in whatever library.
    """
    return max(1, math.ceil(min(_limits(proc, root).values())))


def cpus_limited_by(proc: Path = PROC, root: Path = ROOT) -> str | None:
    """Name what keeps this process from some of the processors, such as `OMP_NUM_THREADS`; None for nothing."""
    limits = _limits(proc, root)
    name = min(limits, key=lambda key: limits[key])
    return name if math.ceil(limits[name]) < (os.cpu_count() or 1) else None


def _limits(proc: Path, root: Path) -> dict[str, float]:
    limits = {"the processors it may run on": _affinity()}
    for name, some in (("the container's quota", _quotas(proc, root)), ("OMP_NUM_THREADS", _asked())):
        if some:
            limits[name] = min(some)
    return limits


def _affinity() -> float:
    if hasattr(os, "sched_getaffinity"):
        return float(len(os.sched_getaffinity(0)))
    return float(os.cpu_count() or 1)


def _asked() -> list[float]:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return [float(asked)] if asked.isdecimal() and int(asked) > 0 else []


def _quotas(proc: Path, root: Path) -> list[float]:
    """Return the processors that each group grants."""
    found = [_v2(folder) if version == 2 else _v1(folder) for version, folder in groups("cpu", proc, root)]
    return [quota for quota in found if quota is not None]


def _v2(folder: Path) -> float | None:
    words = read(folder / "cpu.max").split()
    return _ratio(*words) if len(words) == 2 else None


def _v1(folder: Path) -> float | None:
    return _ratio(read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    try:
        ratio = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return None
    return ratio if ratio > 0 else None
