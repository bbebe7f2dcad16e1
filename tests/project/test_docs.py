"""README and docs say what the program does: a newcomer types their commands as they stand, and follows their links."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from mdps.cli import cli
from mdps.commands import COMMANDS
from mdps.commands.export import export
from mdps.runtime.manifest import MIGRATIONS, SCHEMA_VERSION

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS, *sorted((ROOT / "benchmarks/results").glob("*.md"))]
CODE = ("benchmarks", "commands", "export", "models", "runtime", "serving", "training", "tuning")
PACKAGES = (*CODE, "examples", "tests")
BLOCK = re.compile(r"^(?: {4}|\$ )(?P<command>(?:mdps(?:-export)?|python -m mdps[\w.]*) .*)$", re.MULTILINE)


def typed(text: str) -> list[list[str]]:
    """Words of each command of a page's code blocks and examples, without comments and what it is piped into."""
    lines = BLOCK.findall(text.replace("\\\n", " "))
    return [shlex.split(re.split(r" #| \| | &$", line)[0]) for line in lines]


def command_of(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    return command


def parse(command: click.Command, words: list[str]) -> None:
    """As the command line would, up to running it; for a group its subcommand."""
    if isinstance(command, click.Group):
        parse(command_of(words[0]), words[1:])
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
            assert not [word for word in words[2:] if word.startswith("--") and word not in source], words
        else:
            parse(cli if name == "mdps" else export, words)


def test_the_promise_for_bundles_names_the_schemas_that_are_read() -> None:
    promise = (ROOT / "docs/use/running.md").read_text(encoding="utf-8")
    assert f"`schema_version`, {SCHEMA_VERSION} in this release" in promise
    assert f"this one reads {min(MIGRATIONS)} to {SCHEMA_VERSION}." in promise


def test_a_command_that_is_no_longer_there_is_noticed() -> None:
    (words,) = typed("as in\n\n    mdps predict bundle line/ \\\n        --out results --colour | jq  # see\n")
    assert words[-1] == "--colour"
    with pytest.raises(click.NoSuchOption):
        parse(cli, words[1:])


@pytest.mark.parametrize("command", [name for name in COMMANDS if command_of(name).epilog])
def test_the_examples_of_a_commands_help_can_be_typed(command: str) -> None:
    examples = re.findall(r"^  mdps (.*)$", command_of(command).epilog or "", re.MULTILINE)
    assert examples
    for example in examples:
        parse(cli, shlex.split(example.split(" | ")[0]))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_nowhere(link: str, page: Path) -> bool:
    """Whether a link of the page names a file that is not there, or a heading that its page has not."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return not target.exists() or bool(anchor and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and leads_nowhere(link, page)]


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What `--out` leaves, in all\n")
    links = ["page.md", "#what---out-leaves-in-all", "page.md#what", "#what", "gone.md", "gone.md#what"]
    assert [link for link in links if leads_nowhere(link, page)] == links[2:]


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {index.parent / link for link in re.findall(r"\]\(([^)#]+\.md)\)", index.read_text(encoding="utf-8"))}
    assert linked == set(DOCS) - {index}


def test_pages_that_code_and_messages_name_are_there() -> None:
    files = [ROOT / "pyproject.toml", ROOT / "cli.py", *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))]
    named = {name for path in files for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))}
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).is_file()]


def steps(name: str, heading: str, number: int) -> list[str]:
    """Return the commands of an example below a heading, by its number, without comments and broken lines."""
    below = (ROOT / name).read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    example = re.findall(r"(?:^    .*\n)+", below, re.MULTILINE)[number]
    return [line.partition("  #")[0].strip() for line in re.sub(r"\\\n +", "", example).splitlines()]


def test_the_first_steps_on_a_card_are_the_same_everywhere() -> None:
    short = steps("README.md", "## You have an RTX card", 0)
    assert len(short) == 4
    assert steps("docs/use/gpu.md", "## From a fresh machine to the first verdict", 1)[-3:] == short[1:]


def test_the_readme_is_short_and_begins_with_python() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    assert re.match(r"# mdps\n\n```python\n", text)
