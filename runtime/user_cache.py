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


def cache_file(name: str) -> Path:
    """Return the place of a file of the cache, which need not exist; OSError as of the folder."""
    return cache_folder() / name


def entries(name: str) -> dict[str, Any]:
    """Return the entries of a file of the cache, none without one; OSError or ValueError where it cannot be read."""
    try:
        found = json.loads(cache_file(name).read_bytes())
    except (FileNotFoundError, NotADirectoryError):  # nothing yet; where nothing can be, the writing says so
        return {}
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def readable_entries(name: str) -> dict[str, Any]:
    """Return the entries of a file of the cache, none where it cannot be read: what it held is found out again."""
    try:
        return entries(name)
    except (OSError, ValueError):
        return {}


def write_newest(name: str, known: Mapping[str, Any], key: str, entry: Any) -> None:
    """Write what is `known` with this entry as the newest, KEPT in all, into a file of the cache. Raises OSError."""
    file, ordered = cache_file(name), {other: value for other, value in known.items() if other != key} | {key: entry}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(dict(list(ordered.items())[-KEPT:]), indent=1) + "\n")
