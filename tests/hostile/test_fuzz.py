"""The fuzzer of tests/hostile/fuzz: it notices what it is there for, and a short run of it finds nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer's child is bounded by Linux's limits")


@pytest.mark.parametrize("target", ["manifest", "checkpoint", "request"])
def test_a_short_run_of_the_fuzzer_finds_nothing(target, tmp_path):
    pytest.importorskip("starlette", reason="the extra [serve] is not installed")
    command = [sys.executable, "tests/hostile/fuzz", target, "--cases", "60", "--seed", "7", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert "60 cases" in run.stdout


def test_the_fuzzer_notices_code_memory_hangs_and_foreign_errors(tmp_path):
    """A target that does each of these things on demand, so that a clean report means something."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, env=_environment())
    for found in ("os.system", "outside.txt", "SIGKILL", "ZeroDivisionError", "CPU seconds", "memory"):
        assert found in run.stdout, run.stdout + run.stderr


def _environment():
    fuzz = ROOT / "tests" / "hostile" / "fuzz"
    return {**os.environ, "PYTHONPATH": f"{fuzz}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


_PROGRAM = """
import os, pathlib, signal
import engine
engine.SECONDS, engine.RESIDENT = 1.0, 64 * 2**20

class Evil:
    refusals = (ValueError,)
    def start(self, folder): pass
    def seeds(self): return [{"x": bytes([n])} for n in range(7)]
    def mutated(self, case, random): return case
    def run(self, case, folder):
        kind = case["x"][0]
        if kind == 0: raise ValueError("documented")
        if kind == 1: 1 / 0
        if kind == 2: os.system("true")
        if kind == 3: pathlib.Path("/tmp/outside.txt").write_text("x")
        if kind == 4: bytearray(100 * 2**20)
        if kind == 5:
            while True: pass
        if kind == 6: os.kill(os.getpid(), signal.SIGKILL)


class Late(Evil):
    def seeds(self): return [{"x": bytes([n])} for n in (0, 1, 2, 3, 4, 6)]

for target in (Evil(), Late()):
    report = engine.fuzz(target, 0, cpu_seconds=9, cases=6, say=lambda text: None)
    print(report)
"""
