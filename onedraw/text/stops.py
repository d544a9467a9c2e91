"""Stop strings in a stream of text.

In: text in pieces of any size, stop strings. Out: the text that may be shown, and the stop string that was hit.

A stop is hit at the first character that completes any stop string, so a reply ends at the token that completed it and
never waits for a longer one. If several are completed by the same character, the one that began first is the hit. The
text before it is given out, the stop itself and all after it never. How the text was cut into pieces does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from onedraw.errors import BadParameter


class StopFinder:
    """One owner: the stream of one reply. Holds back only what could still begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise BadParameter("stop", "an empty stop string would stop everything")
        # Longest first: of several completed by one character, the longest began first.
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show now, and the stop string hit so far."""
        if not self._matchers:
            return text, None
        if self._hit is not None:
            return "", self._hit
        buffer = self._held + text
        for stop in range(len(self._held) + 1, len(buffer) + 1):
            # Every matcher must see the character, also when another one is already complete.
            completed = [matcher for matcher in self._matchers if matcher.completes(buffer[stop - 1])]
            if completed:
                self._hit, self._held = completed[0].stop, ""
                return buffer[: stop - len(self._hit)], self._hit
        safe = len(buffer) - max(matcher.matched for matcher in self._matchers)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def finish(self) -> str:
        """What was held back, when no more of this text comes. What is pushed later is another text."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held


class _Matcher:
    """One stop string against the stream (Knuth, Morris, Pratt).

    Invariant: `matched` is the length of the longest prefix of the stop string that the text so far ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = [0] * len(stop)  # the next shorter prefix that the first i + 1 characters end with
        length = 0
        for i in range(1, len(stop)):
            length = self._advance(length, stop[i])
            self._shorter[i] = length

    def completes(self, character: str) -> bool:
        self.matched = self._advance(self.matched, character)
        return self.matched == len(self.stop)

    def _advance(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._shorter[length - 1]
        return length + (self.stop[length] == character)
