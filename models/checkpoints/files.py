"""Reading a file of tensors without running anything that stands in it.

Errors are CheckpointError whose text continues a sentence that starts with the file's name.
"""

import collections
import hashlib
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mdps.models.checkpoints.report import CheckpointError, shown
from mdps.runtime.errors import first_line
from mdps.runtime.image_files import open_file


def _plain_dictionary(*_: Any) -> "collections.OrderedDict[Any, Any]":
    return collections.OrderedDict()


# AnoDDPM and DiffusionAD keep their arguments in a defaultdict(str), which torch's reader cannot fill: it becomes a
# plain dictionary here. Neither name can do anything by itself.
_HARMLESS: list[Any] = [(_plain_dictionary, "collections.defaultdict"), str]
_AGAIN = "copy or download it again"


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(path: Path) -> tuple[Any, dict[str, str]]:
    """Read whatever `torch.save` or safetensors wrote, on the CPU, and the metadata of a safetensors file.

    Raises CheckpointError for files that are absent, empty, cut off, something else, or need code to open.
    """
    head = _head(path)
    if _is_safetensors(head) or path.suffix == ".safetensors":
        return _read_safetensors(path)
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return _read_torch(path), {}
    raise CheckpointError(
        f"is not a checkpoint of a known kind (it starts with {head[:8]!r}): give a torch or safetensors file"
    )


def check_plain(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError for what no file of weights holds, before anything is computed from it.

    That is other kinds of tensors (sparse, quantised, without storage, of whole numbers), and tensors that name more
    values than the file has, which would fill the memory.
    """
    for key, value in tensors.items():
        plain = value.layout is torch.strided and value.device.type == "cpu" and value.is_floating_point()
        if value.is_nested or not plain:
            raise CheckpointError(f"has {shown(key)} as {_kind(value)} and not as plain numbers: save it as float32")
    named, size = sum(value.numel() * value.element_size() for value in tensors.values()), path.stat().st_size
    if named > 2 * size:  # twice: two entries may share their values
        raise CheckpointError(f"names {named} bytes of weights and has {size} itself: it is damaged")


def _kind(value: Tensor) -> str:
    layout, dtype = (str(part).removeprefix("torch.") for part in (value.layout, value.dtype))
    return f"{dtype} ({layout}, {value.device.type})"


def _head(path: Path) -> bytes:
    if not path.exists():
        raise CheckpointError("does not exist: check the path")
    try:
        with open_file(path) as file:
            head = file.read(512)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror}): check the path and its permissions") from None
    if not head:
        raise CheckpointError(f"is empty: {_AGAIN}")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError("is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError("is a web page, not a checkpoint: the download failed, fetch it again")
    return head


def _is_safetensors(head: bytes) -> bool:
    return len(head) > 9 and head[8:9] == b"{" and head[4:8] == b"\0\0\0\0"


def _read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"is no intact safetensors file ({_said(error)}): {_AGAIN}") from None


def _read_torch(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of archives that the next line refuses anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_why_refused(str(error))) from None
    except Exception as error:  # torch raises whatever a damaged byte leads to: EOFError, KeyError, RuntimeError, ...
        if "TorchScript" in str(error):
            raise CheckpointError(f"is a TorchScript archive, which holds code: {_SAVE_WEIGHTS}") from None
        raise CheckpointError(f"is cut off or damaged ({_said(error)}): {_AGAIN}") from None


_SAVE_WEIGHTS = "save the weights alone (torch.save(network.state_dict(), ...) or safetensors) and give that file"


def _why_refused(message: str) -> str:
    name = re.search(r"(?:GLOBAL|function|class|type|instantiate|call)\s+[`'\"]?([A-Za-z_][\w]*(?:\.\w+)+)", message)
    if name:
        return f"needs code to open ({name.group(1)}), and code from checkpoints is never run: {_SAVE_WEIGHTS}"
    return f"is damaged, or a pickle that is no checkpoint ({_reason(message)}): {_AGAIN}"


def _reason(message: str) -> str:
    reason = re.search(r"WeightsUnpickler error: *(.*)", message)
    return reason.group(1).strip() if reason else "no readable pickle"


def _said(error: BaseException) -> str:
    return first_line(str(error), type(error).__name__)[:160]  # torch gives advice by the paragraph
