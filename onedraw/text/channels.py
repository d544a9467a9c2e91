"""Reasoning and content told apart in a stream of text.

In: text in pieces of any size, and the markers around reasoning. Out: (channel, text) pieces without the markers. How the
text was cut into pieces does not matter: what could still become a marker is held back.
"""

from __future__ import annotations

from typing import Literal

TextChannel = Literal["content", "reasoning"]
Markers = tuple[str, str]

THINK: Markers = ("<think>", "</think>")


def reasoning_markers(template_source: str) -> Markers | None:
    """The markers of the family that this chat template belongs to; None if it does not reason aloud."""
    return THINK if all(marker in template_source for marker in THINK) else None


def reasoning_is_open(prompt: str, markers: Markers | None) -> bool:
    """Whether a rendered prompt ends inside reasoning, so that the reply begins there."""
    return markers is not None and prompt.rstrip().endswith(markers[0])


class ChannelSplitter:
    """One owner: the stream of one reply. Without markers everything is content."""

    def __init__(self, markers: Markers | None, *, reasoning_open: bool = False) -> None:
        self._markers = markers
        self._reasoning = reasoning_open and markers is not None
        self._held = ""

    def push(self, text: str) -> list[tuple[TextChannel, str]]:
        """Pieces that are final now, in order."""
        if self._markers is None:
            return [("content", text)] if text else []
        pieces: list[tuple[TextChannel, str]] = []
        rest = self._held + text
        while True:
            marker = self._markers[self._reasoning]
            before, found, after = rest.partition(marker)
            if not found:
                break
            self._put(pieces, before)
            self._reasoning, rest = not self._reasoning, after
        safe = len(rest) - _overlap(rest, marker)
        self._put(pieces, rest[:safe])
        self._held = rest[safe:]
        return pieces

    def finish(self) -> list[tuple[TextChannel, str]]:
        """What was held back, when no more text comes."""
        pieces: list[tuple[TextChannel, str]] = []
        self._put(pieces, self._held)
        self._held = ""
        return pieces

    def _put(self, pieces: list[tuple[TextChannel, str]], text: str) -> None:
        if text:
            pieces.append(("reasoning" if self._reasoning else "content", text))


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text could begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
