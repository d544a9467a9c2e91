"""Stop strings in a stream of text.

In: text in pieces of any size, stop strings. Out: the text that may be shown, and the stop string that was hit.

A stop is hit at the first character that completes any stop string, so a reply ends at the token that completed it and
never waits for a longer one. If several are completed by the same character, the one that began first is the hit. The
text before it is given out, the stop itself and all after it never. How the text was cut into pieces does not matter, and
however many stop strings there are, a character of the text is looked at about once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from onedraw.errors import BadParameter


class StopFinder:
    """One owner: the stream of one reply. Holds back only what could still begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise BadParameter("stop", "an empty stop string would stop everything")
        self._known = _known(tuple(stops)) if stops else None
        self._state = 0
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show now, and the stop string hit so far."""
        if self._known is None:
            return text, None
        if self._hit is not None:
            return "", self._hit
        buffer = self._held + text
        for stop in range(len(self._held) + 1, len(buffer) + 1):
            self._state = self._known.behind(self._state, buffer[stop - 1])
            self._hit = self._known.hits[self._state]
            if self._hit is not None:
                self._held = ""
                return buffer[: stop - len(self._hit)], self._hit
        safe = len(buffer) - self._known.lengths[self._state]
        self._held = buffer[safe:]
        return buffer[:safe], None

    def finish(self) -> str:
        """What was held back, when no more of this text comes. What is pushed later is another text."""
        held, self._held, self._state = self._held, "", 0
        return held


@lru_cache(maxsize=8)  # the choices of a request share one
def _known(stops: tuple[str, ...]) -> _Prefixes:
    return _Prefixes(stops)


class _Prefixes:
    """All prefixes of all stop strings (Aho and Corasick). The state behind a text is the longest prefix that it ends with.

    `lengths`: characters of each. `hits`: the longest stop string that each ends with; of several that are completed at once it
    began first. Frozen once it is made.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the next shorter prefix that each ends with
        self.lengths, self.hits = [0], [None]  # type: tuple[list[int], list[str | None]]
        for stop in stops:
            self._add(stop)
        for state in self._by_length():
            for character, longer in self._next[state].items():
                shorter = self.behind(self._shorter[state], character) if state else 0
                self._shorter[longer] = shorter
                self.hits[longer] = self.hits[longer] or self.hits[shorter]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.lengths.append(self.lengths[state] + 1)
                self.hits.append(None)
            state = self._next[state][character]
        self.hits[state] = stop

    def _by_length(self) -> list[int]:
        return sorted(range(len(self._next)), key=self.lengths.__getitem__)

    def behind(self, state: int, character: str) -> int:
        """The state one character later."""
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)
