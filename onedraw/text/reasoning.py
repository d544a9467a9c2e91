"""Separate reasoning from content in a stream of text, by the markers of the model family's chat template.

In: text in chunks of any size. Out: (channel, text) pairs without the markers and the white space around them. The chunking does
not change the result, because text that may still become a marker is held back. `split` is a pure function of a small state, so
the thinking budget, which also evaluates drafts, follows the same rule as the parser of the final text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

TextChannel = Literal["content", "reasoning"]
ChannelTexts = list[tuple[TextChannel, str]]
# Where a reply begins. may: it may open reasoning; open: the prompt opened it; over: there is none, or the prompt closed it.
InitialThinking = Literal["may", "open", "over"]

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """How a model family marks its reasoning. Part of recorded requests, which hold it by its field names."""

    opens: str  # start marker
    closes: str  # end marker
    closing: str  # text that ends reasoning when its token budget is used up; contains `closes`
    anywhere: bool = False  # reasoning may also begin inside the reply; else a marker there is plain text
    switch: bool = True  # the template has the variable `enable_thinking`
    effort: bool = False  # the template has the variable `reasoning_effort`
    prompted: bool = False  # the prompt ends with `opens` when thinking is enabled


def detect_reasoning(template_source: str) -> ReasoningSyntax | None:
    """The reasoning syntax of the family that this chat template belongs to; None for a model without reasoning."""
    source = template_source.replace("\\n", "\n")
    switch, effort = "enable_thinking" in source, "reasoning_effort" in source
    if "<|channel>" in source and "<channel|>" in source:
        return ReasoningSyntax("<|channel>thought\n", "<channel|>", "\n<channel|>", anywhere=True, switch=switch, effort=effort)
    if "<think>" in source and "</think>" in source:
        closings = ("\n</think>\n\n", "\n</think>\n", "</think>")
        closing = next(text for text in closings if text in source)
        return ReasoningSyntax("<think>", "</think>", closing, switch=switch, effort=effort)
    return None


def initial_thinking(prompt: str, reasoning: ReasoningSyntax | None) -> InitialThinking:
    """Where the reply to a rendered prompt begins: the template may have opened the reasoning, or opened and closed it."""
    end = prompt.rstrip(SPACE)
    if reasoning is None or end.endswith(reasoning.closes.rstrip(SPACE)):
        return "over"
    if end.endswith(reasoning.opens.rstrip(SPACE)):
        return "open"
    return "over" if reasoning.prompted else "may"


@dataclass(frozen=True, slots=True)
class ReasoningState:
    """State of the splitter after some text."""

    mode: Literal["start", "reasoning", "content"]
    held: str = ""  # may still become a marker, or is white space that only counts if more text follows
    trim_left: bool = False  # only white space since the last marker: it is dropped

    @property
    def reasoning(self) -> bool:
        return self.mode == "reasoning"


def initial_state(reasoning: ReasoningSyntax | None, thinking: InitialThinking) -> ReasoningState:
    if reasoning is None or thinking == "over":
        return ReasoningState("content")
    return ReasoningState("reasoning", trim_left=True) if thinking == "open" else ReasoningState("start")


def advance(state: ReasoningState, token: bytes, reasoning: ReasoningSyntax) -> ReasoningState:
    """The state after a token. Markers are ASCII, so each byte is read as one character and UTF-8 need not be decoded."""
    return split(state, token.decode("latin-1"), reasoning)[0]


def split(state: ReasoningState, text: str, reasoning: ReasoningSyntax | None) -> tuple[ReasoningState, ChannelTexts]:
    """The state after `text`, and the texts that are final now, in order."""
    if reasoning is None:
        return state, [("content", text)] if text else []
    texts: ChannelTexts = []
    while True:
        state, rest = _split_at_marker(replace(state, held=""), state.held + text, reasoning, texts)
        if rest is None:
            return state, texts
        text = rest


def _split_at_marker(
    state: ReasoningState, text: str, reasoning: ReasoningSyntax, texts: ChannelTexts
) -> tuple[ReasoningState, str | None]:
    """Read up to the next marker: the state after it and the rest of the text, which is None if there was no whole marker."""
    if state.mode == "start":
        stripped = text.lstrip(SPACE)
        if stripped.startswith(reasoning.opens):
            return ReasoningState("reasoning", trim_left=True), stripped[len(reasoning.opens) :]
        if reasoning.opens.startswith(stripped):
            return ReasoningState("start", text), None
        return ReasoningState("content"), text
    if state.mode == "content" and not reasoning.anywhere:
        rest = text.lstrip(SPACE) if state.trim_left else text
        _append(texts, "content", rest)
        return ReasoningState("content", trim_left=state.trim_left and not rest), None
    marker = reasoning.closes if state.reasoning else reasoning.opens
    channel: TextChannel = "reasoning" if state.reasoning else "content"
    if state.trim_left:
        text = text.lstrip(SPACE)
    before, found, after = text.partition(marker)
    if found:
        _append(texts, channel, before.rstrip(SPACE) if state.reasoning else before)
        return ReasoningState("content" if state.reasoning else "reasoning", trim_left=True), after
    safe = text[: len(text) - _overlap(text, marker)]
    if state.reasoning:
        safe = safe.rstrip(SPACE)
    _append(texts, channel, safe)
    return ReasoningState(state.mode, text[len(safe) :], trim_left=state.trim_left and not safe), None


class ReasoningParser:
    """Splits the text of one reply. Without a reasoning syntax all text is content. Owner: the stream of the reply."""

    def __init__(self, reasoning: ReasoningSyntax | None, thinking: InitialThinking = "may") -> None:
        self._reasoning = reasoning
        self._state = initial_state(reasoning, thinking)

    def push(self, text: str) -> ChannelTexts:
        """Texts that are final now, in order."""
        self._state, texts = split(self._state, text, self._reasoning)
        return texts

    def finish(self) -> ChannelTexts:
        """The text that was held back, at the end of the reply."""
        texts: ChannelTexts = []
        _append(texts, "reasoning" if self._state.reasoning else "content", self._state.held)
        self._state = replace(self._state, held="")
        return texts


class ReasoningTokenCounter:
    """Counts the tokens of one reply that belong to its reasoning, markers included. Owner: the stream of the reply."""

    def __init__(self, reasoning: ReasoningSyntax | None, thinking: InitialThinking) -> None:
        self._reasoning = reasoning
        self._state = initial_state(reasoning, thinking)
        self.count = 0

    def push(self, token: bytes) -> None:
        if self._reasoning is not None:
            before, self._state = self._state, advance(self._state, token, self._reasoning)
            self.count += before.reasoning or self._state.reasoning


def _append(texts: ChannelTexts, channel: TextChannel, text: str) -> None:
    if text:
        texts.append((channel, text))


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text could begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
