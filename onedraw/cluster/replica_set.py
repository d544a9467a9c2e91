"""An engine client over replicas: engines with the same fingerprint, each of which gives the same reply to the same request.

Each request goes to the replica that `routing.py` chooses. When a replica dies or leaves, its requests are sent to others with
`Request.given`: the tokens that their callers have received. A caller sees a pause and then the next token, never an event twice,
and no error as long as another replica can continue within the time that a request may wait. Requests that wait for a lane of
their replica are sent to another one that has a free lane, such as one that has just joined.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from onedraw.backends.base import Capacity
from onedraw.cluster.routing import Loads, SentPages, choose_replica, page_hashes
from onedraw.engine.client import CheckedRequest, EngineClient, Event, FixedWeights, Sink, check_count
from onedraw.engine.stats import Stats, counters_only, total
from onedraw.errors import BadSetting, EngineLost, OnedrawError, QueueFull, ShuttingDown
from onedraw.types import Request, Usage

log = logging.getLogger("onedraw.cluster")

WAIT_SECONDS = 120.0  # the longest that a request waits for a replica to continue it; a new replica needs time to start
RETRY_SECONDS = 0.1  # Requests that wait for room at a replica try again after this time.
MAX_LOSSES = 16  # A request fails when more replicas than this died while they had it: it may be what kills them.
REPLICA_ENDED = (EngineLost, ShuttingDown)  # errors that say that a replica has ended, and nothing about the request


@dataclass(slots=True, eq=False)
class Stream:
    """A request and what its caller has received of the reply. The replica set owns it."""

    checked: CheckedRequest
    sink: Sink
    pages: tuple[bytes, ...]  # hashes of the pages of the request's prompt
    replica: str | None = None  # the replica that runs it; None while it waits for one
    attempt: int = 0  # how many replicas the stream has left; late events of those carry a lower number
    settled: list[int] = field(default_factory=list)  # tokens that the caller has received
    before: Usage = field(default_factory=Usage)  # usage of the parts of the reply that earlier replicas generated
    usage: Usage = field(default_factory=Usage)  # usage up to the last event
    begun: bool = False  # whether its present replica has sent an event of it
    heard: float | None = None  # when its caller received the last event
    scored: bool = False  # whether the caller has received the logprobs of the prompt
    losses: int = 0  # number of replicas that died while they had this stream
    cancelled: bool = False
    done: bool = False
    waits_since: float | None = None  # the time at which the stream lost its replica; None once a new replica sends an event

    @property
    def request(self) -> Request:
        return self.checked.request

    @property
    def attempt_id(self) -> str:
        """The id of the request at its replica. Attempts have different ids, because an engine may still run an earlier one."""
        return f"{self.request.id}~{self.attempt}" if self.attempt else self.request.id

    def continuation(self) -> Request:
        """Return a request that continues the reply after the tokens that the caller has received."""
        return replace(self.request, id=self.attempt_id, given=(*self.request.given, *self.settled))

    def deliver(self, event: Event) -> bool:
        """Pass an event of the current replica on, as the next part of one reply. Return whether it is the last."""
        # `cached` is that of the first replica. Its usage has the number of prompt tokens, so `before.prompt` is set after it.
        self.usage = replace(
            event.usage,
            completion=self.before.completion + event.usage.completion,
            kept=self.before.kept + event.usage.kept,
            rejected=self.before.rejected + event.usage.rejected,
            cached=self.before.cached if self.before.prompt else event.usage.cached,
        )
        self.settled.extend(sampled.token for sampled in event.sampled)
        self.done = event.finish is not None or event.error is not None
        self.waits_since, self.begun, self.heard = None, True, time.monotonic()
        scored = None if self.scored else event.scored
        self.scored = self.scored or scored is not None
        # Any other event has nothing but prompt logprobs that the caller has already.
        if self.done or event.sampled or scored is not None:
            self.sink(replace(event, request_id=self.request.id, usage=self.usage, scored=scored))
        return self.done

    def end(self, error: OnedrawError | None = None) -> None:
        """Deliver the last event on behalf of a replica: this error, or that the request was cancelled."""
        usage = Usage(prompt=len(self.request.prompt))
        self.deliver(Event(self.request.id, finish=None if error else "cancelled", usage=usage, error=error))


@dataclass(slots=True, eq=False)
class Replica:
    """A replica and the streams that it runs. The replica set owns it."""

    name: str
    number: int  # Each replica that joins gets a new number, so that no pages are expected in the cache of one that restarted.
    client: EngineClient
    streams: dict[Stream, None] = field(default_factory=dict)  # its streams, in the order in which they were sent to it
    sent: int = 0  # number of requests sent to it since it joined


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    name: str
    ready: bool
    requests: int  # number of its requests, running and waiting
    sent: int  # number of requests sent to it since it joined


class ReplicaSet(FixedWeights):
    """The EngineClient of replicas with one fingerprint. Replicas may join and leave at any time.

    One lock guards all state. It is held while a sink is called, so the events of a reply arrive in order even if its next
    replica sends some before the thread of its last one is done. It is not held while a replica's client is called with requests,
    which may take time. A thread continues the streams that have no replica.
    """

    where = "a set of replicas"

    def __init__(
        self,
        fingerprint: str,
        *,
        wait_seconds: float = WAIT_SECONDS,
        max_losses: int = MAX_LOSSES,
        on_lost: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`on_lost` is called with the name of a replica that died, with the lock held, so it must not block."""
        self.fingerprint = fingerprint
        self._wait_seconds, self._max_losses, self._on_lost = wait_seconds, max_losses, on_lost
        self._changed = threading.Condition(threading.RLock())
        self._replicas: dict[str, Replica] = {}
        self._streams: dict[str, Stream] = {}  # by request id, until its last event
        self._waiting: deque[Stream] = deque()  # streams without a replica, in the order in which they get one
        self._numbers = itertools.count()
        self._by_number: dict[int, Replica] = {}  # the same replicas as in `_replicas`
        self._sent_pages: SentPages[int] = SentPages()
        self._loads: Loads[int] = Loads()  # the number of streams of each replica
        self._capacity: Capacity | None = None  # the first replica's; all have its fingerprint, so they serve the same requests
        self._ended = Stats()  # counts of the replicas that have left
        self._lost = self._moved = 0
        self._closing = False
        self._mover = threading.Thread(target=self._move_waiting, name="onedraw-mover", daemon=True)
        self._mover.start()

    # ------------------------------------------------------------------ replicas

    def add(self, name: str, client: EngineClient, *, fingerprint: str) -> None:
        """Let a replica take requests. One with another fingerprint may give other tokens, so it is refused."""
        if fingerprint != self.fingerprint:
            raise BadSetting(
                f"replica {name} has the fingerprint {fingerprint!r} and these replicas have {self.fingerprint!r}, so it could "
                "give other replies; start it with the same model, version, kind of device and dtype, or serve it separately"
            )
        with self._changed:
            if self._closing:
                raise ShuttingDown("the replicas are being closed, so none can join")
            if name in self._replicas:
                raise ValueError(f"there is a replica {name!r} already; choose another name")
            replica = Replica(name, next(self._numbers), client)
            self._replicas[name] = self._by_number[replica.number] = replica
            self._loads.add(replica.number)
            self._capacity = self._capacity or client.capacity
            self._changed.notify_all()

    def remove(self, name: str) -> EngineClient | None:
        """Continue the requests of a replica on others. Return its client, for the caller to close; None if it left already."""
        return self._leave(name, lost=False)

    def lost(self, name: str) -> None:
        """Note that a replica has died. Do nothing if one of its requests has shown that before, if the replica has left, or if
        the set is being closed."""
        with self._changed:
            if not self._closing:
                self._leave(name, lost=True)

    @property
    def ongoing(self) -> int:
        """The number of requests that run or wait, also those that wait for a replica."""
        return len(self._streams)

    def statuses(self) -> list[ReplicaStatus]:
        with self._changed:
            return [ReplicaStatus(one.name, one.client.ready, len(one.streams), one.sent) for one in self._replicas.values()]

    # ------------------------------------------------------------------ EngineClient

    @property
    def capacity(self) -> Capacity:
        if self._capacity is None:
            raise _no_replica()
        return self._capacity

    @property
    def ready(self) -> bool:
        with self._changed:
            return not self._closing and any(one.client.ready for one in self._replicas.values())

    @property
    def failed(self) -> bool:
        """Always False, since another replica may join at any time."""
        return False

    @property
    def max_requests(self) -> int:
        """The limit of the largest replica, since requests with the same prompt are sent to one replica."""
        with self._changed:
            return max((one.client.max_requests for one in self._replicas.values()), default=1)

    def stats(self) -> Stats:
        with self._changed:
            now = total([self._ended, *(one.client.stats() for one in self._replicas.values())])
            waiting = now.waiting + len(self._waiting)
            return replace(now, waiting=waiting, replicas_lost=self._lost, moved_requests=self._moved)

    def check(self, request: Request) -> CheckedRequest:
        with self._changed:
            client = next((one.client for one in self._replicas.values()), None)
        if client is None:
            raise _no_replica()
        return client.check(request)

    def check_count(self, replies: int, *, param: str | None = None) -> None:
        check_count(replies, self.max_requests, param=param)

    def submit(self, requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        self.check_count(len(requests))
        page_size = self.capacity.page_size
        together: dict[tuple[int, ...], list[Stream]] = {}  # streams with the same prompt, by prompt
        for checked, sink in requests:
            batch = together.setdefault(checked.request.prompt, [])
            batch.append(Stream(checked, sink, batch[0].pages if batch else page_hashes(checked.request.prompt, page_size)))
        streams = [stream for batch in together.values() for stream in batch]
        with self._changed:
            if self._closing:
                raise ShuttingDown("the server is shutting down and takes no new requests")
            self._streams.update({stream.request.id: stream for stream in streams})
        try:
            for batch in together.values():
                replica = self._assign(batch)
                if replica is None:
                    raise _no_replica()
                self._send(replica, batch, [stream.checked for stream in batch])
        except BaseException:
            for stream in streams:
                self._abandon(stream)
            raise

    def cancel(self, request_id: str) -> None:
        with self._changed:
            stream = self._streams.get(request_id)
            if stream is None:
                return
            stream.cancelled = True
            replica = None if stream.replica is None else self._replicas[stream.replica]
            attempt_id = stream.attempt_id
            self._changed.notify_all()  # If the stream waits for a replica, the thread that moves streams ends it.
        if replica is not None:
            replica.client.cancel(attempt_id)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Close all replicas at the same time. Streams without a replica end, because no replica will join."""
        with self._changed:
            self._closing = True
            clients = [one.client for one in self._replicas.values()]
            self._changed.notify_all()
        threads = [threading.Thread(target=client.close, args=(drain_seconds,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in (*threads, self._mover):
            thread.join()

    # ------------------------------------------------------------------ streams to replicas

    def _assign(self, batch: Sequence[Stream], *, with_room: bool = False) -> Replica | None:
        """Choose a replica for streams with the same prompt and note them as its own. None if no replica is ready, or,
        if `with_room` is set, none that is ready has room in its queue."""
        with self._changed:
            if self._capacity is None:
                return None
            matches = self._sent_pages.matches(batch[0].pages)

            def ready(number: int) -> bool:
                return self._by_number[number].client.ready

            def roomy(number: int) -> bool:
                return ready(number) and self._loads[number] + len(batch) <= self._by_number[number].client.max_requests

            choose = partial(choose_replica, matches, self._loads, page_size=self._capacity.page_size, lanes=self._capacity.lanes)
            number = choose(able=roomy)
            if number is None and not with_room:  # A full replica refuses the batch, with an error that says what to do.
                number = choose(able=ready)
            if number is None:
                return None
            replica = self._by_number[number]
            self._sent_pages.add(batch[0].pages, number)
            self._loads.change(number, len(batch))
            replica.sent += len(batch)
            replica.streams.update(dict.fromkeys(batch))
            for stream in batch:
                stream.replica = replica.name
            return replica

    def _send(self, replica: Replica, batch: Sequence[Stream], checked: Sequence[CheckedRequest], attempt: int = 0) -> None:
        """Send streams to the replica that they were assigned to. If that replica has ended, these streams wait for another one,
        like all other streams of it."""
        try:
            replica.client.submit([(one, self._sink(stream, attempt)) for one, stream in zip(checked, batch, strict=True)])
        except REPLICA_ENDED:
            self._leave(replica.name, lost=True)
        for one, stream in zip(checked, batch, strict=True):
            if stream.cancelled or stream.attempt != attempt:  # That may have come before the replica knew the request.
                replica.client.cancel(one.request.id)

    def _move_waiting(self) -> None:
        """Continue streams that have no replica, one after the other, until the set is closed."""
        while True:
            with self._changed:
                for stream in list(self._waiting):
                    error = self._why_over(stream)
                    if stream.cancelled or error is not None:
                        self._waiting.remove(stream)
                        stream.end(None if stream.cancelled else error)
                        self._forget(stream)
                if not self._waiting and not self._closing:
                    self._take_from_queue()
                if not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                    continue
                stream = self._waiting[0]
                replica = self._assign([stream], with_room=True)
                if replica is None:
                    self._changed.wait(RETRY_SECONDS)
                    continue
                self._waiting.popleft()
                request, attempt = stream.continuation(), stream.attempt
            try:
                self._send(replica, [stream], [replica.client.check(request)], attempt)
            except OnedrawError as error:
                self._event(stream, attempt, Event(request.id, error=error))

    def _queued(self, replica: Replica) -> list[Stream]:
        """Return the streams that wait for a lane of a replica, the last one first. Which ones run is known to the replica only;
        those that were sent last and have had no event hardly do."""
        assert self._capacity is not None
        count = max(self._loads[replica.number] - self._capacity.lanes, 0)
        return list(itertools.islice((stream for stream in reversed(replica.streams) if not stream.begun), count))

    def _call_back(self, replica: Replica, streams: Sequence[Stream]) -> None:
        """Let streams leave the queue of a replica."""
        for stream in streams:
            replica.client.cancel(stream.attempt_id)
            stream.waits_since = None  # It may be set since an earlier loss.
            self._wait(stream)

    def _take_from_queue(self) -> None:
        """Let streams that wait for a lane of the busiest replica leave it, as many as another one has free lanes. First come
        those whose callers have received a part of the reply."""
        free = next((one for one in self._loads.ascending() if self._by_number[one].client.ready), None)
        busiest = self._loads.busiest()
        if free is None or busiest is None or self._capacity is None:
            return
        replica, lanes = self._by_number[busiest], self._capacity.lanes - self._loads[free]
        taken = sorted(self._queued(replica), key=lambda stream: stream.heard is None)[: max(lanes, 0)]
        self._moved += len(taken)
        self._call_back(replica, taken)

    def _why_over(self, stream: Stream) -> OnedrawError | None:
        """Return the error with which a stream without a replica ends now, if it does."""
        assert stream.waits_since is not None
        if self._closing:
            return ShuttingDown("the server was shut down before this request finished")
        if stream.losses > self._max_losses:
            return EngineLost(f"{stream.losses} replicas died while they had this request, so it is not sent to another one")
        if time.monotonic() - stream.waits_since > self._wait_seconds:
            return _no_replica(self._wait_seconds)
        return None

    # ------------------------------------------------------------------ events from replicas

    def _sink(self, stream: Stream, attempt: int) -> Sink:
        return lambda event: self._event(stream, attempt, event)

    def _event(self, stream: Stream, attempt: int, event: Event) -> None:
        with self._changed:
            if stream.done or stream.attempt != attempt:
                return
            assert stream.replica is not None
            if isinstance(event.error, REPLICA_ENDED) and not self._closing:
                self._leave(stream.replica, lost=True)
            elif isinstance(event.error, QueueFull) and attempt > 0:  # The request had been accepted before, so it waits.
                self._wait(stream)
            elif stream.deliver(event):
                self._forget(stream)

    def _leave(self, name: str, *, lost: bool) -> EngineClient | None:
        """Forget a replica and let its streams wait for others. Streams in the queues of the others go behind those whose callers
        have received a part of the reply."""
        with self._changed:
            replica = self._replicas.pop(name, None)
            if replica is None:
                return None
            del self._by_number[replica.number]
            self._loads.remove(replica.number)
            self._ended = total([self._ended, counters_only(replica.client.stats())])
            self._lost += lost
            moving = [(stream, stream.attempt_id) for stream in replica.streams]
            for stream, _ in moving:
                stream.losses += lost
                # `_wait` sets a new time only where none is set, and that of an earlier loss is still set if this replica has
                # sent the stream no event.
                stream.waits_since = None
                self._wait(stream)
            self._moved += len(moving)
            for other in self._replicas.values() if moving else ():
                self._call_back(other, self._queued(other)[::-1])
            self._waiting = deque(sorted(self._waiting, key=lambda stream: math.inf if stream.heard is None else stream.heard))
            if lost:
                log.warning("replica %s died; %d requests continue on other replicas", name, len(moving))
                self._on_lost(name)
        if not lost:
            for _, attempt_id in moving:
                replica.client.cancel(attempt_id)
        return replica.client

    def _wait(self, stream: Stream) -> None:
        """Let a stream leave its replica and wait for another one."""
        self._take_from_replica(stream)
        stream.replica, stream.begun = None, False
        stream.attempt += 1
        stream.before = stream.usage
        stream.waits_since = stream.waits_since or time.monotonic()
        self._waiting.append(stream)
        self._changed.notify_all()

    def _take_from_replica(self, stream: Stream) -> None:
        replica = None if stream.replica is None else self._replicas.get(stream.replica)
        if replica is not None and stream in replica.streams:
            del replica.streams[stream]
            self._loads.change(replica.number, -1)

    def _abandon(self, stream: Stream) -> None:
        """Forget a stream whose submission failed, and cancel it if a replica has accepted it."""
        with self._changed:
            replica = None if stream.replica is None else self._replicas.get(stream.replica)
            stream.done = stream.cancelled = True
            if stream in self._waiting:
                self._waiting.remove(stream)
            self._forget(stream)
        if replica is not None:
            replica.client.cancel(stream.attempt_id)

    def _forget(self, stream: Stream) -> None:
        self._take_from_replica(stream)
        self._streams.pop(stream.request.id, None)
        busiest = self._loads.busiest()
        lanes = 0 if self._capacity is None else self._capacity.lanes
        if self._waiting or (busiest is not None and self._loads[busiest] > lanes):
            self._changed.notify_all()  # There is room at a replica now.


def _no_replica(waited: float = 0.0) -> EngineLost:
    after = f" after {waited:g} seconds" if waited else ""
    return EngineLost(f"no replica can serve this request{after}; see the logs of the replicas, and try again in a moment")
