"""Drafts that the host proposes: the protocol of a proposer, n-gram lookup, and the caller's predicted output.

A draft is a token that is proposed before it is sampled. A proposer gets a request, its history and the maximum number of drafts.
It cannot change the answer, because a draft is kept only if it equals the token that the target model samples anyway.
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
        """Return drafts that may follow the history. If there are more than `room`, the caller drops the rest."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop the state of a request, because it has ended."""
        ...


def chain(tokens: tuple[int, ...]) -> tuple[Draft, ...]:
    """Return tokens as a chain of drafts, in which each is the parent of the next."""
    return tuple(map(Draft, tokens, range(-1, len(tokens))))


# ---------------------------------------------------------------------- drafts from the sequence's own tokens


class NgramProposer:
    """Finds an earlier occurrence of the last tokens and drafts the tokens that followed it. Of the tokens that a request has
    at its first step, only the last `reach` are indexed, which bounds the time of that step."""

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
        if index is None or index.stop > length:  # A history never shrinks, so this is another request with the same id.
            index = SuffixIndex(longest=self._longest, shortest=self._shortest, start=max(length - self._reach, 0))
            self._indexes[request.id] = index
        end = index.latest(history)
        if end is None:
            return ()
        tokens = history.slice(end, min(end + room, length))
        if len(tokens) < room:  # The occurrence overlaps the suffix, so the text is periodic: draft further periods.
            tokens = list(islice(cycle(tokens), room))
        return chain(tuple(tokens))

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class SuffixIndex:
    """Knows where each n-gram of a growing history occurred last. Tokens before `start` are left out.

    N-grams that end at the end of the history are added later, since a suffix would find itself.
    """

    __slots__ = ("_ends", "_longest", "_start", "stop")

    def __init__(self, *, longest: int, shortest: int, start: int) -> None:
        self._longest = longest
        self._start = start
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(longest, shortest - 1, -1)}
        self.stop = start  # position in the history; n-grams that end here or earlier are in the index

    def latest(self, history: History) -> int | None:
        """Return where the last earlier occurrence of the longest known suffix ends, or None."""
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
            first = max(self.stop + 1, self._start + n)  # where the first n-gram ends that is not in the index yet
            offset = first - n - begin
            ends.update(zip(zip(*(tokens[offset + i :] for i in range(n)), strict=False), range(first, stop + 1), strict=False))
        self.stop = stop


# ---------------------------------------------------------------------- drafts from the caller's predicted output


PREDICTION = "prediction"
ANCHORS = (3, 2)  # To realign, this many of the last output tokens must occur in the prediction; 3 is tried first.


class PredictionProposer:
    """Drafts the rest of the reply that the request predicts, from the position in it that the output has reached."""

    name = PREDICTION

    def __init__(self) -> None:
        self._alignments: dict[str, Alignment] = {}

    def propose(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
        if not request.predicted or room <= 0:
            return ()
        alignment = self._alignments.get(request.id)
        shrunk = alignment is not None and alignment.seen > len(history.output)
        if alignment is None or shrunk:  # An output never shrinks: then this is another request with the same id.
            alignment = self._alignments[request.id] = Alignment(request.predicted)
        alignment.follow(history.output)
        if alignment.lost:
            return ()
        return chain(request.predicted[alignment.pointer : alignment.pointer + room])

    def forget(self, request_id: str) -> None:
        self._alignments.pop(request_id, None)


class Alignment:
    """Tracks which position of the prediction the output has reached."""

    __slots__ = ("_ends", "_predicted", "lost", "pointer", "replaced", "seen")

    def __init__(self, predicted: tuple[int, ...]) -> None:
        self._predicted = predicted
        self._ends: dict[tuple[int, ...], list[int]] = {}  # from an n-gram of 3 or 2 tokens to its ends in the prediction
        for n in ANCHORS:
            for end in range(n, len(predicted) + 1):
                self._ends.setdefault(predicted[end - n : end], []).append(end)
        self.pointer = 0  # index of the predicted token that is expected next
        self.seen = 0  # number of output tokens that were taken into account
        self.replaced = False  # whether the last output token differed from the prediction, which is taken as one replaced token
        self.lost = False  # whether the last output tokens do not occur in the prediction, so that nothing is drafted

    def follow(self, output: list[int]) -> None:
        """Advance over the new output tokens while they agree with the prediction, else realign."""
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
        else:  # Assume that one token was replaced, which is the most common edit.
            self.pointer, self.replaced = self.pointer + 1, True

    def _find(self, output: list[int]) -> int | None:
        """Return where the last output tokens end in the prediction: at the nearest place from `pointer` on, else at the
        last one before it."""
        for n in ANCHORS:
            ends = self._ends.get(tuple(output[-n:])) if len(output) >= n else None
            if ends:
                ahead = bisect_left(ends, self.pointer)
                return ends[ahead] if ahead < len(ends) else ends[-1]
        return None
