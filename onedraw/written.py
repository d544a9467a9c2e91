"""Frozen dataclasses as JSON values and back, by their own type hints.

In: a value made of dataclasses, tuples, sets, mappings, numbers and texts. Out: what `json` can write; and the way back.
What has no such form (an object with behaviour) is refused with its name rather than written half.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")


class Unwritable(Exception):
    """The message names the field and what it holds."""


def write(value: object, *, path: str = "") -> Any:
    """The JSON form. Numbers that JSON lacks are texts: "-inf"."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: write(getattr(value, f.name), path=f"{path}.{f.name}".lstrip(".")) for f in fields(value)}
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case tuple() | list():
            return [write(item, path=path) for item in value]
        case frozenset() | set():
            return sorted(write(item, path=path) for item in value)
        case Mapping():
            return {str(key): write(item, path=path) for key, item in value.items()}
        case _:
            raise Unwritable(f"{path} holds a {type(value).__name__}, which has no written form")


def read(kind: type[Value], value: Any) -> Value:
    """A dataclass from its JSON form. Fields that are missing keep their defaults; unknown ones are an error."""
    made: Value = _read(kind, value)
    return made


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _read_fields(kind, value)
    if isinstance(kind, types.UnionType) or origin is typing.Union:
        return _read_union(arguments, value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return tuple(_read(arguments[0], item) for item in value)
        return tuple(_read(each, item) for each, item in zip(arguments, value, strict=True))
    if origin is frozenset:
        return frozenset(_read(arguments[0], item) for item in value)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is not one of {arguments}")
        return value
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{value!r} is no {getattr(kind, '__name__', kind)}")


def _read_fields(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{kind.__name__} must be an object")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - {f.name for f in fields(kind)})
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
    return kind(**{name: _read(hints[name], item) for name, item in value.items()})


def _read_union(kinds: tuple[Any, ...], value: Any) -> Any:
    """The first kind that takes the value; None is itself."""
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        try:
            return _read(kind, value)
        except (ValueError, TypeError):
            continue
    raise ValueError(f"{value!r} is none of {kinds}")
