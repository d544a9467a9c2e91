"""Separate reasoning from content in a stream of text, by the markers of the model family's chat template.

Text comes in chunks of any size; the output is (channel, text) pairs without the markers and the white space around them. The
division into chunks does not change the result, because text that may still become a marker is held back. `split` is a pure
function of a small state. So the thinking budget, which also evaluates drafts, uses the same rule as the parser of the reply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

TextChannel = Literal["content", "reasoning"]
ChannelTexts = list[tuple[TextChannel, str]]
# The state in which a reply begins. "may": it may open reasoning; "open": the prompt has opened it; "over": the prompt has closed
# it, or the model does not reason.
InitialThinking = Literal["may", "open", "over"]

SPACE = " \t\r\n"  # characters that are removed around markers


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """How a model family marks its reasoning. Recorded requests store it by its field names, which must not be renamed."""

    opens: str  # the marker at the start of reasoning, such as <think>
    closes: str  # the marker at its end, such as </think>
    closing: str  # text that is forced when the thinking budget is used up; it contains `closes`
    anywhere: bool = False  # whether reasoning may also begin later in the reply; if False, a start marker there is plain text
    switch: bool = True  # whether the chat template has the variable `enable_thinking`
    effort: bool = False  # whether the chat template has the variable `reasoning_effort`
    prompted: bool = False  # whether the rendered prompt ends with `opens` if thinking is enabled


def detect_reasoning(template_source: str) -> ReasoningSyntax | None:
    """Return the reasoning syntax that the source of a chat template shows; None for a model that does not reason."""
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
    """Return the state in which the reply begins: the end of the prompt may have opened reasoning, or opened and closed it."""
    end = prompt.rstrip(SPACE)
    if reasoning is None or end.endswith(reasoning.closes.rstrip(SPACE)):
        return "over"
    if end.endswith(reasoning.opens.rstrip(SPACE)):
        return "open"
    return "over" if reasoning.prompted else "may"


def continued_thinking(begun: str, reasoning: ReasoningSyntax | None) -> InitialThinking:
    """Return the state in which a reply begins that continues a message: inside the message's reasoning or after it. `begun` is
    the text of the message so far."""
    return "open" if reasoning is not None and begun.rfind(reasoning.opens) > begun.rfind(reasoning.closes) else "over"


@dataclass(frozen=True, slots=True)
class ReasoningState:
    """How far `split` has come in a reply: the channel of the text so far, and the text that it holds back."""

    mode: Literal["start", "reasoning", "content"]
    held: str = ""  # text that may still become a marker, or white space that only counts if more text follows
    trim_left: bool = False  # whether only white space has followed the last marker; such white space is dropped

    @property
    def reasoning(self) -> bool:
        return self.mode == "reasoning"


def initial_state(reasoning: ReasoningSyntax | None, thinking: InitialThinking) -> ReasoningState:
    if reasoning is None or thinking == "over":
        return ReasoningState("content")
    return ReasoningState("reasoning", trim_left=True) if thinking == "open" else ReasoningState("start")


def advance(state: ReasoningState, token: bytes, reasoning: ReasoningSyntax) -> ReasoningState:
    """Return the state after a token. Markers are ASCII, so bytes can be read as characters without decoding UTF-8."""
    return split(state, token.decode("latin-1"), reasoning)[0]


def split(state: ReasoningState, text: str, reasoning: ReasoningSyntax | None) -> tuple[ReasoningState, ChannelTexts]:
    """Return the state after `text`, and the texts that became final, in order."""
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
    """Read up to the next marker. Return the state after it and the rest of the text, or None as the rest if no marker is
    complete."""
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
    """Separates the reasoning of one reply from its content. Without a reasoning syntax all text is content."""

    def __init__(self, reasoning: ReasoningSyntax | None, thinking: InitialThinking = "may") -> None:
        self._reasoning = reasoning
        self._state = initial_state(reasoning, thinking)

    def push(self, text: str) -> ChannelTexts:
        """Return the texts that became final, in order."""
        self._state, texts = split(self._state, text, self._reasoning)
        return texts

    def finish(self) -> ChannelTexts:
        """Return the text that was held back, at the end of the reply."""
        texts: ChannelTexts = []
        _append(texts, "reasoning" if self._state.reasoning else "content", self._state.held)
        self._state = replace(self._state, held="")
        return texts


class ReasoningTokenCounter:
    """Counts the tokens of one reply that belong to its reasoning, including those of the markers."""

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
    """Return how many characters at the end of the text could be the beginning of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
