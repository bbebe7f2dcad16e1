"""Where the time of a step goes."""

import re
from pathlib import Path

import pytest

from mdps.benchmarks.step_profile import main, table
from mdps.runtime.openvino import has_bfloat16


def test_both_engines_say_what_a_step_is_made_of(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    openvino = pytest.importorskip("openvino")
    assert main([str(tiny_bundle), "--runs", "1"]) == 0
    said = capsys.readouterr().out
    ours, other, *half = re.split(r"openvino(?:-bf16)?, guided_step\.openvino\.onnx", said)
    assert len(half) == has_bfloat16(openvino.Core())
    assert "onnxruntime, guided_step.onnx" in ours
    assert "| Conv |" in ours
    assert "| Convolution |" in other


def test_shares_add_up_and_small_ones_are_one_row() -> None:
    assert table({"a": 600.0, "b": 399.0, "c": 1.0}).splitlines() == [
        "| a | 600.0 | 60.0 % |",
        "| b | 399.0 | 39.9 % |",
        "| the rest | 1.0 | 0.1 % |",
    ]


def test_a_graph_that_a_bundle_lacks_is_one_sentence(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_bundle), "--graph", "no_step"]) == 2
    assert "has no ONNX graph 'no_step'" in capsys.readouterr().err
