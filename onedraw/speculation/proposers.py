"""The protocol of every proposer of drafts on the host.

In: a request, its history, and the maximum number of drafts. Out: drafts. A proposer cannot change the answer, because a draft
is kept only if it equals the token that the target model samples anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import cycle, islice
from typing import Protocol

from onedraw.types import Draft, History, Request


class Proposer(Protocol):
    @property
    def name(self) -> str: ...

    def propose(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
        """At most `room` drafts that may follow the history; more are dropped."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended: drop its state."""
        ...


def chain(tokens: tuple[int, ...]) -> tuple[Draft, ...]:
    """Tokens as a chain of drafts, each the parent of the next."""
    return tuple(map(Draft, tokens, range(-1, len(tokens))))


# ------------------ Drafts from the sequence's own tokens


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


# ------------------ Drafts from the reply that the caller predicted


ANCHORS = (3, 2)  # how many of the output's last tokens must match the prediction, tried in this order


class PredictionProposer:
    """Owner: the engine thread."""

    name = "prediction"

    def __init__(self) -> None:
        self._alignments: dict[str, Alignment] = {}

    def propose(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
        if not request.predicted or room <= 0:
            return ()
        alignment = self._alignments.get(request.id)
        if alignment is None or alignment.seen > len(
            history.output
        ):  # a shorter output belongs to another request with the same id
            alignment = self._alignments[request.id] = Alignment(request.predicted)
        alignment.follow(history.output)
        if alignment.lost:
            return ()
        return chain(request.predicted[alignment.pointer : alignment.pointer + room])

    def forget(self, request_id: str) -> None:
        self._alignments.pop(request_id, None)


class Alignment:
    """The position of an output in its prediction."""

    __slots__ = ("_ends", "_predicted", "lost", "pointer", "replaced", "seen")

    def __init__(self, predicted: tuple[int, ...]) -> None:
        self._predicted = predicted
        self._ends: dict[tuple[int, ...], list[int]] = {}  # ends of each 3-gram and 2-gram, ascending
        for n in ANCHORS:
            for end in range(n, len(predicted) + 1):
                self._ends.setdefault(predicted[end - n : end], []).append(end)
        self.pointer = 0  # the next predicted token
        self.seen = 0  # output tokens taken into account
        self.replaced = False  # the pointer assumes that one token was replaced
        self.lost = False  # the output does not match the prediction

    def follow(self, output: list[int]) -> None:
        """Advance by the new output tokens, or realign."""
        fresh = output[self.seen :]
        if not fresh:
            return
        self.seen = len(output)
        if not self.lost:
            expected = self._predicted[self.pointer : self.pointer + len(fresh)]
            agreed = next((i for i, (a, b) in enumerate(zip(expected, fresh, strict=False)) if a != b), len(expected))
            self.pointer += agreed
            self.replaced = self.replaced and not agreed
            if agreed == len(fresh):
                return
        self._realign(output)

    def _realign(self, output: list[int]) -> None:
        found = self._find(output)
        if found is not None:
            self.pointer, self.lost, self.replaced = found, False, False
        elif self.lost or self.replaced or self.pointer >= len(self._predicted):
            self.lost = True
        else:  # the most common edit replaces one token
            self.pointer, self.replaced = self.pointer + 1, True

    def _find(self, output: list[int]) -> int | None:
        """The end of the output's last tokens in the prediction: the nearest one ahead, else the latest one behind."""
        for n in ANCHORS:
            ends = self._ends.get(tuple(output[-n:])) if len(output) >= n else None
            if ends:
                ahead = bisect_left(ends, self.pointer)
                return ends[ahead] if ahead < len(ends) else ends[-1]
        return None
