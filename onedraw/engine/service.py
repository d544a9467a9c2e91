"""The service connects callers on any thread with the engine, which runs on a thread of its own.

Any thread may submit and cancel requests. With each request comes a sink, the function that gets its events. Events are delivered
on the engine's thread, so a sink must not block. A request that the backend cannot serve is refused before it is queued. A
cancellation takes effect at the start of the next step. An arrival is a submitted request that the engine has not taken yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from onedraw.backends.base import Backend, Capacity
from onedraw.engine.client import BuildConstraint, CheckedRequest, check_count, check_request, refuse_constraints
from onedraw.engine.engine import Engine, Sink, nothing
from onedraw.engine.stats import Stats
from onedraw.errors import EngineLost, OnedrawError, QueueFull, ShuttingDown, StepFailed
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.types import Request

log = logging.getLogger("onedraw.engine")


class Service:
    """Builds, runs and closes an engine on a thread of its own. It is the EngineClient of an engine in this process.

    The engine is built on the thread that runs its steps, because OpenMP makes a pool for each thread that uses it. Two pools of
    a CPU backend would slow each other down by a third.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        queue_limit: int = 256,
        build_constraint: BuildConstraint = refuse_constraints,
        on_stats: Callable[[Stats], None] = nothing,
    ) -> None:
        """`on_stats` is called on the engine's thread with the counters whenever they may have changed."""
        self._build_constraint, self._on_stats = build_constraint, on_stats
        self._queue_limit = queue_limit
        self._changed = threading.Condition()
        self._arrivals: deque[tuple[CheckedRequest, Sink]] = deque()
        self._cancelled: deque[str] = deque()
        self._calls: deque[tuple[Callable[[Engine], None], Future[None]]] = deque()  # functions that the engine's thread calls
        self._draining = False
        self._stop = False
        made: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_engine, made), name="onedraw-engine", daemon=True)
        self._thread.start()
        self._engine = made.result()  # raises the exception of make_engine, if there was one
        self._stats = self._engine.stats()

    @property
    def capacity(self) -> Capacity:
        return self._engine.backend.capacity

    @property
    def ready(self) -> bool:
        return self._thread.is_alive() and not (self._draining or self._stop)

    @property
    def failed(self) -> bool:
        return not self._thread.is_alive() and not self._draining

    @property
    def max_requests(self) -> int:
        return self._queue_limit + self.capacity.lanes

    def stats(self) -> Stats:
        """Return the counters as they were after the last step."""
        return self._stats

    def check(self, request: Request) -> CheckedRequest:
        return check_request(request, self.capacity, self._build_constraint)

    def check_count(self, replies: int, *, param: str | None = None) -> None:
        check_count(replies, self.max_requests, param=param)

    def submit(self, requests: Sequence[tuple[Request | CheckedRequest, Sink]]) -> None:
        """Accept all of the requests or none. Requests that are not checked yet are checked first."""
        self.check_count(len(requests))
        checked = [(request if isinstance(request, CheckedRequest) else self.check(request), sink) for request, sink in requests]
        with self._changed:
            if self._draining:
                raise ShuttingDown("the server is shutting down and takes no new requests")
            if self._stop or not self._thread.is_alive():
                raise EngineLost("the engine failed and takes no new requests; see the server's log")
            if self._engine.unfinished + len(self._arrivals) + len(requests) > self._queue_limit + self.capacity.lanes:
                self._refuse_over_share([one.request.caller for one, _ in checked])
            self._arrivals.extend(checked)
            self._changed.notify()

    def _refuse_over_share(self, callers: Sequence[str]) -> None:
        """Raise QueueFull unless each of these callers stays within an even share of the queue, which is full. So the requests of
        one caller cannot keep all others out. Without fair scheduling, raise in any case."""
        waiting = Counter(dict(self._engine.scheduler.waiting.counts))  # a copy, since the engine's thread changes the original
        waiting.update(one.request.caller for one, _ in self._arrivals)
        waiting.update(callers)
        share = self._queue_limit // len(waiting)
        if not self._engine.scheduler.fair or any(waiting[caller] > share for caller in callers):
            raise QueueFull(f"{self._queue_limit} requests are waiting already; try again in a moment")

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify()

    @property
    def paused(self) -> bool:
        return self._engine.paused

    def pause(self, *, end: bool = False) -> None:
        def pause(engine: Engine) -> None:
            engine.paused = True
            engine.end_all("moved") if end else engine.settle()

        self._call(pause)

    def resume(self) -> None:
        def resume(engine: Engine) -> None:
            engine.paused = False

        self._call(resume)

    def replace_weights(self, replace: Callable[[Backend], None], snapshots: Callable[[Backend], SnapshotFolder]) -> None:
        self._call(lambda engine: engine.replace_weights(replace, snapshots))

    def _call(self, work: Callable[[Engine], None]) -> None:
        """Run work on the engine's thread between two steps, and wait for it. What it raises is raised here."""
        result: Future[None] = Future()
        with self._changed:
            if self._stop or not self._thread.is_alive():
                raise EngineLost("the engine has stopped")
            self._calls.append((work, result))
            self._changed.notify()
        result.result()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish within `drain_seconds`, then cancel the rest and end the thread."""
        with self._changed:
            self._draining = True
            if drain_seconds and self._engine.paused:  # Resume, else the running requests could not finish.
                self._calls.append((lambda engine: setattr(engine, "paused", False), Future()))
                self._changed.notify()
        deadline = time.monotonic() + drain_seconds
        while time.monotonic() < deadline and self._thread.is_alive() and self._has_work():
            time.sleep(0.01)
        with self._changed:
            self._stop = True
            self._changed.notify()
        self._thread.join()

    def _has_work(self) -> bool:
        with self._changed:  # While the lock is held, every arrival is either in the queue or in the engine, never between them.
            return bool(self._arrivals) or self._engine.busy

    def _run(self, make_engine: Callable[[], Engine], made: Future[Engine]) -> None:
        try:
            engine = make_engine()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(engine)
        end: OnedrawError = EngineLost("the engine failed and takes no more requests; see the server's log")
        try:
            while self._step(engine):
                pass
            end = ShuttingDown("the server was shut down before this request finished")
        except BaseException:
            log.exception("the engine failed and cannot continue")
        finally:
            with self._changed:  # After this `submit` refuses requests, so none can arrive that would never get an event.
                self._stop = True
                left, self._arrivals = self._arrivals, deque()
                calls, self._calls = self._calls, deque()
            for _, result in calls:
                result.set_exception(end)
            for checked, sink in left:
                engine.add(checked.request, sink, checked.constraint)
            try:
                engine.fail_all(end)
                self._publish(engine)
            except BaseException:
                log.exception("the engine failed while it was closed")
            finally:
                engine.close()

    def _step(self, engine: Engine) -> bool:
        """Run one engine step and return whether to continue."""
        try:
            if not self._take_messages(engine):
                return False
            engine.step()
            if not engine.busy:
                engine.scheduler.allocator.audit()
        except BaseException:  # a bug outside the backend, or a panic in native code; every request must still get its last event
            log.exception("the engine failed between steps")
            engine.fail_all(StepFailed("the engine failed; see the server's log"))
        self._publish(engine)
        return True

    def _publish(self, engine: Engine) -> None:
        self._stats = engine.stats()
        self._on_stats(self._stats)

    def _take_messages(self, engine: Engine) -> bool:
        """Pass arrivals and cancellations to the engine, and make the calls that `_call` has queued. Sleep while there is nothing
        to do. Return False to stop the thread."""
        with self._changed:
            while not (self._stop or self._arrivals or self._cancelled or self._calls or not engine.idle):
                self._changed.wait()
            if self._stop:
                return False
            arrived = bool(self._arrivals)
            while self._arrivals:
                checked, sink = self._arrivals.popleft()
                engine.add(checked.request, sink, checked.constraint)
            if arrived:
                self._publish(engine)  # so that metrics show waiting requests during a long step
            cancelled, self._cancelled = self._cancelled, deque()
            calls, self._calls = self._calls, deque()
        for request_id in cancelled:
            engine.cancel(request_id)
        for work, result in calls:
            try:
                work(engine)
            except BaseException as error:  # The error belongs to the caller; the engine continues.
                result.set_exception(error)
            else:
                result.set_result(None)
        if cancelled or calls:
            self._publish(engine)
        return True
