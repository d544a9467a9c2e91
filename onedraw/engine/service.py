"""The only thread border: callers on any thread, the engine on its own. (interface; body follows)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onedraw.errors import OnedrawError
from onedraw.types import Choice, Finish, Logprobs, Request, Usage


@dataclass(frozen=True, slots=True)
class Event:
    """What a request's sink hears after a turn. The last one has a finish or an error."""

    request_id: str
    chosen: tuple[Choice, ...] = ()
    finish: Finish | None = None
    stop_id: int | None = None
    usage: Usage = Usage()
    scored: tuple[Logprobs, ...] | None = None  # logprobs of the prompt's tokens but the first, once, when asked for
    error: OnedrawError | None = None


Sink = Callable[[Event], None]


class Service:
    def check(self, request: Request) -> None: ...
    def submit(self, requests: Sequence[tuple[Request, Sink]]) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def close(self, drain_seconds: float = 0.0) -> None: ...
