"""An engine in another process: its client, and the part of the engine's process that serves the client.

A channel carries messages of `wire.py` between the two, in order. For a process of this machine it is a pair of sockets, which
send frames: the length in four bytes, then a message. Each side has a thread that reads and never waits for the other side. The
client's process writes on a thread of its own, so a caller never waits for the engine's process. The engine's thread writes the
events of a step itself, in one message; if the client does not read, the engine waits, so events never pile up.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol, assert_never

from onedraw.backends.base import Capacity
from onedraw.engine.client import (
    BuildConstraint,
    CheckedRequest,
    EngineClient,
    Event,
    FixedWeights,
    Sink,
    check_count,
    check_request,
)
from onedraw.engine.stats import Stats
from onedraw.engine.wire import (
    Cancel,
    Close,
    Events,
    Failed,
    Report,
    RequestCodec,
    Started,
    Submit,
    ToEngine,
    WireError,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from onedraw.errors import BadRequest, EngineLost, OnedrawError, QueueFull, ShuttingDown, StepFailed
from onedraw.types import Request

log = logging.getLogger("onedraw.engine")

LENGTH_BYTES = 4
MOST_FRAME_BYTES = 1 << 30  # the most bytes of the requests that one call submits; a frame's length field could hold more
SOCKET_BYTES = 1 << 20  # a side that writes waits while this many bytes are sent but not read
STATS_SECONDS = 0.05  # while no event is sent, the counters are sent this often
STOP_SECONDS = 30.0  # how long the engine's process may take to end after the last request has ended
DEATH_SECONDS = 5.0  # how long to wait for the end of a process that has closed its connection
MOST_SENT = 4  # A client refuses requests beyond this many times the number that the engine can run and queue.
BUILDERS = 2  # threads of the engine's process that build constraints


class MessageSender(Protocol):
    def send(self, message: bytes) -> None:
        """Send a message, on any thread. OSError: the other side has ended."""
        ...


class EngineChannel(MessageSender, Protocol):
    """One end of the connection of the two processes. One thread receives."""

    def receive(self) -> bytes | None:
        """Wait for a message. None: the other side has ended."""
        ...

    def close(self) -> None:
        """End the connection. It wakes the thread that receives, here and on the other side."""
        ...


class Frames:
    """One end of the pair of sockets. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self._reader = end.makefile("rb", buffering=1 << 16)
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send a message, and wait while the other side does not read. OSError: the other side has ended."""
        with self._lock:
            self._socket.sendall(len(message).to_bytes(LENGTH_BYTES, "little") + message)

    def receive(self) -> bytes | None:
        """Wait for a message. None: the other side has ended."""
        try:
            head = self._reader.read(LENGTH_BYTES)
            length = int.from_bytes(head, "little")
            message = self._reader.read(length)
        except OSError:
            return None
        return message if len(head) == LENGTH_BYTES and len(message) == length else None

    def close(self) -> None:
        """End the connection. It wakes the thread that receives, here and on the other side."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# ---------------------------------------------------------------------- the client


class RemoteEngine(FixedWeights):
    """The EngineClient of an engine in another process. The process has sent its first message (Started); all later ones are
    read here."""

    where = "an engine in a process of its own"

    def __init__(
        self,
        channel: EngineChannel,
        started: Started,
        *,
        codec: RequestCodec,
        build_constraint: BuildConstraint,
        on_report: Callable[[Report], None],
        end_process: Callable[[float], str],
    ) -> None:
        """`end_process` waits the given seconds for the end of the process, then kills it, and returns how it ended, as text."""
        self._channel, self._codec, self._build_constraint = channel, codec, build_constraint
        self._capacity, self._max_requests, self._stats = started.capacity, started.max_requests, started.stats
        self.fingerprint = started.fingerprint
        self._on_report, self._end_process = on_report, end_process
        self._lock = threading.Lock()
        self._sinks: dict[str, Sink] = {}  # by request id; an entry is removed at the request's last event
        self._closing = self._ended = False
        self._heard = time.monotonic()  # time of the engine's last message, or of a request sent to it when it was idle
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="onedraw-to-engine", daemon=True)
        self._reader = threading.Thread(target=self._read, name="onedraw-from-engine", daemon=True)
        self._writer.start()
        self._reader.start()

    # ------------------------------------------------------------------ EngineClient

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def ready(self) -> bool:
        return not self._ended and not self._closing

    @property
    def failed(self) -> bool:
        return self._ended and not self._closing

    @property
    def max_requests(self) -> int:
        return self._max_requests

    def stats(self) -> Stats:
        return self._stats

    def check(self, request: Request) -> CheckedRequest:
        return check_request(request, self._capacity, self._build_constraint)

    def check_count(self, replies: int, *, param: str | None = None) -> None:
        check_count(replies, self._max_requests, param=param)

    def submit(self, requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        self.check_count(len(requests))
        message = self._codec.submit(tuple(checked.request for checked, _ in requests))
        if len(message) > MOST_FRAME_BYTES:
            raise BadRequest(f"the requests take {len(message):,} bytes together, over {MOST_FRAME_BYTES:,}; split them")
        with self._lock:
            if self._closing:
                raise ShuttingDown("the server is shutting down and takes no new requests")
            if self._ended:
                raise EngineLost("the engine's process has ended and takes no new requests; see the server's log")
            if len(self._sinks) + len(requests) > MOST_SENT * self._max_requests:
                raise QueueFull(f"{len(self._sinks)} requests are running and waiting already; try again in a moment")
            if not self._sinks:
                self._heard = time.monotonic()
            self._sinks.update({checked.request.id: sink for checked, sink in requests})
            self._outgoing.put(message)

    def cancel(self, request_id: str) -> None:
        if request_id in self._sinks:
            self._outgoing.put(encode(Cancel((request_id,))))

    def close(self, drain_seconds: float = 0.0) -> None:
        with self._lock:
            self._closing = True
            self._outgoing.put(encode(Close(drain_seconds)))
        self._reader.join(drain_seconds + STOP_SECONDS)
        if self._reader.is_alive():
            self._end_process(0)
            self._reader.join()
        self._writer.join()

    def join(self, seconds: float) -> bool:
        """Wait up to this many seconds for the end of the engine's process. Return whether it has ended."""
        self._reader.join(seconds)
        return not self._reader.is_alive()

    @property
    def silent_seconds(self) -> float:
        """For how long the engine has sent nothing although it has requests."""
        return time.monotonic() - self._heard if self._sinks else 0.0

    # ------------------------------------------------------------------ threads

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._channel.send(message)
            except OSError:  # The process has ended, which the thread in `_read` sees too.
                return

    def _read(self) -> None:
        failure: OnedrawError | None = None
        try:
            while (data := self._channel.receive()) is not None:
                self._heard = time.monotonic()
                match decode_from_engine(data):
                    case Events(events, stats):
                        self._stats = stats or self._stats
                        for event in events:
                            self._deliver(event)
                    case Report() as report:
                        self._on_report(report)
                    case Failed(error):
                        failure = error
                    case Started():
                        raise WireError("the engine's process has started twice")
                    case message:
                        assert_never(message)
        except Exception:
            log.exception("a message of the engine's process cannot be read")
        self._end(failure)

    def _deliver(self, event: Event) -> None:
        last = event.finish is not None or event.error is not None
        sink = self._sinks.pop(event.request_id, None) if last else self._sinks.get(event.request_id)
        if sink is None:
            return
        try:
            sink(event)
        except Exception:  # A sink that fails must not end the replies to other requests.
            log.exception("an event could not be delivered")

    def _end(self, failure: OnedrawError | None) -> None:
        """Give every request its last event, since the engine's process sends nothing more."""
        self._channel.close()
        how = self._end_process(STOP_SECONDS if self._closing else DEATH_SECONDS)
        with self._lock:
            self._ended = True
            left, self._sinks = self._sinks, {}
        self._outgoing.put(None)  # ends the thread that writes
        error = failure
        if self._closing:
            error = ShuttingDown("the server was shut down before this request finished")
        elif error is None:
            error = EngineLost(f"the engine's process ended ({how}) before this request finished; see the server's log")
        if not self._closing:
            log.critical("the engine's process ended (%s) with %d requests", how, len(left))
        for request_id, sink in left.items():
            try:
                sink(Event(request_id, error=error))
            except Exception:
                log.exception("the error event of a request could not be delivered")


# ---------------------------------------------------------------------- the engine's process


class EventSender:
    """Sends events to the client: those of a step in one message, with the counters. `sink` is the sink of all requests."""

    def __init__(self, channel: MessageSender) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._stats: Stats | None = None  # the latest counters; None if they have been sent
        self._sent = 0.0  # when the last message was sent

    def sink(self, event: Event) -> None:
        self._events.append(event)

    def flush(self) -> None:
        """Send all events that were not sent yet. The engine calls this after each step."""
        if self._events:
            self._send()

    def publish(self, stats: Stats) -> None:
        """Store the counters after a step. They are sent with the next events, or now if there may be none for a while."""
        with self._lock:
            self._stats = stats
        if not (stats.running or stats.waiting) or time.monotonic() - self._sent > STATS_SECONDS:
            self._send()

    def _send(self) -> None:
        with self._lock:
            events = tuple(self._events.popleft() for _ in range(len(self._events)))
            stats, self._stats = self._stats, None
            if not events and stats is None:
                return
            try:
                message = encode(Events(events, stats))
            except Exception:  # A value cannot be encoded; the requests must still get a last event.
                log.exception("the events of a step cannot be sent")
                error = StepFailed("the events of a step cannot be sent; see the server's log")
                message = encode(Events(tuple(Event(event.request_id, error=error) for event in events), stats))
            self._sent = time.monotonic()
            with suppress(OSError):  # If the client has ended, the thread that receives ends this process.
                self._channel.send(message)


class EngineServer:
    """Serves one client in the engine's process, until the client closes the engine or ends."""

    def __init__(
        self, engine: EngineClient, channel: MessageSender, sender: EventSender, codec: RequestCodec, *, fingerprint: str
    ) -> None:
        self._engine, self._channel, self._sender, self._codec = engine, channel, sender, codec
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._building: dict[str, bool] = {}  # ids of requests whose constraint is being built, and whether they are cancelled
        self._builders = ThreadPoolExecutor(BUILDERS, thread_name_prefix="onedraw-constraints")

    def run(self, incoming: SimpleQueue[bytes | None]) -> None:
        """Handle messages until one is None, which means that the client has ended or closed the engine."""
        engine = self._engine
        self._channel.send(encode(Started(engine.capacity, engine.max_requests, engine.stats(), self._fingerprint)))
        while (data := incoming.get()) is not None:
            message: ToEngine = decode_to_engine(data)
            match message:
                case Submit():
                    self._submit(self._codec.requests(message))
                case Cancel(request_ids):
                    for request_id in request_ids:
                        self._cancel(request_id)
                case Close(drain_seconds):
                    threading.Thread(target=self._close, args=(drain_seconds, incoming), daemon=True).start()
                case _:
                    assert_never(message)
        self._engine.close()
        self._builders.shutdown(wait=False, cancel_futures=True)

    def _close(self, drain_seconds: float, incoming: SimpleQueue[bytes | None]) -> None:
        self._engine.close(drain_seconds)
        incoming.put(None)

    def _submit(self, requests: Sequence[Request]) -> None:
        """Submit requests that the client has checked. Constraints are built on another thread, since that may take long."""
        if all(one.constraint is None for one in requests):
            self._accept([CheckedRequest(one) for one in requests])
            return
        with self._lock:
            self._building.update((one.id, False) for one in requests)
        self._builders.submit(self._build, requests)

    def _build(self, requests: Sequence[Request]) -> None:
        error: OnedrawError | None = None
        checked: list[CheckedRequest] = []
        try:
            checked = [self._engine.check(one) for one in requests]
        except OnedrawError as refused:
            error = refused
        except BaseException:  # also a panic in native code
            log.exception("the constraint of a request cannot be built")
            error = StepFailed("the constraint on this reply cannot be built; see the server's log")
        with self._lock:  # A cancellation before this is noted in `_building`; one after it finds the request in the engine.
            if error is None:
                self._accept(checked)
            else:
                self._refuse(requests, error)
            cancelled = [one.id for one in requests if self._building.pop(one.id)]
        for request_id in cancelled:
            self._engine.cancel(request_id)

    def _accept(self, checked: Sequence[CheckedRequest]) -> None:
        try:
            self._engine.submit([(one, self._sender.sink) for one in checked])
        except OnedrawError as error:
            self._refuse([one.request for one in checked], error)

    def _refuse(self, requests: Sequence[Request], error: OnedrawError) -> None:
        for request in requests:
            self._sender.sink(Event(request.id, error=error))
        self._sender.flush()

    def _cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._building:
                self._building[request_id] = True
                return
        self._engine.cancel(request_id)
