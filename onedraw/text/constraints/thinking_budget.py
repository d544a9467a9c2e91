"""A thinking budget: reasoning that has used up its tokens is closed with the family's own words.

In: how a family reasons, a limit in tokens, the ids of the closing words. Out: a Constraint that allows everything until the
limit is reached inside reasoning, and then, behind a whole character, one token after the other of the closing words. It
counts by the same walk that tells the channels of a reply apart, over history and drafts alike, so drafts cannot change
where thinking ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onedraw.text.constraints.base import Walk
from onedraw.text.reasoning import Place, ReasoningSyntax, InitialThinking, beginning, walk
from onedraw.types import Bits

NOT_CLOSING = -1


@dataclass(frozen=True, slots=True)
class Spent:
    """Where a reply stands, how many tokens of reasoning it has had, and which closing token is due."""

    place: Place
    tokens: int = 0
    due: int = NOT_CLOSING
    missing: int = 0  # bytes that the last character still needs


class ThinkingBudget:
    """Owner: one request. `spell` gives the bytes of a token."""

    def __init__(
        self, reasoning: ReasoningSyntax, *, limit: int, closing: Sequence[int], spell: Callable[[int], bytes], thinking: InitialThinking
    ) -> None:
        assert closing
        self._reasoning = reasoning
        self._limit = limit
        self._closing = tuple(closing)
        self._spell = spell
        self._masks = {token: single(token) for token in closing}
        first = Spent(beginning(reasoning, thinking))
        self._walk = Walk(self._judged(first), self._step)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> Bits | None:
        due = self._walk.after(output, drafts).due
        return None if due == NOT_CLOSING else self._masks[self._closing[due]]

    def _step(self, spent: Spent, token: int) -> Spent:
        # The markers are ASCII, so bytes may be read as characters one by one.
        said = self._spell(token)
        place, _ = walk(spent.place, said.decode("latin-1"), self._reasoning)
        if spent.due != NOT_CLOSING:
            if spent.due + 1 < len(self._closing):
                return replace(spent, place=place, due=spent.due + 1)
            # After the last closing token thinking is over, whatever the text before it made of the marker.
            return replace(spent, place=_over(place), due=NOT_CLOSING)
        return self._judged(Spent(place, spent.tokens + spent.place.reasoning, missing=missing_bytes(spent.missing, said)))

    def _judged(self, spent: Spent) -> Spent:
        over = spent.place.reasoning and spent.tokens >= self._limit and not spent.missing
        return replace(spent, due=0) if over else spent


def _over(place: Place) -> Place:
    return Place("content", fresh=True) if place.reasoning else place


def missing_bytes(missing: int, said: bytes) -> int:
    """How many bytes the last character still needs, where it needed so many before."""
    for byte in said:
        if missing and 0x80 <= byte < 0xC0:
            missing -= 1
        else:
            missing = 0 if byte < 0xC0 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
    return missing


def single(token: int) -> Bits:
    """The set of one token."""
    bits = np.zeros(token // 32 + 1, dtype=np.uint32)
    bits[token // 32] = np.uint32(1 << (token % 32))
    return bits
