"""Grammars of tool calls, which combine the tools' JSON schemas with the call syntax of a dialect.

The input is tools, the dialect and a tokenizer. The output is a Lark grammar of a reply that must call a tool, or may. In a reply
that may, text is free until a call begins; from there on, every character must match one of the tools and its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from onedraw import limits
from onedraw.errors import BadParameter, BadRequest
from onedraw.text.constraints.grammar import bound_whitespace, lark_string
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.dialects import GEMMA_QUOTE, MARKERS, Dialect, Tool
from onedraw.text.tools.schema import (
    ANY_TYPE_KEYWORDS,
    ARRAY_KEYWORDS,
    DEFINITIONS,
    JSON_TYPES,
    NOT_SUPPORTED,
    OBJECT_KEYWORDS,
    SCHEMA_ERRORS,
    constants,
    object_properties,
    only,
    refuse,
    refuse_missing,
    resolve_pointer,
    schema_types,
    unwritable_key,
)

LarkText = Callable[[str], str]  # writes a text in Lark's notation, with special tokens by their ids
CheckSchema = Callable[[Any, str], Any]  # (schema, path of the schema in the request) → the schema, or raises BadParameter

_ANY_TEXT = r"/(.|\n)*/"
_NUMBER_KEYWORDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_STRING_KEYWORDS = frozenset(("minLength", "maxLength", "pattern", "format"))
_UNESCAPED_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")


class _Rules:
    """Collects the rules of one grammar and limits the work of writing and checking them."""

    def __init__(self, check: CheckSchema) -> None:
        self._check = check
        self._work = 0
        self.lines: list[str] = []

    def add(self, *rules: str) -> None:
        for rule in rules:
            self._spend(len(rule))
            self.lines.append(rule)

    def check(self, schema: Any, param: str) -> Any:
        self._spend(limits.TOOL_CHECK_WORK + len(json.dumps(schema)))
        return self._check(schema, param)

    def _spend(self, work: int) -> None:
        """Count work; over the limit raise BadRequest. A BadParameter would be caught where a tool is not strict, and the work
        would go on."""
        self._work += work
        if self._work > limits.MAX_TOOL_WORK:
            raise BadRequest(
                f"tools: their schemas take too much work: {limits.MAX_TOOL_WORK:,} characters may be written and checked for "
                f"the grammar of their calls; send fewer tools, or simpler schemas",
                param="tools",
                code="invalid_parameter",
            )


class ToolCallGrammar:
    """Collects the rules of one grammar. Create a new one for each request."""

    def __init__(self, dialect: Dialect, *, tokenizer: Tokenizer, lark_text: LarkText, check: CheckSchema) -> None:
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._lark_text = lark_text
        self._rules = _Rules(check)
        self._check = self._rules.check

    def write(self, tools: Sequence[Tool], *, required: bool, parallel: bool, content: str | None = None) -> str:
        """Return the grammar of a reply that must (`required`) or may call a tool. `content` is the JSON schema that a reply
        without calls follows."""
        one = " | ".join(self._function(number, tool) for number, tool in enumerate(tools))
        self._rules.add(f"one: {one}")
        calls = self._calls(parallel=parallel and self._dialect != "llama")
        if required:
            start = calls
        elif content is not None:
            self._rules.add(f"content: %json {content}")
            start = f"content | {calls}"
        else:
            start = self._free(calls, parallel=parallel)
        return "\n".join([f"start: {start}", *self._rules.lines])

    def _calls(self, *, parallel: bool) -> str:
        if self._dialect == "pythonic":
            return '"[" one (", " one)* "]"' if parallel else '"[" one "]"'
        if self._dialect not in MARKERS:
            return "one"
        opens, closes = (self._lark_text(marker) for marker in MARKERS[self._dialect])
        self._rules.add(f"call: {opens} inside", f"inside: {self._inside()} {closes}")
        between = "" if self._dialect == "gemma" else '"\\n" '
        return f"call ({between}call)*" if parallel else "call"

    def _inside(self) -> str:
        return {"hermes": '"\\n" one "\\n"', "qwen_xml": '"\\n" one "\\n"', "laguna": "one", "gemma": "one"}[self._dialect]

    def _free(self, calls: str, *, parallel: bool) -> str:
        """Write the start rule of a reply that is free text with calls in it."""
        if self._dialect not in MARKERS:  # Without markers a reply is either a call or text.
            first = "\\[" if self._dialect == "pythonic" else "{"
            self._rules.add(rf"TEXT: /([^\s{first}](.|\n)*)?/")
            return f"TEXT | {calls}"
        opens = MARKERS[self._dialect][0]
        ids = self._tokenizer.encode(opens, add_special=False)
        many = "*" if parallel else "?"
        if len(ids) == 1 and self._tokenizer.is_special(ids[0]):
            self._rules.add(f"TEXT: {_ANY_TEXT}")
            return f"TEXT (call TEXT){many}" if parallel else "TEXT call?"
        self._rules.add(
            f"before[suffix={lark_string(opens)}]: {_ANY_TEXT}",
            rf"TEXT: {_ANY_TEXT} & ~/(.|\n)*{opens.replace('|', '[|]')}(.|\n)*/",
        )
        return "(before inside)* TEXT" if parallel else "TEXT | before inside"

    def _function(self, number: int, tool: Tool) -> str:
        name = f"f{number}"
        schema = self._schema(tool)
        match self._dialect:
            case "hermes" | "llama":
                word = "arguments" if self._dialect == "hermes" else "parameters"
                head = lark_string(f'{{"name": {json.dumps(tool.name)}, "{word}": ')
                self._rules.add(f'{name}: {head} {name}_a "}}"', f"{name}_a: %json {json.dumps(bound_whitespace(schema))}")
            case "qwen_xml":
                body = self._tagged(name, tool, schema, head="<parameter={}>\n", tail="\n</parameter>")
                self._rules.add(f'{name}: {lark_string(f"<function={tool.name}>" + chr(10))} {body} "</function>"')
            case "laguna":
                head = "<arg_key>{}</arg_key>\n<arg_value>"
                body = self._tagged(name, tool, schema, head=head, tail="</arg_value>")
                self._rules.add(f"{name}: {lark_string(tool.name + chr(10))} {body}")
            case "gemma":
                literals = self._literals(_GEMMA, name, tool)
                self._rules.add(f'{name}: {lark_string(f"call:{tool.name}{{")} {literals.members(schema)} "}}"')
            case "pythonic":
                literals = self._literals(_PYTHON, name, tool)
                self._rules.add(f'{name}: {lark_string(tool.name + "(")} {literals.members(schema)} ")"')
        return name

    def _literals(self, style: _LiteralStyle, name: str, tool: Tool) -> _LiteralGrammar:
        return _LiteralGrammar(
            style,
            name,
            self._rules,
            lark_text=self._lark_text,
            tokenizer=self._tokenizer,
            param=tool.param,
            strict=tool.strict,
        )

    def _schema(self, tool: Tool) -> dict[str, Any]:
        """Return the schema that the grammar enforces. If the tool's own cannot be compiled, a strict tool is refused; otherwise
        JSON arguments may be any object, and in the other dialects each parameter is checked separately."""
        schema, as_json = {"type": "object", **tool.schema}, self._dialect in ("hermes", "llama")
        try:
            self._check(tool.schema, tool.param)
        except BadParameter:
            if tool.strict:
                raise
            if as_json:
                return {"type": "object"}
        return schema if as_json else object_properties(schema, tool.param, self._dialect, strict=tool.strict)

    def _tagged(self, name: str, tool: Tool, schema: dict[str, Any], *, head: str, tail: str) -> str:
        """Write tagged parameters in the order of the schema. Those that are not required may be left out."""
        definitions: dict[str, Any] = {key: schema[key] for key in DEFINITIONS if key in schema}
        required = schema.get("required", ())
        parts = []
        for number, (key, part) in enumerate((schema.get("properties") or {}).items()):
            rule = f"{name}_p{number}"
            try:
                value = self._tagged_value(rule, part, definitions, tail=tail, param=f"{tool.param}.properties.{key}")
            except SCHEMA_ERRORS:
                if tool.strict:
                    raise
                value = self._value_of_types(rule, part, tail)
            self._rules.add(f"{rule}: {lark_string(head.format(key))} {value} {lark_string(chr(10))}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _tagged_value(self, rule: str, part: Any, definitions: dict[str, Any], *, tail: str, param: str) -> str:
        if not isinstance(part, dict) or schema_types(part) != ("string",):
            schema = self._check({**definitions, **part} if isinstance(part, dict) else part, param)
            self._rules.add(f"{rule}_v: %json {json.dumps(bound_whitespace(schema))}")
            return f"{rule}_v {lark_string(tail)}"
        if "enum" in part or "const" in part:
            texts = constants({**part, "type": "string"}, param)
            if any(tail.strip() in text for text in texts):
                keyword = "const" if "const" in part else "enum"
                raise BadParameter(
                    f"{param}.{keyword}", f"contains {tail.strip()}, which ends a value in this model's tool call syntax"
                )
            return "(" + " | ".join(map(lark_string, texts)) + f") {lark_string(tail)}"
        refuse(part, ANY_TYPE_KEYWORDS, param)
        self._check(only(part, _STRING_KEYWORDS), param)
        terminal = _text_terminal(part, avoiding=tail, param=param)
        if terminal is None:
            return self._any_text(rule, tail)
        self._rules.add(f"{rule.upper()}_V: {terminal}")
        return f"{rule.upper()}_V {lark_string(tail)}"

    def _value_of_types(self, rule: str, part: Any, tail: str) -> str:
        """Write a JSON value of the types in the schema, or any text up to the closing tag if the value may be a string."""
        types = schema_types(part) if isinstance(part, dict) else ()
        if not types or "string" in types or not set(types) <= JSON_TYPES:
            return self._any_text(rule, tail)
        self._rules.add(f"{rule}_l: %json {json.dumps(bound_whitespace({'type': list(types)}))}")
        return f"{rule}_l {lark_string(tail)}"

    def _any_text(self, rule: str, tail: str) -> str:
        """Write a rule that matches any text up to the closing tag."""
        self._rules.add(f"{rule}_v[suffix={lark_string(tail)}]: {_ANY_TEXT}")
        return f"{rule}_v"


# ---------------------------------------------------------------------- values written as Gemma or Python literals


@dataclass(frozen=True, slots=True)
class _LiteralStyle:
    """How a dialect spells values and separates them."""

    true: str
    false: str
    null: str
    separator: str
    member: str  # text between the key and the value of an argument
    inner: str  # text between the key and the value in a nested object
    quoted_keys: bool  # whether keys of nested objects have quotes
    json_strings: bool  # whether strings are written as in JSON; if not, between Gemma's quotes


_GEMMA = _LiteralStyle("true", "false", "null", ",", ":", ":", quoted_keys=False, json_strings=False)
_PYTHON = _LiteralStyle("True", "False", "None", ", ", "=", ": ", quoted_keys=True, json_strings=True)


class _LiteralGrammar:
    """Adds the rules for the arguments of one tool, written as Gemma or Python literals, to a ToolCallGrammar."""

    def __init__(
        self,
        style: _LiteralStyle,
        name: str,
        rules: _Rules,
        *,
        lark_text: LarkText,
        tokenizer: Tokenizer,
        param: str,
        strict: bool,
    ) -> None:
        self._style, self._strict, self._check = style, strict, rules.check
        self._name = name
        self._rules = rules
        self._lark_text = lark_text
        quote = tokenizer.encode(GEMMA_QUOTE, add_special=False)
        self._quote_is_special = len(quote) == 1 and tokenizer.is_special(quote[0])
        self._param = param
        self._count = 0
        self._depth = 0
        self._root: dict[str, Any] = {}
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def members(self, schema: dict[str, Any]) -> str:
        """Write the arguments of a call: the properties of the schema in their order."""
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
                    raise unwritable_key(key, path)
                continue
            name = lark_string(key + style.member) if top else self._key(key)
            rule = self._rule(f"{name} {self._value(part, f'{path}.properties.{key}')}")
            parts.append((rule, key in required))
        return self._sequence(parts)

    def _key(self, key: str) -> str:
        return lark_string((json.dumps(key, ensure_ascii=False) if self._style.quoted_keys else key) + self._style.inner)

    def _sequence(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Write members in their order, with separators between those that are present. `first` matches the members from one on
        if none came before; `rest` matches them, with a separator, if one did."""
        separator = lark_string(self._style.separator)
        first, rest = '""', '""'
        for rule, required in reversed(parts):
            begun = f"{rule} {rest}" if rest != '""' else rule
            first = self._rule(begun if required else f"{begun} | {first}")
            after = f"{separator} {begun}"
            rest = self._rule(after if required else f"({after}) | {rest}")
        return first

    def _value(self, schema: Any, path: str) -> str:
        """Write a value of this schema. If it cannot be enforced and the tool is not strict, write a value of the same type, or
        any value."""
        self._depth += 1
        try:
            return self._enforced_value(schema, path)
        finally:
            self._depth -= 1

    def _enforced_value(self, schema: Any, path: str) -> str:
        try:
            return self._exact_value(schema, path)
        except SCHEMA_ERRORS:
            if self._strict:
                raise
        if isinstance(schema, dict) and isinstance(schema.get("type"), str):
            with suppress(*SCHEMA_ERRORS):
                return self._exact_value(
                    {name: schema[name] for name in ("type", "properties", "required", "items") if name in schema}, path
                )
        return self._anything()

    def _anything(self) -> str:
        """Write a rule that matches any value."""
        if self._style.json_strings:
            return self._json({})
        if self._any is None:
            self._any = rule = f"{self._name}_any"
            types = ("string", "number", "boolean", "null")
            inner = f'({rule} ("," {rule})*)?'
            key = f"{self._name}_K".upper()
            self._rules.add(f"{key}: /[A-Za-z_][A-Za-z0-9_]*/")
            members = f'({key} ":" {rule} ("," {key} ":" {rule})*)?'
            plain = " | ".join(self._typed(kind, {"type": kind}, "") for kind in types)
            self._rules.add(f'{rule}: {plain} | "[" {inner} "]" | "{{" {members} "}}"')
        return self._any

    def _exact_value(self, schema: Any, path: str) -> str:
        if self._depth > limits.MAX_LITERAL_DEPTH:
            raise BadParameter(path, f"is more than {limits.MAX_LITERAL_DEPTH} levels deep, which {NOT_SUPPORTED}")
        if not isinstance(schema, dict):
            raise BadParameter(path, "must be a schema object: this model's tool call syntax needs the type of every value")
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), path)
        if "const" in schema or "enum" in schema:
            return "(" + " | ".join(self._constant(value) for value in constants(schema, path)) + ")"
        for name in ("anyOf", "oneOf"):
            if name in schema:
                parts = [self._value(part, f"{path}.{name}[{number}]") for number, part in enumerate(schema[name])]
                if not parts:
                    raise BadParameter(f"{path}.{name}", "is empty; it needs at least one schema")
                return "(" + " | ".join(parts) + ")"
        types = schema.get("type")
        if isinstance(types, list) and types:
            return "(" + " | ".join(self._value({**schema, "type": kind}, path) for kind in types) + ")"
        return self._typed(types, schema, path)

    def _typed(self, kind: Any, schema: dict[str, Any], path: str) -> str:
        refuse(schema, ANY_TYPE_KEYWORDS, path)
        bounds = only(schema, _NUMBER_KEYWORDS | _STRING_KEYWORDS)
        if kind not in JSON_TYPES or len(bounds) > 1:
            self._check(bounds, path)
        refuse(schema, ARRAY_KEYWORDS if kind == "array" else OBJECT_KEYWORDS if kind == "object" else (), path)
        match kind:
            case "string":
                return self._string(schema, path)
            case "number" | "integer":
                return self._json(only(schema, _NUMBER_KEYWORDS))
            case "boolean":
                return f"({lark_string(self._style.true)} | {lark_string(self._style.false)})"
            case "null":
                return lark_string(self._style.null)
            case "array":
                item = self._value(schema.get("items", {"type": "string"}), f"{path}.items")
                return self._rule(f'"[" ({item} ({lark_string(self._style.separator)} {item})*)? "]"')
            case "object":
                return self._rule(f'"{{" {self._members(schema, path)} "}}"')
            case _:
                raise BadParameter(f"{path}.type", "is required in this model's tool call syntax")

    def _string(self, schema: dict[str, Any], path: str) -> str:
        if self._style.json_strings:
            return self._json(only(schema, _STRING_KEYWORDS))
        terminal = _text_terminal(schema, avoiding=GEMMA_QUOTE, param=path)
        quote = self._lark_text(GEMMA_QUOTE)
        if terminal is None and not self._quote_is_special:
            self._count += 1
            rule = f"{self._name}_s{self._count}"
            self._rules.add(f"{rule}[suffix={lark_string(GEMMA_QUOTE)}]: {_ANY_TEXT}")
            return f"{quote} {rule}"
        self._count += 1
        name = f"{self._name}_S{self._count}".upper()
        self._rules.add(f"{name}: {terminal or _ANY_TEXT}")
        return f"{quote} {name} {quote}"

    def _constant(self, value: Any) -> str:
        style = self._style
        match value:
            case None:
                return lark_string(style.null)
            case bool():
                return lark_string(style.true if value else style.false)
            case str():
                if style.json_strings:
                    return lark_string(json.dumps(value, ensure_ascii=False))
                return f"{self._lark_text(GEMMA_QUOTE)} {lark_string(value)} {self._lark_text(GEMMA_QUOTE)}"
            case list():
                return self._between("[", [self._constant(item) for item in value], "]")
            case dict():
                return self._between("{", [f"{self._key(key)} {self._constant(item)}" for key, item in value.items()], "}")
            case _:
                return lark_string(json.dumps(value))

    def _between(self, opens: str, parts: Sequence[str], closes: str) -> str:
        return " ".join([lark_string(opens), f" {lark_string(self._style.separator)} ".join(parts), lark_string(closes)])

    def _reference(self, pointer: str, path: str) -> str:
        if pointer not in self._references:
            target = resolve_pointer(self._root, pointer, path)
            self._count += 1
            rule = self._references[pointer] = f"{self._name}_r{self._count}"
            self._rules.add(f"{rule}: {self._value(target, path)}")
        return self._references[pointer]

    def _json(self, schema: dict[str, Any]) -> str:
        return self._rule(f"%json {json.dumps(schema)}")

    def _rule(self, body: str) -> str:
        self._count += 1
        rule = f"{self._name}_n{self._count}"
        self._rules.add(f"{rule}: {body}")
        return rule


def _text_terminal(part: dict[str, Any], *, avoiding: str, param: str) -> str | None:
    """Return a terminal for an unquoted string with the keywords of its schema, in which `avoiding` does not occur. None if the
    schema allows any text."""
    if "format" in part:
        raise BadParameter(f"{param}.format", f"{NOT_SUPPORTED}, which writes strings without quotes")
    bounds = []
    if "minLength" in part or "maxLength" in part:
        bounds.append(rf"/(.|\n){{{part.get('minLength', 0)},{part.get('maxLength', '')}}}/")
    if "pattern" in part:
        pattern = _UNESCAPED_SLASH.sub(r"\1\\/", part["pattern"])
        before = "" if pattern.startswith("^") else r"(.|\n)*"
        after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else r"(.|\n)*"
        bounds.append(f"/{before}({pattern.removeprefix('^').removesuffix('$' if not after else '')}){after}/")
    if not bounds:
        return None
    excluded = avoiding.strip().replace("/", "\\/").replace("|", "[|]")
    return " & ".join([*bounds, rf"~/(.|\n)*{excluded}(.|\n)*/"])
