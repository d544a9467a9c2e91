"""The replica set as an engine client: where requests go, what it counts, and how it ends."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from onedraw.backends.fake import FakeBackend
from onedraw.cluster.replica_set import ReplicaSet
from onedraw.engine.client import CheckedRequest, EngineClient, Event, Sink
from onedraw.errors import BadRequest, BadSetting, EngineLost, QueueFull, ShuttingDown
from onedraw.types import Plan, Request, SamplingParams
from tests.cluster.mortal import Mortal
from tests.engine.test_service import PATIENCE, read, start


class Slow(FakeBackend):
    """A backend whose requests run until they are cancelled, for as long as a test needs them."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{"max_context": 4096, "pages": 8192, **sizes})

    def submit(self, plan: Plan) -> Any:
        time.sleep(0.001)
        return super().submit(plan)


@contextmanager
def replica_set(*clients: EngineClient, **options: Any) -> Iterator[ReplicaSet]:
    replicas = ReplicaSet("one", **options)
    for number, client in enumerate(clients):
        replicas.add(f"r{number}", client, fingerprint="one")
    try:
        yield replicas
    finally:
        replicas.close()


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(seed=1, max_tokens=max_tokens))


def submit(replicas: ReplicaSet, *requests: Request) -> list[queue.SimpleQueue[Event]]:
    inboxes: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in requests]
    replicas.submit([(replicas.check(one), inbox.put) for one, inbox in zip(requests, inboxes, strict=True)])
    return inboxes


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    with replica_set(start(FakeBackend()), start(FakeBackend())) as replicas:
        stems = [tuple(range(10 * i, 10 * i + 9)) for i in range(4)]
        for turn in range(3):
            for number, stem in enumerate(stems):
                prompt = stem + (5,) * turn
                [inbox] = submit(replicas, request(f"q{turn}.{number}", prompt=prompt))
                assert read(inbox)[1].finish == "length"
        assert {status.sent for status in replicas.statuses()} != {0, 12}
        assert replicas.stats().prefix_hits >= 2 * 4 * 8


def test_a_replica_that_joins_again_under_its_name_has_an_empty_cache() -> None:
    with replica_set(start(FakeBackend()), start(FakeBackend())) as replicas:
        prompt = tuple(range(40))
        for name in ("a", "b"):
            [inbox] = submit(replicas, request(name, prompt=prompt))
            assert read(inbox)[1].finish == "length"
        [holder] = [status.name for status in replicas.statuses() if status.sent == 2]
        client = replicas.remove(holder)
        assert client is not None
        [inbox] = submit(replicas, request("c", prompt=prompt))
        assert read(inbox)[1].finish == "length"
        replicas.add(holder, client, fingerprint="one")
        [inbox] = submit(replicas, request("d", prompt=prompt))
        assert read(inbox)[1].finish == "length"
        assert {status.name: status.sent for status in replicas.statuses()}[holder] == 0


def test_a_replica_of_another_fingerprint_is_refused() -> None:
    with replica_set() as replicas, pytest.raises(BadSetting, match=r"'two'.*'one'"):
        replicas.add("other", start(FakeBackend()), fingerprint="two")


def test_without_replicas_a_request_is_refused_with_what_to_do() -> None:
    mortal = Mortal(start(FakeBackend()))
    with replica_set(mortal) as replicas:
        checked = replicas.check(request("a"))
        mortal.die()
        with pytest.raises(EngineLost, match="see the logs of the replicas"):
            replicas.submit([(checked, lambda event: None)])
        assert not replicas.ready


def test_when_all_replicas_died_a_request_waits_and_then_ends_with_an_error() -> None:
    with replica_set(Mortal(start(FakeBackend()), 2), Mortal(start(FakeBackend()), 2), wait_seconds=0.2) as replicas:
        [inbox] = submit(replicas, request("a"))
        last = read(inbox)[1]
        assert isinstance(last.error, EngineLost)
        assert "after 0.2 seconds" in str(last.error)
        assert replicas.stats().replicas_lost == 2


def test_a_request_that_waits_for_a_replica_goes_on_when_one_joins() -> None:
    with replica_set(Mortal(start(FakeBackend()), 3)) as replicas:
        [inbox] = submit(replicas, request("a", max_tokens=20))
        wait_until(lambda: replicas.stats().replicas_lost == 1)
        assert replicas.stats().waiting == 1
        replicas.add("new", start(FakeBackend()), fingerprint="one")
        last = read(inbox)[1]
        assert last.finish == "length"
        assert last.usage.completion == 20
        assert replicas.stats().completion_tokens >= 20, "the counts of the replica that died are kept"


class Silent(Mortal):
    """A replica that accepts requests and sends no event, as one does whose lanes are all taken."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client)
        self.got: list[str] = []  # the ids of its requests, in the order in which they came

    def submit(self, requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        with self._lock:
            self._running.update({self._id(checked.request.id): sink for checked, sink in requests})
            self.got += [checked.request.id.partition("~")[0] for checked, _ in requests]


def test_the_time_in_the_queue_of_a_replica_is_no_wait_for_one() -> None:
    first, second = Silent(start(FakeBackend())), Silent(start(FakeBackend()))
    with replica_set(first, wait_seconds=0.3) as replicas:
        [inbox] = submit(replicas, request("a"))
        replicas.add("second", second, fingerprint="one")
        first.die()
        wait_until(lambda: replicas.stats().moved_requests == 1)
        time.sleep(0.5)
        replicas.add("third", start(FakeBackend()), fingerprint="one")
        second.die()
        assert read(inbox)[1].finish == "length"


def test_a_request_that_kills_its_replicas_is_not_sent_to_all_of_them() -> None:
    services = [start(FakeBackend()) for _ in range(5)]
    with replica_set(*(Mortal(service, 0) for service in services), max_losses=2) as replicas:
        [inbox] = submit(replicas, request("a"))
        last = read(inbox)[1]
        assert "3 replicas died while they had this request" in str(last.error)
        assert len(replicas.statuses()) == 2


def test_a_cancelled_request_ends_wherever_it_is() -> None:
    mortal = Mortal(start(Slow()))
    with replica_set(mortal) as replicas:
        running, waiting = submit(replicas, request("a", max_tokens=4000), request("b", max_tokens=4000))
        running.get(timeout=PATIENCE)
        replicas.cancel("a")
        assert read(running)[1].finish == "cancelled"
        mortal.die()
        wait_until(lambda: replicas.stats().replicas_lost == 1)
        replicas.cancel("b")
        assert read(waiting)[1].finish == "cancelled"
        replicas.cancel("b")
        replicas.cancel("unknown")


def test_requests_of_a_dead_replica_wait_for_room_at_the_others() -> None:
    """They were accepted once, so a full queue elsewhere is no reason to refuse them."""
    small = start(FakeBackend(lanes=1), queue_limit=1)
    big = Mortal(start(Slow(lanes=8)))
    with replica_set(big) as replicas:
        inboxes = submit(replicas, *(request(f"q{i}", max_tokens=30) for i in range(8)))
        inboxes[0].get(timeout=PATIENCE)
        replicas.add("small", small, fingerprint="one")
        big.die()
        ends = [read(inbox)[1] for inbox in inboxes]
        assert {end.finish for end in ends} == {"length"}


def test_a_replica_that_becomes_idle_takes_a_request_from_the_queue_of_another() -> None:
    with replica_set(Silent(start(FakeBackend(lanes=1))), start(Slow(lanes=1))) as replicas:
        prompt = (7,) * 40
        submit(replicas, request("long", prompt=prompt))
        [short] = submit(replicas, request("short", max_tokens=200))
        [same] = submit(replicas, request("same", prompt=prompt))
        assert read(short)[1].finish == "length"
        assert read(same)[1].finish == "length"
        assert [status.requests for status in replicas.statuses()] == [1, 0]
        assert replicas.stats().replicas_lost == 0


def test_a_reply_that_has_begun_goes_before_those_that_wait_in_the_queue() -> None:
    """The second replica takes a request from the queue of the first one, and dies when it has sent three events of it."""
    first = Silent(start(FakeBackend(lanes=1)))
    with replica_set(first) as replicas:
        for name in ("a", "b", "c"):
            submit(replicas, request(name))
        replicas.add("second", Mortal(start(FakeBackend(lanes=1)), 3), fingerprint="one")
        wait_until(lambda: len(first.got) == 5)
        assert first.got == ["a", "b", "c", "c", "b"]
        assert replicas.stats().moved_requests == 2, "b has only lost its place"


def test_a_queue_that_is_full_everywhere_refuses_new_requests() -> None:
    with replica_set(start(Slow(lanes=1), queue_limit=1)) as replicas:
        for number in range(2):
            submit(replicas, request(f"q{number}", max_tokens=4000))
        wait_until(lambda: replicas.stats().running == 1)
        with pytest.raises(QueueFull):
            submit(replicas, request("q2", max_tokens=4000))
        with pytest.raises(BadRequest, match="3 replies at once are more than the 2"):
            submit(replicas, *(request(f"p{i}") for i in range(3)))


def test_closing_ends_every_request_and_takes_no_new_ones() -> None:
    with replica_set(start(Slow()), start(Slow())) as replicas:
        inboxes = submit(replicas, *(request(f"q{i}", prompt=(i, 2, 3), max_tokens=4000) for i in range(4)))
        checked = replicas.check(request("late"))
        replicas.close()
        for inbox in inboxes:
            assert isinstance(read(inbox)[1].error, ShuttingDown)
        with pytest.raises(ShuttingDown):
            replicas.submit([(checked, lambda event: None)])


def test_a_drained_set_finishes_its_requests() -> None:
    with replica_set(start(Slow()), start(Slow())) as replicas:
        inboxes = submit(replicas, *(request(f"q{i}", prompt=(i, 2, 3), max_tokens=20) for i in range(4)))
        replicas.close(drain_seconds=PATIENCE)
        assert [read(inbox)[1].finish for inbox in inboxes] == ["length"] * 4
