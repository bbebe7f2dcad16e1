"""The help and the range of a setting, beside the dataclass's field whose name, type and default it has.

    steps: Annotated[int | None, Option("Denoising steps N of a pass.", low=1)] = None

The command line makes its options of such fields (`mdps.commands.fields`), so that a new one is spelled once.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin

from mdps.runtime.errors import UsageError


class Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=Dataclass)


@dataclass(frozen=True)
class Option:
    """How a user sets a field.

    `low` and `high` bound a number or each number of a list; `above` says that `low` itself is out. `flag` is the
    option's name where it is not the field's. The field is `unit` times what the user gives. `words` are all that may
    be given, where the type does not say; of `choices` each makes a value. `example` is a list's. `parse` reads a text,
    with a ValueError for the user. What is set `seldom` has no option of its own, only a key of `--set`.
    """

    help: str = ""
    low: float | None = None
    high: float | None = None
    above: bool = False
    flag: str = ""
    unit: float = 1
    example: str = ""
    parse: Callable[[str], Any] | None = None
    words: tuple[str, ...] = ()
    choices: Mapping[str, Callable[[], Any]] | None = None
    seldom: bool = False


@dataclass(frozen=True)
class Setting:
    """A field that a user may set; `kind` is its type, without None; of several the first."""

    name: str
    kind: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """Its option on the command line, such as --image-size."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def key(self) -> str:
        """Its name for `--set`: the option without its dashes."""
        return self.flag.split("/")[0].removeprefix("--")

    @property
    def words(self) -> tuple[str, ...]:
        """All values, where these are words."""
        if self.option.words or self.option.choices:
            return self.option.words or tuple(self.option.choices or ())
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()


def settings_of(cls: type[Dataclass]) -> tuple[Setting, ...]:
    """Return the fields of a dataclass, and of those inside it, that have an `Option`."""
    found: list[Setting] = []
    for field in fields(cls):
        if get_origin(field.type) is Annotated:
            kind, *extras = get_args(field.type)
            (option,) = [extra for extra in extras if isinstance(extra, Option)]
            default = None if field.default is MISSING else field.default
            found.append(Setting(field.name, _without_none(kind), default, option))
        elif inner := _inner(field):
            found += settings_of(inner)
    return tuple(found)


def _inner(field: Field[Any]) -> type[Dataclass] | None:
    """Return the dataclass that a field holds, if it holds one."""
    return field.type if isinstance(field.type, type) and is_dataclass(field.type) else None


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    return next(one for one in get_args(kind) if one is not type(None))


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return the dataclass with these values of its fields and of those inside it, by name; None keeps a default."""
    unknown = set(values) - set(_names(cls))
    if unknown:
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    return _build(cls, {name: value for name, value in values.items() if value is not None})


def _names(cls: type[Dataclass]) -> Iterator[str]:
    for field in fields(cls):
        inner = _inner(field)
        yield from [field.name] if inner is None else [field.name, *_names(inner)]


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    words = {one.name: one.option.choices for one in settings_of(cls) if one.option.choices is not None}
    given: dict[str, Any] = {}
    for field in fields(cls):
        inner, value = _inner(field), values.get(field.name)
        if value is not None:
            given[field.name] = _meant(value, words.get(field.name))
        elif inner is not None:
            given[field.name] = _build(inner, values)
    return cls(**given)


def _meant(value: Any, words: Mapping[str, Callable[[], Any]] | None) -> Any:
    return words[value]() if words is not None and isinstance(value, str) else value


def check_ranges(record: Dataclass) -> None:
    """Raise UsageError for a number outside the range of its field's option."""
    for setting in settings_of(type(record)):
        value = getattr(record, setting.name, None)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not _inside(setting.option, number):
                raise UsageError(f"{setting.name} is {number}; it {_rule(setting.option)}")


def _inside(option: Option, number: float) -> bool:
    number /= option.unit
    low, high = option.low, option.high
    above = low is None or (number > low if option.above else number >= low)
    return above and (high is None or number <= high)


def _rule(option: Option) -> str:
    unit = option.unit
    if option.high is not None:
        return f"must lie between {(option.low or 0) * unit:g} and {option.high * unit:g}"
    if option.above and option.low == 0:
        return "must be positive"
    return "must not be negative" if option.low == 0 else f"must be at least {(option.low or 0) * unit:g}"
