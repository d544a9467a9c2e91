"""Drafts from the sequence's own tokens: the tokens that followed the latest earlier occurrence of its last n-gram.

In: a request's history. Out: the continuation of the latest earlier occurrence of the longest matching suffix. Each request
has an index from n-grams to the end of their latest occurrence; it grows with the history, so the cost of a step depends on
its new tokens, not on the length of the context.
"""

from __future__ import annotations

from itertools import cycle, islice

from onedraw.speculation.proposer import chain
from onedraw.types import Draft, History, Request


class NgramProposer:
    """Owner: the engine thread. `reach` bounds how many tokens before a request's first step are indexed."""

    name = "ngram"

    def __init__(self, longest: int = 4, shortest: int = 2, reach: int = 16_384) -> None:
        if not 1 <= shortest <= longest <= reach:
            raise ValueError(f"need 1 <= shortest <= longest <= reach, not {shortest}, {longest}, {reach}")
        self._longest = longest
        self._shortest = shortest
        self._reach = reach
        self._indexes: dict[str, SuffixIndex] = {}

    def propose(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
        length = len(history)
        if room <= 0:
            return ()
        index = self._indexes.get(request.id)
        if index is None or index.stop > length:  # a shorter history belongs to another request with the same id
            index = SuffixIndex(longest=self._longest, shortest=self._shortest, start=max(length - self._reach, 0))
            self._indexes[request.id] = index
        end = index.latest(history)
        if end is None:
            return ()
        tokens = history.slice(end, min(end + room, length))
        if len(tokens) < room:  # the occurrence overlaps the suffix: the text is periodic, so repeat it
            tokens = list(islice(cycle(tokens), room))
        return chain(tuple(tokens))

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class SuffixIndex:
    """Where each n-gram of a growing history ended last. Tokens before `start` are left out.

    n-grams that end at the end of the history are not added yet: a suffix would match itself.
    """

    __slots__ = ("_ends", "_longest", "_start", "stop")

    def __init__(self, *, longest: int, shortest: int, start: int) -> None:
        self._longest = longest
        self._start = start
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(longest, shortest - 1, -1)}
        self.stop = start  # n-grams that end here or earlier are in the index

    def latest(self, history: History) -> int | None:
        """The end of the latest earlier occurrence of the longest suffix that occurs earlier."""
        length = len(history)
        if self.stop < length - 1:
            self._add(history, length - 1)
        tail = tuple(history.slice(max(length - self._longest, self._start), length))
        for n, ends in self._ends.items():
            if n <= len(tail) and (end := ends.get(tail[-n:])) is not None:
                return end
        return None

    def _add(self, history: History, stop: int) -> None:
        begin = max(self.stop + 1 - self._longest, self._start)
        tokens = history.slice(begin, stop)
        for n, ends in self._ends.items():
            first = max(self.stop + 1, self._start + n)  # the earliest end that is new
            offset = first - n - begin
            ends.update(zip(zip(*(tokens[offset + i :] for i in range(n)), strict=False), range(first, stop + 1), strict=False))
        self.stop = stop
