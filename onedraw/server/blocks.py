"""A reply as a row of blocks, each of one kind: thinking, text, a tool call. What Responses and Messages are written from.

In: the parts of one choice, in order. Out: changes: a block begins, grows, ends. The blocks that stand at the end are the
whole reply, so a whole reply is the fold of its stream here too. A token of the answer belongs to the text that is open, with
those that lead from there into thinking or a call, which nobody knows before; or, where none is open, to the next text if nothing
else comes before it. So which tokens a text has does not depend on how the reply was cut into parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from onedraw.server.openai.choice_parts import ReplyPart, Token
from onedraw.types import Call

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class ContentBlock:
    """Owner: the Blocks it stands in."""

    index: int
    kind: Kind
    call: Call | None = None
    text: str = ""
    tokens: list[Token] | None = None  # of a text, where logprobs were asked for
    cut: bool = False  # the reply ended in the middle of it


@dataclass(frozen=True, slots=True)
class BlockOpened:
    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockGrew:
    block: ContentBlock
    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockClosed:
    block: ContentBlock


BlockChange = BlockOpened | BlockGrew | BlockClosed


class ContentBlocks:
    """One owner: the scribe of one reply."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._held: tuple[Token, ...] = ()  # of the answer, and not in a block yet

    def take(self, part: ReplyPart) -> list[BlockChange]:
        changes: list[BlockChange] = []
        if part.answers:
            self._held += part.said
        if part.reasoning:
            changes += self._grow("thinking", None, part.reasoning)
        if part.text:
            changes += self._grow("text", None, part.text)
        for call, text in part.calls:
            changes += self._grow("call", call, text)
        return changes

    def end(self, *, cut: bool = False) -> list[BlockChange]:
        """A reply that said nothing has one empty text. `cut`: it was to go on; what it was saying is cut with it, but for a
        call that was whole by then."""
        changes = [] if self.blocks else self._grow("text", None, "")
        if self._open is not None:
            self._open.cut = cut and not (self._open.kind == "call" and _is_json(self._open.text))
        return [*changes, *self._close()]

    def _grow(self, kind: Kind, call: Call | None, text: str) -> list[BlockChange]:
        changes: list[BlockChange] = []
        if self._open is None or (self._open.kind, self._open.call) != (kind, call):
            changes += self._close()
            if kind != "text":
                self._held = ()  # what thinking and calls begin with
            self._open = ContentBlock(len(self.blocks), kind, call)
            self.blocks.append(self._open)
            changes.append(BlockOpened(self._open))
        return [*changes, *self._said(self._open, text)] if text else changes

    def _said(self, block: ContentBlock, text: str) -> list[BlockChange]:
        """More of a block, with the tokens that wait for it."""
        tokens: tuple[Token, ...] = ()
        if block.kind == "text":
            tokens, self._held = self._held, ()
            block.tokens = [*(block.tokens or ()), *tokens]
        block.text += text
        return [BlockGrew(block, text, tokens)] if text or tokens else []

    def _close(self) -> list[BlockChange]:
        closed, self._open = self._open, None
        return [] if closed is None else [*self._said(closed, ""), BlockClosed(closed)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
