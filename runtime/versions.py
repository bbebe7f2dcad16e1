"""Which releases of the libraries are installed here: what every stored result carries."""

import importlib.metadata
import platform

from mdps import __version__


def installed(*packages: str) -> dict[str, str]:
    """Versions of those of `packages` that are installed, by the names of their wheels, in that order."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions(*packages: str) -> dict[str, str]:
    """Those of mdps and Python, and of `packages` that are installed."""
    return {"mdps": __version__, "python": platform.python_version()} | installed(*packages)
