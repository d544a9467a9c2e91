"""What the caller expects the reply to be, as a drafter.

In: a request with predicted tokens, its history. Out: the prediction from the place the output has reached. While the
output follows, a pointer moves along; where it leaves, the pointer is set anew to where the output's last tokens stand
in the prediction, ahead of the old place first. The prediction is indexed once, so a turn costs its new tokens.
"""

from __future__ import annotations

from bisect import bisect_left

from onedraw.speculation.proposer import chain
from onedraw.types import Draft, History, Request

ANCHORS = (3, 2)  # how many of the output's last tokens must stand in the prediction, tried in this order


class PredictionProposer:
    """Owner: the engine thread."""

    name = "prediction"

    def __init__(self) -> None:
        self._alignments: dict[str, Alignment] = {}

    def propose(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
        if not request.predicted or room <= 0:
            return ()
        alignment = self._alignments.get(request.id)
        if alignment is None or alignment.seen > len(history.output):  # a shorter output is another request's
            alignment = self._alignments[request.id] = Alignment(request.predicted)
        alignment.follow(history.output)
        if alignment.lost:
            return ()
        return chain(request.predicted[alignment.pointer : alignment.pointer + room])

    def forget(self, request_id: str) -> None:
        self._alignments.pop(request_id, None)


class Alignment:
    """How far an output has come in its prediction."""

    __slots__ = ("_ends", "_predicted", "lost", "pointer", "replaced", "seen")

    def __init__(self, predicted: tuple[int, ...]) -> None:
        self._predicted = predicted
        self._ends: dict[tuple[int, ...], list[int]] = {}  # where each 3-gram and 2-gram ends, in rising order
        for n in ANCHORS:
            for end in range(n, len(predicted) + 1):
                self._ends.setdefault(predicted[end - n : end], []).append(end)
        self.pointer = 0  # predicted tokens before it are behind the output
        self.seen = 0  # output tokens taken into account
        self.replaced = False  # the pointer rests on the assumption that one token was replaced
        self.lost = False  # the output is nowhere in the prediction

    def follow(self, output: list[int]) -> None:
        """Move along with the output tokens that are new, or find the place again."""
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
        place = self._find(output)
        if place is not None:
            self.pointer, self.lost, self.replaced = place, False, False
        elif self.lost or self.replaced or self.pointer >= len(self._predicted):
            self.lost = True
        else:  # the commonest edit puts one token in another's place and goes on
            self.pointer, self.replaced = self.pointer + 1, True

    def _find(self, output: list[int]) -> int | None:
        """Where the output's last tokens end: the nearest place ahead, else the latest behind."""
        for n in ANCHORS:
            ends = self._ends.get(tuple(output[-n:])) if len(output) >= n else None
            if ends:
                ahead = bisect_left(ends, self.pointer)
                return ends[ahead] if ahead < len(ends) else ends[-1]
        return None
