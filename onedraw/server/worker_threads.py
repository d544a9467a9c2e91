"""Runs the reading, checking and tokenizing of requests on threads, so that the event loop stays free for streams.

There are few threads, and callers take turns for them, so that one caller with many requests delays the others by the work of one
request each. Work on long requests, and work that compiles response formats, has threads of its own: both may take seconds, and
short requests do not wait for them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from starlette.requests import Request

from onedraw.limits import MAX_CALLER_FORMAT_WORK, MAX_FORMAT_WORK, MAX_LONG_WORK, MAX_SHORT_WORK
from onedraw.server.auth import turn_caller
from onedraw.server.middleware import or_disconnect

Result = TypeVar("Result")


class Turns:
    """A number of slots, of which one caller has at most `share` at once (None: all). Callers take turns for them; the requests
    of one caller get theirs in order of arrival. It must be used on one event loop."""

    def __init__(self, most: int, share: int | None = None) -> None:
        self._free = most
        self._share = most if share is None else share
        self._held: Counter[str] = Counter()  # number of slots of each caller
        # the requests of each caller that wait for a slot; the caller at the front gets the next slot
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, caller: str) -> None:
        if self._free and self._held[caller] < self._share:
            self._take(caller)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # The slot was given to this request just as its client disconnected.
                self.release(caller)
            raise

    def release(self, caller: str) -> None:
        """Free a slot of this caller and give it to the first request of the next caller that still waits and may have another
        one. That caller is moved behind all others."""
        self._free += 1
        self._held -= Counter([caller])  # drops callers whose count is 0
        while (waits := next((one for one in self._waiting if self._held[one] < self._share), None)) is not None:
            waiting = self._waiting.pop(waits)
            turn = waiting.popleft()
            if waiting:
                self._waiting[waits] = waiting
            if not turn.done():
                self._take(waits)
                turn.set_result(None)
                return

    def _take(self, caller: str) -> None:
        self._free -= 1
        self._held[caller] += 1


class Workers:
    """The threads of one server for the work on requests."""

    def __init__(self) -> None:
        self._short, self._long = Turns(MAX_SHORT_WORK), Turns(MAX_LONG_WORK)
        self._formats = Turns(MAX_FORMAT_WORK, share=MAX_CALLER_FORMAT_WORK)
        self._threads = ThreadPoolExecutor(MAX_SHORT_WORK + MAX_LONG_WORK + MAX_FORMAT_WORK, thread_name_prefix="request-work")

    async def run(self, request: Request, work: Callable[[], Result], *, long: bool, compiles: bool = False) -> Result:
        """Run work on a thread and return its result. `long`: its request is long. `compiles`: it compiles a response format.

        If the client disconnects first, ClientGone is raised. Work that has not started is then dropped; work that runs cannot be
        stopped and occupies its thread until it ends."""
        turns = [self._formats] if compiles else [] if long else [self._short]
        return await or_disconnect(
            request.receive, self._run(work, [*turns, self._long] if long else turns, turn_caller(request.scope))
        )

    async def _run(self, work: Callable[[], Result], turns: Sequence[Turns], caller: str) -> Result:
        held: list[Turns] = []
        try:
            for turn in turns:
                await turn.acquire(caller)
                held.append(turn)
        except asyncio.CancelledError:
            for turn in held:
                turn.release(caller)
            raise
        running = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)

        def end(ended: asyncio.Future[Result]) -> None:
            for turn in held:
                turn.release(caller)
            if not ended.cancelled():
                ended.exception()  # Otherwise asyncio logs it if the client has gone and nothing awaits the result.

        running.add_done_callback(end)
        return await asyncio.shield(running)
