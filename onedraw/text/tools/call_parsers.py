"""The inside of a call, in every family's syntax: characters in, name and JSON arguments out.

A parser is a generator: it is sent one character at a time, appends events to a list, and returns when the call is over.
What cannot be a call raises Malformed. Arguments are given out as soon as they are known to be JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Generator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from onedraw.text.reasoning import SPACE
from onedraw.text.tokenizer import replace_surrogates
from onedraw.text.tools.dialects import GEMMA_QUOTE, MARKERS, CallableTools, Dialect
from onedraw.text.tools.schema import kind_of, types_of

# -------------------- Characters of a call, one by one: what parsers of every syntax ask of them.


Parser: TypeAlias = Generator[None, str, None]


class Malformed(Exception):
    """These characters are no call."""


class Another(Exception):
    """A call that is over was not closed, and another one begins."""


def demand(holds: bool) -> None:
    if not holds:
        raise Malformed


def closed(dialect: Dialect) -> Parser:
    """The marker behind a call. What else stands before it is nothing; before another call, it is the reader's."""
    opens, closes = MARKERS[dialect]
    _, found = yield from until((closes, opens))
    if found == opens:
        raise Another


def skip(character: str) -> Generator[None, str, str]:
    """The first character that is no space, this one included."""
    while character in SPACE:
        character = yield
    return character


def expect(text: str, first: str) -> Parser:
    demand(text[0] == first)
    for wanted in text[1:]:
        demand((yield) == wanted)


def until(ends: Sequence[str]) -> Generator[None, str, tuple[str, str]]:
    """The text before the first of these, and which one it was."""
    text = ""
    while True:
        text += yield
        found = next((end for end in ends if text.endswith(end)), None)
        if found is not None:
            return text[: -len(found)], found


# -------------------- The inside of a call, in every family's syntax: characters in, name and JSON arguments out


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    pass


CallEvent: TypeAlias = CallStart | CallArguments | CallEnd
Types: TypeAlias = dict[str, dict[str, tuple[str, ...]]]  # tool → parameter → JSON types it may have; none: any


def parser_of(calls: CallableTools) -> Callable[[list[CallEvent]], Parser]:
    types = {tool.name: types_of(tool.schema) for tool in calls.tools}
    match calls.dialect:
        case "hermes":
            return _hermes
        case "llama":
            return _llama
        case "qwen_xml":
            return partial(_qwen_xml, types=types)
        case "laguna":
            return partial(_laguna, types=types)
        case "gemma":
            return _gemma
        case "pythonic":
            return partial(_pythonic, names=frozenset(types))


# ---------------------------------------------------------------------------------------------- JSON: Hermes, Qwen, Llama


def _hermes(out: list[CallEvent]) -> Parser:
    """{"name": …, "arguments": {…}} and the marker behind it."""
    yield from _json_call(out, (yield from skip((yield))))
    yield from closed("hermes")


def _llama(out: list[CallEvent]) -> Parser:
    """{"name": …, "parameters": {…}} where a reply begins."""
    yield from _json_call(out, (yield from skip((yield))))


def _json_call(out: list[CallEvent], first: str) -> Parser:
    """An object with a name and arguments, in either order; arguments pass through as they are written."""
    demand(first == "{")
    name: str | None = None
    early: list[str] = []  # arguments that came before the name
    given = False
    character = yield from skip((yield))
    while character != "}":
        key = yield from _string(character)
        demand(key in ("name", "arguments", "parameters", "type", "id"))
        demand((yield from skip((yield))) == ":")
        character = yield from skip((yield))
        if key == "name":
            name = yield from _string(character)
            out.append(CallStart(name))
            if early:
                out.append(CallArguments("".join(early)))
            character = yield from skip((yield))
        elif key in ("arguments", "parameters"):
            given = True
            character = yield from skip((yield from _raw(character, out, early if name is None else None)))
        else:
            character = yield from skip((yield from _raw(character, out, [])))
        demand(character in ",}")
        if character == ",":
            character = yield from skip((yield))
    demand(name is not None)
    if not given:
        out.append(CallArguments("{}"))
    out.append(CallEnd())


def _raw(first: str, out: list[CallEvent], early: list[str] | None) -> Generator[None, str, str]:
    """A JSON value as it is written, given out character by character; the character behind it is returned."""

    def say(text: str) -> None:
        if early is not None:
            early.append(text)
        else:
            out.append(CallArguments(text))

    if first == '"':  # arguments as a text that holds JSON
        said = yield from _string(first)
        say(said)
        return (yield)
    demand(first not in ",:]}")
    depth, quoted, escaped, character = 0, False, False, first
    while True:
        if quoted:
            quoted, escaped = not (character == '"' and not escaped), character == "\\" and not escaped
        elif depth == 0 and character in ",}] \t\r\n":
            return character
        else:
            quoted = character == '"'
            depth += (character in "{[") - (character in "}]")
        say(character)
        if depth == 0 and not quoted and character in '}]"':
            return (yield)
        character = yield


def _string(first: str) -> Generator[None, str, str]:
    """A JSON string, decoded."""
    demand(first == '"')
    raw, escaped = first, False
    while True:
        character = yield
        raw += character
        if character == '"' and not escaped:
            break
        escaped = character == "\\" and not escaped
    try:
        return replace_surrogates(json.loads(raw))
    except ValueError:
        raise Malformed from None


# ---------------------------------------------------------------------------------------------- tags: Qwen3-Coder and 3.5, Laguna


def _qwen_xml(out: list[CallEvent], *, types: Types) -> Parser:
    """<function=name> <parameter=key> value </parameter> … </function> and the marker behind it."""
    yield from expect("<function=", (yield from skip((yield))))
    name, _ = yield from until((">",))
    out.append(CallStart(name.strip()))
    members = Members(out, types.get(name.strip(), {}))
    while True:
        head, which = yield from until(("<parameter=", "</function>"))
        demand(not head.strip(SPACE))
        if which == "</function>":
            break
        key, _ = yield from until((">",))
        yield from members.read(key, "</parameter>", trim=True)
    members.end()
    yield from closed("qwen_xml")


def _laguna(out: list[CallEvent], *, types: Types) -> Parser:
    """name <arg_key>key</arg_key> <arg_value>value</arg_value> … and the marker behind it."""
    opens, close = MARKERS["laguna"]
    name, which = yield from until(("<arg_key>", close, opens))
    if which == opens and not name.strip(SPACE):
        raise Another
    demand(bool(name.strip(SPACE)))
    out.append(CallStart(name.strip(SPACE)))
    members = Members(out, types.get(name.strip(SPACE), {}))
    while which == "<arg_key>":
        key, _ = yield from until(("</arg_key>",))
        yield from until(("<arg_value>",))
        yield from members.read(key.strip(SPACE), "</arg_value>", trim=False)
        _, which = yield from until(("<arg_key>", close, opens))
    members.end()
    if which == opens:
        raise Another


class Members:
    """Writes tagged parameters as the members of a JSON object. A text is given out as it comes, anything else when whole."""

    def __init__(self, out: list[CallEvent], types: dict[str, tuple[str, ...]]) -> None:
        self._out = out
        self._types = types
        self._any = False

    def read(self, key: str, close: str, *, trim: bool) -> Parser:
        """A value up to its closing tag. `trim`: a line break at each end belongs to the tags."""
        self._out.append(CallArguments((", " if self._any else "{") + json.dumps(key, ensure_ascii=False) + ": "))
        self._any = True
        kinds = self._types.get(key, ())
        if kinds == ("string",):
            yield from self._text(close, trim=trim)
            return
        value, _ = yield from until((close,))
        while kinds and "string" not in kinds and _in_quotes(value):  # a text inside of it may hold what ends it
            value += close + (yield from until((close,)))[0]
        if trim:
            value = value.removeprefix("\n").removesuffix("\n")
        self._out.append(CallArguments(_value(value, kinds)))

    def end(self) -> None:
        self._out.append(CallArguments("}" if self._any else "{}"))
        self._out.append(CallEnd())

    def _text(self, close: str, *, trim: bool) -> Parser:
        ends = ("\n" + close, close) if trim else (close,)
        held, first = "", trim
        self._out.append(CallArguments('"'))
        while True:
            character = yield
            if first and character == "\n":
                first = False
                continue
            first = False
            held += character
            ended = next((end for end in ends if held.endswith(end)), None)
            if ended is not None:
                self._say(held[: -len(ended)])
                break
            keep = max((n for n in range(len(ends[0])) if held.endswith(ends[0][:n]) or held.endswith(close[:n])), default=0)
            self._say(held[: len(held) - keep])
            held = held[len(held) - keep :]
        self._out.append(CallArguments('"'))

    def _say(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(json.dumps(text, ensure_ascii=False)[1:-1]))


def _in_quotes(text: str) -> bool:
    """Whether an object or an array ends inside of a text."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        json.JSONDecoder(strict=False).decode(text.strip())
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _value(text: str, kinds: tuple[str, ...]) -> str:
    """A tagged value as JSON: what it is where that is allowed, else a text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if kinds and kind_of(value) not in kinds and not (kind_of(value) == "integer" and "number" in kinds) and "string" in kinds:
        value = text
    return text.strip() if not isinstance(value, str) else replace_surrogates(json.dumps(value, ensure_ascii=False))


# ---------------------------------------------------------------------------------------------- literals: Gemma, pythonic


def _gemma(out: list[CallEvent]) -> Parser:
    """call:name{key:value,…} with strings between their own quotes, and the marker behind it."""
    yield from expect("call:", (yield from skip((yield))))
    name, _ = yield from until(("{",))
    out.append(CallStart(name.strip(SPACE)))
    out.append(CallArguments("{"))
    yield from _gemma_members(out, "}")
    out.append(CallEnd())
    yield from closed("gemma")


def _gemma_members(out: list[CallEvent], close: str) -> Parser:
    """What stands between braces or brackets; the opening one is read already."""
    character = yield from skip((yield))
    while character != close:
        if close == "}":
            if character == GEMMA_QUOTE[0]:
                yield from expect(GEMMA_QUOTE, character)
                key, _ = yield from until((GEMMA_QUOTE,))
                demand((yield from skip((yield))) == ":")
            else:
                rest, _ = yield from until((":",))
                key = character + rest
            out.append(CallArguments(json.dumps(key.strip(SPACE), ensure_ascii=False) + ": "))
            character = yield from skip((yield))
        character = yield from skip((yield from _gemma_value(out, character)))
        demand(character in (",", close))
        if character == ",":
            out.append(CallArguments(", "))
            character = yield from skip((yield))
    out.append(CallArguments(close))


def _gemma_value(out: list[CallEvent], first: str) -> Generator[None, str, str]:
    """A value; the character behind it is returned."""
    if first in "{[":
        out.append(CallArguments(first))
        yield from _gemma_members(out, "}" if first == "{" else "]")
        return (yield)
    if first == GEMMA_QUOTE[0]:
        yield from expect(GEMMA_QUOTE, first)
        out.append(CallArguments('"'))
        held = ""
        while not held.endswith(GEMMA_QUOTE):
            held += yield
            keep = max(n for n in range(len(GEMMA_QUOTE) + 1) if held.endswith(GEMMA_QUOTE[:n]))
            out.append(CallArguments(json.dumps(held[: len(held) - keep], ensure_ascii=False)[1:-1]))
            held = held[len(held) - keep :]
        out.append(CallArguments('"'))
        return (yield)
    text = ""
    character = first
    while character not in ",}]":
        text += character
        character = yield
    out.append(CallArguments(_value(text.strip(SPACE), ())))
    return character


def _pythonic(out: list[CallEvent], *, names: Set[str]) -> Parser:
    """[name(key=value, …), …], as Python would write it. `names`: of tools, which need not be names there."""
    demand((yield from skip((yield))) == "[")
    while True:
        name, _ = yield from until(("(",))
        name = name.strip(SPACE)
        demand(name in names or name.replace(".", "_").replace("-", "_").isidentifier())
        out.append(CallStart(name))
        out.append(CallArguments("{"))
        character = yield from skip((yield))
        while character != ")":
            rest, _ = yield from until(("=",))
            out.append(CallArguments(json.dumps((character + rest).strip(SPACE), ensure_ascii=False) + ": "))
            character = yield from _literal(out)
            if character == ",":
                out.append(CallArguments(", "))
                character = yield from skip((yield))
        out += [CallArguments("}"), CallEnd()]
        character = yield from skip((yield))
        demand(character in ",]")
        if character == "]":
            return


def _literal(out: list[CallEvent]) -> Generator[None, str, str]:
    """A Python literal, given out as JSON when it is whole; the comma or parenthesis behind it is returned."""
    text, depth, quote, escaped = "", 0, "", False
    while True:
        character = yield
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif depth == 0 and character in ",)":
            break
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        text += character
    out.append(CallArguments(replace_surrogates(json.dumps(_python_value(text.strip(SPACE)), ensure_ascii=False))))
    return character


def _python_value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            json.dumps(value)
            return value
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise Malformed
