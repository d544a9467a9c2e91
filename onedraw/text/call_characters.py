"""Characters of a call, one by one: what parsers of every syntax ask of them.

A reader of characters is a generator: it is sent one at a time, and returns what it has found.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias

from onedraw.text.channels import SPACE
from onedraw.text.tools import MARKERS, Dialect

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
