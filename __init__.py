"""mdps: takes a diffusion anomaly detector (Masked Diffusion Posterior Sampling) from a checkpoint to the line.

import mdps

detector = mdps.demo_detector()
print(detector(mdps.demo_picture("bad")))
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Imported when they are asked for, so that `mdps --help` is quick; type checkers read __init__.pyi.
_LATE = {"demo_detector": "mdps.runtime.demo", "demo_picture": "mdps.runtime.demo", "load": "mdps.runtime.loading"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_LATE]
