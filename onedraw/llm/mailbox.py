"""Messages from the engine's thread to asyncio tasks: many messages, one wake-up of the event loop.

In: messages, put by any thread. Out: lists of messages, in the order they were put, for the one task that owns a mailbox. An
engine step has an event for every request; a wake-up of the loop per event would cost more than handling it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")
MAX_MESSAGES = 256  # taken at once


class Mailbox(Generic[MessageT]):
    """The messages for one task, which takes them."""

    def __init__(self, wakeup: LoopWakeup) -> None:
        self._wakeup = wakeup
        self._messages: deque[MessageT] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, message: MessageT) -> None:
        """From any thread."""
        self._messages.append(message)
        self._wakeup.notify(self)

    async def take(self) -> list[MessageT]:
        """All messages so far, at least one and at most MAX_MESSAGES; with more than that, other tasks run first."""
        while not self._messages:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if len(self._messages) > MAX_MESSAGES:  # the task was away for long
            await asyncio.sleep(0)
        # Other threads may append while these are taken.
        return [self._messages.popleft() for _ in range(min(len(self._messages), MAX_MESSAGES))]

    def wake(self) -> None:
        """On the loop: resume the waiting task."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class LoopWakeup:
    """Wakes the tasks of one event loop. Any thread may notify."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._notified: deque[Mailbox[object]] = deque()
        self._scheduled = False

    def notify(self, mailbox: Mailbox[MessageT]) -> None:
        self._notified.append(mailbox)  # type: ignore[arg-type]  # mailboxes of any type
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._wake_all)
        except RuntimeError:  # a closed loop has no tasks left
            if not self._loop.is_closed():
                raise

    def _wake_all(self) -> None:
        # Reset first: a message that arrives during the loop below schedules another wake-up.
        self._scheduled = False
        while self._notified:
            self._notified.popleft().wake()
