"""Frozen dataclasses to JSON and back, strictly: a wrong key or type is a BundleError that names it."""

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from mdps.runtime.errors import BundleError, UsageError


class Record:
    """Mixin for frozen dataclasses: `to_json` gives plain JSON values, `from_json` checks every key and type."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    later: ClassVar[Mapping[str, Any]] = {}
    """Keys that older records lack, with what their absence means; a record that means it lacks them still."""

    def to_json(self) -> dict[str, Any]:
        """Keys in the order of the fields, so that equal records give equal text."""
        told = {field.name: encode(getattr(self, field.name)) for field in fields(self)}
        return {key: value for key, value in told.items() if key not in self.later or value != self.later[key]}

    @classmethod
    def from_json(cls, obj: object, where: str = "") -> Self:
        """The record `obj` describes; `where` (a file, or a key of one) opens the sentence of a BundleError."""
        where = where or cls.__name__
        if not isinstance(obj, dict):
            raise BundleError(f"{where} should be an object with keys, found {_show(obj)}")
        obj = {**cls.later, **obj}
        hints = get_type_hints(cls)
        names = [field.name for field in fields(cls)]
        _check_keys(where, names, obj)
        values = {name: decode(hints[name], obj[name], f"{where}.{name}") for name in names}
        try:
            return cls(**values)
        except BundleError:
            raise
        except UsageError as error:
            raise BundleError(f"{where}: {error}") from None


def _check_keys(where: str, names: list[str], obj: dict[str, Any]) -> None:
    missing = [name for name in names if name not in obj]
    unknown = [name for name in obj if name not in names]
    if missing:
        raise BundleError(f"{where} lacks the key {missing[0]!r}: make the bundle again with `mdps export`")
    if unknown:
        raise BundleError(f"{where} has the unknown key {unknown[0]!r}: remove it, or upgrade mdps")


def encode(value: Any) -> Any:
    """Plain JSON values of a record, tuple, dictionary or scalar."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint` (a record, scalar, Literal, optional, tuple or dict of such), or a BundleError."""
    if hint is Any:
        return value
    if is_dataclass(hint) and hasattr(hint, "from_json"):
        return hint.from_json(value, where)
    kind = get_origin(hint) or hint
    return _DECODERS[kind](hint, value, where)


def _decode_union(hint: Any, value: Any, where: str) -> Any:
    if value is None and type(None) in get_args(hint):
        return None
    (inner,) = [item for item in get_args(hint) if item is not type(None)]
    return decode(inner, value, where)


def _decode_literal(hint: Any, value: Any, where: str) -> Any:
    choices = get_args(hint)
    if not any(value == item and type(value) is type(item) for item in choices):
        raise BundleError(f"{where} should be one of {', '.join(map(str, choices))}, found {_show(value)}")
    return value


def _decode_tuple(hint: Any, value: Any, where: str) -> Any:
    inner = get_args(hint)
    if not isinstance(value, list | tuple):
        raise BundleError(f"{where} should be a list, found {_show(value)}")
    if inner[-1] is Ellipsis:
        inner = (inner[0],) * len(value)
    if len(inner) != len(value):
        raise BundleError(f"{where} should have {len(inner)} entries, found {len(value)}")
    return tuple(decode(item, entry, f"{where}[{i}]") for i, (item, entry) in enumerate(zip(inner, value, strict=True)))


def _decode_dict(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise BundleError(f"{where} should be an object with keys, found {_show(value)}")
    return {key: decode(get_args(hint)[1], item, f"{where}.{key}") for key, item in value.items()}


def _decode_scalar(hint: Any, value: Any, where: str) -> Any:
    accepted: Any = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise BundleError(f"{where} should be {_NAMES[hint]}, found {_show(value)}")
    if hint is not float:
        return value
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond 1e308
        number = math.inf
    if not math.isfinite(number):
        raise BundleError(f"{where} should be a finite number, found {_show(value)}")
    return number


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_DECODERS: dict[Any, Callable[[Any, Any, str], Any]] = {
    Union: _decode_union,
    types.UnionType: _decode_union,
    Literal: _decode_literal,
    tuple: _decode_tuple,
    dict: _decode_dict,
    **dict.fromkeys(_NAMES, _decode_scalar),
}


def _show(value: object) -> str:
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        return "values nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
