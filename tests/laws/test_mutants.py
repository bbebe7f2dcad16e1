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


def test_every_mutant_has_one_place_and_its_tests_exist(mutants):
    assert not [name for name, count in Counter(m.name for m in mutants.MUTANTS).items() if count > 1]
    for mutant in mutants.MUTANTS:
        place = mutants.place_of(mutant, ROOT)
        compile(place.replaced(mutants.written(mutant)), place.file, "exec")
        for test in mutant.tests:
            assert (ROOT / "tests" / mutants.test_of(test, ROOT).partition("::")[0]).is_file()


STEP = """class Plain:
    def update(self, x, noise):
        # größer
        known = x + noise * 2
        return known - noise
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "runtime" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "deep" / "test_steps.py").write_text("def test_step():\n    pass\n")
    return tmp_path


def mutant(mutants, function="Plain.update", code="x + noise * 2", broken="x - noise"):
    return mutants.Mutant("name", function, code, broken, "wrong", ("test_step[1]",))


@pytest.mark.parametrize(
    "text",
    [
        STEP,
        STEP.replace("x + noise * 2", "(x\n            + noise * 2  # why\n        )"),
        "import sys\n\n\nclass Other:\n    def update(self, x, noise):\n        return x\n\n\n" + STEP,
        "if True:\n" + "".join(f"    {line}\n" for line in STEP.splitlines()),
    ],
    ids=["as it is", "laid out anew", "further down", "further in"],
)
def test_a_function_is_found_wherever_it_lies(mutants, tree, text):
    file = tree / "runtime" / "deep" / "moved.py"
    file.write_text(text)
    (tree / "runtime" / "other.py").write_text("def update(x, noise):\n    return x + noise\n")
    changed = mutant(mutants)
    with mutants.broken(changed, tree):
        names = {}
        exec(compile(file.read_text(), "moved.py", "exec"), names)
        assert names["Plain"]().update(7, 2) == (7 - 2) - 2
    assert file.read_text() == text
    assert mutants.test_of(changed.tests[0], tree) == "deep/test_steps.py::test_step[1]"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"function": "Plain.updated"}, "there is no function Plain.updated"),
        ({"code": "noise"}, "has this 2 times"),
        ({"code": "x - noise"}, "has this 0 times"),
    ],
)
def test_what_is_not_there_once_is_refused(mutants, tree, change, said):
    (tree / "runtime" / "step.py").write_text(STEP)
    with pytest.raises(mutants.NotFoundError, match=said):
        mutants.place_of(mutant(mutants, **change), tree)


def test_a_test_that_two_files_have_is_named_with_its_file(mutants, tree):
    (tree / "tests" / "test_other.py").write_text("def test_step():\n    pass\n")
    with pytest.raises(mutants.NotFoundError, match="2 files"):
        mutants.test_of("test_step", tree)
    assert mutants.test_of("test_other::test_step", tree) == "test_other.py::test_step"
    with pytest.raises(mutants.NotFoundError, match="0 files"):
        mutants.test_of("test_none", tree)


def test_the_table_has_a_row_a_mutant_and_all_were_noticed(mutants):
    rows = [line.split(" | ") for line in (ROOT / "docs" / "develop" / "mutations.md").read_text().splitlines()[8:]]
    assert [row[0] for row in rows] == [f"| `{mutant.name}`" for mutant in mutants.MUTANTS]
    assert {row[3] for row in rows} == {"killed"}


@pytest.mark.skipif(sys.platform == "win32", reason="there are no forks")
def test_a_line_that_matters_is_noticed_and_one_that_does_not_is_not(tmp_path):
    """One mutant of the list, and one that changes nothing."""
    program = tmp_path / "mutants.py"
    text = PROGRAM.read_text().replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
    key = 'KEY = next(mutant for mutant in MUTANTS if mutant.name == "noise-key")'
    same = 'Mutant("same", "NoiseBank._one", "step_index + 1", "1 + step_index", "nothing", KEY.tests),'
    text = re.sub(r"^LOADED = .*$", 'LOADED = ["pytest", "numpy"]', text, flags=re.MULTILINE)  # neither needs torch
    program.write_text(text.replace("@contextmanager", f"{key}\nMUTANTS = (KEY, {same})\n\n\n@contextmanager", 1))
    command = [sys.executable, program, "--report", tmp_path / "report.md"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    test = "test_equal_keys_give_equal_noise_and_others_do_not"
    assert ran.stdout.splitlines() == [f"noise-key killed {test}", "same survived nothing"], ran.stderr
    rows = (tmp_path / "report.md").read_text().splitlines()[8:]
    assert [row.split(" | ")[3:] for row in rows] == [["killed", f"`{test}` |"], ["survived", "`nothing` |"]]
