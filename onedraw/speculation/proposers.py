"""Drafts that the host proposes: the protocol of a proposer, n-gram lookup, and the caller's predicted output.

A draft is a token that is proposed before it is sampled. A proposer gets a request, its history and the maximum number of drafts.
It cannot change the answer, because a draft is kept only if it equals the token that the target model samples anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol

from onedraw.types import Draft, History, Request

LONGEST_MATCH = 8  # longer matches count as this many tokens


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for one row, the name of the source that made them, and the evidence for them.

    `match` is how many tokens before the drafts agree with the tokens before the place from which they were copied, at most
    LONGEST_MATCH. The more agree, the likelier are the drafts. It is 0 if the source does not know.
    """

    drafts: tuple[Draft, ...] = ()
    source: str = ""
    match: int = 0


NO_PROPOSAL = Proposal()


class Proposer(Protocol):
    @property
    def name(self) -> str: ...

    def propose(self, request: Request, history: History, room: int) -> Proposal:
        """Return drafts that may follow the history, at most `room`. It is called in most steps, so it has to be fast."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop the state of a request, because it has ended."""
        ...


def chain(tokens: tuple[int, ...]) -> tuple[Draft, ...]:
    """Return tokens as a chain of drafts, in which each is the parent of the next."""
    return tuple(map(Draft, tokens, range(-1, len(tokens))))


def matching_suffix(first: list[int], end: int, second: list[int] | tuple[int, ...], stop: int) -> int:
    """Return how many tokens before `end` in the one list agree with those before `stop` in the other, at most LONGEST_MATCH."""
    most, count = min(end, stop, LONGEST_MATCH), 0
    while count < most and first[end - count - 1] == second[stop - count - 1]:
        count += 1
    return count


# ---------------------------------------------------------------------- drafts from the sequence's own tokens


class NgramProposer:
    """Finds an earlier occurrence of the last tokens and drafts the tokens that followed it. Of the tokens that a request has
    at its first step, only the last `reach` are indexed, which bounds the time of that step. `shortest` is how many tokens have
    to agree."""

    name = "ngram"

    def __init__(self, shortest: int = 2, reach: int = 16_384) -> None:
        if not 1 <= shortest <= reach:
            raise ValueError(f"need 1 <= shortest <= reach, not {shortest}, {reach}")
        self._shortest = shortest
        self._reach = reach
        self._indexes: dict[str, SuffixIndex] = {}

    def propose(self, request: Request, history: History, room: int) -> Proposal:
        length = len(history)
        if room <= 0:
            return NO_PROPOSAL
        index = self._indexes.get(request.id)
        if index is None or index.stop > length:  # A history never shrinks, so this is another request with the same id.
            index = self._indexes[request.id] = SuffixIndex(self._shortest, start=max(length - self._reach, 0))
        end, match = index.find(history)
        if not match:
            return NO_PROPOSAL
        tokens = history.slice(end, min(end + room, length))
        if len(tokens) < room:  # The occurrence overlaps the suffix, so the text is periodic: draft further periods.
            tokens = list(islice(cycle(tokens), room))
        return Proposal(chain(tuple(tokens)), self.name, match)

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class SuffixIndex:
    """Finds the earlier place in a growing history whose preceding tokens agree best with the last tokens. Tokens before `start`
    are left out.

    The places with the same last `shortest` tokens are linked, each with the one before it, and the latest PLACES of them are
    compared. A place at the end of the history is linked later, since a suffix would find itself.
    """

    PLACES = 8

    __slots__ = ("_before", "_latest", "_shortest", "_start", "_tokens", "stop")

    def __init__(self, shortest: int, *, start: int) -> None:
        self._shortest, self._start = shortest, start
        self._tokens: list[int] = []  # those of the history from `start` on
        self._latest: dict[tuple[int, ...], int] = {}  # from `shortest` tokens to the end of their latest occurrence
        self._before: list[int] = [0] * shortest  # by end, the end of the occurrence before that, 0 if there is none
        self.stop = start  # position in the history up to which tokens are known here

    def find(self, history: History) -> tuple[int, int]:
        """Return the position that follows the best place, the latest among equals, and how many tokens agree there; (0, 0) if
        there is none."""
        tokens, latest, before, shortest = self._tokens, self._latest, self._before, self._shortest
        length = len(history)
        tokens += history.slice(self.stop, length)
        self.stop = length
        length -= self._start
        for end in range(len(before), length):
            key = tuple(tokens[end - shortest : end])
            before.append(latest.get(key, 0))
            latest[key] = end
        if length < shortest:
            return 0, 0
        place = latest.get(tuple(tokens[length - shortest :]), 0)
        best, match = 0, 0
        for _ in range(self.PLACES):
            if not place or match == LONGEST_MATCH:
                break
            found = matching_suffix(tokens, place, tokens, length)
            if found > match:
                best, match = place, found
            place = before[place]
        return best + self._start, match


# ---------------------------------------------------------------------- drafts from the caller's predicted output


PREDICTION = "prediction"
ANCHORS = (3, 2)  # To realign, this many of the last output tokens must occur in the prediction; 3 is tried first.


class PredictionProposer:
    """Drafts the rest of the reply that the request predicts, from the position in it that the output has reached."""

    name = PREDICTION

    def __init__(self) -> None:
        self._alignments: dict[str, Alignment] = {}

    def propose(self, request: Request, history: History, room: int) -> Proposal:
        if not request.predicted or room <= 0:
            return NO_PROPOSAL
        alignment = self._alignments.get(request.id)
        shrunk = alignment is not None and alignment.seen > len(history.output)
        if alignment is None or shrunk:  # An output never shrinks: then this is another request with the same id.
            alignment = self._alignments[request.id] = Alignment(request.predicted)
        alignment.follow(history.output)
        drafts = () if alignment.lost else chain(request.predicted[alignment.pointer : alignment.pointer + room])
        if not drafts:
            return NO_PROPOSAL
        output = history.output
        # After a replaced token nothing agrees, which is weaker evidence than a reply that has not begun.
        match = max(matching_suffix(output, len(output), request.predicted, alignment.pointer), 1) if output else 0
        return Proposal(drafts, self.name, match)

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
