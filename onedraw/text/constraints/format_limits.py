"""Check schemas and grammars against the limits in `onedraw/limits.py`, before they are compiled or walked recursively.

The input is a JSON schema or the text of a grammar, and `param`, the caller's name for that field. If a limit is exceeded,
BadParameter names the parameter and the limit. The checks use loops instead of recursion, so no depth can exhaust the stack. A
format that passes can still be too costly, so `checker.py` then compiles it in a helper process first. A symbol of a grammar is a
name, a literal, a pattern or a bracket; a group is a part of a rule in parentheses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from onedraw import limits
from onedraw.errors import BadParameter
from onedraw.text.tokenizer import has_surrogate

_DEFINITIONS = ("$defs", "definitions")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def schema_text(schema: Any, param: str) -> str:
    """Return a schema as JSON text, or raise BadParameter if it is over a limit."""
    check_schema(schema, param)
    text = json.dumps(schema)
    if "\\ud" in text and has_surrogate(json.dumps(schema, ensure_ascii=False)):
        raise BadParameter(param, "contains half of a surrogate pair; send valid Unicode")
    check_characters(text, param)
    return text


def check_characters(text: str, param: str, *, most: int | None = None) -> None:
    most = limits.MAX_FORMAT_CHARACTERS if most is None else most
    if len(text) > most:
        raise BadParameter(param, f"has {len(text):,} characters; at most {most:,} are allowed")


def check_choices(texts: Sequence[str], param: str) -> None:
    if len(texts) > limits.MAX_FORMAT_MEMBERS:
        raise BadParameter(param, f"has {len(texts):,} texts; at most {limits.MAX_FORMAT_MEMBERS:,} are allowed")


# ---------------------------------------------------------------------- schemas


def check_schema(schema: Any, param: str) -> None:
    """Raise BadParameter if a schema is over a limit. Its size is checked first, which bounds the work of checking its depth."""
    _check_size(schema, param)
    _check_depth(schema, param)


def _check_size(schema: Any, param: str) -> None:
    values = references = 0
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, nesting = pending.pop()
        values += 1
        if values > limits.MAX_FORMAT_VALUES:
            raise BadParameter(param, f"has more than {limits.MAX_FORMAT_VALUES:,} values; at most that many are allowed")
        if nesting > limits.MAX_FORMAT_NESTING:
            raise BadParameter(param, f"is nested more than {limits.MAX_FORMAT_NESTING} levels deep; use $ref for inner schemas")
        if isinstance(value, Mapping):
            references += any(isinstance(value.get(name), str) for name in _REFERENCES)
            if references > limits.MAX_FORMAT_REFERENCES:
                raise BadParameter(
                    param, f"has more than {limits.MAX_FORMAT_REFERENCES:,} references; at most that many are allowed"
                )
            inner = list(value.values())
        elif isinstance(value, list | tuple):
            if len(value) > limits.MAX_FORMAT_MEMBERS:
                raise BadParameter(
                    param, f"has a list of {len(value):,} members; at most {limits.MAX_FORMAT_MEMBERS:,} are allowed in one list"
                )
            inner = list(value)
        else:
            continue
        if values + len(pending) + len(inner) > limits.MAX_FORMAT_VALUES:
            raise BadParameter(param, f"has more than {limits.MAX_FORMAT_VALUES:,} values; at most that many are allowed")
        pending += [(part, nesting + 1) for part in inner]


def _check_depth(schema: Any, param: str) -> None:
    """Raise BadParameter if a compiler that walks the schema recursively would exceed the limit on recursion. The compiler
    is assumed to follow each `$ref` where it meets it, and to walk each value only once."""
    seen: set[int] = set()
    path: list[Iterator[Any]] = [iter((schema,))]
    while path:
        value = next(path[-1], path)
        if value is path:
            path.pop()
            continue
        if not isinstance(value, dict | list) or id(value) in seen:
            continue
        seen.add(id(value))
        path.append(iter(_parts(value, schema)))
        if len(path) > limits.MAX_FORMAT_DEPTH:
            raise BadParameter(
                param, f"is more than {limits.MAX_FORMAT_DEPTH} levels deep with its references followed; use fewer"
            )


def _parts(value: dict[str, Any] | list[Any], root: Any) -> list[Any]:
    """Return the values into which a compiler descends from a value: those directly inside it and the targets of its references.
    Definitions are left out, because a compiler gets to them only through references."""
    if isinstance(value, list):
        return value
    parts = [part for name, part in value.items() if name not in _DEFINITIONS]
    return parts + [_target(root, value[name]) for name in _REFERENCES if isinstance(value.get(name), str)]


def _target(root: Any, pointer: str) -> Any:
    """Return the value to which a reference points in the same schema; None if there is none."""
    if not pointer.startswith("#"):
        return None
    target = root
    for step in pointer[1:].strip("/").split("/") if len(pointer) > 1 else ():
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(name)
        elif isinstance(target, list) and name.isdecimal() and len(name) < 9 and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
    return target


# ---------------------------------------------------------------------- grammars

# For each rule of a grammar, the rules that it uses: (name of the used rule, number of groups around it).
Uses = Mapping[str, Sequence[tuple[str, int]]]

# The work of these patterns grows linearly with the text, because their repetitions never give back what they have read. As in
# the compiler, a regular expression ends at the first slash that is not escaped, also inside a character class.
_DEFINITION = re.compile(r"\s*+[!?]*+([A-Za-z_][\w-]*+)[^:\"/|]*+:(?!:=)")
_SYMBOL = re.compile(r"//.*|\"(?:\\.|[^\"\\])*+\"?|/(?:\\.|[^/\\])++/?|([A-Za-z_][\w-]*+)|([({\[])|([)}\]])|[^\s]")
_JSON_RULE = re.compile(r"%json\s*")


def check_lark(text: str, param: str, *, most: int | None = None) -> None:
    """Raise BadParameter if a Lark grammar, or a JSON schema inside it, is over a limit."""
    check_characters(text, param, most=most)
    uses: dict[str, list[tuple[str, int]]] = {}
    current: list[tuple[str, int]] = []
    symbols = groups = 0
    for line in _without_schemas(text, param).split("\n"):
        start = _DEFINITION.match(line)
        if start:
            current, groups = uses.setdefault(start[1], []), 0
        for symbol in _SYMBOL.finditer(line, start.end() if start else 0):
            symbols += 1
            if symbols > limits.MAX_FORMAT_VALUES:
                raise BadParameter(param, f"has more than {limits.MAX_FORMAT_VALUES:,} symbols; at most that many are allowed")
            name, opening, closing = symbol.groups()
            groups += bool(opening) - bool(closing)
            if name:
                current.append((name, groups))
    check_rules(uses, "start", param)


def _without_schemas(text: str, param: str) -> str:
    """Return a Lark grammar without the JSON schemas in it, after checking those schemas."""
    kept, end, decoder = [], 0, json.JSONDecoder()
    for number, found in enumerate(_JSON_RULE.finditer(text)):
        if number == limits.MAX_FORMAT_RULES:
            raise BadParameter(param, f"has more than {limits.MAX_FORMAT_RULES:,} schemas; at most that many are allowed")
        if found.start() < end:
            continue
        try:
            schema, stop = decoder.raw_decode(text, found.end())
        except RecursionError:
            raise BadParameter(param, f"has a schema that is nested more than {limits.MAX_FORMAT_NESTING} levels deep") from None
        except ValueError:  # It is not JSON. The compiler, which comes later, refuses it with a better message.
            continue
        check_schema(schema, param)
        kept.append(text[end : found.end()])
        end = stop
    return "".join([*kept, text[end:]])


def check_rules(uses: Uses, first: str, param: str) -> None:
    """Raise BadParameter if a grammar has too many rules, or if a compiler that descends into each rule where it is first used
    would exceed the limit on recursion. `first` is the start rule."""
    if len(uses) > limits.MAX_FORMAT_RULES:
        raise BadParameter(param, f"has {len(uses):,} rules; at most {limits.MAX_FORMAT_RULES:,} are allowed")
    seen = {first}
    path = [(0, iter(uses.get(first, ())))]
    while path:
        depth, following = path[-1]
        use = next(following, None)
        if use is None:
            path.pop()
            continue
        name, groups = use
        inner = depth + 1 + groups
        if inner > limits.MAX_FORMAT_DEPTH:
            raise BadParameter(param, f"has rules that use each other more than {limits.MAX_FORMAT_DEPTH} levels deep; use fewer")
        if name in uses and name not in seen:
            seen.add(name)
            path.append((inner, iter(uses[name])))
