"""How far a lane's counts of tokens follow a request's history. The same for every backend.

In: positions with their histories. Out: whether counts made earlier may be continued, so a decode step adds one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from onedraw.types import History


class HasHistory(Protocol):
    """What a position says about where it stands."""

    @property
    def lane(self) -> int: ...
    @property
    def request_id(self) -> str: ...
    @property
    def history(self) -> History: ...
    @property
    def drafts(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class CountedHistory:
    """What a lane's buffer holds: this request's prompt, and this many known tokens."""

    request_id: str
    prompt: tuple[int, ...]
    known: int

    def is_prefix_of(self, place: HasHistory) -> bool:
        """The place has the same request, as far on or farther. Known tokens never change, prompts are compared last."""
        same = self.request_id == place.request_id and self.known <= len(place.history)
        return same and (self.prompt is place.history.prompt or self.prompt == place.history.prompt)
