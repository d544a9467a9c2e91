"""How the text of a reply is to be read: which part of it is reasoning, which the answer, which a tool call.

In: a ReplySyntax, made with the prompt, and text in pieces of any size. Out: parts that are final, each of one channel. A
completion is read plainly: everything is content.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from onedraw.text.reasoning import ReasoningParser, Pieces, ReasoningSyntax, InitialThinking, initial_thinking
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.call_parsers import Arguments, Begin, End
from onedraw.text.tools.call_stream import ToolCallParser, Text
from onedraw.text.tools.dialects import GEMMA_QUOTE, MARKERS, CallableTools
from onedraw.types import Call, Channel


@dataclass(frozen=True, slots=True)
class ReplySyntax:
    """What is known of a reply before it begins."""

    opening: bool = False  # it begins a text of its own: a first space that only marks a word is dropped
    reasoning: ReasoningSyntax | None = None
    thinking: InitialThinking = "over"  # where the reply begins
    spelled: frozenset[int] = frozenset()  # special tokens that are markers, spelled out for the reader
    calls: CallableTools | None = None  # tools that may be called


PLAIN_TEXT = ReplySyntax()


def chat_reply_syntax(prompt: str, reasoning: ReasoningSyntax | None, calls: CallableTools | None, tokenizer: Tokenizer) -> ReplySyntax:
    """How the reply to a rendered chat is read."""
    markers: list[str] = [] if reasoning is None else [reasoning.opens, reasoning.closes]
    if calls is not None:
        markers += [*MARKERS.get(calls.dialect, ()), *([GEMMA_QUOTE] if calls.dialect == "gemma" else [])]
    return ReplySyntax(
        opening=True,
        reasoning=reasoning,
        thinking=initial_thinking(prompt, reasoning),
        spelled=special_ids(markers, tokenizer),
        calls=calls,
    )


def special_ids(markers: Iterable[str], tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that these markers are written with."""
    ids = (token for marker in markers for token in tokenizer.encode(marker, add_special=False))
    return frozenset(token for token in ids if tokenizer.is_special(token))


@dataclass(frozen=True, slots=True)
class Part:
    """A final part of a reply's text; of a call, a part of its arguments."""

    channel: Channel
    text: str
    call: Call | None = None
    read: bool = True  # else it is the beginning of a call that was cut off before it had a name


class ReplyParser:
    """One owner: the stream of one reply."""

    def __init__(self, reading: ReplySyntax) -> None:
        self._splitter = ReasoningParser(reading.reasoning, reading.thinking)
        self._calls = None if reading.calls is None else ToolCallParser(reading.calls)
        self._parallel = reading.calls is None or reading.calls.parallel
        self._call: Call | None = None

    @property
    def calls(self) -> int:
        """CallableTools that came to their end."""
        return 0 if self._calls is None else self._calls.calls

    @property
    def over(self) -> bool:
        """The reply has said all that it may: the one call it was asked for."""
        return not self._parallel and self.calls > 0

    def push(self, text: str) -> list[Part]:
        return self._parts(self._splitter.push(text))

    def finish(self) -> list[Part]:
        rest = self._parts(self._splitter.finish())
        return rest if self._calls is None else [*rest, *self._told(self._calls.finish())]

    def _parts(self, pieces: Pieces) -> list[Part]:
        parts: list[Part] = []
        for channel, text in pieces:
            if channel == "content" and self._calls is not None:
                parts += self._told(self._calls.push(text))
            else:
                parts.append(Part(channel, text))
        return parts

    def _told(self, events: Iterable[Begin | Arguments | End | Text]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            match event:
                case Begin(name):
                    index = 0 if self._call is None else self._call.index + 1
                    # By chance, not by seed: a client sends the ids of all turns back together.
                    self._call = Call(index, f"call_{secrets.token_hex(12)}", name)
                    parts.append(Part("tool", "", self._call))
                case Arguments(text):
                    parts.append(Part("tool", text, self._call))
                case Text(text, read):
                    parts.append(Part("content", text, read=read))
                case End():
                    pass
        return parts
