"""GrammarCompiler of tool calls: the tools' own schemas, written in the family's syntax.

In: tools, the dialect, a tokenizer. Out: a Lark grammar of a reply that must call, or may. In a reply that may call, text is
free until a call begins; from there on every character of it is held to a tool that exists and to that tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from onedraw.errors import BadParameter
from onedraw.text.constraints.grammar import bound_whitespace, literal
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.dialects import GEMMA_QUOTE, MARKERS, Dialect, Tool
from onedraw.text.tools.schema import (
    BINDS_ALL,
    BINDS_ARRAYS,
    BINDS_OBJECTS,
    KINDS,
    NO_SCHEMA,
    as_members,
    constants,
    kinds_of,
    only,
    pointed_to,
    refuse,
    refuse_missing,
    unwritable,
)

# -------------------- A JSON schema as a grammar of literals that are not JSON: Gemma's and Python's.


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


# -------------------- GrammarCompiler of tool calls: the tools' own schemas, written in the family's syntax.


Spell = Callable[[str], str]  # a text as a Lark grammar writes it
Check = Callable[[Any, str], Any]  # a schema and the caller's path to it → the schema, or a refusal


class ToolCallGrammar:
    """Writes one grammar. `spell` knows which markers are special tokens; `check` judges schemas."""

    def __init__(self, dialect: Dialect, *, tokenizer: Tokenizer, spell: Spell, check: Check) -> None:
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._spell = spell
        self._check = check
        self._rules: list[str] = []

    def write(self, tools: Sequence[Tool], *, required: bool, parallel: bool, content: str | None = None) -> str:
        """A reply that calls (`must`), or one that may. `content`: a JSON schema for the reply that does not call."""
        one = " | ".join(self._function(number, tool) for number, tool in enumerate(tools))
        self._rules.append(f"one: {one}")
        calls = self._calls(parallel=parallel and self._dialect != "llama")
        if required:
            start = calls
        elif content is not None:
            self._rules.append(f"content: %json {content}")
            start = f"content | {calls}"
        else:
            start = self._free(calls, parallel=parallel)
        return "\n".join([f"start: {start}", *self._rules])

    # ------------------------------------------------------------------ around the calls

    def _calls(self, *, parallel: bool) -> str:
        if self._dialect == "pythonic":
            return '"[" one (", " one)* "]"' if parallel else '"[" one "]"'
        if self._dialect not in MARKERS:
            return "one"
        opens, closes = (self._spell(marker) for marker in MARKERS[self._dialect])
        self._rules += [f"call: {opens} inside", f"inside: {self._inside()} {closes}"]
        between = "" if self._dialect == "gemma" else '"\\n" '
        return f"call ({between}call)*" if parallel else "call"

    def _inside(self) -> str:
        return {"hermes": '"\\n" one "\\n"', "qwen_xml": '"\\n" one "\\n"', "laguna": "one", "gemma": "one"}[self._dialect]

    def _free(self, calls: str, *, parallel: bool) -> str:
        """Content, and calls where they begin."""
        if self._dialect not in MARKERS:  # a call stands alone, at the beginning
            first = "\\[" if self._dialect == "pythonic" else "{"
            self._rules.append(rf"TEXT: /([^\s{first}](.|\n)*)?/")
            return f"TEXT | {calls}"
        opens = MARKERS[self._dialect][0]
        ids = self._tokenizer.encode(opens, add_special=False)
        many = "*" if parallel else "?"
        if len(ids) == 1 and self._tokenizer.is_special(ids[0]):
            self._rules.append(f"TEXT: {FREE}")
            return f"TEXT (call TEXT){many}" if parallel else "TEXT call?"
        self._rules += [
            f"before[suffix={literal(opens)}]: {FREE}",
            rf"TEXT: {FREE} & ~/(.|\n)*{opens.replace('|', '[|]')}(.|\n)*/",
        ]
        return "(before inside)* TEXT" if parallel else "TEXT | before inside"

    # ------------------------------------------------------------------ one function

    def _function(self, number: int, tool: Tool) -> str:
        name = f"f{number}"
        schema = self._schema(tool)
        match self._dialect:
            case "hermes" | "llama":
                word = "arguments" if self._dialect == "hermes" else "parameters"
                head = literal(f'{{"name": {json.dumps(tool.name)}, "{word}": ')
                self._rules += [f'{name}: {head} {name}_a "}}"', f"{name}_a: %json {json.dumps(bound_whitespace(schema))}"]
            case "qwen_xml":
                body = self._tagged(name, tool, schema, head="<parameter={}>\n", tail="\n</parameter>", behind="\n")
                self._rules.append(f'{name}: {literal(f"<function={tool.name}>" + chr(10))} {body} "</function>"')
            case "laguna":
                head = "<arg_key>{}</arg_key>\n<arg_value>"
                body = self._tagged(name, tool, schema, head=head, tail="</arg_value>", behind="\n")
                self._rules.append(f"{name}: {literal(tool.name + chr(10))} {body}")
            case "gemma":
                literals = self._literals(GEMMA, name, tool)
                self._rules.append(f'{name}: {literal(f"call:{tool.name}{{")} {literals.members(schema)} "}}"')
            case "pythonic":
                literals = self._literals(PYTHON, name, tool)
                self._rules.append(f'{name}: {literal(tool.name + "(")} {literals.members(schema)} ")"')
        return name

    def _literals(self, style: Style, name: str, tool: Tool) -> Literals:
        return Literals(
            style,
            name,
            self._rules,
            spell=self._spell,
            tokenizer=self._tokenizer,
            param=tool.param,
            strict=tool.strict,
            check=self._check,
        )

    def _schema(self, tool: Tool) -> dict[str, Any]:
        """The tool's schema. One that cannot be held to is refused where it is strict; else any object will do where arguments
        are JSON, and elsewhere each part is judged by itself."""
        found, as_json = {"type": "object", **tool.schema}, self._dialect in ("hermes", "llama")
        try:
            self._check(tool.schema, tool.param)
        except BadParameter:
            if tool.strict:
                raise
            if as_json:
                return {"type": "object"}
        return found if as_json else as_members(found, tool.param, self._dialect, strict=tool.strict)

    def _tagged(self, name: str, tool: Tool, schema: dict[str, Any], *, head: str, tail: str, behind: str) -> str:
        """Parameters between tags, in the order of the schema, those that are not required left out or not."""
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = schema.get("required", ())
        parts = []
        for number, (key, part) in enumerate((schema.get("properties") or {}).items()):
            rule = f"{name}_p{number}"
            try:
                value = self._tagged_value(rule, part, shared, tail=tail, param=f"{tool.param}.properties.{key}")
            except NO_SCHEMA:
                if tool.strict:
                    raise
                value = self._loosely(rule, part, tail)
            self._rules.append(f"{rule}: {literal(head.format(key))} {value} {literal(behind)}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _tagged_value(self, rule: str, part: Any, shared: dict[str, Any], *, tail: str, param: str) -> str:
        if not isinstance(part, dict) or kinds_of(part) != ("string",):
            schema = self._check({**shared, **part} if isinstance(part, dict) else part, param)
            self._rules.append(f"{rule}_v: %json {json.dumps(bound_whitespace(schema))}")
            return f"{rule}_v {literal(tail)}"
        if "enum" in part or "const" in part:
            texts = constants({**part, "type": "string"}, param)
            if any(tail.strip() in text for text in texts):
                keyword = "const" if "const" in part else "enum"
                raise BadParameter(f"{param}.{keyword}", f"holds {tail.strip()}, which ends a value")
            return "(" + " | ".join(map(literal, texts)) + f") {literal(tail)}"
        refuse(part, BINDS_ALL, param)
        self._check(only(part, TEXTUAL), param)
        terminal = text_terminal(part, avoiding=tail, param=param)
        if terminal is None:
            return self._anything(rule, tail)
        self._rules.append(f"{rule.upper()}_V: {terminal}")
        return f"{rule.upper()}_V {literal(tail)}"

    def _loosely(self, rule: str, part: Any, tail: str) -> str:
        """A value of its types, and no more; of a text, anything up to the tag that ends it, as it is read."""
        kinds = kinds_of(part) if isinstance(part, dict) else ()
        if not kinds or "string" in kinds or not set(kinds) <= KINDS:
            return self._anything(rule, tail)
        self._rules.append(f"{rule}_l: %json {json.dumps(bound_whitespace({'type': list(kinds)}))}")
        return f"{rule}_l {literal(tail)}"

    def _anything(self, rule: str, tail: str) -> str:
        """Any text up to the tag that ends it."""
        self._rules.append(f"{rule}_v[suffix={literal(tail)}]: {FREE}")
        return f"{rule}_v"
