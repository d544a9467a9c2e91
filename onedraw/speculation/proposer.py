"""The protocol of every proposer of drafts on the host.

In: a request, its history, and the maximum number of drafts. Out: drafts. A proposer cannot change the answer, because a draft
is kept only if it equals the token that the target model samples anyway.
"""

from __future__ import annotations

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
