"""Options of a command made from the fields of a dataclass: each is spelled once, beside its field."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import click

from mdps.runtime.option import Dataclass, Option, Setting, settings_of

Command = Callable[..., Any]
NUMBERS: dict[Any, tuple[Any, Any]] = {int: (click.IntRange, click.INT), float: (click.FloatRange, click.FLOAT)}


def fields(
    cls: type[Dataclass],
    *,
    without: Iterable[str] = (),
    only: Iterable[str] | None = None,
    recipes: Mapping[str, Dataclass] | None = None,
) -> Callable[[Command], Command]:
    """Return a decorator that adds an option for each field; the values arrive under the fields' names.

    With `recipes` a default is what each of these says, and an option that is not given is None.
    """

    def add(command: Command) -> Command:
        for setting in reversed(settings_of(cls)):
            chosen = setting.name not in without if only is None else setting.name in only
            if chosen and not setting.option.seldom:
                command = click.option(setting.flag, setting.name, **_attributes(setting, recipes))(command)
        return command

    return add


def settings(cls: type[Dataclass] | None, others: Iterable[Setting] = (), *, of: str) -> Callable[[Command], Command]:
    """Return a decorator that adds `--set KEY=VALUE` for what is set seldom of `cls`, and for the `others`.

    What is given arrives as `settings`, by the fields' names.
    """
    seldom = [setting for setting in (settings_of(cls) if cls else ()) if setting.option.seldom]
    known = {setting.key: setting for setting in (*seldom, *others)}

    def read(context: click.Context, _: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
        if "help" in texts:
            click.echo(_listed(known.values()))
            context.exit()
        given: dict[str, Any] = {}
        for text in texts:
            name, value = _read(context, known, text)
            if name in given:
                raise click.BadParameter(f"{text.partition('=')[0]} is given twice: leave one of them out")
            given[name] = value
        return given

    return click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", callback=read,
        help=f"Set {of}; may be given several times. `--set help` lists the keys.",
    )  # fmt: skip


def _attributes(setting: Setting, recipes: Mapping[str, Dataclass] | None) -> dict[str, Any]:
    """Return the arguments of `click.option`."""
    default, option = (None if recipes else _shown(setting, setting.default)), setting.option
    told: dict[str, Any] = {"default": default, "show_default": default is not False, "help": option.help}
    if recipes:
        told["help"] = f"{option.help} {_defaults(setting, recipes)}".strip()
    if setting.kind is bool:
        return told if "/" in setting.flag else {**told, "is_flag": True}
    if setting.words:
        return {**told, "type": click.Choice(setting.words)}
    if option.parse is not None:
        return {**told, "callback": _parsed(option.parse)}
    if get_origin(setting.kind) is tuple:
        kind, *others = get_args(setting.kind)
        if others == [Ellipsis]:
            return {**told, "callback": _parsed(_list_of(setting))}
        return {**told, "type": kind, "nargs": 1 + len(others)}
    return {**told, "type": _type(setting.kind, option), "callback": _scaled(setting)}


def _defaults(setting: Setting, recipes: Mapping[str, Dataclass]) -> str:
    found = {name: _shown(setting, getattr(recipe, setting.name)) for name, recipe in recipes.items()}
    first, *others = [(name, "none" if value is None else value) for name, value in found.items()]
    if first[1] is False:
        return ""
    parts = [str(first[1]), *(f"{name}: {value}" for name, value in others if value != first[1])]
    return f"[default: {', '.join(parts)}]"


def _shown(setting: Setting, value: Any) -> Any:
    """Return a default as the user would give it."""
    if isinstance(value, tuple):
        return ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value) or "none"
    if value is None or setting.kind not in NUMBERS:
        return value
    return value if setting.kind is int and setting.option.unit == 1 else f"{value / setting.option.unit:g}"


def _type(kind: Any, option: Option) -> Any:
    if kind is Path:
        return click.Path(path_type=Path)
    if kind not in NUMBERS:
        return click.STRING
    ranged, plain = NUMBERS[float if option.unit != 1 else kind]
    if option.low is None and option.high is None:
        return plain
    return ranged(option.low, option.high, min_open=option.above)


def _scaled(setting: Setting) -> Callable[..., Any] | None:
    if setting.option.unit == 1:
        return None
    return lambda _, __, value: None if value is None else setting.kind(value * setting.option.unit)


def _parsed(parse: Callable[[str], Any]) -> Callable[..., Any]:
    def read(_: click.Context, __: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return read


def _list_of(setting: Setting) -> Callable[[str], tuple[Any, ...]]:
    """Return a reader of lists such as 1,2,4 ("none": an empty one)."""
    kind, _ = get_args(setting.kind)
    one = _type(kind, setting.option)

    def read(text: str) -> tuple[Any, ...]:
        try:
            return () if text == "none" else tuple(one.convert(part.strip(), None, None) for part in text.split(","))
        except click.BadParameter:
            raise ValueError(f"{text!r} is neither 'none' nor a list such as {setting.option.example}") from None

    return read


def _read(context: click.Context, known: Mapping[str, Setting], text: str) -> tuple[str, Any]:
    key, mark, value = text.partition("=")
    key = key.strip().removeprefix("--").replace("_", "-")
    if not mark:
        raise click.BadParameter(f"{text!r} should be KEY=VALUE: `--set help` lists the keys")
    if key not in known:
        near = get_close_matches(key, known)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise click.BadParameter(f"there is no key {key!r}: {hint}`--set help` lists them")
    setting = known[key]
    try:
        return setting.name, _value(context, setting, value.strip())
    except click.BadParameter as error:
        raise click.BadParameter(f"{key}: {error.message}") from None


def _value(context: click.Context, setting: Setting, text: str) -> Any:
    if setting.kind is bool:
        return click.BOOL.convert(text, None, context)
    attributes = _attributes(setting, None) | {"default": None}
    option = click.Option([setting.flag, setting.name], **attributes)
    return option.process_value(context, tuple(text.split(",")) if option.nargs > 1 else text)


def _listed(known: Iterable[Setting]) -> str:
    """Return a line for each key: the values it takes, and its help."""
    lines = [(f"{setting.key}={_takes(setting)}", f"{setting.option.help}{_default(setting)}") for setting in known]
    width = max(len(pair) for pair, _ in lines)
    return "\n".join(f"{pair:{width}}  {told}" for pair, told in lines)


def _default(setting: Setting) -> str:
    default = _shown(setting, setting.default)
    return "" if default is None else f" [default: {'no' if default is False else default}]"


def _takes(setting: Setting) -> str:
    if setting.words:
        return "|".join(setting.words)
    if get_origin(setting.kind) is tuple:
        return setting.option.example or ",".join("N" * len(get_args(setting.kind)))
    return {bool: "yes|no", int: "N", float: "X", Path: "PATH"}.get(setting.kind, "TEXT")
