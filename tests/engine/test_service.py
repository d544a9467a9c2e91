"""The service: requests from many threads reach one engine thread, and every request ends with an event."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from onedraw.backends.base import StepHandle
from onedraw.backends.fake import FakeBackend
from onedraw.build.llm import make_service
from onedraw.engine.client import Event
from onedraw.engine.engine import Engine
from onedraw.engine.scheduler import Scheduler
from onedraw.engine.service import Service
from onedraw.errors import (
    BadParameter,
    BadRequest,
    ContextOverflow,
    EngineLost,
    NonFiniteLogits,
    QueueFull,
    ShuttingDown,
    Unsupported,
)
from onedraw.memory.allocator import Allocator
from onedraw.settings import Settings
from onedraw.speculation.speculator import Speculator
from onedraw.types import Outcome, Request, Row, RowOutcome, SamplingParams

PATIENCE = 120.0  # seconds


class Slow(FakeBackend):
    """200 tokens take ten seconds, so a request is still running when the test checks it."""

    def run(self, row: Row) -> RowOutcome:
        time.sleep(0.05)
        return super().run(row)


def start(backend: FakeBackend | None = None, *, queue_limit: int = 64) -> Service:
    return make_service(lambda: backend or FakeBackend(), Settings(queue_limit=queue_limit), Speculator())


def start_with_engine(backend: FakeBackend | None = None) -> tuple[Service, Engine]:
    """Return a service and its engine, so that a test can replace methods of the engine."""
    made: list[Engine] = []

    def make_engine() -> Engine:
        own = backend or FakeBackend()
        allocator = Allocator(own.capacity, reuse=True)
        scheduler = Scheduler(allocator=allocator, capacity=own.capacity, speculator=Speculator(), step_tokens=512)
        made.append(Engine(backend=own, scheduler=scheduler))
        return made[0]

    return Service(make_engine), made[0]


def request(name: str, *, length: int = 3, **params: object) -> Request:
    return Request(id=name, prompt=tuple(range(1, length + 1)), params=SamplingParams(**{"max_tokens": 8, **params}))  # type: ignore[arg-type]


def read(inbox: queue.SimpleQueue[Event]) -> tuple[list[int], Event]:
    tokens: list[int] = []
    while True:
        event = inbox.get(timeout=PATIENCE)
        tokens.extend(c.token for c in event.sampled)
        if event.finish or event.error:
            return tokens, event


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.005)


def complete(service: Service, request: Request) -> tuple[list[int], Event]:
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    service.submit([(request, inbox.put)])
    return read(inbox)


def test_many_threads_get_their_own_answers() -> None:
    service = start(FakeBackend(lanes=3, pages=40))
    alone = {}
    for seed in range(12):
        lonely = start()
        alone[seed] = complete(lonely, request(f"r{seed}", seed=seed))[0]
        lonely.close()
    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda s=s: found.__setitem__(s, complete(service, request(f"r{s}", seed=s))[0]))
        for s in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.close()
    assert found == alone


def test_a_cancelled_request_frees_its_pages() -> None:
    service = start(Slow(max_context=250))
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    service.submit([(request("a", max_tokens=200), inbox.put)])
    inbox.get(timeout=PATIENCE)
    wait_until(lambda: service.stats().pages_used > 0)  # the counters are updated after the events of a step
    service.cancel("a")
    assert read(inbox)[1].finish == "cancelled"
    wait_until(lambda: service.stats().pages_used == 0)
    service.close()


def test_a_request_to_a_full_queue_is_refused() -> None:
    service = start(Slow(lanes=1, max_context=250), queue_limit=2)
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    service.submit([(request("first", max_tokens=200), inbox.put)])
    many = [(request(f"q{i}", max_tokens=200), inbox.put) for i in range(3)]
    with pytest.raises(QueueFull, match="2 requests"):
        service.submit(many)
    service.close()


def test_a_caller_that_fills_the_queue_keeps_no_other_caller_out() -> None:
    service = start(Slow(lanes=1, max_context=250), queue_limit=4)
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    service.submit([(replace(request(f"a{i}", max_tokens=200), caller="a"), inbox.put) for i in range(5)])
    with pytest.raises(QueueFull):
        service.submit([(replace(request("a5"), caller="a"), inbox.put)])
    service.submit([(replace(request(f"b{i}"), caller="b"), inbox.put) for i in range(2)])
    with pytest.raises(QueueFull):  # two of four are the share of each of two callers
        service.submit([(replace(request("b2"), caller="b"), inbox.put)])
    service.submit([(replace(request("c"), caller="c"), inbox.put)])
    service.close()


def test_in_strict_order_the_queue_is_full_for_everyone() -> None:
    settings = Settings(queue_limit=2, scheduling_policy="fcfs")
    service = make_service(lambda: Slow(lanes=1, max_context=250), settings, Speculator())
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    service.submit([(replace(request(f"a{i}", max_tokens=200), caller="a"), inbox.put) for i in range(3)])
    with pytest.raises(QueueFull):
        service.submit([(replace(request("b"), caller="b"), inbox.put)])
    service.close()


def test_a_request_that_has_ended_leaves_its_place_at_once() -> None:
    """The counters were published after the events of a step, so who sent as many requests as there is room for, and then sent
    more as soon as they had ended, was refused with QueueFull."""
    service = start(FakeBackend(lanes=1), queue_limit=2)
    inbox: queue.SimpleQueue[Event | QueueFull] = queue.SimpleQueue()
    ends: list[str] = []

    def send_more(event: Event) -> None:
        inbox.put(event)
        if event.finish is not None:
            ends.append(event.request_id)
            if len(ends) % 3 == 0 and len(ends) < 30:
                try:
                    service.submit([(request(f"q{len(ends)}-{i}"), send_more) for i in range(3)])
                except QueueFull as error:
                    inbox.put(error)

    service.submit([(request(f"q{i}"), send_more) for i in range(3)])
    finished = 0
    while finished < 30:
        event = inbox.get(timeout=PATIENCE)
        assert isinstance(event, Event), event
        finished += event.finish is not None
    service.close()


def test_more_requests_than_the_queue_can_ever_hold_are_a_bad_request() -> None:
    service = start(FakeBackend(lanes=1), queue_limit=2)
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with pytest.raises(BadRequest, match="4 replies at once are more than the 3"):
        service.submit([(request(f"q{i}"), inbox.put) for i in range(4)])
    assert inbox.empty()
    service.close()


def test_a_prompt_that_fills_every_page_is_scored() -> None:
    """A scored prompt has no next token, so it must not wait for a page for one: it would block the requests behind it."""
    service = start(FakeBackend(vocab=99, pages=16, page_size=4, max_context=64))
    tokens, event = complete(service, request("full", length=60, max_tokens=4))
    assert (len(tokens), event.finish) == (4, "length")
    tokens, event = complete(service, request("scored", length=64, max_tokens=0, prompt_logprobs=0))
    assert (tokens, event.finish) == ([], "length")
    assert event.scored is not None
    assert len(event.scored) == 63
    service.close()


def test_a_request_for_more_pages_than_exist_is_refused_instead_of_waiting_forever() -> None:
    service = start(FakeBackend(pages=4, page_size=4, max_context=64))
    with pytest.raises(ContextOverflow, match="over the context of 16"):
        service.check(request("a", length=10, max_tokens=8))
    assert complete(service, request("b", length=8, max_tokens=8))[1].finish == "length"
    service.close()


def test_a_sliding_group_does_not_limit_the_context_if_its_window_and_one_row_fit() -> None:
    service = start(FakeBackend(pages=(40, 5), windows=(None, 12), page_size=4, max_context=160))
    assert complete(service, request("long", length=60, max_tokens=100))[1].finish == "length"
    assert service.stats().window_pages_freed > 20
    service.close()
    service = start(FakeBackend(pages=(40, 2), windows=(None, 12), page_size=4, max_context=160))
    with pytest.raises(ContextOverflow, match="over the context of 8"):
        service.check(request("long", length=6))
    service.close()


class NoTokenAfterTheFirst(FakeBackend):
    """Samples one token, and finds no token allowed at the position after it, in the same step (as after a kept draft)."""

    def run(self, row: Row) -> RowOutcome:
        return RowOutcome(super().run(row).sampled[:1], no_token_left=True)


def test_tokens_sampled_before_an_error_are_delivered_before_it() -> None:
    """They may complete a stop string; then the reply ends normally and the error is dropped."""
    service = start(NoTokenAfterTheFirst())
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    service.submit([(request("a"), inbox.put)])
    first, second = inbox.get(timeout=PATIENCE), inbox.get(timeout=PATIENCE)
    assert (len(first.sampled), first.error) == (1, None)
    assert isinstance(second.error, NonFiniteLogits)
    assert not second.sampled
    service.close()


def test_closing_lets_running_requests_finish() -> None:
    service = start(Slow())
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    service.submit([(request("a", max_tokens=20), inbox.put)])
    service.close(drain_seconds=PATIENCE)
    assert read(inbox)[1].finish == "length"
    with pytest.raises(ShuttingDown):
        service.submit([(request("b"), inbox.put)])


def test_closing_without_drain_time_ends_running_requests_with_shutting_down() -> None:
    service = start(Slow(max_context=250))
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    service.submit([(request("a", max_tokens=200), inbox.put)])
    service.close()
    assert isinstance(read(inbox)[1].error, ShuttingDown)


def test_an_impossible_request_is_refused_before_any_work() -> None:
    service = start(FakeBackend(max_context=16))
    with pytest.raises(ContextOverflow, match=r"10 tokens.*max_tokens is 8.*18.*16"):
        service.check(request("a", length=10))
    with pytest.raises(BadParameter, match="outside the vocabulary of 61"):
        service.check(Request(id="b", prompt=(61,), params=SamplingParams()))
    service.close()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.0, "logit_bias": ((1, 2.0),)},
        {"temperature": 0.0, "min_tokens": 2},
        {"temperature": 0.0, "logprobs": 0},
    ],
)
def test_a_backend_without_logits_serves_plain_greedy_only(params: dict[str, object]) -> None:
    service = start(FakeBackend(returns_logits=False))
    with pytest.raises(Unsupported) as caught:
        service.check(request("a", **params))
    assert caught.value.code == "sampling_unsupported"
    assert complete(service, request("b", temperature=0.0))[1].finish == "length"
    service.close()


def test_an_engine_that_raises_between_steps_fails_its_requests_and_serves_the_next() -> None:
    """A bug in planning must not leave callers waiting forever."""
    service, engine = start_with_engine()
    scheduler = engine.scheduler
    real, calls = scheduler.plan, []

    def broken() -> list[object]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return real()  # type: ignore[return-value]

    scheduler.plan = broken  # type: ignore[method-assign,assignment]
    assert complete(service, request("a"))[1].error is not None
    assert complete(service, request("b"))[1].finish == "length"
    service.close()


class Panic(BaseException):
    """Like a panic in native code: not an Exception."""


@pytest.mark.parametrize("where", ["plan", "finish"])
def test_a_panic_ends_every_request(where: str) -> None:
    service, engine = start_with_engine(FakeBackend(lanes=2))
    scheduler = engine.scheduler
    real, calls = getattr(scheduler, where), []

    def broken(*given: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise Panic("planted")
        return real(*given)

    setattr(scheduler, where, broken)
    inboxes: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in range(2)]
    service.submit([(request(f"a{i}"), inbox.put) for i, inbox in enumerate(inboxes)])
    assert [read(inbox)[1].error is not None for inbox in inboxes] == [True, True]
    assert complete(service, request("b"))[1].finish == "length"
    service.close()


def test_an_engine_that_cannot_continue_ends_every_request_and_takes_no_new_one() -> None:
    service, engine = start_with_engine(FakeBackend(lanes=1))
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def raises(event: Event) -> None:
        raise Panic("planted")

    def broken() -> object:
        raise Panic("planted")

    engine.stats = broken  # type: ignore[method-assign,assignment]
    service.submit([(request("a"), raises), (request("b"), inbox.put)])
    assert read(inbox)[1].error is not None
    wait_until(lambda: not service.ready)
    with pytest.raises(EngineLost, match="the engine failed"):
        service.submit([(request("c"), inbox.put)])
    service.close()


def test_an_outcome_with_too_few_rows_leaves_no_sequence_in_flight() -> None:
    class Short(FakeBackend):
        def collect(self, handle: StepHandle) -> Outcome:
            found = super().collect(handle)
            return Outcome(found.rows[:-1], found.seconds) if handle == 1 else found

    service, engine = start_with_engine(Short(max_in_flight=2, lanes=2))
    inboxes: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in range(2)]
    service.submit([(request(f"a{i}"), inbox.put) for i, inbox in enumerate(inboxes)])
    assert all(read(inbox)[1].error is not None for inbox in inboxes)
    assert [complete(service, request(f"b{i}"))[1].finish for i in range(3)] == ["length"] * 3
    assert not engine.scheduler.in_flight
    service.close()
