"""Translate grammars in llama.cpp's notation (GBNF) into llguidance's notation (Lark).

The input is the text of a grammar with a rule `root`, where every reply begins. The output is Lark text with one rule per line,
and for each line the place of its rule in the caller's text, so that the compiler's errors can name that place. A symbol is a
literal, a character class, the name of a rule, or a group (alternatives in parentheses).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onedraw.errors import BadParameter
from onedraw.limits import MAX_FORMAT_VALUES
from onedraw.text.constraints.format_limits import check_characters, check_rules

MAX_GROUPS = 28  # most groups inside each other that llguidance compiles
MAX_REPEATS = 3  # repetitions of one symbol one after the other, such as the two in "a"*?
_COUNT_DIGITS = 6  # digits of a number in a repetition {m,n}
_SPACE = re.compile(r"(?:[ \t]+|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:\s+|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+")
_COUNT = re.compile(r"\{\s*+(\d++)\s*+(?:(,)\s*+(\d*+)\s*+)?+\}")  # never backtracks, so long white space costs little
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = {"x": 2, "u": 4, "U": 8}
_POSITION = re.compile(r"^(?:at )?(\d+)\(\d+\): ")


@dataclass(frozen=True, slots=True)
class Translation:
    """A translated grammar. `lines[i]` is the line of the caller's text from which line i of the Lark text was made."""

    lark: str
    lines: tuple[int, ...]

    def in_source(self, reason: str) -> str:
        """Return an error of the compiler with the line of the caller's text in place of that in the Lark text."""
        found = _POSITION.search(reason.removeprefix(prefix := "cannot be compiled: "))
        if found is None or not 0 < int(found[1]) <= len(self.lines):
            return reason
        return f"{prefix}line {self.lines[int(found[1]) - 1]}: {reason.removeprefix(prefix)[found.end() :]}"


# ---------------------------------------------------------------------- the parts of a rule


@dataclass(frozen=True, slots=True)
class _Literal:
    text: str


@dataclass(frozen=True, slots=True)
class _Class:
    """A character class such as [a-z], as a regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of a rule by its name inside another rule. `at` is its position in the caller's text, for errors."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Part
    suffix: str  # the repetition in Lark's notation, such as "*" or "{1,3}"


@dataclass(frozen=True, slots=True)
class _Group:
    alternatives: tuple[tuple[_Part, ...], ...]


_Part = _Literal | _Class | _Use | _Repeat | _Group


@dataclass(slots=True)
class _Rule:
    """A rule of the caller's grammar, defined on this line of the text."""

    line: int
    body: _Group
    uses: list[tuple[_Use, int]] = field(default_factory=list)  # the rules that it uses, each with the number of groups around it


def translate(source: str, param: str) -> Translation:
    """Return the translation of a GBNF grammar. If the text is not valid GBNF or exceeds a limit, raise BadParameter; a
    syntax error has line and column."""
    check_characters(source, param)
    rules = _Parser(source, param).rules()
    for rule in rules.values():
        rule.uses.extend(_uses(rule.body))
        for use, _ in rule.uses:
            if use.name not in rules:
                raise _error(source, use.at, f"the rule {use.name!r} is not defined", param)
    if "root" not in rules:
        raise BadParameter(param, "this GBNF cannot be translated: it has no rule named root, where a reply begins; add one")
    check_rules({name: [(use.name, groups) for use, groups in rule.uses] for name, rule in rules.items()}, "root", param)
    names = _names(rules, _terminals(rules))
    written = [f"{names[name]}: {_alternatives(rule.body, names)}" for name, rule in rules.items()]
    return Translation("\n".join(written), tuple(rule.line for rule in rules.values()))


def _error(source: str, at: int, message: str, param: str) -> BadParameter:
    line, column = source.count("\n", 0, at) + 1, at - source.rfind("\n", 0, at)
    return BadParameter(param, f"this GBNF cannot be translated: line {line}, column {column}: {message}")


class _Parser:
    """Parses the text of one grammar by recursive descent."""

    def __init__(self, source: str, param: str) -> None:
        self._source, self._param = source, param
        self._at = 0
        self._symbols = 0

    def rules(self) -> dict[str, _Rule]:
        """Return the rules by name. If a name is defined twice, the last definition counts."""
        found: dict[str, _Rule] = {}
        self._skip(_SPACE_AND_LINES)
        line, counted = 1, 0
        while self._at < len(self._source):
            line += self._source.count("\n", counted, self._at)
            counted = self._at
            name = self._match(_NAME)
            if name is None:
                raise self._error("expected the name of a rule")
            self._skip(_SPACE_AND_LINES)
            if not self._source.startswith("::=", self._at):
                raise self._error("expected ::=")
            self._at += 3
            self._skip(_SPACE_AND_LINES)
            found[name[0]] = _Rule(line, self._alternatives(groups=0))
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                raise self._error(f"unexpected {self._source[self._at]!r}")
            self._skip(_SPACE_AND_LINES)
        return found

    def _alternatives(self, *, groups: int) -> _Group:
        if groups > MAX_GROUPS:
            raise self._error(f"more than {MAX_GROUPS} groups inside each other; use rules instead")
        found = [self._sequence(groups=groups)]
        while self._source.startswith("|", self._at):
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(groups=groups))
        return _Group(tuple(found))

    def _sequence(self, *, groups: int) -> tuple[_Part, ...]:
        space = _SPACE_AND_LINES if groups else _SPACE
        parts: list[_Part] = []
        while (part := self._part(groups=groups)) is not None:
            self._symbols += 1
            if self._symbols > MAX_FORMAT_VALUES:
                raise BadParameter(self._param, f"has more than {MAX_FORMAT_VALUES:,} symbols; at most that many are allowed")
            self._skip(space)
            while suffix := self._suffix():
                self._symbols += 1
                if _repeats(part) == MAX_REPEATS:
                    raise self._error(f"more than {MAX_REPEATS} repetitions follow one symbol; use fewer")
                part = _Repeat(part, suffix)
                self._skip(space)
            parts.append(part)
        return tuple(parts)

    def _part(self, *, groups: int) -> _Part | None:
        source, at = self._source, self._at
        match source[at : at + 1]:
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return _Class(r"(.|\n)")
            case "(":
                self._at += 1
                self._skip(_SPACE_AND_LINES)
                group = self._alternatives(groups=groups + 1)
                if not source.startswith(")", self._at):
                    raise self._error("expected )")
                self._at += 1
                return group
            case "<" | "!":
                raise self._error("tokens are not supported; write their text")
        name = self._match(_NAME)
        return None if name is None else _Use(name[0], at)

    def _suffix(self) -> str:
        """Read the repetition after a symbol, if there is one, and return it in Lark's notation; empty if there is none."""
        if (sign := self._source[self._at : self._at + 1]) in ("*", "+", "?"):
            self._at += 1
            return sign
        if sign != "{":
            return ""
        found = self._match(_COUNT)
        if found is None:
            raise self._error("expected a repetition: {m}, {m,} or {m,n}")
        first, comma, last = found.groups()
        if len(first) > _COUNT_DIGITS or len(last or "") > _COUNT_DIGITS:
            raise self._error(f"a repetition count has more than {_COUNT_DIGITS} digits; use a smaller one")
        return f"{{{first},{last or ''}}}" if comma else f"{{{first},{first}}}"

    def _literal(self) -> _Literal:
        self._at += 1
        text = []
        while not self._source.startswith('"', self._at):
            text.append(self._character())
        self._at += 1
        return _Literal("".join(text))

    def _class(self) -> _Class:
        start = self._at
        self._at += 1
        negated = self._source.startswith("^", self._at)
        self._at += negated
        ranges = []
        while not self._source.startswith("]", self._at):
            at, first = self._at, self._character()
            last = first
            if self._source.startswith("-", self._at) and not self._source.startswith("-]", self._at):
                self._at += 1
                last = self._character()
            if last < first:
                self._at = at
                raise self._error("the end of a range is before its beginning")
            ranges.append(f"\\x{{{ord(first):X}}}" if last == first else f"\\x{{{ord(first):X}}}-\\x{{{ord(last):X}}}")
        self._at += 1
        if not ranges and not negated:
            self._at = start
            raise self._error("an empty character class, which nothing matches")
        return _Class(f"[{'^' if negated else ''}{''.join(ranges)}]" if ranges else r"(.|\n)")

    def _character(self) -> str:
        """Read one character of a literal or a character class, which may be escaped."""
        source, at = self._source, self._at
        if at >= len(source):
            raise self._error("the text ends inside a literal or a character class")
        if source[at] != "\\":
            self._at += 1
            return source[at]
        kind = source[at + 1 : at + 2]
        if kind in _ESCAPES and kind:
            self._at += 2
            return _ESCAPES[kind]
        digits = source[at + 2 : at + 2 + _HEX.get(kind, 0)]
        if kind not in _HEX or not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
            raise self._error(f"an unknown escape: {source[at : at + 2]}")
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"\\{kind}{digits} is not a character")
        self._at += 2 + len(digits)
        return chr(code)

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._source, self._at)
        self._at = self._at if found is None else found.end()

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._source, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _error(self, message: str) -> BadParameter:
        return _error(self._source, self._at, message, self._param)


# ---------------------------------------------------------------------- from parts to Lark


def _repeats(part: _Part) -> int:
    count = 0
    while isinstance(part, _Repeat):
        part, count = part.part, count + 1
    return count


def _uses(group: _Group) -> Iterator[tuple[_Use, int]]:
    """Yield the rules that a group uses, in order, each with the number of groups around it."""
    pending: list[tuple[_Part, int]] = [(group, -1)]
    while pending:
        part, groups = pending.pop()
        match part:
            case _Use():
                yield part, groups
            case _Repeat(inner):
                pending.append((inner, groups))
            case _Group(alternatives):
                pending += [(inner, groups + 1) for parts in reversed(alternatives) for inner in reversed(parts)]


def _terminals(rules: dict[str, _Rule]) -> frozenset[str]:
    """Return the names of the rules that can become terminals, which Lark matches as one regular expression: rules that use only
    other such rules, so no recursive ones. Terminals are faster to match."""
    missing = {name: {use.name for use, _ in rule.uses} for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in missing.items():
        for other in used:
            users[other].append(name)
    found: set[str] = set()
    ready = [name for name, used in missing.items() if not used]
    while ready:
        name = ready.pop()
        if name == "root":
            continue
        found.add(name)
        for user in users[name]:
            missing[user].discard(name)
            if not missing[user]:
                ready.append(user)
    return frozenset(found)


def _names(rules: dict[str, _Rule], terminals: frozenset[str]) -> dict[str, str]:
    """Map each rule to a name that Lark allows: lower case for a rule, upper case for a terminal, `start` for `root`."""
    names, taken = {"root": "start"}, {"start": 1}  # `taken` has the number to append when a name is needed again
    for name in rules:
        if name == "root":
            continue
        plain = re.sub(r"\W", "_", name.encode("ascii", "replace").decode())
        plain = plain if plain[0].isalpha() else f"r{plain}"
        plain = unique = plain.upper() if name in terminals else plain.lower()
        while unique in taken:
            unique, taken[plain] = f"{plain}_{taken[plain]}", taken[plain] + 1
        names[name] = unique
        taken[unique] = 1
    return names


def _alternatives(group: _Group, names: dict[str, str]) -> str:
    return " | ".join(_sequence(parts, names) for parts in group.alternatives)


def _sequence(parts: Sequence[_Part], names: dict[str, str]) -> str:
    return " ".join(_part(part, names) for part in parts) or '""'


def _part(part: _Part, names: dict[str, str]) -> str:
    match part:
        case _Literal(text):
            return json.dumps(text, ensure_ascii=False)
        case _Class(pattern):
            return f"/{pattern}/"
        case _Use(name):
            return names[name]
        case _Repeat(_Repeat() as inner, suffix):
            return f"({_part(inner, names)}){suffix}"
        case _Repeat(inner, suffix):
            return f"{_part(inner, names)}{suffix}"
        case _Group():
            return f"({_alternatives(part, names)})"
