"""The choice of a backend: measured, written down, read again; a bad cache costs a warning and nothing else."""

import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import BackendError, UsageError, choice, load
from mdps.runtime.bundle import Bundle, LoadOptions
from mdps.runtime.choice import CpuSituation, choose, installed
from mdps.runtime.engines import ENGINES
from mdps.runtime.errors import BackendWarning
from mdps.runtime.manifest import Manifest
from mdps.runtime.user_cache import cache_file

SITUATION = CpuSituation("bundle", "cpu", 2, 1, {"onnxruntime": "1", "openvino": "2"})
BOTH = ("onnxruntime", "openvino")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's file, in a folder that does not exist yet."""
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path / "not" / "yet"))
    return tmp_path / "not" / "yet" / "engines.json"


@pytest.fixture(autouse=True)
def both_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "installed", lambda: BOTH)
    monkeypatch.setattr(choice, "MEASURED_SECONDS", 0.05)


class Probes:
    """Backends that take so many milliseconds a step, or fail; says what happened."""

    def __init__(self, **milliseconds: float | None) -> None:
        self.milliseconds, self.ran, self.closed = milliseconds, [], []

    def __call__(self, name: str, opened: ExitStack) -> Callable[[], None]:
        opened.callback(self.closed.append, name)

        def probe() -> None:
            self.ran.append(name)
            if (pause := self.milliseconds[name]) is None:
                raise BackendError(f"{name} is broken")
            time.sleep(pause / 1000)

        return probe


def refuse(*_: Any) -> Any:
    raise AssertionError("measured again")


@pytest.mark.parametrize(("slow", "fast"), [BOTH, BOTH[::-1]])
def test_the_faster_one_is_chosen_and_written_down(cache: Path, slow: str, fast: str) -> None:
    probes = Probes(**{slow: 12, fast: 2})
    assert choose(SITUATION, probes) == fast
    assert sorted(probes.closed) == sorted(BOTH)
    (entry,) = json.loads(cache.read_text()).values()
    assert (entry["engine"], entry["cpu"], entry["threads"]) == (fast, "cpu", 2)
    assert entry["step_ms"][slow] > 12 > entry["step_ms"][fast] >= 2
    assert [path.name for path in cache.parent.iterdir()] == ["engines.json"]
    assert choose(SITUATION, refuse) == fast


def test_steps_are_measured_in_turns_after_a_warm_up(cache: Path) -> None:
    probes = Probes(onnxruntime=1, openvino=1)
    choose(SITUATION, probes)
    warm_up, ran = probes.ran[:2], probes.ran[2:]
    assert warm_up == list(BOTH)
    rounds = [ran[start : start + 2] for start in range(0, len(ran), 2)]
    assert len(rounds) >= choice.LEAST_ROUNDS
    assert all(one == list(BOTH)[:: -1 if index % 2 else 1] for index, one in enumerate(rounds))


@pytest.mark.parametrize(
    "change",
    [
        {"bundle": "b"},
        {"cpu": "c"},
        {"threads": 1},
        {"samples": 4},
        {"versions": {"onnxruntime": "1", "openvino": "3"}},
    ],
)
def test_another_situation_is_measured_itself(cache: Path, change: dict[str, Any]) -> None:
    choose(SITUATION, Probes(onnxruntime=1, openvino=9))
    assert choose(replace(SITUATION, **change), Probes(onnxruntime=9, openvino=1)) == "openvino"
    assert choose(SITUATION, refuse) == "onnxruntime"
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, json.dumps({SITUATION.key: {"step_ms": {}}}).encode()],
)
def test_a_damaged_cache_is_a_warning_and_repaired(cache: Path, content: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    with pytest.warns(BackendWarning, match=r"engines\.json is damaged"):
        assert choose(SITUATION, Probes(onnxruntime=9, openvino=1)) == "openvino"
    assert choose(SITUATION, refuse) == "openvino"


def test_a_remembered_backend_that_does_not_exist_does_not_count(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps({SITUATION.key: {"engine": "rm -rf"}}))
    assert choose(SITUATION, Probes(onnxruntime=9, openvino=1)) == "openvino"


def test_an_unwritable_cache_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path / "file"))
    with pytest.warns(BackendWarning, match="not remembered and will be measured again") as said:
        assert choose(SITUATION, Probes(onnxruntime=1, openvino=9)) == "onnxruntime"
    assert len(said) == 1


def test_a_write_that_is_cut_off_leaves_the_old_choices(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(SITUATION, Probes(onnxruntime=1, openvino=9))
    before = cache.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(BackendWarning, match="No space left"):
        choose(replace(SITUATION, threads=1), Probes(onnxruntime=1, openvino=9))
    assert cache.read_bytes() == before
    assert [path.name for path in cache.parent.iterdir()] == ["engines.json"]


def test_the_cache_stays_small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdps.runtime.user_cache.KEPT", 3)
    for threads in range(1, 6):
        choose(replace(SITUATION, threads=threads), Probes(onnxruntime=0, openvino=0))
    assert [entry["threads"] for entry in json.loads(cache.read_text()).values()] == [3, 4, 5]


def test_a_backend_that_fails_is_left_out_and_tried_again_next_time(cache: Path) -> None:
    with pytest.warns(BackendWarning, match="openvino is left out of the choice: openvino is broken"):
        assert choose(SITUATION, Probes(onnxruntime=1, openvino=None)) == "onnxruntime"
    assert not cache.exists()
    with (
        pytest.warns(BackendWarning, match="left out"),
        pytest.raises(BackendError, match="onnxruntime is broken"),
    ):
        choose(SITUATION, Probes(onnxruntime=None, openvino=None))


def test_a_single_backend_is_taken_unmeasured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "installed", lambda: ("openvino",))
    assert choose(SITUATION, refuse) == "openvino"
    assert not cache.exists()


def test_installed_is_what_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setitem(sys.modules, "MNN", None)
    assert installed() == ("onnxruntime",)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendError, match=r"mdps\[cpu\].*mdps\[openvino\]"):
        installed()


def test_a_backend_whose_scores_differ_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # whatever is asked for is there
    assert installed() == ("onnxruntime", "openvino", "mnn")
    assert [engine.name for engine in ENGINES if engine.arithmetic] == ["openvino-bf16"]


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MDPS_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_file(choice.FILE_NAME) == tmp_path / ".cache" / "mdps" / "engines.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_file(choice.FILE_NAME) == tmp_path / ".cache" / "mdps" / "engines.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "xdg"))
    assert cache_file(choice.FILE_NAME) == tmp_path / "xdg" / "mdps" / "engines.json"
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path / "ours"))
    assert cache_file(choice.FILE_NAME) == tmp_path / "ours" / "engines.json"


def test_a_user_without_a_home_is_only_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MDPS_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.warns(BackendWarning, match="set MDPS_CACHE"):
        assert choose(SITUATION, Probes(onnxruntime=1, openvino=9)) == "onnxruntime"


# A real bundle


def test_the_situation_is_the_bundles_files_and_not_its_calibration(tiny_bundle: Path) -> None:
    manifest = Manifest.read(tiny_bundle, verify=False)
    here = CpuSituation.here(manifest, 2, 1)
    assert here == CpuSituation.here(replace(manifest, name="other", calibrations={}), 2, 1)
    files = manifest.files | {"score.onnx": replace(manifest.files["score.onnx"], sha256="0" * 64)}
    assert here.bundle != CpuSituation.here(replace(manifest, files=files), 2, 1).bundle
    assert here.cpu
    assert "onnxruntime" in here.versions


def test_auto_measures_a_bundle_once(tiny_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    with load(tiny_bundle, engine="auto", calibrated=False, threads=1) as detector:
        chosen, score = detector.provenance["engine"], detector(picture).score
    (entry,) = json.loads(cache.read_text()).values()
    assert entry["engine"] == chosen == min(entry["step_ms"], key=entry["step_ms"].get)
    monkeypatch.setattr(choice, "measure", refuse)
    other = next(name for name in BOTH if name != chosen)
    for name in (chosen, other):  # what is written decides, not a new look
        entry["engine"] = name
        cache.write_text(json.dumps({CpuSituation.here(detector.manifest, 1, 1).key: entry}))
        with load(tiny_bundle, engine="auto", calibrated=False, threads=1) as again:
            assert again.provenance["engine"] == name
            assert again(picture).score == pytest.approx(score, abs=1e-3)


def test_torch_runs_the_guided_step_of_a_traced_bundle_whatever_the_backend(tiny_bundle: Path, cache: Path) -> None:
    from mdps.runtime.loading import choose_engine

    bundle = Bundle.read(tiny_bundle)
    guided = replace(bundle.manifest.graphs["guided_step"], session="traced")
    traced = replace(bundle.manifest, graphs=bundle.manifest.graphs | {"guided_step": guided})
    assert choose_engine(replace(bundle, manifest=traced), LoadOptions(engine="auto")).name == "onnxruntime"
    assert not cache.exists(), "there was nothing to compare"


def test_wrong_backends(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no engine 'tvm': choose one of onnxruntime, openvino"):
        load(tiny_bundle, engine="tvm", calibrated=False)
    for engine in ("openvino", "auto"):
        with pytest.raises(UsageError, match=r"computes on none: choose one of .*onnxruntime-cuda"):
            load(tiny_bundle, engine=engine, device="0", calibrated=False)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendError, match=r'pip install "mdps\[openvino\]"'):
        load(tiny_bundle, engine="openvino", calibrated=False)


def test_the_command_line_warns_in_one_line(
    tiny_bundle: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openvino")
    cache.parent.mkdir(parents=True)
    cache.write_text("damaged")
    image = tmp_path / "part.png"
    Image.effect_noise((32, 32), 60).save(image)
    options = ["--out", str(tmp_path / "out"), "--scores-only", "--engine", "auto", "--threads", "1"]
    assert run(cli, ["predict", str(tiny_bundle), str(image), *options]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"Warning: the choice of an engine cannot be read and is made again: {cache} is damaged")
    assert err.count("\n") == 1


def test_nothing_is_said_of_a_sound_cache(cache: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(SITUATION, Probes(onnxruntime=1, openvino=2))
        choose(SITUATION, refuse)
