"""The most memory this process has held."""

import gc
import sys
from pathlib import Path

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
