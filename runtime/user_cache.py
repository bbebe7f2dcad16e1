"""Where the runtime keeps what is dear to find out again: choices, measurements, what was compiled for a card."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mdps.runtime.atomic import write_text

KEPT = 200
"""Entries of a file; the oldest make way."""


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


def write_newest(file: Path, entries: Mapping[str, Any], key: str, entry: Any) -> None:
    """Write `entries` with this one as the newest, KEPT in all, into a file of the cache. Raises OSError."""
    ordered = {name: value for name, value in entries.items() if name != key} | {key: entry}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(dict(list(ordered.items())[-KEPT:]), indent=1) + "\n")
