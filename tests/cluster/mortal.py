"""A replica in the test's process that dies when it has delivered a given number of events."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace

from onedraw.backends.base import Capacity
from onedraw.engine.client import CheckedRequest, EngineClient, Event, Sink
from onedraw.engine.stats import Stats
from onedraw.errors import EngineLost
from onedraw.types import Request

NUMBERS = itertools.count()


class Mortal:
    """An engine client over another one, which outlives it and may serve several of them. After `events` events it is dead: the
    next event is lost with all later ones, and the running requests end with EngineLost, as they do when the process of an engine
    is killed."""

    def __init__(self, client: EngineClient, events: int | None = None, *, in_submit: bool = False) -> None:
        self.client = client
        self.left = events
        self.in_submit = in_submit  # whether death is first seen by `submit`
        self.dead = threading.Event()
        self.delivered = 0
        self._name = f"mortal{next(NUMBERS)}"  # before the ids of its requests, so that those of several do not collide
        self._lock = threading.Lock()
        self._running: dict[str, Sink] = {}

    @property
    def capacity(self) -> Capacity:
        return self.client.capacity

    @property
    def ready(self) -> bool:
        return not self.dead.is_set() or self.in_submit

    @property
    def failed(self) -> bool:
        return self.dead.is_set()

    @property
    def max_requests(self) -> int:
        return self.client.max_requests

    def stats(self) -> Stats:
        return self.client.stats()

    def check(self, request: Request) -> CheckedRequest:
        return self.client.check(request)

    def check_count(self, replies: int, *, param: str | None = None) -> None:
        self.client.check_count(replies, param=param)

    def submit(self, requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        with self._lock:
            if self.dead.is_set():
                raise EngineLost("this replica is dead")
            self._running.update({self._id(checked.request.id): sink for checked, sink in requests})
        renamed = [replace(one, request=replace(one.request, id=self._id(one.request.id))) for one, _ in requests]
        self.client.submit([(checked, self._event) for checked in renamed])
        if self.left == 0 and self.in_submit:
            self.die()

    def _id(self, request_id: str) -> str:
        return f"{self._name}/{request_id}"

    def _event(self, event: Event) -> None:
        with self._lock:
            sink = self._running.get(event.request_id)
            if sink is None:
                return
            if self.left == 0:
                lost = True
            else:
                lost = False
                self.left = None if self.left is None else self.left - 1
                self.delivered += 1
                if event.finish is not None or event.error is not None:
                    del self._running[event.request_id]
        if lost:
            self.die()
        else:
            sink(event)

    def die(self) -> None:
        self.dead.set()
        with self._lock:
            running, self._running = self._running, {}
        for request_id, sink in running.items():
            self.client.cancel(request_id)
            sink(Event(request_id, error=EngineLost("this replica was killed")))

    def cancel(self, request_id: str) -> None:
        if not self.dead.is_set():
            self.client.cancel(self._id(request_id))

    def close(self, drain_seconds: float = 0.0) -> None:
        self.dead.set()
