"""Parsers of one tool call, one for each dialect (call syntax of a model family).

A parser reads the characters of a call after its opening marker, and emits the call's name and its arguments as JSON. It is a
generator, which is sent one character at a time, appends events to a list, and returns when the call is complete. Text that
cannot be a call raises NotACall. A part of the arguments is emitted as soon as its JSON is certain. `call_stream.py` finds where
calls begin in a reply, runs the parsers, and decides what is content.
"""

from __future__ import annotations

import ast
import json
import re
from collections import deque
from collections.abc import Callable, Generator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from onedraw.text.reasoning import SPACE
from onedraw.text.tokenizer import replace_surrogates
from onedraw.text.tools.dialects import GEMMA_QUOTE, MARKERS, VALUE_ENDS, CallableTools, Dialect
from onedraw.text.tools.schema import json_type, parameter_types


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
CallParser: TypeAlias = Generator[None, str, None]
ParameterTypes: TypeAlias = dict[str, frozenset[str]]  # parameter → the JSON types that it may have; an empty set: any


class NotACall(Exception):
    """The characters are not a tool call, so they are content."""


class NextCallStarted(Exception):
    """A complete call lacks its closing marker, and the opening marker of the next call has been read."""


def call_parser(calls: CallableTools) -> Callable[[list[CallEvent]], CallParser]:
    """Return a function that starts a parser of one call in the dialect."""
    types = {tool.name: parameter_types(tool.schema) for tool in calls.tools}
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


# ---------------------------------------------------------------------- reading characters


def require(condition: bool) -> None:
    if not condition:
        raise NotACall


def skip_space(character: str) -> Generator[None, str, str]:
    """Return the first character that is not white space, beginning with the given one."""
    while character in SPACE:
        character = yield
    return character


def expect(text: str, first: str) -> CallParser:
    """Read this text, whose first character has been read already, or raise NotACall."""
    require(text[0] == first)
    for wanted in text[1:]:
        require((yield) == wanted)


def read_until(ends: Sequence[str]) -> Generator[None, str, tuple[str, str]]:
    """Read up to the first of these texts. Return the text before it, and which of them it was."""
    text = ""
    while True:
        text += yield
        found = next((end for end in ends if text.endswith(end)), None)
        if found is not None:
            return text[: -len(found)], found


def close_marker(dialect: Dialect) -> CallParser:
    """Read up to the marker that closes a call and ignore text before it. If the opening marker of another call
    comes first, raise NextCallStarted."""
    opens, closes = MARKERS[dialect]
    _, found = yield from read_until((closes, opens))
    if found == opens:
        raise NextCallStarted


# ---------------------------------------------------------------------- JSON: Hermes, Qwen3, Llama


def _hermes(out: list[CallEvent]) -> CallParser:
    """Parse a call of Hermes or Qwen3: {"name": …, "arguments": {…}} and the closing marker."""
    yield from _json_call(out, (yield from skip_space((yield))))
    yield from close_marker("hermes")


def _llama(out: list[CallEvent]) -> CallParser:
    """Parse a call of Llama: {"name": …, "parameters": {…}}, which has no markers around it."""
    yield from _json_call(out, (yield from skip_space((yield))))


def _json_call(out: list[CallEvent], first: str) -> CallParser:
    """Parse an object with a name and arguments, in either order. The text of the arguments is emitted unchanged."""
    require(first == "{")
    name: str | None = None
    early: list[str] = []  # the text of the arguments if they come before the name, since the name must be emitted first
    given = False
    character = yield from skip_space((yield))
    while character != "}":
        key = yield from _json_string(character)
        require(key in ("name", "arguments", "parameters", "type", "id"))
        require((yield from skip_space((yield))) == ":")
        character = yield from skip_space((yield))
        if key == "name":
            name = yield from _json_string(character)
            out.append(CallStart(name))
            if early:
                out.append(CallArguments("".join(early)))
            character = yield from skip_space((yield))
        elif key in ("arguments", "parameters"):
            given = True
            character = yield from skip_space((yield from _json_value(character, out, early if name is None else None)))
        else:
            character = yield from skip_space((yield from _json_value(character, out, [])))
        require(character in ",}")
        if character == ",":
            character = yield from skip_space((yield))
    require(name is not None)
    if not given:
        out.append(CallArguments("{}"))
    out.append(CallEnd())


def _json_value(first: str, out: list[CallEvent], early: list[str] | None) -> Generator[None, str, str]:
    """Read a JSON value and return the character after it. The text is emitted unchanged, or appended to `early` if given."""

    def emit(text: str) -> None:
        if early is not None:
            early.append(text)
        else:
            out.append(CallArguments(text))

    if first == '"':  # Some models write the arguments as a string that contains JSON.
        emit((yield from _json_string(first)))
        return (yield)
    require(first not in ",:]}")
    depth, quoted, escaped, character = 0, False, False, first
    while True:
        if quoted:
            quoted, escaped = not (character == '"' and not escaped), character == "\\" and not escaped
        elif depth == 0 and character in ",}] \t\r\n":
            return character
        else:
            quoted = character == '"'
            depth += (character in "{[") - (character in "}]")
        emit(character)
        if depth == 0 and not quoted and character in '}]"':
            return (yield)
        character = yield


def _json_string(first: str) -> Generator[None, str, str]:
    """Read a JSON string and return its decoded value."""
    require(first == '"')
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
        raise NotACall from None


# ---------------------------------------------------------------------- tags: Qwen3-Coder and 3.5, Laguna


def _qwen_xml(out: list[CallEvent], *, types: dict[str, ParameterTypes]) -> CallParser:
    """Parse a call of Qwen3-Coder or Qwen3.5: <function=name> <parameter=key> value </parameter> … </function> and the closing
    marker."""
    yield from expect("<function=", (yield from skip_space((yield))))
    name, _ = yield from read_until((">",))
    out.append(CallStart(name.strip()))
    arguments = _TaggedArguments(out, "qwen_xml", types.get(name.strip(), {}))
    head, which = yield from read_until(("<parameter=", "</function>"))
    require(not head.strip(SPACE))
    while which == "<parameter=":
        key, _ = yield from read_until((">",))
        which = yield from arguments.read(key)
    arguments.end()
    if which == "</function>":
        yield from close_marker("qwen_xml")
    elif which == MARKERS["qwen_xml"][0]:
        raise NextCallStarted


def _laguna(out: list[CallEvent], *, types: dict[str, ParameterTypes]) -> CallParser:
    """Parse a call of Laguna: name <arg_key>key</arg_key> <arg_value>value</arg_value> … and the closing marker."""
    opens, close = MARKERS["laguna"]
    name, which = yield from read_until(("<arg_key>", close, opens))
    if which == opens and not name.strip(SPACE):
        raise NextCallStarted
    require(bool(name.strip(SPACE)))
    out.append(CallStart(name.strip(SPACE)))
    arguments = _TaggedArguments(out, "laguna", types.get(name.strip(SPACE), {}))
    while which == "<arg_key>":
        key, _ = yield from read_until(("</arg_key>",))
        yield from read_until(("<arg_value>",))
        which = yield from arguments.read(key.strip(SPACE))
    arguments.end()
    if which == opens:
        raise NextCallStarted


class _TaggedArguments:
    """Emits tagged parameters as a JSON object: a string as it arrives, any other value once it is complete."""

    def __init__(self, out: list[CallEvent], dialect: Dialect, types: ParameterTypes) -> None:
        self._out = out
        self._close, self._next = VALUE_ENDS[dialect]
        self._trim = dialect == "qwen_xml"  # whether a line break next to a tag is removed: it is not part of the value
        self._types = types
        self._any = False

    def read(self, key: str) -> Generator[None, str, str]:
        """Read a value and its closing tag. Return the text after it, which is one of those that can come next."""
        self._out.append(CallArguments((", " if self._any else "{") + json.dumps(key, ensure_ascii=False) + ": "))
        self._any = True
        types = self._types.get(key, frozenset())
        if types == {"string"}:
            self._out.append(CallArguments('"'))
            found = yield from self._value(self._emit, lambda end: False)
            self._out.append(CallArguments('"'))
            return found
        parts: list[str] = []
        found = yield from self._value(parts.append, lambda end: _ends_inside_string("".join(parts) + end))
        self._out.append(CallArguments(_as_json("".join(parts), types)))
        return found

    def end(self) -> None:
        self._out.append(CallArguments("}" if self._any else "{}"))
        self._out.append(CallEnd())

    def _value(self, write: Callable[[str], object], goes_on: Callable[[str], bool]) -> Generator[None, str, str]:
        """Read a value and write its text in parts as soon as they are certain.

        A closing tag ends the value if one of the texts that can come next follows it, perhaps after white space, and `goes_on`
        returns False. `goes_on` is called with the text that is not written yet, up to the end of that white space.
        """
        ends = ("\n" + self._close, self._close) if self._trim else (self._close,)
        again = deque[str]()  # characters to read again, because the closing tag before them turned out to be part of the value
        held, first = "", self._trim
        while True:
            character = again.popleft() if again else (yield)
            if first and character == "\n":
                first = False
                continue
            first = False
            held += character
            end = next((end for end in ends if held.endswith(end)), None)
            if end is None:
                keep = max(n for end in ends for n in range(len(end)) if held.endswith(end[:n]))
                write(held[: len(held) - keep])
                held = held[len(held) - keep :]
                continue
            space: list[str] = []
            after, found = "", None
            while found is None and any(text.startswith(after) for text in self._next):
                character = again.popleft() if again else (yield)
                if not after and character in SPACE:
                    space.append(character)
                else:
                    after += character
                    found = next((text for text in self._next if text == after), None)
            if found is not None and not goes_on(held + "".join(space)):
                write(held[: -len(end)])
                return found
            write(held)
            held = ""
            again.extendleft(reversed([*space, *after]))

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(json.dumps(text, ensure_ascii=False)[1:-1]))


def _ends_inside_string(text: str) -> bool:
    """Whether this text is the beginning of a JSON value and ends inside a string. A string in JSON
    has no raw line breaks, so text with one inside a string is not such a beginning."""
    text = text.lstrip()
    if not text.startswith(('"', "{", "[")):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _as_json(text: str, types: Set[str]) -> str:
    """Return a value as JSON. Text that is JSON of an allowed type stays as it is; any other text becomes a string."""
    try:
        value = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        value = text
    if (
        types
        and json_type(value) not in types
        and not (json_type(value) == "integer" and "number" in types)
        and "string" in types
    ):
        value = text
    return text.strip() if not isinstance(value, str) else replace_surrogates(json.dumps(value, ensure_ascii=False))


# ---------------------------------------------------------------------- literals: Gemma, pythonic


def _gemma(out: list[CallEvent]) -> CallParser:
    """Parse a call of Gemma: call:name{key:value,…}, whose strings have Gemma's own quotes, and the closing marker."""
    yield from expect("call:", (yield from skip_space((yield))))
    name, _ = yield from read_until(("{",))
    out.append(CallStart(name.strip(SPACE)))
    out.append(CallArguments("{"))
    yield from _gemma_members(out, "}")
    out.append(CallEnd())
    yield from close_marker("gemma")


def _gemma_members(out: list[CallEvent], close: str) -> CallParser:
    """Parse the members of an object or array up to `close`. Its opening bracket has been read already."""
    character = yield from skip_space((yield))
    while character != close:
        if close == "}":
            if character == GEMMA_QUOTE[0]:
                yield from expect(GEMMA_QUOTE, character)
                key, _ = yield from read_until((GEMMA_QUOTE,))
                require((yield from skip_space((yield))) == ":")
            else:
                rest, _ = yield from read_until((":",))
                key = character + rest
            out.append(CallArguments(json.dumps(key.strip(SPACE), ensure_ascii=False) + ": "))
            character = yield from skip_space((yield))
        character = yield from skip_space((yield from _gemma_value(out, character)))
        require(character in (",", close))
        if character == ",":
            out.append(CallArguments(", "))
            character = yield from skip_space((yield))
    out.append(CallArguments(close))


def _gemma_value(out: list[CallEvent], first: str) -> Generator[None, str, str]:
    """Emit a value and return the character after it."""
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
    out.append(CallArguments(_as_json(text.strip(SPACE), frozenset())))
    return character


def _pythonic(out: list[CallEvent], *, names: Set[str]) -> CallParser:
    """Parse [name(key=value, …), …], as Python would write it. `names` are the tools; their names need not be identifiers."""
    require((yield from skip_space((yield))) == "[")
    while True:
        name, _ = yield from read_until(("(",))
        name = name.strip(SPACE)
        require(name in names or name.replace(".", "_").replace("-", "_").isidentifier())
        out.append(CallStart(name))
        out.append(CallArguments("{"))
        character = yield from skip_space((yield))
        while character != ")":
            rest, _ = yield from read_until(("=",))
            out.append(CallArguments(json.dumps((character + rest).strip(SPACE), ensure_ascii=False) + ": "))
            character = yield from _python_literal(out)
            if character == ",":
                out.append(CallArguments(", "))
                character = yield from skip_space((yield))
        out += [CallArguments("}"), CallEnd()]
        character = yield from skip_space((yield))
        require(character in ",]")
        if character == "]":
            return


def _python_literal(out: list[CallEvent]) -> Generator[None, str, str]:
    """Read a Python literal, emit it as JSON once it is complete, and return the comma or parenthesis after it."""
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
    out.append(CallArguments(_python_as_json(text.strip(SPACE))))
    return character


_PYTHON_STRING = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", re.DOTALL)
_NOT_A_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def _python_as_json(text: str) -> str:
    """Return a Python literal as JSON. A string in double quotes is read as JSON if possible, else as Python, because the grammar
    of constrained calls writes JSON strings."""
    parts = _PYTHON_STRING.split(text)
    try:
        parts[::2] = [re.sub(r"\b(True|False|None)\b", lambda name: _PYTHON_NAMES[name[0]], part) for part in parts[::2]]
        parts[1::2] = map(_string_as_json, parts[1::2])
        found = "".join(parts)
        json.loads(found, parse_constant=_not_json)
    except _NOT_A_LITERAL:
        try:
            found = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        except _NOT_A_LITERAL:
            raise NotACall from None
    return replace_surrogates(found)


def _string_as_json(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        value = ast.literal_eval(text)
    return json.dumps(value, ensure_ascii=False)
