"""Who guesses: the protocol of every proposer on the host.

In: a request, its history, and how many drafts there is room for. Out: drafts. A proposer can be wrong, late or empty;
it cannot change the answer, because a draft is kept only while it equals what the target chooses anyway.
"""

from __future__ import annotations

from typing import Protocol

from onedraw.types import Draft, History, Request


class Proposer(Protocol):
    @property
    def name(self) -> str: ...

    def propose(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
        """At most `room` drafts that may follow the history; more are cut."""
        ...

    def forget(self, request_id: str) -> None:
        """The request is over: drop what was kept for it."""
        ...


def chain(tokens: tuple[int, ...]) -> tuple[Draft, ...]:
    """Drafts one after the other: a tree with one child everywhere."""
    return tuple(map(Draft, tokens, range(-1, len(tokens))))
