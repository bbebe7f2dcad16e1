"""NVIDIA cards: which the machine has, which of them this process may use, and how much memory they have free.

A card has two numbers. NVML and nvidia-smi count all cards by their PCI address; CUDA counts those that
CUDA_VISIBLE_DEVICES leaves, in its order or in one of its own. People give the first number, engines take the second
one, and the card's UUID leads from one to the other.
"""

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from mdps.runtime.errors import BackendError, UsageError

MIB = 2**20
_QUERY = ("index", "uuid", "name", "compute_cap", "memory.free", "memory.total", "driver_version")
_NO_CARD = 100  # CUDA_ERROR_NO_DEVICE
_TOO_OLD = (35, 803, 804)  # the driver, for the CUDA that is installed: as libraries of CUDA say it, and as it does
_NAME = re.compile(r"\d+|(gpu-|mig-)?[0-9a-f-]*", re.IGNORECASE)
_MAJOR_MINOR = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and .._MINOR


@dataclass(frozen=True)
class Card:
    """One card, by NVML's number of it and UUID where that lists it, and by CUDA's `ordinal` where it was chosen.

    Bytes of memory are None where card and host share theirs, or nothing on the machine lists it.
    """

    index: int | None = None
    uuid: str = ""
    name: str = ""
    compute_capability: str = ""
    free: int | None = None
    total: int | None = None
    driver: str = ""
    ordinal: int | None = None

    def __str__(self) -> str:
        number = self.ordinal if self.index is None else self.index
        return f"card {number} ({self.name}, {self.uuid or f'compute capability {self.compute_capability}'})"


def cards() -> tuple[Card, ...]:
    """All cards of the machine, by NVML or else nvidia-smi; none where neither answers."""
    try:
        import pynvml
    except ImportError:
        return _cards_of_tool()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or one that does not fit its own library
        return ()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        return tuple(_card_of_library(pynvml, index, driver) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return _cards_of_tool()
    finally:
        pynvml.nvmlShutdown()


def choose(device: str | int | None) -> Card:
    """Return the card with the index that nvidia-smi shows, or a UUID or its beginning, and CUDA's number of it.

    None: the first one CUDA shows, of which no more than that number is known where nothing lists it.
    Raises UsageError where there can be or is no such card or CUDA_VISIBLE_DEVICES hides it, BackendError where CUDA
    has none.
    """
    if device is not None:
        _check_name(device)
    visible, known = cuda_cards(), cards()
    by_uuid = {_bare(card.uuid): card for card in known}
    if device is None:
        return replace(by_uuid.get(visible[0], Card()), ordinal=0)
    card = find(device, known)
    if _bare(card.uuid) not in visible:
        shown = ", ".join(str(by_uuid.get(uuid, uuid)) for uuid in visible)
        raise UsageError(f"{card} is hidden from this process by {_filter()}, it sees {shown}: choose among those")
    return replace(card, ordinal=visible.index(_bare(card.uuid)))


def find(device: str | int, known: Sequence[Card]) -> Card:
    """The card that `choose` means by `device`, among those the machine has.

    Raises UsageError where none of them or two are meant, BackendError where the machine has none.
    """
    text = str(device).strip()
    if not known:
        _check_name(text)
        module = importlib.util.find_spec("pynvml") is not None
        remedy = "" if module else ", and pip install nvidia-ml-py where nvidia-smi is missing"
        raise BackendError(
            f"card {text!r} was asked for, but no card is listed here: install NVIDIA's driver until `nvidia-smi` "
            f"lists one{remedy}"
        )
    found = [card for card in known if _is_meant(card, text)]
    if len(found) == 1:
        return found[0]
    wrong = f"{text!r} is the beginning of {len(found)} cards" if found else f"there is no card {text!r}"
    raise UsageError(f"{wrong}: choose an index or a UUID of {', '.join(map(str, known))}")


def cuda_cards() -> tuple[UUID, ...]:
    """UUIDs of the cards this process may use, in CUDA's order; BackendError where there is no driver or no card."""
    library = _driver()
    _check(library, library.cuInit(0))
    count = ctypes.c_int()
    _check(library, library.cuDeviceGetCount(ctypes.byref(count)))
    if not count.value:
        raise BackendError(_no_card())
    return tuple(_uuid(library, ordinal) for ordinal in range(count.value))


def cuda_capabilities() -> tuple[str, ...]:
    """Compute capabilities, such as "8.6", of the `cuda_cards` in their order, by the driver; errors as there."""
    count, library = len(cuda_cards()), _driver()
    return tuple(_capability(library, ordinal) for ordinal in range(count))


def _capability(library: Any, ordinal: int) -> str:
    handle, value = _handle(library, ordinal), ctypes.c_int()
    numbers = []
    for attribute in _MAJOR_MINOR:
        _check(library, library.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle))
        numbers.append(str(value.value))
    return ".".join(numbers)


def _handle(library: Any, ordinal: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _check(library, library.cuDeviceGet(ctypes.byref(handle), ordinal))
    return handle


def _uuid(library: Any, ordinal: int) -> UUID:
    handle, raw = _handle(library, ordinal), (ctypes.c_ubyte * 16)()
    # The second version names an instance of a card that is cut into several (MIG), the first one the whole card.
    get = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
    _check(library, get(ctypes.byref(raw), handle))
    return UUID(bytes=bytes(raw))


def _driver() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise BackendError(
            f"a card was asked for, but NVIDIA's driver cannot be loaded ({error}): install it, or compute on the "
            "CPU (leave out --engine; with `mdps gpu-check` add --cpu)"
        ) from error


def _check(library: Any, code: int) -> None:
    if code == _NO_CARD:
        raise BackendError(_no_card())
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown").decode(errors="replace")
        remedy = "update NVIDIA's driver" if code in _TOO_OLD else "repair the driver until `nvidia-smi` works"
        raise BackendError(f"CUDA does not start (error {code}, {reason}): {remedy}")


def _no_card() -> str:
    hidden = f" ({_filter()})" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
    return f"CUDA shows this process no card{hidden}: check that, and that `nvidia-smi` lists one"


def _filter() -> str:
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}"


def _check_name(device: str | int) -> None:
    """UsageError for what can name no card on any machine; an empty text is left to `find`."""
    text = str(device).strip()
    if not _NAME.fullmatch(text) or text.startswith("-"):
        raise UsageError(
            f"there is no card {text!r}: give an index as `nvidia-smi` shows it, or a UUID or its beginning, of "
            "`nvidia-smi -L`"
        )


def _is_meant(card: Card, text: str) -> bool:
    if text.isdecimal():
        return card.index == int(text)
    uuid = card.uuid.lower()
    return len(text) >= 4 and (uuid.startswith(text.lower()) or uuid.partition("-")[2].startswith(text.lower()))


def _bare(uuid: str) -> UUID | str:
    """Without the kind in front of it, "GPU-" or "MIG-"."""
    try:
        return UUID(uuid.partition("-")[2])
    except ValueError:
        return uuid


def _card_of_library(pynvml: Any, index: int, driver: str) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    free = total = None
    with suppress(pynvml.NVMLError):  # not supported where there is no memory of its own
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        free, total = int(memory.free), int(memory.total)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return Card(index, uuid, name, f"{major}.{minor}", free, total, driver)


def _cards_of_tool() -> tuple[Card, ...]:
    query = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return tuple(_card_of_line(line) for line in done.stdout.splitlines() if line.strip())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def _card_of_line(line: str) -> Card:
    index, uuid, name, capability, free, total, driver = (part.strip() for part in line.split(","))
    return Card(int(index), uuid, name, capability, _bytes(free), _bytes(total), driver)


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) * MIB if mebibytes.isdecimal() else None  # otherwise "[N/A]"
