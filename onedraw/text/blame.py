"""Which keyword of a JSON schema is to blame that it cannot be compiled.

In: a schema, and a judge that says what is wrong with one. Out: the path of the keyword and the reason. The judge names no
places, so the schema is taken apart: the deepest part that cannot be compiled by itself, then the keyword without which it can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Judge = Callable[[Any], str]  # what is wrong with a schema; empty: nothing

_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SHARED = ("$defs", "definitions")  # what a part needs of the whole, to be judged by itself


@dataclass(frozen=True, slots=True)
class Blame:
    path: str  # ".properties.a.pattern"
    reason: str


def find_blame(schema: Any, judge: Judge) -> Blame | None:
    """None where no single keyword can be named."""
    shared = {name: schema[name] for name in _SHARED if isinstance(schema, dict) and name in schema}
    return _search(schema, "", lambda part: judge(_beside(part, shared)))


def _beside(part: Any, shared: Mapping[str, Any]) -> Any:
    return {**shared, **part} if isinstance(part, dict) else part


def _search(schema: Any, path: str, judge: Judge) -> Blame | None:
    reason = judge(schema)
    if not reason:
        return None
    if not isinstance(schema, dict):
        return Blame(path, reason)
    if named := _named_keys(reason, schema):
        return Blame(f"{path}.{named}", f"is not supported ({reason})")
    for step, part in _parts(schema):
        found = _search(part, path + step, judge)
        if found is not None:
            return found
    for keyword in schema:
        if keyword not in _SHARED and not judge({name: value for name, value in schema.items() if name != keyword}):
            return Blame(f"{path}.{keyword}", reason)
    return Blame(path, reason)


def _named_keys(reason: str, schema: Mapping[str, Any]) -> str | None:
    """The keyword a reason names, where it stands at this very place."""
    if not reason.startswith("Unimplemented keys"):
        return None
    return next((name for name in re.findall(r'"([^"]+)"', reason) if name in schema), None)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), dict):
            yield from ((f".{keyword}.{name}", part) for name, part in schema[keyword].items())
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            yield from ((f".{keyword}[{number}]", part) for number, part in enumerate(schema[keyword]))
    for keyword in _SINGLES:
        if isinstance(schema.get(keyword), dict):
            yield f".{keyword}", schema[keyword]
