"""Runs the reading, checking and tokenizing of requests on threads, so that the event loop stays free for streams.

In: a function. Out: its result. Long work has threads of its own, so that a few long requests leave the short ones a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from starlette.requests import Request

from onedraw.limits import MAX_LONG_WORK
from onedraw.server.middleware import or_disconnect

Result = TypeVar("Result")


class Workers:
    """The threads of one server."""

    def __init__(self, most: int = MAX_LONG_WORK) -> None:
        self._turns = asyncio.Semaphore(most)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="long-work")

    async def run(self, request: Request, work: Callable[[], Result], *, long: bool) -> Result:
        """The result of the work. If the client disconnects first, ClientGone is raised: work that waits for its turn is dropped,
        and work that runs keeps its turn until it ends."""
        return await or_disconnect(request.receive, self._long(work) if long else asyncio.to_thread(work))

    async def _long(self, work: Callable[[], Result]) -> Result:
        await self._turns.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, work)
        running.add_done_callback(self._end)
        return await asyncio.shield(running)

    def _end(self, ended: asyncio.Future[Result]) -> None:
        self._turns.release()
        if not ended.cancelled():
            ended.exception()  # Mark it as seen: nobody awaits work whose client has gone.
