"""A reply as a row of blocks, each of one kind: thinking, text, a tool call. What Responses and Messages are written from.

In: the parts of one choice, in order. Out: changes: a block begins, grows, ends. The blocks that stand at the end are the
whole reply, so a whole reply is the fold of its stream here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onedraw.server.parts import Part, Token
from onedraw.types import Call

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class Block:
    """Owner: the Blocks it stands in."""

    index: int
    kind: Kind
    call: Call | None = None
    text: str = ""
    tokens: list[Token] | None = None  # of a text, where logprobs were asked for


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    block: Block
    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change = Opened | Grew | Closed


class Blocks:
    """One owner: the scribe of one reply."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def take(self, part: Part) -> list[Change]:
        changes: list[Change] = []
        if part.reasoning:
            changes += self._grow("thinking", None, part.reasoning)
        if part.text:
            changes += self._grow("text", None, part.text, part.said)
        for call, text in part.calls:
            changes += self._grow("call", call, text)
        return changes

    def end(self) -> list[Change]:
        """A reply that said nothing has one empty text."""
        changes = [] if self.blocks else self._grow("text", None, "")
        return [*changes, *self._close()]

    def _grow(self, kind: Kind, call: Call | None, text: str, tokens: tuple[Token, ...] = ()) -> list[Change]:
        changes: list[Change] = []
        if self._open is None or (self._open.kind, self._open.call) != (kind, call):
            changes += self._close()
            self._open = Block(len(self.blocks), kind, call)
            self.blocks.append(self._open)
            changes.append(Opened(self._open))
        if text:
            self._open.text += text
            self._open.tokens = [*(self._open.tokens or ()), *tokens]
            changes.append(Grew(self._open, text, tokens))
        return changes

    def _close(self) -> list[Change]:
        closed, self._open = self._open, None
        return [] if closed is None else [Closed(closed)]
