"""Where the runtime keeps what is dear to find out again: choices, measurements, what was compiled for a card."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """MDPS_CACHE, or a folder in the user's cache, which need not exist yet; OSError where there is none."""
    if given := os.environ.get("MDPS_CACHE"):
        return Path(given)
    folder = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
    if Path(folder).is_absolute():  # the standard says to ignore a relative one
        return Path(folder) / "mdps"
    try:
        return Path.home() / ".cache" / "mdps"
    except RuntimeError as error:
        raise OSError(f"this user has no home folder ({error}), set MDPS_CACHE") from error
