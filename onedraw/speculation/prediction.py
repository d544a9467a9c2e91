"""Drafts from the reply that the caller predicted.

In: a request with predicted tokens, its history. Out: the prediction from the point that the output has reached. While the
output follows the prediction, a pointer advances; after a deviation the pointer moves to where the last tokens of the output
occur in the prediction, preferably ahead of its old position. The prediction is indexed once, so a step costs its new tokens.
"""

from __future__ import annotations

from bisect import bisect_left

from onedraw.speculation.proposer import chain
from onedraw.types import Draft, History, Request

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
