"""The list of tests/mutants.py stays true, and the program tells a test that notices from one that does not."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "mutants.py"


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def test_every_line_stands_once_in_its_file_and_its_tests_exist(mutants):
    assert not [name for name, count in Counter(m.name for m in mutants.MUTANTS).items() if count > 1]
    for mutant in mutants.MUTANTS:
        text = (ROOT / mutant.file).read_text()
        assert text.count(mutant.line) == 1, mutant.name
        compile(text.replace(mutant.line, mutant.broken), mutant.file, "exec")
        for test in mutant.tests:
            file, name = re.fullmatch(r"([\w/]+\.py)::(\w+)(?:\[.+\])?", test).groups()
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{mutant.name}: {test}"


def test_the_table_has_a_row_a_mutant_and_all_were_noticed(mutants):
    rows = [line.split(" | ") for line in (ROOT / "docs" / "mutations.md").read_text().splitlines()[8:]]
    assert [row[0] for row in rows] == [f"| `{mutant.name}`" for mutant in mutants.MUTANTS]
    assert {row[3] for row in rows} == {"killed"}


@pytest.mark.skipif(sys.platform == "win32", reason="there are no forks")
def test_a_line_that_matters_is_noticed_and_one_that_does_not_is_not(tmp_path):
    """One mutant of the list, and one that changes nothing."""
    program = tmp_path / "mutants.py"
    text = PROGRAM.read_text().replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
    same = 'Mutant("same", "runtime/noise.py", "INITIAL = -1", "INITIAL = -(1)", "nothing", MUTANTS[7].tests),'
    text = re.sub(r"^LOADED = .*$", 'LOADED = ["pytest", "numpy"]', text, flags=re.MULTILINE)  # neither needs torch
    program.write_text(text.replace("@contextmanager", f"MUTANTS = (MUTANTS[7], {same})\n\n\n@contextmanager", 1))
    command = [sys.executable, program, "--report", tmp_path / "report.md"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    test = "runtime/test_noise.py::test_equal_keys_give_equal_noise_and_others_do_not"
    assert ran.stdout.splitlines() == [f"noise-key killed {test}", "same survived nothing"], ran.stderr
    rows = (tmp_path / "report.md").read_text().splitlines()[8:]
    assert [row.split(" | ")[3:] for row in rows] == [["killed", f"`{test}` |"], ["survived", "`nothing` |"]]
