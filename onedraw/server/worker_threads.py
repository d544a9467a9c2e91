"""Runs the reading, checking and tokenizing of requests on threads, so that the event loop stays free for streams.

There are few threads, and callers take turns for them, so that one caller with many requests delays the others by the work of one
request each. Work on long requests, and work that compiles response formats, has threads of its own: both may take seconds, and
short requests do not wait for them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from starlette.requests import Request

from onedraw.limits import MAX_FORMAT_WORK, MAX_LONG_WORK, MAX_SHORT_WORK
from onedraw.server.auth import turn_caller
from onedraw.server.middleware import or_disconnect

Result = TypeVar("Result")


class Turns:
    """A number of slots. Callers take turns for them; the requests of one caller get theirs in order of arrival. It must
    be used on one event loop."""

    def __init__(self, most: int) -> None:
        self._free = most
        # the requests of each caller that wait for a slot; the caller at the front gets the next slot
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, caller: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # The slot was given to this request just as its client disconnected.
                self.release()
            raise

    def release(self) -> None:
        """Give the slot to the first request of the next caller that still waits, and move that caller behind all others. If no
        request waits, the slot is free."""
        while self._waiting:
            caller, waiting = self._waiting.popitem(last=False)
            turn = waiting.popleft()
            if waiting:
                self._waiting[caller] = waiting
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Workers:
    """The threads of one server for the work on requests."""

    def __init__(self) -> None:
        self._short, self._long, self._formats = (Turns(most) for most in (MAX_SHORT_WORK, MAX_LONG_WORK, MAX_FORMAT_WORK))
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
                turn.release()
            raise
        running = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)

        def end(ended: asyncio.Future[Result]) -> None:
            for turn in held:
                turn.release()
            if not ended.cancelled():
                ended.exception()  # Otherwise asyncio logs it if the client has gone and nothing awaits the result.

        running.add_done_callback(end)
        return await asyncio.shield(running)
