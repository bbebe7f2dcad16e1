"""Options that are made from a dataclass's fields, and `--set` for the same fields."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest

from mdps.cli import cli
from mdps.commands import COMMANDS
from mdps.commands.fields import fields, settings
from mdps.commands.terminal import run
from mdps.export.options import ExportOptions
from mdps.runtime.errors import UsageError
from mdps.runtime.option import Option, build, check_ranges, settings_of

FOLDER = Path(fields.__code__.co_filename).parent


@dataclass(frozen=True)
class Inner:
    heads: Annotated[int | None, Option("Attention heads.", low=1)] = None
    shape: Annotated[tuple[str, int] | None, Option("Made of a word.", choices={"square": lambda: ("square", 4)})] = (
        None
    )


@dataclass(frozen=True)
class Given:
    side: Annotated[int, Option("Side of the images.", low=8)] = 64
    rate: Annotated[float, Option("Of learning.", low=0, above=True)] = 1e-4
    share: Annotated[float | None, Option("Of the images.", low=0, high=1)] = None
    kind: Annotated[Literal["l1", "l2"] | None, Option("Of the norm.")] = None
    steps: Annotated[tuple[int, ...], Option("Numbers of steps.", low=1, example="2,4")] = (3, 5)
    box: Annotated[tuple[int, int] | None, Option("LEFT TOP.")] = None
    mask: Annotated[bool | None, Option("A second pass.", flag="--mask/--no-mask")] = None
    quick: Annotated[bool, Option("Leave out what is slow.")] = False
    folder: Annotated[Path | None, Option("Where to.")] = None
    limit: Annotated[int, Option("Of a body.", low=0, above=True, unit=2**20, flag="--limit-mib")] = 16 * 2**20
    inner: Inner = field(default_factory=Inner)
    calm: Annotated[int, Option("Seconds to wait.", low=0, seldom=True)] = 3
    silent: int = 7


ALWAYS = [one for one in settings_of(Given) if one.name not in ("quick", "calm")]


def called(*words: str, decorator: Any = None) -> tuple[int, dict[str, Any]]:
    """Exit code and what the command was called with."""
    seen: dict[str, Any] = {}

    @click.command()
    @(decorator or fields(Given))
    def command(**options: Any) -> None:
        seen.update(options)

    return run(command, list(words)), seen


def set_to(*pairs: str) -> tuple[int, dict[str, Any]]:
    words = [word for pair in pairs for word in ("--set", pair)]
    code, seen = called(*words, decorator=settings(Given, ALWAYS, of="a field"))
    return code, seen.get("settings", {})


def test_what_is_not_given_is_the_dataclass_own() -> None:
    code, options = called()
    assert (code, build(Given, options)) == (0, Given())


def test_every_kind_of_field_is_read() -> None:
    text = (
        "--side 8 --rate 0.5 --share 1 --kind l2 --steps 1,2 --box -1 2 --no-mask --quick --folder a/b --limit-mib 0.5 "
        "--heads 4 --shape square"
    )
    code, options = called(*text.split())
    wanted = Given(8, 0.5, 1.0, "l2", (1, 2), (-1, 2), False, True, Path("a/b"), 2**19, Inner(4, ("square", 4)))
    assert (code, build(Given, options)) == (0, wanted)
    assert called("--steps", "none")[1]["steps"] == ()


def test_set_reads_the_same_fields() -> None:
    pairs = (
        "side=8",
        "rate=0.5",
        "kind=l2",
        "steps=1,2",
        "box=-1,2",
        "mask=no",
        "folder=a/b",
        "limit_mib=0.5",
        "heads=4",
    )
    code, given = set_to(*pairs, "--shape=square")
    wanted = Given(8, 0.5, None, "l2", (1, 2), (-1, 2), False, False, Path("a/b"), 2**19, Inner(4, ("square", 4)))
    assert (code, build(Given, given)) == (0, wanted)
    assert set_to() == (0, {})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--side", "7"], "7 is not in the range x>=8"),
        (["--rate", "0"], "0 is not in the range x>0"),
        (["--kind", "l3"], "'l3' is not one of 'l1', 'l2'"),
        (["--steps", "1,x"], "'1,x' is neither 'none' nor a list such as 2,4"),
        (["--steps", "1,0"], "'1,0' is neither 'none' nor a list such as 2,4"),
        (["--silent", "3"], "No such option"),
    ],
)
def test_a_wrong_value_is_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(*words)[0] == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        ("step=3", "there is no key 'step': did you mean steps"),
        ("colour=red", "there is no key 'colour': `--set help` lists them"),
        ("quick=yes", "there is no key 'quick'"),
        ("silent=3", "there is no key 'silent'"),
        ("side", "'side' should be KEY=VALUE"),
        ("side=7", "side: 7 is not in the range x>=8"),
        ("kind=l3", "kind: 'l3' is not one of 'l1', 'l2'"),
        ("mask=perhaps", "mask: 'perhaps' is not a valid boolean"),
        ("box=1", "box: "),
        ("shape=round", "shape: 'round' is not"),
    ],
)
def test_a_wrong_setting_is_a_sentence(pair: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert set_to(pair)[0] == 2
    assert sentence in capsys.readouterr().err


def test_what_is_set_seldom_is_a_key_and_no_option() -> None:
    assert called("--calm", "4")[0] == 2
    assert set_to("calm=4") == (0, {"calm": 4})


def test_a_key_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert set_to("side=8", "side=9")[0] == 2
    assert "side is given twice" in capsys.readouterr().err


def test_the_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert set_to("help")[0] == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=1) == ["calm=N", "Seconds to wait. [default: 3]"]
    assert lines[1].split(maxsplit=1) == ["side=N", "Side of the images. [default: 64]"]
    assert [line.split("=")[0] for line in lines[5:8]] == ["steps", "box", "mask"]
    assert "shape=square" in lines[-1]


def test_help_shows_defaults_and_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    called("--help")
    text = " ".join(capsys.readouterr().out.split())
    for shown in (
        "[default: 64; x>=8]",
        "[default: 0.0001; x>0]",
        "[default: 3,5]",
        "[default: 16; x>0]",
        "--mask / --no",
    ):
        assert shown in text
    assert "silent" not in text


def test_recipes_show_their_defaults_and_leave_the_option_open(capsys: pytest.CaptureFixture[str]) -> None:
    recipes = {"paper": Given(), "small": Given(side=32, share=0.5)}
    decorator = fields(Given, without=["shape", "heads"], recipes=recipes)
    assert called(decorator=decorator)[1] == dict.fromkeys(one for one in called()[1] if one not in ("shape", "heads"))
    called("--help", decorator=decorator)
    text = " ".join(capsys.readouterr().out.split())
    assert "Side of the images. [default: 64, small: 32]" in text
    assert "Of the images. [default: none, small: 0.5]" in text
    assert "Of learning. [default: 0.0001]" in text


def test_ranges_hold_without_a_command_line_too() -> None:
    check_ranges(Given())
    for wrong, sentence in (
        (Given(side=7), "side is 7; it must be at least 8"),
        (Given(rate=0), "rate is 0; it must be positive"),
        (Given(share=1.5), "share is 1.5; it must lie between 0 and 1"),
        (Given(steps=(1, 0)), "steps is 0; it must be at least 1"),
    ):
        with pytest.raises(UsageError, match=sentence):
            check_ranges(wrong)


def test_a_value_of_no_field_is_never_lost() -> None:
    with pytest.raises(TypeError, match="Given has no colour"):
        build(Given, {"colour": "red"})


# All commands


def every_option() -> dict[str, list[click.Option]]:
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {
        name: [one for one in command.params if isinstance(one, click.Option)]
        for name, command in commands.items()
        if command is not None
    }


def test_every_command_is_in_the_list_of_help() -> None:
    assert list(every_option()) == list(COMMANDS)
    sources = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")]
    written = [name for source in sources for name in re.findall(r"^@click\.command\([\s\S]*?^def (\w+)", source, re.M)]
    assert sorted(written) == sorted(name.replace("-", "_") for name in COMMANDS)


def test_every_option_says_what_it_is_for() -> None:
    silent = [f"{name} {one.opts[0]}" for name, options in every_option().items() for one in options if not one.help]
    assert not silent


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_needs_neither_torch_nor_an_engine(name: str) -> None:
    code = (
        "import sys; from mdps.cli import cli; from mdps.commands.terminal import run; "
        f"run(cli, [{name!r}, '--help']); "
        "print(sorted({'torch', 'onnx', 'onnxruntime', 'openvino', 'anomalib', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


TABLE = FOLDER.parent / "docs/develop/options.md"


def keys_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    assert run(cli, [command, "--set", "help"]) == 0
    return {line.partition("=")[0] for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize("name", ["bench", "peers", "reproduce", "sweep", "trade"])
def test_options_that_became_keys_are_still_to_be_had(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page lists what each study could be told before its options became keys."""
    rows = {row.split("|")[1].strip(" `"): row.split("|")[4:6] for row in TABLE.read_text().splitlines() if "| " in row}
    kept, keys = (set(re.findall(r"`([-\w]+)`", cell)) for cell in rows[name])
    assert kept <= {one.opts[0] for one in every_option()[name]}
    own = {key for key in keys if not key.startswith("-")} - set(COMMANDS)
    assert own
    assert own - {"samples", "steps"} <= keys_of(name, capsys)


def test_a_study_can_be_told_what_an_export_can(capsys: pytest.CaptureFixture[str]) -> None:
    of_files = {"engine", "compute-capability", "max-batch", "count-nodes"}
    export = {one.key for one in settings_of(ExportOptions)} - of_files
    decided = {"reproduce": {"samples", "method"}, "trade": {"gradient", "steps", "mask-pass", "method"}}
    for name, left_out in decided.items():
        assert keys_of(name, capsys) >= export - left_out
        assert not keys_of(name, capsys) & left_out
