"""The machine and what this process may take of it: processors, memory, the libraries' releases."""

import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mdps import __version__

PROC, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_UNLIMITED = 2**60  # what cgroup v1 says where nothing was set is near 2**63


@dataclass(frozen=True)
class Room:
    """Bytes that may still be taken, and what sets that bound; `mapped`: it counts addresses, used or not."""

    bytes: int
    bound: str
    mapped: bool = False


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
    found = [_quota(version, folder) for version, folder in groups("cpu", proc, root)]
    return [quota for quota in found if quota > 0]


def _quota(version: int, folder: Path) -> float:
    """Return the processors of one group, 0 where it sets no bound."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = " ".join(read(folder / name) for name in names).split()
        return int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return 0


def rooms(proc: Path = Path("/proc"), cgroup: Path = PROC, root: Path = ROOT) -> Iterator[Room]:
    """Yield every bound that this system tells of; none where it tells of none, as on Windows and macOS."""
    memory = _fields(proc / "meminfo")
    if "MemAvailable" in memory:
        yield Room(memory["MemAvailable"] + memory.get("SwapFree", 0), "free memory and swap of this machine")
    for version, folder in groups("memory", cgroup, root):
        yield from _of_group(version, folder)
    yield from _of_process(_fields(proc / "self" / "status"))


def _fields(path: Path) -> dict[str, int]:
    """Return the bytes of a file of lines like "MemFree:  12 kB"."""
    rows = (line.split() for line in read(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _of_group(version: int, folder: Path) -> Iterator[Room]:
    limit, used, cache = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    texts = [read(folder / name).strip() for name in (limit, used)]
    if not all(text.isdecimal() for text in texts) or int(texts[0]) >= _UNLIMITED:  # "max", or no such file
        return
    rows = (line.split() for line in read(folder / "memory.stat").splitlines())
    freed = sum(int(row[1]) for row in rows if len(row) == 2 and row[0] == cache and row[1].isdecimal())
    yield Room(max(0, int(texts[0]) - int(texts[1]) + freed), f"left of the container's limit, {folder / limit}")


def _of_process(status: Mapping[str, int]) -> Iterator[Room]:
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, field, command, mapped in (("RLIMIT_AS", "VmSize", "-v", True), ("RLIMIT_DATA", "VmData", "-d", True)):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY and field in status:
            yield Room(max(0, limit - status[field]), f"left of the limit that `ulimit {command}` shows", mapped)


def groups(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Yield the version (1 or 2) and the folder of each group that may limit `controller` ("cpu", "memory").

    From this process's own up to the root, of which a container often shows only the last.
    """
    for line in read(proc).splitlines() or ["0::/"]:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            yield from ((2, folder) for folder in _up(root, group))
        elif controller in controllers.split(","):
            yield from ((1, folder) for name in {controller, controllers} for folder in _up(root / name, group))


def _up(root: Path, group: str) -> list[Path]:
    inner = root / group.lstrip("/")
    return [inner, *(folder for folder in inner.parents if folder == root or root in folder.parents)]


def read(path: Path) -> str:
    """Return the text of a file, nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def installed(*packages: str) -> dict[str, str]:
    """Versions of those of `packages` that are installed, by the names of their wheels, in that order."""
    import importlib.metadata

    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions(*packages: str) -> dict[str, str]:
    """Those of mdps and Python, and of `packages` that are installed: they go with every stored result."""
    return {"mdps": __version__, "python": platform.python_version()} | installed(*packages)
