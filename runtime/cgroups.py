"""The control groups of this process, from its own up to the root; a container often shows only the root."""

from collections.abc import Iterator
from pathlib import Path

PROC, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def groups(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Yield the version (1 or 2) and the folder of each group that may limit `controller` ("cpu", "memory")."""
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
