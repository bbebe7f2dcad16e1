"""Rules of the house that no linter knows: no circles of imports, small functions, few options, plain docstrings."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import click
import grimp

import mdps
from mdps.cli import cli

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("benchmarks", "commands", "export", "models", "runtime", "serving", "training", "tuning")
SOURCES = [
    ROOT / "__init__.py",
    ROOT / "cli.py",
    *(p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py"))),
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_LINES = 50
MOST_MEDIAN = 7
MOST_OPTIONS = 240
MOST_CLI_LINES = 60


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for imported in imports.get(module, ()):
            if imported not in order:
                visit(imported)
            if imported in path:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == order[module]:
            group = path[path.index(module) :]
            del path[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in imports:
        if module not in order:
            visit(module)
    return found


def test_circles_are_found() -> None:
    line = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"a", "b"}}
    assert circles(line) == []
    assert circles(line | {"c": {"a"}}) == [["a", "b", "c"]]
    assert circles(line | {"c": {"b"}, "e": {"f"}, "f": {"e"}}) == [["b", "c"], ["e", "f"]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions and those for type checkers alone count: a circle of them is one in the mind, too."""
    assert Path(mdps.__file__).parent == ROOT
    graph = grimp.build_graph("mdps", cache_dir=None)
    assert circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


def nodes(paths: list[Path], *kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of these kinds, each with the file and line that it is at."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node


def definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the functions and classes that stand in `node` itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        else:
            yield from definitions(child)


def lines(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


def lengths() -> dict[str, int]:
    """Return the lines of every function, without those of functions and classes within."""
    functions = nodes(SOURCES, ast.FunctionDef, ast.AsyncFunctionDef)
    return {place: lines(node) - sum(map(lines, definitions(node))) for place, node in functions}


def test_functions_are_short() -> None:
    assert len(lengths()) > 1000
    assert statistics.median(lengths().values()) <= MOST_MEDIAN


def test_no_function_is_long() -> None:
    assert {place: count for place, count in lengths().items() if count > MOST_LINES} == {}


def test_no_docstring_begins_with_what_or_as() -> None:
    documented = nodes([*SOURCES, *TESTS], ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    assert [place for place, node in documented if (ast.get_docstring(node) or "").startswith(("What ", "As `"))] == []


def commands(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield from commands(command) if isinstance(command, click.Group) else [command]


def test_the_options_of_all_commands_are_few() -> None:
    assert len(list(commands(cli))) == 17
    options = [
        f"{command.name} {p.name}" for command in commands(cli) for p in command.params if p.param_type_name == "option"
    ]
    assert len(options) <= MOST_OPTIONS


def test_the_cli_only_assembles() -> None:
    assert len((ROOT / "cli.py").read_text(encoding="utf-8").splitlines()) <= MOST_CLI_LINES
