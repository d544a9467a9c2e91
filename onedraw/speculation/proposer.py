"""Who guesses: the protocol of every proposer, and the one that never guesses.

In: a history and how many drafts there is room for. Out: drafts. A proposer can be wrong, late or empty; it cannot
change the answer, because a draft is kept only while it equals what the target chooses anyway.
"""

from __future__ import annotations

from typing import Protocol

from onedraw.types import Draft, History


class Proposer(Protocol):
    def propose(self, request_id: str, history: History, room: int) -> tuple[Draft, ...]:
        """At most `room` drafts that may follow the history."""
        ...


class Silent:
    """Plain decoding is zero drafts."""

    def propose(self, request_id: str, history: History, room: int) -> tuple[Draft, ...]:
        return ()


def chain(tokens: tuple[int, ...]) -> tuple[Draft, ...]:
    """Drafts one after the other: a tree with one child everywhere."""
    return tuple(Draft(token=token, parent=index - 1) for index, token in enumerate(tokens))
