"""Runs the reading, checking and tokenizing of requests on threads, so that the event loop stays free for streams.

Work on long requests has a few threads of its own, so that it cannot occupy the threads that short requests need.
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
    """The threads for the work on long requests of one server. Short work runs on asyncio's default threads."""

    def __init__(self, most: int = MAX_LONG_WORK) -> None:
        self._turns = asyncio.Semaphore(most)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="long-work")

    async def run(self, request: Request, work: Callable[[], Result], *, long: bool) -> Result:
        """Run work on a thread and return its result. If the client disconnects first, ClientGone is raised. Work that has not
        started is then dropped; work that runs cannot be stopped and occupies its thread until it ends."""
        return await or_disconnect(request.receive, self._long(work) if long else asyncio.to_thread(work))

    async def _long(self, work: Callable[[], Result]) -> Result:
        await self._turns.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, work)
        running.add_done_callback(self._end)
        return await asyncio.shield(running)

    def _end(self, ended: asyncio.Future[Result]) -> None:
        self._turns.release()
        if not ended.cancelled():
            ended.exception()  # Reading the exception keeps asyncio from logging it if the client has gone and nothing awaits it.
