"""Which guesses a row carries: proposers in order of cost, the backend's own guesses last, each as long as it pays off.

In: a request, its history, the backend's guesses, the room there is, and what verification kept so far. Out: drafts and
their source. Owner: the engine thread. Nothing here can change a token, only how soon it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onedraw.speculation.proposer import Proposer
from onedraw.types import Draft, History, Request

DEVICE = "device"  # source of the backend's own guesses


@dataclass(frozen=True, slots=True)
class Guess:
    drafts: tuple[Draft, ...] = ()
    source: str = ""


NOTHING = Guess()


class Speculator:
    def __init__(self, proposers: Sequence[Proposer] = (), *, draft_tokens: int | None = None) -> None:
        self._proposers = tuple(proposers)
        self._draft_tokens = draft_tokens  # None: decided by window.py

    def guess(self, request: Request, history: History, own: tuple[Draft, ...], *, room: int, running: int) -> Guess:
        """Drafts for the row that reaches the end of `history`. `own` are the backend's; `running` rows share the turn."""
        if not request.speculate or room <= 0:
            return NOTHING
        for proposer in self._proposers:
            drafts = proposer.propose(request, history, room)[:room]
            if drafts:
                return Guess(drafts, proposer.name)
        return Guess(own[:room], DEVICE) if own else NOTHING

    def learn(self, request_id: str, source: str, *, drafted: int, kept: int) -> None:
        """What verification made of a guess."""

    def observe(self, *, tokens: int, rows: int, seconds: float) -> None:
        """What a turn without prompt rows cost: `tokens` computed for `rows` sequences."""

    def forget(self, request_id: str) -> None:
        for proposer in self._proposers:
            proposer.forget(request_id)
