"""A whole reply, which is built by adding its pieces (parts of a reply as they arrive) in order.

Consecutive text of one channel (reasoning, content or one tool call) forms a content block, and every interface that shows a
whole reply reads these blocks. `Reply.add` returns the changes to them. The stream events of the Responses and Messages APIs are
written from these changes, so a streamed reply always equals the whole one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from onedraw.llm.reply_stream import Generation
from onedraw.types import Call, Channel, Finish, Logprobs, Piece, ReplyToken, Usage


@dataclass(slots=True)
class ContentBlock:
    """Consecutive text of one channel. Only the Reply that holds a block changes it.

    Each content token belongs to one content block. The tokens that begin a marker of reasoning or of a call look like content
    until the marker is complete; they stay with the content block before the marker if there is one, else they belong to no
    block. So the tokens of a block do not depend on how the reply was divided into pieces.
    """

    index: int
    channel: Channel
    call: Call | None = None  # set if this is the block of a tool call; `text` is then the JSON of its arguments
    text: str = ""
    tokens: list[ReplyToken] = field(default_factory=list)  # only content blocks list their tokens
    cut: bool = False  # whether max_tokens ended the reply before this block was complete


@dataclass(frozen=True, slots=True)
class BlockOpened:
    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockGrew:
    """A block got more text, more tokens, or both; `text` may be empty."""

    block: ContentBlock
    text: str
    tokens: tuple[ReplyToken, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockClosed:
    block: ContentBlock


BlockChange = BlockOpened | BlockGrew | BlockClosed


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A tool call and the JSON text of its arguments."""

    call: Call
    arguments: str


@dataclass(slots=True)
class Reply:
    """One choice as a whole. Generating again with this `seed` and n = 1 gives the same reply."""

    seed: int = 0
    prompt_ids: tuple[int, ...] = ()
    tokens: list[ReplyToken] = field(default_factory=list)
    blocks: list[ContentBlock] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: tuple[Logprobs, ...] | None = None
    _open: ContentBlock | None = field(default=None, init=False, repr=False, compare=False)  # the last block, which grows
    # Content tokens that have no text yet, so that the block they belong to is not known.
    _pending: tuple[ReplyToken, ...] = field(default=(), init=False, repr=False, compare=False)

    @property
    def token_ids(self) -> list[int]:
        return [token.token for token in self.tokens]

    @property
    def text(self) -> str:
        """The answer, without reasoning and tool calls."""
        return "".join(block.text for block in self.blocks if block.channel == "content")

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if block.channel == "reasoning")

    @property
    def calls(self) -> list[ReplyCall]:
        return [ReplyCall(block.call, block.text) for block in self.blocks if block.call is not None]

    def add(self, piece: Piece) -> list[BlockChange]:
        """Add the next piece and return what it changed. A piece with a finish reason closes the last block."""
        changes: list[BlockChange] = []
        self.tokens.extend(piece.tokens)
        if piece.channel == "content":
            self._pending += piece.tokens
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.text or piece.call is not None:
            changes += self._extend(piece.channel, piece.call, piece.text)
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason
            self.usage = piece.usage or self.usage
            changes += self._end()
        return changes

    def _extend(self, channel: Channel, call: Call | None, text: str) -> list[BlockChange]:
        changes: list[BlockChange] = []
        if self._open is None or (self._open.channel, self._open.call) != (channel, call):
            changes += self._close()
            if channel != "content":
                self._pending = ()  # These tokens began a marker of reasoning or of a call, so they belong to no content block.
            self._open = ContentBlock(len(self.blocks), channel, call)
            self.blocks.append(self._open)
            changes.append(BlockOpened(self._open))
        return [*changes, *self._grow(self._open, text)] if text else changes

    def _grow(self, block: ContentBlock, text: str) -> list[BlockChange]:
        tokens: tuple[ReplyToken, ...] = ()
        if block.channel == "content":
            tokens, self._pending = self._pending, ()
            block.tokens.extend(tokens)
        block.text += text
        return [BlockGrew(block, text, tokens)] if text or tokens else []

    def _close(self) -> list[BlockChange]:
        closed, self._open = self._open, None
        return [] if closed is None else [*self._grow(closed, ""), BlockClosed(closed)]

    def _end(self) -> list[BlockChange]:
        """Close the last block. A reply without text gets one empty content block. A call with complete JSON is not `cut`."""
        changes = [] if self.blocks else self._extend("content", None, "")
        if self._open is not None and self.finish == "length":
            self._open.cut = self._open.call is None or not _is_json(self._open.text)
        return [*changes, *self._close()]


def new_replies(generations: Sequence[Generation]) -> list[Reply]:
    """Return empty replies, one per choice with its seed, that pieces can be added to."""
    return [Reply(seed=one.seed_of(i), prompt_ids=one.prompt) for one in generations for i in range(one.n)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
