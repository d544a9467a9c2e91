"""Parse the text of a reply into reasoning, content and tool calls.

The input is a ReplySyntax, which is known with the prompt, and text in chunks of any size. The output is final ReplyParts, each
of one channel. The reply to a plain completion is all content.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from onedraw.text.reasoning import (
    ChannelTexts,
    InitialThinking,
    ReasoningParser,
    ReasoningSyntax,
    ReasoningTokenCounter,
    continued_thinking,
    initial_thinking,
)
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.call_parsers import CallArguments, CallEnd, CallEvent, CallStart
from onedraw.text.tools.call_stream import Content, ToolCallParser
from onedraw.text.tools.dialects import GEMMA_QUOTE, MARKERS, CallableTools
from onedraw.types import Call, Channel


@dataclass(frozen=True, slots=True)
class ReplySyntax:
    """How the text of a reply is parsed. Recorded requests store it by its field names, which must not be renamed."""

    opening: bool = False  # whether the reply is a text of its own, so that SentencePiece's space before it is dropped
    reasoning: ReasoningSyntax | None = None
    thinking: InitialThinking = "over"  # whether the reply begins inside reasoning, may open it, or has none
    spelled: frozenset[int] = frozenset()  # special tokens that are markers, which the parser must see in the text
    calls: CallableTools | None = None  # the tools that the reply may call; None: calls are not parsed


PLAIN_TEXT = ReplySyntax()  # the syntax of a completion, whose text is not parsed


def chat_reply_syntax(
    prompt: str,
    reasoning: ReasoningSyntax | None,
    calls: CallableTools | None,
    tokenizer: Tokenizer,
    *,
    begun: str | None = None,
) -> ReplySyntax:
    """Return the syntax of the reply to a rendered chat. `begun` is the text of a message that the reply continues."""
    markers: list[str] = [] if reasoning is None else [reasoning.opens, reasoning.closes]
    if calls is not None:
        markers += [*MARKERS.get(calls.dialect, ()), *([GEMMA_QUOTE] if calls.dialect == "gemma" else [])]
    tokens = (token for marker in markers for token in tokenizer.encode(marker, add_special=False))
    return ReplySyntax(
        opening=begun is None,
        reasoning=reasoning,
        thinking=initial_thinking(prompt, reasoning) if begun is None else continued_thinking(begun, reasoning),
        spelled=frozenset(token for token in tokens if tokenizer.is_special(token)),
        calls=calls,
    )


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Final text of one channel. For a tool call the text is JSON of its arguments."""

    channel: Channel
    text: str
    call: Call | None = None
    truncated_call: bool = False  # whether this is the text of a tool call that was cut off before its name was complete


class ReplyParser:
    """The parser of one reply."""

    def __init__(self, syntax: ReplySyntax) -> None:
        self._reasoning = ReasoningParser(syntax.reasoning, syntax.thinking)
        self._counter = ReasoningTokenCounter(syntax.reasoning, syntax.thinking)
        self._calls = None if syntax.calls is None else ToolCallParser(syntax.calls)
        self._parallel = syntax.calls is None or syntax.calls.parallel
        self._call: Call | None = None

    @property
    def completed_calls(self) -> int:
        return 0 if self._calls is None else self._calls.completed

    @property
    def done(self) -> bool:
        """Whether the reply ends here, because it may contain one call only, and that call is complete."""
        return not self._parallel and self.completed_calls > 0

    @property
    def reasoning_tokens(self) -> int:
        return self._counter.count

    def count_token(self, token: bytes) -> None:
        """Count a token if it belongs to the reasoning. `token` is the token's bytes."""
        self._counter.push(token)

    def push(self, text: str) -> list[ReplyPart]:
        return self._parse(self._reasoning.push(text))

    def finish(self, *, cut: bool = False) -> list[ReplyPart]:
        """Return the text that was held back, at the end of the reply. `cut` means that max_tokens ended it."""
        parts = self._parse(self._reasoning.finish())
        return parts if self._calls is None else [*parts, *self._convert(self._calls.finish(cut=cut))]

    def _parse(self, texts: ChannelTexts) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        for channel, text in texts:
            if channel == "content" and self._calls is not None:
                parts += self._convert(self._calls.push(text))
            else:
                parts.append(ReplyPart(channel, text))
        return parts

    def _convert(self, events: Iterable[CallEvent | Content]) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        for event in events:
            match event:
                case CallStart(name):
                    index = 0 if self._call is None else self._call.index + 1
                    # The id is random and not made from the seed, because a client may send the calls of several replies with the
                    # same seed in one request, and ids must differ.
                    self._call = Call(index, f"call_{secrets.token_hex(12)}", name)
                    parts.append(ReplyPart("tool", "", self._call))
                case CallArguments(text):
                    parts.append(ReplyPart("tool", text, self._call))
                case Content(text, truncated_call):
                    parts.append(ReplyPart("content", text, truncated_call=truncated_call))
                case CallEnd():
                    pass
        return parts
