"""Cards without a card: a fake NVML, a fake nvidia-smi and a fake CUDA driver stand in for the libraries."""

import ctypes
import importlib.util
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from uuid import UUID

import pytest

from mdps.runtime import cards as cards_module
from mdps.runtime.cards import Card, cards, choose, cuda_cards, find
from mdps.runtime.errors import BackendError, UsageError

GB = 10**9
L4, A2, T4 = (f"GPU-{n}{'0' * 7}-1111-2222-3333-{'4' * 12}" for n in "abc")
CAPABILITIES = {L4: (8, 9), A2: (8, 6), T4: (7, 5)}


class FakeNvml:
    """The functions of pynvml that are called; cards are (uuid, name, capability, memory or None)."""

    class NVMLError(Exception):
        pass

    def __init__(self, *rows, starts=True):
        self.rows, self.starts, self.open = rows, starts, 0

    def nvmlInit(self):  # noqa: N802 - the library's name, as below
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.1"

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.rows)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.rows[index]

    def nvmlDeviceGetUUID(self, row):  # noqa: N802
        return row[0]

    def nvmlDeviceGetName(self, row):  # noqa: N802
        return row[1]

    def nvmlDeviceGetCudaComputeCapability(self, row):  # noqa: N802
        return row[2]

    def nvmlDeviceGetMemoryInfo(self, row):  # noqa: N802
        if row[3] is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(free=row[3][0], total=row[3][1])


class FakeCuda:
    """The functions of the CUDA driver that are called: it shows `uuids`, in its order."""

    def __init__(self, *uuids, fails_with=0):
        self.uuids, self.code = uuids, fails_with

    def cuInit(self, _):  # noqa: N802
        return self.code

    def cuGetErrorString(self, _, text):  # noqa: N802
        text._obj.value = b"system not yet initialized"
        return 0

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = len(self.uuids)
        return 0

    def cuDeviceGet(self, handle, ordinal):  # noqa: N802
        handle._obj.value = 70 + ordinal
        return 0

    def cuDeviceGetAttribute(self, value, attribute, handle):  # noqa: N802
        major_minor = CAPABILITIES[self.uuids[handle.value - 70]]
        value._obj.value = major_minor[{75: 0, 76: 1}[attribute]]
        return 0

    def cuDeviceGetUuid_v2(self, raw, handle):  # noqa: N802
        raw._obj[:] = UUID(self.uuids[handle.value - 70][4:]).bytes
        return 0


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml(
        (L4, "NVIDIA L4", (8, 9), (20 * GB, 24 * GB)),
        (A2, "NVIDIA A2", (8, 6), (2 * GB, 16 * GB)),
        (T4, "Tesla T4", (7, 5), None),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def show(monkeypatch):
    """Sets what the CUDA driver shows this process."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def show(*uuids, **how):
        monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeCuda(*uuids, **how))

    return show


def test_nvml_lists_the_cards(nvml):
    found = cards()
    assert found[0] == Card(0, L4, "NVIDIA L4", "8.9", 20 * GB, 24 * GB, "580.1")
    assert (found[2].free, found[2].total) == (None, None)
    assert nvml.open == 0
    assert str(found[1]) == f"card 1 (NVIDIA A2, {A2})"


def test_without_a_driver_there_are_no_cards(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(starts=False))
    assert cards() == ()


def test_nvidia_smi_is_asked_where_the_module_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    lines = f"0, {L4}, NVIDIA L4, 8.9, 19000, 23034, 580.1\n1, {A2}, NVIDIA GB10, 12.1, [N/A], [N/A], 580.1\n\n"
    monkeypatch.setattr(subprocess, "run", lambda query, **_: SimpleNamespace(stdout=lines))
    first, second = cards()
    assert first == Card(0, L4, "NVIDIA L4", "8.9", 19000 * 2**20, 23034 * 2**20, "580.1")
    assert (second.index, second.free) == (1, None)
    for answer in ("a line of another tool\n", None):
        monkeypatch.setattr(subprocess, "run", lambda query, answer=answer, **_: SimpleNamespace(stdout=answer or "x"))
        assert cards() == ()


def test_a_card_is_chosen_by_index_or_uuid_whatever_order_cuda_has(nvml, show):
    show(T4, L4, A2)  # the fastest first, or CUDA_VISIBLE_DEVICES=2,0,1
    assert [choose(device).ordinal for device in (0, "1", 2)] == [1, 2, 0]
    assert choose(A2) == replace(cards()[1], ordinal=2)
    assert choose("gpu-b0000000").name == "NVIDIA A2"
    assert choose("c000") == replace(cards()[2], ordinal=0)
    assert choose(None) == replace(cards()[2], ordinal=0)


def test_capabilities_come_in_the_order_of_cuda(nvml, show):
    show(T4, A2)
    assert cards_module.cuda_capabilities() == ("7.5", "8.6")
    assert [card.compute_capability for card in cards()] == ["8.9", "8.6", "7.5"]
    show(fails_with=100)
    with pytest.raises(BackendError, match="shows this process no card"):
        cards_module.cuda_capabilities()


def test_a_card_that_is_not_there_is_named_with_those_that_are(nvml, show):
    show(L4, A2, T4)
    with pytest.raises(UsageError, match=r"no card '3': choose an index or a UUID of card 0 \(NVIDIA L4, GPU-a"):
        choose(3)
    for device in ("GPU-d", "cuda:0", "-1", ""):
        with pytest.raises(UsageError, match="there is no card"):
            choose(device)
    with pytest.raises(UsageError, match="'GPU-' is the beginning of 3 cards"):
        choose("GPU-")


def test_a_card_that_cuda_visible_devices_hides_is_an_error_and_not_another_card(nvml, show, monkeypatch):
    show(A2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose(1) == replace(cards()[1], ordinal=0)
    with pytest.raises(UsageError, match=r"card 0 \(NVIDIA L4.*hidden .*CUDA_VISIBLE_DEVICES=1, it sees card 1 \(NVID"):
        choose(0)


def test_cards_that_nothing_lists_can_be_used_but_not_chosen(show, monkeypatch):
    monkeypatch.setattr(cards_module, "cards", lambda: ())
    show(L4)
    assert choose(None) == Card(ordinal=0)
    for there, asked in ((True, False), (False, True)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: there or None)
        with pytest.raises(BackendError, match="no card is listed here") as raised:
            choose(0)
        assert ("nvidia-ml-py" in str(raised.value)) == asked


def test_an_instance_of_a_card_that_is_cut_up_is_no_card_of_the_list(nvml, show):
    show(f"MIG-{L4[4:-1]}5")
    assert choose(None) == Card(ordinal=0)


def test_a_driver_that_is_missing_or_broken_is_a_sentence(show, monkeypatch):
    show(fails_with=802)
    with pytest.raises(BackendError, match=r"error 802, system not yet initialized"):
        cuda_cards()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for how in ({"fails_with": 100}, {}):
        show(**how)
        with pytest.raises(BackendError, match=r"no card \(CUDA_VISIBLE_DEVICES=7\)"):
            cuda_cards()

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    sentence = r"driver cannot be loaded \(.*cannot open.*leave out --engine; .*gpu-check` add --cpu"
    for device in (None, "7", "GPU-", "b000"):
        with pytest.raises(BackendError, match=sentence):
            choose(device)
    for device in ("foo", "-1", "cuda:0", "1.5"):  # wrong on every machine, whatever the driver
        with pytest.raises(UsageError, match=f"there is no card '{device}': give an index"):
            choose(device)
        with pytest.raises(UsageError, match=f"there is no card '{device}': give an index"):
            find(device, ())


@pytest.mark.parametrize(
    ("code", "remedy"), [(35, "update NVIDIA's driver"), (803, "update NVIDIA's driver"), (802, "repair the driver")]
)
def test_a_driver_that_is_too_old_is_to_be_updated(show, code, remedy):
    show(fails_with=code)
    with pytest.raises(BackendError, match=remedy):
        cuda_cards()
