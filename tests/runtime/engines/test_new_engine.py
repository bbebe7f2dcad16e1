"""A new engine is a module and a row: this one runs a bundle's graphs by onnx's reference evaluator."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from mdps.cli import cli
from mdps.commands.terminal import run
from mdps.runtime import UsageError, choice, engines, load
from mdps.runtime.bundle import LoadFields, LoadOptions
from mdps.runtime.doctor import diagnose
from mdps.runtime.engines import AUTO, ENGINES, Engine, named
from mdps.runtime.engines.interface import TINY_MODEL, Check, GraphFile, module_of, tried
from mdps.runtime.session import Arrays, BoundRun, CopyingRun

ROW = Engine("onnx-reference", "ONNX's reference", __name__, "onnx", ("onnx",), "export", automatic=True)


# All that a new engine is made of: these two functions, a session, and the row above.


def open(engine: Engine, graph: GraphFile, options: LoadOptions) -> "ReferenceSession":
    return ReferenceSession(graph.file)


def probe(engine: Engine) -> Check:
    model = onnx.load_model_from_string(TINY_MODEL)
    return tried(engine, lambda x: ReferenceEvaluator(model).run(None, {"x": x})[0])


class ReferenceSession:
    """A session of the evaluator."""

    provider = f"onnx {onnx.__version__}"

    def __init__(self, path: Path) -> None:
        self._evaluator = ReferenceEvaluator(str(path))
        self.inputs = tuple(self._evaluator.input_names)
        self.outputs = tuple(self._evaluator.output_names)

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        names = list(outputs or self.outputs)
        return dict(zip(names, self._evaluator.run(names, dict(feeds)), strict=True))

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> BoundRun:
        return CopyingRun(self, feeds)

    def close(self) -> None:
        pass


# What the rest of mdps makes of the row.


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engines, "ENGINES", (*ENGINES, ROW))
    monkeypatch.setenv("MDPS_CACHE", str(tmp_path))


@pytest.mark.usefixtures("table")
def test_it_scores_as_onnxruntime_does(tiny_bundle: Path) -> None:
    """The load compares it with the bundle's own reference too: no export has seen this engine."""
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    scores, maps = [], []
    for engine in ("onnxruntime", ROW.name):
        with load(tiny_bundle, engine=engine, calibrated=False, threads=1, warm_up=False) as detector:
            found = detector(picture)
            scores.append(found.score)
            maps.append(found.anomaly_map)
    assert detector.provenance["engine"] == ROW.name
    assert set(detector.provenance["engines"].values()) == {ReferenceSession.provider}
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    np.testing.assert_allclose(maps[1], maps[0], atol=1e-4)


@pytest.mark.usefixtures("table")
def test_doctor_choice_and_options_know_it() -> None:
    assert Check(ROW.name, True) in diagnose().engines
    assert choice.installed()[-1] == ROW.name
    assert LoadOptions(engine=ROW.name).engine == ROW.name
    assert module_of(named(ROW.name)).probe is probe


def test_without_its_row_it_is_unknown() -> None:
    with pytest.raises(UsageError, match="there is no engine 'onnx-reference': choose one of onnxruntime, openvino"):
        LoadOptions(engine=ROW.name)


# The table


@pytest.mark.parametrize("command", ["calibrate", "predict", "serve", "evaluate", "trade", "reproduce"])
def test_the_choices_of_the_command_line_are_the_tables(command: str) -> None:
    (option,) = [one for one in cli.get_command(None, command).params if one.name == "engine"]  # type: ignore[arg-type]
    assert list(option.type.choices) == [*(engine.name for engine in ENGINES), AUTO]  # type: ignore[attr-defined]


def test_an_export_writes_for_the_engines_that_read_files_of_their_own() -> None:
    (option,) = [one for one in cli.get_command(None, "export").params if one.name == "engine"]  # type: ignore[arg-type]
    own = [engine.name for engine in ENGINES if engine.reads in ("own", "plans")]
    assert list(option.type.choices) == own == ["mnn", "tensorrt-rtx", "tensorrt"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("option", ["--backend", "--provider"])
def test_the_options_before_are_gone_and_lead_to_what_came_after(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, ["predict", "bundle", "x.png", "--out", "out", option, "openvino"]) == 2
    said = capsys.readouterr().err
    assert f"No such option '{option}': it is --engine now." in said


def test_rows_differ_and_name_modules_that_are_there() -> None:
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)
    for engine in ENGINES:
        module = module_of(engine)
        assert callable(module.open)
        assert callable(module.probe)
        assert callable(getattr(module, "open_bundle", None)) == engine.on_card
    assert len({engine.form for engine in ENGINES if engine.norms}) == sum(bool(engine.norms) for engine in ENGINES)


def test_type_checkers_know_every_load_option() -> None:
    assert LoadFields.__annotations__.keys() == LoadOptions.__dataclass_fields__.keys()


def test_options_of_a_command_are_those_that_are_no_default() -> None:
    options = LoadOptions(engine="mnn", product="blue", device=0, max_batch=3)
    assert options.command_line("engine", "device", "product") == " --engine mnn --device 0 --product blue"
    assert replace(options, engine="onnxruntime").command_line("engine") == ""
