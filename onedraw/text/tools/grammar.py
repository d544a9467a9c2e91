"""Grammars of tool calls, which combine the tools' JSON schemas with the call syntax of a dialect.

The input is tools, the dialect (call syntax of a model family) and a tokenizer. The output is a Lark grammar of a reply that must
call a tool, or may. In a reply that may, text is free until a call begins; from there on, every character must match one of the
tools and its schema. The schema of a strict tool is enforced completely or refused; that of any other tool as far as possible.
Methods that "write" an element add rules for it to the grammar and return the Lark text that refers to it.
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
from onedraw.text.constraints.numbers import exact_numbers
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.dialects import GEMMA_QUOTE, MARKERS, VALUE_ENDS, Dialect, Tool
from onedraw.text.tools.schema import (
    ANY_TYPE_KEYWORDS,
    ARRAY_KEYWORDS,
    COMBINATORS,
    JSON_TYPES,
    NOT_SUPPORTED,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    RESTRICTIONS,
    SCHEMA_ERRORS,
    STRING_KEYWORDS,
    alternatives,
    can_write_key,
    constants,
    object_properties,
    only,
    parameter_types,
    refuse,
    refuse_missing,
    resolve_pointer,
    standalone,
    unwritable_key,
)

LarkText = Callable[[str], str]  # writes a text in Lark's notation, with special tokens by their ids
# (schema, its path in the request, a function that is called with the processor time of the check) → the schema, or raises
# BadParameter
CheckSchema = Callable[[Any, str, Callable[[float], None]], Any]

_ANY_TEXT = r"/(.|\n)*/"
_UNESCAPED_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")


class _Rules:
    """The rules of one grammar, with a limit on the work of writing and checking them."""

    def __init__(self, check: CheckSchema) -> None:
        self._check = check
        self._work = 0
        self.lines: list[str] = []

    def add(self, *rules: str) -> None:
        for rule in rules:
            self.spend(len(rule))
            self.lines.append(rule)

    def check(self, schema: Any, param: str) -> Any:
        self.spend(limits.TOOL_CHECK_WORK + len(json.dumps(schema)))
        return self._check(schema, param, self._spend_seconds)

    def _spend_seconds(self, seconds: float) -> None:
        """Count processor time as its share of the whole work that is allowed."""
        self.spend(int(seconds / limits.TOOL_SECONDS * limits.MAX_TOOL_WORK))

    def spend(self, work: int) -> None:
        """Count work, and raise BadRequest when it exceeds the limit. BadParameter would not do: it is caught where a tool is not
        strict, and the work would go on."""
        self._work += work
        if self._work > limits.MAX_TOOL_WORK:
            raise BadRequest(
                f"tools: their schemas take too much work: {limits.MAX_TOOL_WORK:,} characters may be written and checked for "
                f"the grammar of their calls, in {limits.TOOL_SECONDS:g} seconds of processor time; send fewer tools, or simpler "
                "schemas",
                param="tools",
                code="invalid_parameter",
            )


class ToolCallGrammar:
    """Writes the grammar of one request from its tools. Create a new object for each request."""

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
                body = self._tagged(name, tool, schema, head="<parameter={}>\n", before="\n")
                self._rules.add(f'{name}: {lark_string(f"<function={tool.name}>" + chr(10))} {body} "</function>"')
            case "laguna":
                head = "<arg_key>{}</arg_key>\n<arg_value>"
                body = self._tagged(name, tool, schema, head=head)
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
            tool=tool,
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

    def _tagged(self, name: str, tool: Tool, schema: dict[str, Any], *, head: str, before: str = "") -> str:
        """Write tagged parameters in the order of the schema. Those that are not required may be left out. `before` is the text
        between a value and its closing tag."""
        close, following = VALUE_ENDS[self._dialect]
        end = rf"{_in_pattern(close)}[ \t\r\n]*({'|'.join(map(_in_pattern, following))})"
        values = _TaggedValues(tool, tail=before + close, end=end, rules=self._rules)
        required, types = schema.get("required", ()), parameter_types(tool.schema)
        parts = []
        for number, (key, part) in enumerate((schema.get("properties") or {}).items()):
            rule = f"{name}_p{number}"
            value = values.write(rule, part, types.get(key, frozenset()), f"{tool.param}.properties.{key}")
            self._rules.add(f"{rule}: {lark_string(head.format(key))} {value} {lark_string(chr(10))}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)


# ---------------------------------------------------------------------- values between tags


class _TaggedValues:
    """Adds the rules for the values of one tool, written between tags, to a ToolCallGrammar.

    `tail` is the text after a value. `end` is a pattern of the text at which the parser of calls ends a value, so no
    value may contain it.
    """

    def __init__(self, tool: Tool, *, tail: str, end: str, rules: _Rules) -> None:
        self._tail, self._end = tail, end
        self._strict = tool.strict
        self._root = {"type": "object", **tool.schema}
        self._rules = rules
        self._check = rules.check

    def write(self, rule: str, part: Any, types: frozenset[str], param: str) -> str:
        """Write a value and its tail. If it cannot be enforced and the tool is not strict, write a value of its types."""
        try:
            if types == {"string"}:
                return self._text(
                    rule, [self._string(one, param) for one in alternatives(part, self._root, param, self._rules.spend)]
                )
            return self._json(rule, self._check(standalone(part, self._root, param), param))
        except SCHEMA_ERRORS:
            if self._strict:
                raise
        if not types or "string" in types or not types <= JSON_TYPES:
            return self._text(rule, [_ANY_TEXT])
        return self._json(rule, {"type": sorted(types)})

    def _json(self, rule: str, schema: Any) -> str:
        self._rules.add(f"{rule}_v: %json {json.dumps(bound_whitespace(schema))}")
        return f"{rule}_v {lark_string(self._tail)}"

    def _text(self, rule: str, texts: Sequence[str]) -> str:
        """Write a text that matches one of these expressions. The value ends at the first tail that follows such a text."""
        text = f"({' | '.join(texts)}) & ~/(.|\\n)*{self._end}(.|\\n)*/"
        self._rules.add(f"{rule}_v[lazy]: {rule.upper()}_V", f"{rule.upper()}_V: ({text}) {lark_string(self._tail)}")
        return f"{rule}_v"

    def _string(self, part: dict[str, Any], param: str) -> str:
        """Write the expression of a text that follows a schema without combinators."""
        if "enum" not in part and "const" not in part:
            refuse(part, ANY_TYPE_KEYWORDS, param)
            self._check(only(part, STRING_KEYWORDS), param)
            return _text_expression(part, param)
        texts = constants({**part, "type": "string"}, param)
        if any(re.search(self._end, text) for text in texts):
            keyword = "const" if "const" in part else "enum"
            raise BadParameter(f"{param}.{keyword}", "contains a text that ends a value in this model's tool call syntax")
        return f"({' | '.join(map(lark_string, texts))})"


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
        tool: Tool,
    ) -> None:
        self._style, self._strict, self._check = style, tool.strict, rules.check
        self._name = name
        self._rules = rules
        self._lark_text = lark_text
        quote = tokenizer.encode(GEMMA_QUOTE, add_special=False)
        self._quote_is_special = len(quote) == 1 and tokenizer.is_special(quote[0])
        self._param = tool.param
        self._count = 0
        self._depth = 0
        self._root = {"type": "object", **tool.schema}  # the schema in which references are resolved
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def members(self, schema: dict[str, Any]) -> str:
        """Write the arguments of a call: the properties of the schema in their order."""
        return self._members(schema, self._param, top=True)

    def _members(self, schema: dict[str, Any], path: str, *, top: bool = False) -> str:
        style = self._style
        required, properties = schema.get("required") or (), schema.get("properties") or {}
        extra = None if top else self._extra_member(schema, path)
        if self._strict:
            refuse_missing(required, properties, path)
        parts: list[tuple[str, bool]] = []
        for key, part in properties.items():
            if not style.quoted_keys and not can_write_key(key, "gemma"):
                if self._strict:
                    raise unwritable_key(key, path)
                continue
            name = lark_string(key + style.member) if top else self._key(key)
            rule = self._rule(f"{name} {self._value(part, f'{path}.properties.{key}')}")
            parts.append((rule, key in required))
        return self._sequence(parts, extra)

    def _extra_member(self, schema: dict[str, Any], path: str) -> str | None:
        """Write a member that is not one of the properties; None if there may be none. Without `additionalProperties`,
        such members are allowed only in objects whose schema has no properties."""
        style, properties = self._style, schema.get("properties") or {}
        allowed = schema.get("additionalProperties", not properties)
        if allowed is False:
            return None
        self._count += 1
        name = f"{self._name}_K{self._count}".upper()
        pattern = r'/"[^"\\\x00-\x1f\x7f]*"/' if style.quoted_keys else r'/[^ \t\r\n:,{}\[\]<>|"]+/'
        taken = [lark_string(json.dumps(key, ensure_ascii=False) if style.quoted_keys else key) for key in properties]
        self._rules.add(f"{name}: {pattern}" + (f" & ~({' | '.join(taken)})" if taken else ""))
        value = self._anything() if allowed in (True, {}) else self._value(allowed, f"{path}.additionalProperties")
        return self._rule(f"{name} {lark_string(style.inner)} {value}")

    def _key(self, key: str) -> str:
        return lark_string((json.dumps(key, ensure_ascii=False) if self._style.quoted_keys else key) + self._style.inner)

    def _sequence(self, parts: Sequence[tuple[str, bool]], extra: str | None) -> str:
        """Write members in their order, with separators between those that are present, and then any number of members `extra`.

        For each member there are two rules, which match it and all members after it. The rule `first` is for the case that no
        member came before it; the rule `rest` begins with a separator, because one did.
        """
        separator = lark_string(self._style.separator)
        first, rest = '""', '""'
        if extra is not None:
            rest = self._rule(f"({separator} {extra})*")
            first = self._rule(f"({extra} {rest})?")
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
        combinators = [name for name in COMBINATORS if name in schema]
        if combinators and (len(combinators) > 1 or combinators == ["allOf"] or not RESTRICTIONS.isdisjoint(schema)):
            return f"({' | '.join(self._value(one, path) for one in alternatives(schema, self._root, path, self._rules.spend))})"
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), path)
        if "const" in schema or "enum" in schema:
            keyword = "const" if "const" in schema else "enum"
            return f"({' | '.join(self._constant(value, f'{path}.{keyword}') for value in constants(schema, path))})"
        for name in combinators:
            parts = [self._value(part, f"{path}.{name}[{number}]") for number, part in enumerate(schema[name])]
            if not parts:
                raise BadParameter(f"{path}.{name}", "is empty; it needs at least one schema")
            return f"({' | '.join(parts)})"
        types = schema.get("type")
        if isinstance(types, list) and types:
            return "(" + " | ".join(self._value({**schema, "type": kind}, path) for kind in types) + ")"
        return self._typed(types, schema, path)

    def _typed(self, kind: Any, schema: dict[str, Any], path: str) -> str:
        refuse(schema, ANY_TYPE_KEYWORDS, path)
        bounds = only(schema, NUMBER_KEYWORDS | STRING_KEYWORDS)
        if kind not in JSON_TYPES or len(bounds) > 1:
            self._check(bounds, path)
        refuse(schema, ARRAY_KEYWORDS if kind == "array" else OBJECT_KEYWORDS if kind == "object" else (), path)
        match kind:
            case "string":
                return self._string(schema, path)
            case "number" | "integer":
                return self._json(only(schema, NUMBER_KEYWORDS))
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
            return self._json(only(schema, STRING_KEYWORDS))
        quote = self._lark_text(GEMMA_QUOTE)
        text = rf"{_text_expression(schema, path)} & ~/(.|\n)*{_in_pattern(GEMMA_QUOTE)}(.|\n)*/"
        self._count += 1
        name = f"{self._name}_S{self._count}".upper()
        if self._quote_is_special:
            self._rules.add(f"{name}: {text}")
            return f"{quote} {name} {quote}"
        rule = f"{self._name}_s{self._count}"
        self._rules.add(f"{rule}[lazy]: {name}", f"{name}: ({text}) {lark_string(GEMMA_QUOTE)}")
        return f"{quote} {rule}"

    def _constant(self, value: Any, path: str) -> str:
        style = self._style
        match value:
            case None:
                return lark_string(style.null)
            case bool():
                return lark_string(style.true if value else style.false)
            case str():
                if style.json_strings:
                    return lark_string(json.dumps(value, ensure_ascii=False))
                if GEMMA_QUOTE in value:
                    raise BadParameter(path, f"contains {GEMMA_QUOTE}, which ends a string in this model's tool call syntax")
                return f"{self._lark_text(GEMMA_QUOTE)} {lark_string(value)} {self._lark_text(GEMMA_QUOTE)}"
            case list():
                return self._between("[", [self._constant(item, path) for item in value], "]")
            case dict():
                for key in value:
                    if not style.quoted_keys and not can_write_key(key, "gemma"):
                        raise BadParameter(path, f"contains the name {key!r}, which this model's tool call syntax cannot write")
                members = [f"{self._key(key)} {self._constant(item, path)}" for key, item in value.items()]
                return self._between("{", members, "}")
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
        return self._rule(f"%json {json.dumps(exact_numbers(schema, self._param))}")

    def _rule(self, body: str) -> str:
        self._count += 1
        rule = f"{self._name}_n{self._count}"
        self._rules.add(f"{rule}: {body}")
        return rule


def _text_expression(part: dict[str, Any], param: str) -> str:
    """Return a Lark expression for an unquoted string with the keywords of its schema."""
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
    return f"({' & '.join(bounds or [_ANY_TEXT])})"


def _in_pattern(text: str) -> str:
    """Write a text inside a regular expression of a Lark grammar."""
    return text.replace("/", "\\/").replace("|", "[|]")
