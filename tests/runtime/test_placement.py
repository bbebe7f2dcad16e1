"""A bundle's card is chosen and has room before anything is opened: FakeCards and a fake CUDA stand in for both."""

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
from click.testing import CliRunner

from mdps.benchmarks.bench.rounds import environment
from mdps.benchmarks.bench.run import where
from mdps.cli import cli
from mdps.runtime import cards as cards_module
from mdps.runtime import load, memory, placement
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.cards import Card
from mdps.runtime.engines import ENGINES, named
from mdps.runtime.errors import BackendError, BackendWarning, UsageError
from mdps.runtime.loading import open_pipeline
from mdps.runtime.manifest import PlanEntry
from mdps.runtime.placement import Placement, place
from mdps.runtime.user_cache import cache_file

GB = 10**9


class FakeCards:
    """The cards of a machine, which CUDA shows in the other order; `asked` is what was chosen."""

    def __init__(self, *free):
        names = ("NVIDIA L4", "NVIDIA A2")
        self.rows = tuple(
            Card(i, f"GPU-{i}", names[i], "8.9", amount, 24 * GB, "580.1") for i, amount in enumerate(free)
        )
        self.asked = []

    def cards(self):
        return self.rows

    def choose(self, device):
        self.asked.append(device)
        if device is None:
            return replace(self.rows[-1], ordinal=0)
        card = cards_module.find(device, self.rows)
        return replace(card, ordinal=len(self.rows) - 1 - card.index)

    def take(self, amount):
        self.rows = tuple(replace(card, free=card.free - amount) for card in self.rows)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path))

    def machine(*free):
        fake = FakeCards(*free)
        monkeypatch.setattr(placement, "cards", fake.cards)
        monkeypatch.setattr(placement, "choose", fake.choose)
        return fake

    return machine


def placed(bundle, engine="onnxruntime-cuda", **how):
    return place(Bundle.read(bundle), LoadOptions(engine=engine, **how), named(engine))


def test_who_computes_on_a_card():
    found = {engine.name for engine in ENGINES if engine.on_card}
    assert found == {"tensorrt", "tensorrt-rtx", "onnxruntime-cuda", "onnxruntime-tensorrt"}


def test_the_card_is_the_one_asked_for(tiny_bundle, machine):
    fake = machine(20 * GB, 20 * GB)
    assert placed(tiny_bundle, device="0").card.ordinal == 1
    assert placed(tiny_bundle, device="GPU-1").card.ordinal == 0
    assert placed(tiny_bundle).card.index == 1
    assert placed(tiny_bundle, "tensorrt").card.index == 1
    assert fake.asked == ["0", "GPU-1", None, None]
    with pytest.raises(UsageError, match="no card '7'"):
        placed(tiny_bundle, device="7")


def test_a_card_for_what_computes_on_none_is_an_error(tiny_bundle, machine):
    fake = machine(20 * GB)
    assert placed(tiny_bundle, "onnxruntime") is None
    with pytest.raises(UsageError, match="the card '0' was given, but the engine onnxruntime computes on none"):
        placed(tiny_bundle, "onnxruntime", device="0")
    assert fake.asked == []


def test_loading_is_refused_before_anything_is_opened(tiny_bundle, machine, monkeypatch):
    machine(GB // 2, 20 * GB)
    monkeypatch.setattr("mdps.runtime.loading.card_module_of", lambda _: pytest.fail("opened"))
    for engine in ("onnxruntime-cuda", "tensorrt-rtx"):
        with pytest.raises(BackendError, match=r"needs 0\.6 GB .*card 0 \(NVIDIA L4\) has 0\.5 free .*choose card 1"):
            load(tiny_bundle, calibrated=False, device=0, engine=engine)


def test_loading_opens_on_the_card_and_keeps_what_it_took(tiny_bundle, machine, monkeypatch):
    fake, opened = machine(20 * GB, 20 * GB), {}

    class Here:
        @staticmethod
        def open_bundle(engine, bundle, options, card):
            opened.update(ordinal=card.ordinal, engine=engine.name)
            fake.take(3 * GB)  # what the engines would take
            return open_pipeline(bundle, ExitStack(), threads=1)

    monkeypatch.setattr("mdps.runtime.loading.card_module_of", lambda _: Here)
    how = {"engine": "onnxruntime-cuda", "device": "0", "threads": 1, "calibrated": False}
    load(tiny_bundle, **how).close()
    assert opened == {"ordinal": 1, "engine": "onnxruntime-cuda"}
    assert list(json.loads(cache_file(placement.FILE_NAME).read_text()).values()) == [3 * GB]
    machine(2 * GB, GB)
    with pytest.raises(BackendError, match=r"needs 3\.0 GB \(measured on this kind of card"):
        load(tiny_bundle, **how)


def test_a_whole_batch_that_may_not_fit_is_a_warning(tiny_bundle, machine):
    machine(int(0.9 * GB))
    with pytest.warns(BackendWarning, match=r"64 samples at once may need .* GB .*card 0 .* has 0\.9 free"):
        assert placed(tiny_bundle, max_batch=64).card.ordinal == 0


def test_a_card_that_nothing_lists_is_not_judged(tiny_bundle, machine, monkeypatch):
    machine(0)
    monkeypatch.setattr(placement, "choose", lambda device: Card(ordinal=3))
    found = placed(tiny_bundle)
    assert found == Placement(Card(ordinal=3))
    found.loaded()
    assert not cache_file(placement.FILE_NAME).exists()


def test_plans_are_weighed_by_their_own_files(tiny_bundle, machine, monkeypatch):
    fake, seen = machine(20 * GB), []
    monkeypatch.setattr(placement, "estimate", lambda *given: seen.append(given[-1]) or memory.estimate(*given))
    bundle = Bundle.read(tiny_bundle)
    entry = PlanEntry(
        role="guided_step", file="features.onnx", engine="tensorrt", version="10", key="k",
        compute_capabilities=("8.9",), precision="fp32", graph="guided_step.onnx", batch=(1, 1, 8),
        samples=None, types={}, inspected="network",
    )  # fmt: skip
    listed = replace(bundle, manifest=replace(bundle.manifest, plans=(entry,)))
    for engine in ("tensorrt", "onnxruntime-cuda"):
        place(listed, LoadOptions(engine=engine), named(engine))
    assert seen == [{"guided_step": "features.onnx"}] * 2 + [{}] * 2
    assert fake.asked == [None, None]


@pytest.mark.parametrize("command", ["predict", "calibrate", "evaluate", "serve", "bench"])
def test_every_command_that_runs_a_bundle_takes_a_card(command):
    shown = CliRunner().invoke(cli, [command, "--help"], terminal_width=200).output
    assert "--device" in shown
    assert "index as nvidia-smi shows it" in shown
    assert command == "bench" or "|onnxruntime-cuda|" in shown


@pytest.mark.parametrize("command", ["calibrate", "predict"])
def test_a_card_without_a_provider_on_it_is_said_by_the_command(tiny_bundle, tmp_path, command):
    (tmp_path / "good").mkdir()
    from PIL import Image

    Image.new("RGB", (32, 32)).save(tmp_path / "good" / "a.png")
    more = ["--out", str(tmp_path / "out"), "--scores-only"] if command == "predict" else []
    given = [command, str(tiny_bundle), str(tmp_path / "good"), "--device", "1", *more]
    found = CliRunner().invoke(cli, given, standalone_mode=False)
    assert isinstance(found.exception, UsageError)
    assert "computes on none" in str(found.exception)


def test_the_bench_shows_each_process_one_card(monkeypatch):
    monkeypatch.setattr("mdps.benchmarks.bench.run.cards", FakeCards(GB, GB).cards)
    assert [where(device) for device in ("cpu", "cuda", "1")] == [("cpu", None), ("cuda", None), ("cuda", "GPU-1")]
    with pytest.raises(UsageError, match="no card 'gpu'"):
        where("gpu")
    assert environment(1, "GPU-1")["CUDA_VISIBLE_DEVICES"] == "GPU-1"
