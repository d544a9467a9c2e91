"""ReasoningSyntax and content told apart in a stream of text.

In: text in pieces of any size, and how a family marks its reasoning. Out: (channel, text) pieces without the markers and
without the white space around them. How the text was cut into pieces does not matter: what could still become a marker is
held back. The walk is a pure function of a small state, so that whoever counts tokens of a reply that is only guessed so
far (the thinking budget) walks by the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

TextChannel = Literal["content", "reasoning"]
InitialThinking = Literal["may", "open", "over"]  # where a reply begins: before thinking, inside it, behind it
Pieces = list[tuple[TextChannel, str]]

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """How a family thinks aloud: the markers around it, and the words with which its own template ends it."""

    opens: str
    closes: str
    closing: str  # what is said for a model whose thinking ran out of its budget; holds `closes`
    anywhere: bool = False  # may begin in the middle of a reply; else a marker there is plain text
    switch: bool = True  # the template knows `enable_thinking`
    effort: bool = False  # the template knows `reasoning_effort`
    prompted: bool = False  # the prompt itself opens the reasoning, where there is to be some


def detect_reasoning(template_source: str) -> ReasoningSyntax | None:
    """How the family that this chat template belongs to reasons; None if it does not reason aloud."""
    source = template_source.replace("\\n", "\n")
    switch, effort = "enable_thinking" in source, "reasoning_effort" in source
    if "<|channel>" in source and "<channel|>" in source:
        return ReasoningSyntax("<|channel>thought\n", "<channel|>", "\n<channel|>", anywhere=True, switch=switch, effort=effort)
    if "<think>" in source and "</think>" in source:
        written = ("\n</think>\n\n", "\n</think>\n", "</think>")
        return ReasoningSyntax("<think>", "</think>", next(words for words in written if words in source), switch=switch, effort=effort)
    return None


def initial_thinking(prompt: str, reasoning: ReasoningSyntax | None) -> InitialThinking:
    """Where the reply to a rendered prompt begins: a template may open the reasoning, or open and close it."""
    end = prompt.rstrip(SPACE)
    if reasoning is None or end.endswith(reasoning.closes.rstrip(SPACE)):
        return "over"
    if end.endswith(reasoning.opens.rstrip(SPACE)):
        return "open"
    return "over" if reasoning.prompted else "may"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reply stands. `held` may still become a marker, or is space that only counts if more text follows."""

    mode: Literal["start", "reasoning", "content"]
    held: str = ""
    fresh: bool = False  # nothing but white space since the last marker

    @property
    def reasoning(self) -> bool:
        return self.mode == "reasoning"


def beginning(reasoning: ReasoningSyntax | None, thinking: InitialThinking) -> Place:
    if reasoning is None or thinking == "over":
        return Place("content")
    return Place("reasoning", fresh=True) if thinking == "open" else Place("start")


def walk(place: Place, text: str, reasoning: ReasoningSyntax | None) -> tuple[Place, Pieces]:
    """Where the reply stands after `text`, and the pieces that are final now, in order."""
    if reasoning is None:
        return place, [("content", text)] if text else []
    pieces: Pieces = []
    while True:
        place, rest = _step(replace(place, held=""), place.held + text, reasoning, pieces)
        if rest is None:
            return place, pieces
        text = rest


def _step(place: Place, text: str, reasoning: ReasoningSyntax, pieces: Pieces) -> tuple[Place, str | None]:
    """Up to the next marker: the place after it and the rest of the text, or None if there was no whole marker."""
    if place.mode == "start":
        said = text.lstrip(SPACE)
        if reasoning.opens.startswith(said):
            return (Place("reasoning", fresh=True), "") if said == reasoning.opens else (Place("start", text), None)
        if said.startswith(reasoning.opens):
            return Place("reasoning", fresh=True), said[len(reasoning.opens) :]
        return Place("content"), text
    if place.mode == "content" and not reasoning.anywhere:
        rest = text.lstrip(SPACE) if place.fresh else text
        _put(pieces, "content", rest)
        return Place("content", fresh=place.fresh and not rest), None
    marker = reasoning.closes if place.reasoning else reasoning.opens
    channel: TextChannel = "reasoning" if place.reasoning else "content"
    if place.fresh:
        text = text.lstrip(SPACE)
    before, found, after = text.partition(marker)
    if found:
        _put(pieces, channel, before.rstrip(SPACE) if place.reasoning else before)
        return Place("content" if place.reasoning else "reasoning", fresh=True), after
    safe = text[: len(text) - _overlap(text, marker)]
    if place.reasoning:
        safe = safe.rstrip(SPACE)
    _put(pieces, channel, safe)
    return Place(place.mode, text[len(safe) :], fresh=place.fresh and not safe), None


class ReasoningParser:
    """One owner: the stream of one reply. Without a way to reason everything is content."""

    def __init__(self, reasoning: ReasoningSyntax | None, thinking: InitialThinking = "may") -> None:
        self._reasoning = reasoning
        self._place = beginning(reasoning, thinking)

    def push(self, text: str) -> Pieces:
        """Pieces that are final now, in order."""
        self._place, pieces = walk(self._place, text, self._reasoning)
        return pieces

    def finish(self) -> Pieces:
        """What was held back, when no more text comes."""
        pieces: Pieces = []
        _put(pieces, "reasoning" if self._place.reasoning else "content", self._place.held)
        self._place = replace(self._place, held="")
        return pieces


def _put(pieces: Pieces, channel: TextChannel, text: str) -> None:
    if text:
        pieces.append((channel, text))


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text could begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
