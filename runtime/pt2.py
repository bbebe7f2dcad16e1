"""Refuses a torch.export archive whose loading would unpickle code; `torch.export.load` itself does not."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from mdps.runtime.errors import BundleError

_CODE_FOLDERS = ("data/aotinductor/", "data/executorch/")
_PICKLED_OBJECTS = ("data/constants/custom_obj_", "data/constants/opaque_obj_")


def check_program(path: Path, torch: Any) -> None:
    """Raise BundleError unless every entry of the archive is plain numbers or JSON.

    Refused are native code, pickled objects and weights, and example inputs that need more than `weights_only`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                inner = name.split("/", 1)[-1]
                if not _is_plain(inner, archive.read(name) if _must_read(inner) else b"", torch):
                    raise BundleError(
                        f"{path} is refused because loading its entry {inner} could run code: "
                        "export the bundle again with `mdps export`"
                    )
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        raise BundleError(f"{path} is no torch.export program ({error}): export the bundle again") from error


def _must_read(inner: str) -> bool:
    return inner.startswith("data/") and inner.endswith((".json", ".pt"))


def _is_plain(inner: str, content: bytes, torch: Any) -> bool:
    if inner.startswith(_CODE_FOLDERS + _PICKLED_OBJECTS) or inner.endswith((".so", ".pyd", ".dll", ".pkl")):
        return False
    if inner.startswith("data/sample_inputs/"):
        return not content or _loads_as_numbers(content, torch)
    if inner.startswith("data/") and inner.endswith(".pt"):  # the layout of old archives, which is a pickle
        return False
    if inner.startswith("data/") and inner.endswith(".json"):
        return not any(entry.get("use_pickle") for entry in json.loads(content).get("config", {}).values())
    return True


def _loads_as_numbers(content: bytes, torch: Any) -> bool:
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # whatever torch raises, it did not load as numbers
        return False
    return True
