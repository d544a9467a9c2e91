"""Find stop strings in a stream of text, and hold back text that may become one.

`StopFinder.push` takes text in chunks of any size, and returns the text that may be shown and the stop string that was found. It
knows nothing of tokens or channels: `llm/reply_stream.py` passes it the content of a reply and ends the reply at a stop string.

A stop string is found at the first character that completes any of them, so a reply never waits for a longer one. If one
character completes several, the longest is reported. The text before the stop string is shown; the stop string and all text
after it are not. The division into chunks does not change the result, and the work per character does not grow with the number
of stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from onedraw.errors import BadParameter


class StopFinder:
    """Finds the first stop string in the text of one reply. It holds back only text that may become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise BadParameter("stop", "an empty stop string would end every reply at once; remove it")
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._state = 0
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string if one was found."""
        if self._automaton is None:
            return text, None
        if self._found is not None:
            return "", self._found
        buffer = self._held + text
        for stop in range(len(self._held) + 1, len(buffer) + 1):
            self._state = self._automaton.next_state(self._state, buffer[stop - 1])
            self._found = self._automaton.found[self._state]
            if self._found is not None:
                self._held = ""
                return buffer[: stop - len(self._found)], self._found
        safe = len(buffer) - self._automaton.lengths[self._state]
        self._held = buffer[safe:]
        return buffer[:safe], None

    def finish(self) -> str:
        """Return the text that was held back. Text that is pushed later is searched as a new text."""
        held, self._held, self._state = self._held, "", 0
        return held


@lru_cache(maxsize=8)  # so that the n replies of a request, which have the same stop strings, share one automaton
def _automaton(stops: tuple[str, ...]) -> _AhoCorasick:
    return _AhoCorasick(stops)


class _AhoCorasick:
    """The Aho-Corasick automaton of the stop strings. A state stands for a prefix of a stop string: the longest one with which
    the text so far ends.

    `lengths` has the number of characters of each prefix, `found` the longest stop string with which it ends, or None. The object
    does not change after construction.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]  # for each prefix, the longest shorter prefix with which it ends
        self.lengths, self.found = [0], [None]  # type: tuple[list[int], list[str | None]]
        for stop in stops:
            self._add(stop)
        for state in sorted(range(len(self._next)), key=self.lengths.__getitem__):
            for character, longer in self._next[state].items():
                fallback = self.next_state(self._fallback[state], character) if state else 0
                self._fallback[longer] = fallback
                self.found[longer] = self.found[longer] or self.found[fallback]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.lengths.append(self.lengths[state] + 1)
                self.found.append(None)
            state = self._next[state][character]
        self.found[state] = stop

    def next_state(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)
