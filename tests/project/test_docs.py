"""README and docs say what the program does: a newcomer types their commands as they stand, and follows their links."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from mdps.cli import cli, export

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks/results").glob("*.md"))]
BLOCK = re.compile(r"^(?: {4}|\$ )(?P<command>(?:mdps(?:-export)?|python -m mdps[\w.]*) .*)$", re.MULTILINE)


def typed(text: str) -> list[list[str]]:
    """Words of each command of a page's code blocks and examples, without comments and what it is piped into."""
    lines = BLOCK.findall(text.replace("\\\n", " "))
    return [shlex.split(re.split(r" #| \| | &$", line)[0]) for line in lines]


def parse(command: click.Command, words: list[str]) -> None:
    """As the command line would, up to running it; for a group its subcommand."""
    if isinstance(command, click.Group):
        assert words[0] in command.commands, words
        parse(command.commands[words[0]], words[1:])
        return
    # as under its group: click remembers the names of the help option that it was first asked under
    command.make_context(command.name, list(words), **cli.context_settings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_can_be_typed(page: Path) -> None:
    for name, *words in typed(page.read_text(encoding="utf-8")):
        if name == "python":
            module = find_spec(words[1])
            assert module is not None, words
            source = Path(str(module.origin)).read_text(encoding="utf-8")
            assert not [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source], words
        else:
            parse(cli if name == "mdps" else export, words)


def test_a_command_that_is_no_longer_there_is_noticed() -> None:
    (words,) = typed("as in\n\n    mdps predict bundle line/ \\\n        --out results --colour | jq  # see\n")
    assert words[-1] == "--colour"
    with pytest.raises(click.NoSuchOption):
        parse(cli, words[1:])


@pytest.mark.parametrize("command", [name for name, one in cli.commands.items() if one.epilog])
def test_the_examples_of_a_commands_help_can_be_typed(command: str) -> None:
    examples = re.findall(r"^  mdps (.*)$", cli.commands[command].epilog or "", re.MULTILINE)
    assert examples
    for example in examples:
        parse(cli, shlex.split(example.split(" | ")[0]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def first_steps(name: str, heading: str) -> list[str]:
    """The commands of the first example below a heading, without comments."""
    below = (ROOT / name).read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    example = re.search(r"(?:^    .*\n)+", below, re.MULTILINE)
    assert example
    return [line.partition("  #")[0].strip() for line in example[0].splitlines()]


def test_the_first_steps_on_a_card_are_the_same_everywhere() -> None:
    short = first_steps("README.md", "### You have an RTX card")
    full = first_steps("docs/gpu.md", "## From a fresh machine to the first verdict")
    assert len(short) == 6
    assert full[-6:] == short
