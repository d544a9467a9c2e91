"""A JSON schema as a grammar of literals that are not JSON: Gemma's and Python's.

In: a schema, a style, the rules of a grammar in the making. Out: Lark, with rules of its own added. What a schema may say here
is what these families' calls can say: types, enumerations, members, items, alternatives, references. Any other keyword that
would bind the value is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from onedraw.errors import BadParameter
from onedraw.text.grammar import literal
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tool_schema import (
    BINDS_ALL,
    BINDS_ARRAYS,
    BINDS_OBJECTS,
    NO_SCHEMA,
    constants,
    only,
    pointed_to,
    refuse,
    refuse_missing,
    unwritable,
)
from onedraw.text.tools import GEMMA_QUOTE

FREE = r"/(.|\n)*/"  # any text
_NUMERIC = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
TEXTUAL = frozenset(("minLength", "maxLength", "pattern", "format"))

_BARE_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")  # that no backslash stands before


@dataclass(frozen=True, slots=True)
class Style:
    """How a family writes values."""

    true: str
    false: str
    null: str
    separator: str
    member: str  # between a member's name and its value, at the top
    inner: str  # the same further inside
    quoted_keys: bool  # of members further inside
    json_strings: bool


GEMMA = Style("true", "false", "null", ",", ":", ":", quoted_keys=False, json_strings=False)
PYTHON = Style("True", "False", "None", ", ", "=", ": ", quoted_keys=True, json_strings=True)


class Literals:
    """Writes the values of one tool. Owner: the grammar it adds rules to."""

    def __init__(
        self,
        style: Style,
        name: str,
        rules: list[str],
        *,
        spell: Callable[[str], str],
        tokenizer: Tokenizer,
        param: str,
        strict: bool,
        check: Callable[[Any, str], Any],
    ) -> None:
        self._style, self._strict, self._check = style, strict, check
        self._name = name
        self._rules = rules
        self._spell = spell
        self._special = len(ids := tokenizer.encode(GEMMA_QUOTE, add_special=False)) == 1 and tokenizer.is_special(ids[0])
        self._param = param
        self._count = 0
        self._root: dict[str, Any] = {}
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def members(self, schema: dict[str, Any]) -> str:
        """The arguments of a call: the members of the schema's object, in its order."""
        self._root = schema
        return self._members(schema, self._param, top=True)

    def _members(self, schema: dict[str, Any], path: str, *, top: bool = False) -> str:
        style = self._style
        required, properties = schema.get("required") or (), schema.get("properties") or {}
        if self._strict:
            refuse_missing(required, properties, path)
        parts: list[tuple[str, bool]] = []
        for key, part in properties.items():
            if not style.quoted_keys and style.inner in key:
                if self._strict:
                    raise unwritable(key, path)
                continue
            shown = literal(key + style.member) if top else self._key(key)
            rule = self._rule(f"{shown} {self._value(part, f'{path}.properties.{key}')}")
            parts.append((rule, key in required))
        return self._sequence(parts)

    def _key(self, key: str) -> str:
        return literal((json.dumps(key, ensure_ascii=False) if self._style.quoted_keys else key) + self._style.inner)

    def _sequence(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Members with separators between those that are there. `first`: before any member; `rest`: behind one."""
        separator = literal(self._style.separator)
        first, rest = '""', '""'
        for rule, required in reversed(parts):
            begun = f"{rule} {rest}" if rest != '""' else rule
            first = self._rule(begun if required else f"{begun} | {first}")
            after = f"{separator} {begun}"
            rest = self._rule(after if required else f"({after}) | {rest}")
        return first

    def _value(self, schema: Any, path: str) -> str:
        """Where the tool is not strict, anything, if the schema cannot be held to."""
        try:
            return self._held(schema, path)
        except NO_SCHEMA:
            if self._strict:
                raise
        if isinstance(schema, dict) and isinstance(schema.get("type"), str):
            with suppress(*NO_SCHEMA):
                return self._held(
                    {name: schema[name] for name in ("type", "properties", "required", "items") if name in schema}, path
                )
        return self._anything()

    def _anything(self) -> str:
        """Any value, as far as it can be written without a schema."""
        if self._style.json_strings:
            return self._json({})
        if self._any is None:
            self._any = rule = f"{self._name}_any"
            kinds = ("string", "number", "boolean", "null")
            inner = f'({rule} ("," {rule})*)?'
            key = f"{self._name}_K".upper()
            self._rules.append(f"{key}: /[A-Za-z_][A-Za-z0-9_]*/")
            members = f'({key} ":" {rule} ("," {key} ":" {rule})*)?'
            plain = " | ".join(self._typed(kind, {"type": kind}, "") for kind in kinds)
            self._rules.append(f'{rule}: {plain} | "[" {inner} "]" | "{{" {members} "}}"')
        return self._any

    def _held(self, schema: Any, path: str) -> str:
        if not isinstance(schema, dict):
            raise BadParameter(path, "must be a schema object here: this model's call syntax has no grammar of any value")
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), path)
        if "const" in schema or "enum" in schema:
            return "(" + " | ".join(self._constant(value) for value in constants(schema, path)) + ")"
        for name in ("anyOf", "oneOf"):
            if name in schema:
                parts = [self._value(part, f"{path}.{name}[{number}]") for number, part in enumerate(schema[name])]
                if not parts:
                    raise BadParameter(f"{path}.{name}", "holds no schema")
                return "(" + " | ".join(parts) + ")"
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return "(" + " | ".join(self._value({**schema, "type": kind}, path) for kind in kinds) + ")"
        return self._typed(kinds, schema, path)

    def _typed(self, kind: Any, schema: dict[str, Any], path: str) -> str:
        refuse(schema, BINDS_ALL, path)
        self._check(only(schema, _NUMERIC | TEXTUAL), path)
        refuse(schema, BINDS_ARRAYS if kind == "array" else BINDS_OBJECTS if kind == "object" else (), path)
        match kind:
            case "string":
                return self._string(schema, path)
            case "number" | "integer":
                return self._json(only(schema, _NUMERIC))
            case "boolean":
                return f"({literal(self._style.true)} | {literal(self._style.false)})"
            case "null":
                return literal(self._style.null)
            case "array":
                item = self._value(schema.get("items", {"type": "string"}), f"{path}.items")
                return self._rule(f'"[" ({item} ({literal(self._style.separator)} {item})*)? "]"')
            case "object":
                return self._rule(f'"{{" {self._members(schema, path)} "}}"')
            case _:
                raise BadParameter(f"{path}.type", "is needed in this model's call syntax")

    def _string(self, schema: dict[str, Any], path: str) -> str:
        if self._style.json_strings:
            return self._json(only(schema, TEXTUAL))
        terminal = text_terminal(schema, avoiding=GEMMA_QUOTE, param=path)
        quote = self._spell(GEMMA_QUOTE)
        if terminal is None and not self._special:
            self._count += 1
            rule = f"{self._name}_s{self._count}"
            self._rules.append(f"{rule}[suffix={literal(GEMMA_QUOTE)}]: {FREE}")
            return f"{quote} {rule}"
        self._count += 1
        name = f"{self._name}_S{self._count}".upper()
        self._rules.append(f"{name}: {terminal or FREE}")
        return f"{quote} {name} {quote}"

    def _constant(self, value: Any) -> str:
        style = self._style
        match value:
            case None:
                return literal(style.null)
            case bool():
                return literal(style.true if value else style.false)
            case str():
                if style.json_strings:
                    return literal(json.dumps(value, ensure_ascii=False))
                return f"{self._spell(GEMMA_QUOTE)} {literal(value)} {self._spell(GEMMA_QUOTE)}"
            case list():
                return self._between("[", [self._constant(item) for item in value], "]")
            case dict():
                return self._between("{", [f"{self._key(key)} {self._constant(item)}" for key, item in value.items()], "}")
            case _:
                return literal(json.dumps(value))

    def _between(self, opens: str, parts: Sequence[str], closes: str) -> str:
        return " ".join([literal(opens), f" {literal(self._style.separator)} ".join(parts), literal(closes)])

    def _reference(self, pointer: str, path: str) -> str:
        if pointer not in self._references:
            target = pointed_to(self._root, pointer, path)
            self._count += 1
            rule = self._references[pointer] = f"{self._name}_r{self._count}"
            self._rules.append(f"{rule}: {self._value(target, path)}")
        return self._references[pointer]

    def _json(self, schema: dict[str, Any]) -> str:
        return self._rule(f"%json {json.dumps(schema)}")

    def _rule(self, body: str) -> str:
        self._count += 1
        rule = f"{self._name}_n{self._count}"
        self._rules.append(f"{rule}: {body}")
        return rule


def text_terminal(part: dict[str, Any], *, avoiding: str, param: str) -> str | None:
    """A text that stands without quotes, by the keywords of its schema; None: any text."""
    if "format" in part:
        raise BadParameter(f"{param}.format", "cannot be held to in this model's call syntax, where texts stand without quotes")
    bounds = []
    if "minLength" in part or "maxLength" in part:
        bounds.append(rf"/(.|\n){{{part.get('minLength', 0)},{part.get('maxLength', '')}}}/")
    if "pattern" in part:
        pattern = _BARE_SLASH.sub(r"\1\\/", part["pattern"])
        before = "" if pattern.startswith("^") else r"(.|\n)*"
        behind = "" if pattern.endswith("$") and not pattern.endswith("\\$") else r"(.|\n)*"
        bounds.append(f"/{before}({pattern.removeprefix('^').removesuffix('$' if not behind else '')}){behind}/")
    if not bounds:
        return None
    shut = avoiding.strip().replace("/", "\\/").replace("|", "[|]")
    return " & ".join([*bounds, rf"~/(.|\n)*{shut}(.|\n)*/"])
