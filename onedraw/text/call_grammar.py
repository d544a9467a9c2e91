"""Grammars of tool calls: the tools' own schemas, written in the family's syntax.

In: tools, the dialect, a tokenizer. Out: a Lark grammar of a reply that must call, or may. In a reply that may call, text is
free until a call begins; from there on every character of it is held to a tool that exists and to that tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from onedraw.errors import BadParameter
from onedraw.text.grammar import literal, with_bounds
from onedraw.text.literal_grammar import FREE, GEMMA, PYTHON, TEXTUAL, Literals, Style, text_terminal
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tool_schema import BINDS_ALL, KINDS, NO_SCHEMA, as_members, constants, kinds_of, only, refuse
from onedraw.text.tools import MARKERS, Dialect, Tool

Spell = Callable[[str], str]  # a text as a Lark grammar writes it
Check = Callable[[Any, str], Any]  # a schema and the caller's path to it → the schema, or a refusal


class CallGrammar:
    """Writes one grammar. `spell` knows which markers are special tokens; `check` judges schemas."""

    def __init__(self, dialect: Dialect, *, tokenizer: Tokenizer, spell: Spell, check: Check) -> None:
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._spell = spell
        self._check = check
        self._rules: list[str] = []

    def write(self, tools: Sequence[Tool], *, must: bool, parallel: bool, content: str | None = None) -> str:
        """A reply that calls (`must`), or one that may. `content`: a JSON schema for the reply that does not call."""
        one = " | ".join(self._function(number, tool) for number, tool in enumerate(tools))
        self._rules.append(f"one: {one}")
        calls = self._calls(parallel=parallel and self._dialect != "llama")
        if must:
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
        """Text, and calls where they begin."""
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
                self._rules += [f'{name}: {head} {name}_a "}}"', f"{name}_a: %json {json.dumps(with_bounds(schema))}"]
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
            self._rules.append(f"{rule}_v: %json {json.dumps(with_bounds(schema))}")
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
        self._rules.append(f"{rule}_l: %json {json.dumps(with_bounds({'type': list(kinds)}))}")
        return f"{rule}_l {literal(tail)}"

    def _anything(self, rule: str, tail: str) -> str:
        """Any text up to the tag that ends it."""
        self._rules.append(f"{rule}_v[suffix={literal(tail)}]: {FREE}")
        return f"{rule}_v"
