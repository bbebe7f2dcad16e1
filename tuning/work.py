"""The folder of a search that goes on where it was stopped: raw maps of the terms that were tried so far."""

import hashlib
import io
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdps.runtime.atomic import write_bytes, write_text, writing
from mdps.runtime.errors import require

VERSION = 2  # of what is tried and how it is measured: a folder of another is begun anew
KEY = "key.json"

Arrays = dict[str, NDArray[Any]]


def hash_of(paths: Sequence[Path]) -> str:
    """Return one hash of the contents of files, in their order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class Work:
    """Keeps arrays by name, with the seconds that they took; whole or not at all, whatever interrupts.

    `key` says what they are of: a folder of anything else is emptied. UsageError for a folder that holds other things.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder, self._seconds = folder, dict[str, float]()
        wanted = json.dumps({"version": VERSION, **key}, sort_keys=True)
        place = folder / KEY
        with writing(folder):
            if folder.is_dir() and not place.is_file():
                empty = not any(folder.iterdir())
                require(empty, f"{folder} holds other files: name another with --set work=FOLDER, or remove it")
            elif place.is_file() and place.read_text(encoding="utf-8") != wanted:
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            if not place.is_file():
                write_text(place, wanted)

    def keep(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays `name`, made now unless an earlier run left them."""
        place = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.npz"
        if not place.is_file():
            self._make(place, make)
        with np.load(place, allow_pickle=False) as found:
            arrays = dict(found)
        self._seconds[name] = float(arrays.pop("seconds"))
        return arrays

    @property
    def seconds(self) -> float:
        """That everything took which was asked for so far, in this run or in one that was stopped."""
        return sum(self._seconds.values())

    def _make(self, place: Path, make: Callable[[], Arrays]) -> None:
        start, data = time.perf_counter(), io.BytesIO()
        arrays = make()
        np.savez(data, seconds=np.asarray(time.perf_counter() - start), **arrays)  # type: ignore[arg-type]
        with writing(place):
            write_bytes(place, data.getvalue())

    def remove(self) -> None:
        """Remove the folder: what it was for is done."""
        shutil.rmtree(self.folder, ignore_errors=True)
