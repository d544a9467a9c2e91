"""Letters from the engine's thread to readers on an asyncio loop: many letters, one knock.

In: letters, put by any thread. Out: lists of letters, each reader its own, in the order they were put. A turn tells every
request something; to wake the loop once per request would cost more than reading does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")
MOST_LETTERS = 256  # that a reader takes at once


class Mailbox(Generic[MessageT]):
    """The letters of one reader. One owner: the task that takes them; `post` delivers."""

    def __init__(self, post: LoopWakeup) -> None:
        self._post = post
        self._letters: deque[MessageT] = deque()
        self._awaited: asyncio.Future[None] | None = None

    def put(self, letter: MessageT) -> None:
        """On any thread."""
        self._letters.append(letter)
        self._post.touch(self)

    async def take(self) -> list[MessageT]:
        """All that have come, at least one; of very many the first, and others have their turn before the next."""
        while not self._letters:
            self._awaited = asyncio.get_running_loop().create_future()
            try:
                await self._awaited
            finally:
                self._awaited = None
        if len(self._letters) > MOST_LETTERS:  # a reader that was away for long
            await asyncio.sleep(0)
        # The other thread may go on putting letters while these are taken out.
        return [self._letters.popleft() for _ in range(min(len(self._letters), MOST_LETTERS))]

    def wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)


class LoopWakeup:
    """Knocks at one loop. Any thread may touch; the loop delivers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._touched: deque[Mailbox[object]] = deque()
        self._knocked = False

    def touch(self, inbox: Mailbox[MessageT]) -> None:
        self._touched.append(inbox)  # type: ignore[arg-type]  # of every kind
        if self._knocked:
            return
        self._knocked = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # a loop that closed meanwhile has no reader left
            if not self._loop.is_closed():
                raise

    def _deliver(self) -> None:
        # First, so that a letter which comes while these are handed out knocks again.
        self._knocked = False
        while self._touched:
            self._touched.popleft().wake()
