"""Messages from the engine's thread to asyncio tasks, with one wake-up of the event loop for many messages.

Any thread puts messages into a mailbox. The one task that owns it takes them in lists, in the order in which they were put. One
engine step has an event for every request, and waking the event loop for each would cost more than handling the event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")
MAX_MESSAGES = 256  # `take` returns at most this many, so that one task cannot keep the event loop busy.


class Mailbox(Generic[MessageT]):
    """A queue of messages with many producers, and one asyncio task that takes them."""

    def __init__(self, wakeup: LoopWakeup) -> None:
        self._wakeup = wakeup
        self._messages: deque[MessageT] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, message: MessageT) -> None:
        """Add a message. Any thread may call this."""
        self._messages.append(message)
        self._wakeup.notify(self)

    async def take(self) -> list[MessageT]:
        """Wait for a message and return all there are, at most MAX_MESSAGES. If there are more, other tasks run first."""
        while not self._messages:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if len(self._messages) > MAX_MESSAGES:  # The event loop is behind, so let other tasks run before this one continues.
            await asyncio.sleep(0)
        # Take only as many messages as there are now, because other threads may append more during the loop.
        return [self._messages.popleft() for _ in range(min(len(self._messages), MAX_MESSAGES))]

    def wake(self) -> None:
        """Resume the task that waits in `take`. Only the thread of the event loop may call this."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class LoopWakeup:
    """Wakes the tasks that wait for mailboxes on one event loop. Any thread may call `notify`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._notified: deque[Mailbox[object]] = deque()
        self._scheduled = False

    def notify(self, mailbox: Mailbox[MessageT]) -> None:
        self._notified.append(mailbox)  # type: ignore[arg-type]  # the deque holds mailboxes of all message types
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._wake_all)
        except RuntimeError:  # A closed event loop raises this. It has no waiting tasks, so there is nothing to wake.
            if not self._loop.is_closed():
                raise

    def _wake_all(self) -> None:
        # Reset the flag first, so that a message which arrives during the loop below schedules another wake-up.
        self._scheduled = False
        while self._notified:
            self._notified.popleft().wake()
