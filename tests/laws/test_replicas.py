"""A reply does not depend on its replica, nor on how many replicas die while it is generated. The caller gets each token once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onedraw.build.llm import build_llm
from onedraw.cluster.autoscaling import AutoscalingConfig, scaled
from onedraw.cluster.replica_set import ReplicaSet, Stream
from onedraw.engine.client import EngineClient, Event
from onedraw.errors import OnedrawError
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply
from onedraw.settings import Settings
from onedraw.types import Request
from tests.cluster.mortal import Mortal
from tests.llm.test_continue import CHAT, OPTIONS, TOOLS

REQUESTS: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "tools": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400},
    "several choices": {"n": 3, "temperature": 1.2, "presence_penalty": 0.5, "max_tokens": 12, "logprobs": 1},
}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLM]]:
    built = [build_llm(Settings(model="fake", backend="fake", threads=1, max_batch=4)) for _ in range(3)]
    yield built
    for llm in built:
        llm.close()


@contextmanager
def replicated(llm: LLM, clients: Sequence[EngineClient], **options: Any) -> Iterator[tuple[LLM, ReplicaSet]]:
    """An LLM over these replicas with the texts of another one."""
    replicas = ReplicaSet("one", **options)
    for number, client in enumerate(clients):
        replicas.add(f"r{number}", client, fingerprint="one")
    try:
        yield (
            LLM(service=replicas, tokenizer=llm.tokenizer, template=llm.template, card=llm.card, constraints=llm.constraints),
            replicas,
        )
    finally:
        replicas.close()


def replies(llm: LLM, name: str, seed: int) -> list[Reply]:
    prompt = CHAT if name == "tools" else "The sea"
    found = llm.generate(prompt, **REQUESTS[name], seed=seed, checksums=True)
    return found if isinstance(found, list) else [found]


def content(reply: Reply) -> tuple[Any, ...]:
    """All of a reply but what depends on its schedule: ids of calls, prompt tokens found in a cache, and drafts."""
    blocks = [(block.channel, block.text, block.call and block.call.name, block.tokens) for block in reply.blocks]
    usage = replace(reply.usage, cached=0, kept=0, rejected=0)
    return reply.tokens, blocks, reply.finish, reply.stop_reason, reply.seed, usage, reply.prompt_logprobs


def survives_every_death(engines: Sequence[LLM], name: str, seed: int) -> Counter[str]:
    """Compare the replies of a request with those of one engine, with the first replica killed after each of its events. Raise
    AssertionError if they differ."""
    expected = [content(reply) for reply in replies(engines[0], name, seed)]
    seen: Counter[str] = Counter()
    for events in range(1000):
        dying = Mortal(engines[0].service, events)
        with replicated(engines[0], [dying, Mortal(engines[1].service)]) as (llm, replicas):
            got = [content(reply) for reply in replies(llm, name, seed)]
            stats = replicas.stats()
        assert got == expected, f"{name}: the first replica died after {events} events"
        seen.update(deaths=stats.replicas_lost, moved=stats.moved_requests)
        if not dying.dead.is_set() or not stats.replicas_lost:
            break
    else:
        raise AssertionError("the request never ended before the replica died")
    return seen


@pytest.mark.parametrize("name", REQUESTS)
def test_a_replica_may_die_after_any_event(engines: list[LLM], name: str) -> None:
    seen = survives_every_death(engines, name, seed=4)
    assert seen["deaths"] > 3
    assert seen["moved"] > 3


def test_replicas_may_die_one_after_the_other_under_many_requests(engines: list[LLM]) -> None:
    """Every death brings a new replica, over the same three engines. Deaths fall between any events of the requests."""
    names = list(REQUESTS)
    work = [(names[number % len(names)], number) for number in range(48)]
    expected = [[content(reply) for reply in replies(engines[0], *one)] for one in work]
    rng = np.random.default_rng(7)
    got: list[list[Any]] = [[] for _ in work]
    counter = iter(range(10**6))
    replicas: ReplicaSet

    def reborn(lost: str) -> None:
        number = next(counter)
        client = Mortal(engines[number % 3].service, int(rng.integers(0, 120)), in_submit=bool(rng.random() < 0.3))
        threading.Thread(target=lambda: replicas.add(f"new{number}", client, fingerprint="one")).start()

    first = [Mortal(engine.service, 20) for engine in engines]
    with replicated(engines[0], first, on_lost=reborn, max_losses=1000) as (llm, replicas):

        def run(index: int) -> None:
            got[index] = [content(reply) for reply in replies(llm, *work[index])]

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = replicas.stats()
    assert got == expected
    assert stats.replicas_lost > 10
    assert stats.moved_requests > 30


def test_a_replica_that_leaves_gives_its_running_requests_away(engines: list[LLM]) -> None:
    """The engine still runs them when they move, so its last events come late and must not reach the caller."""
    moved = 0
    expected = content(engines[0].generate("The sea", seed=3, max_tokens=200, ignore_eos=True, logprobs=1))  # type: ignore[arg-type]
    for after in range(0, 60, 7):
        first = Mortal(engines[0].service)
        with replicated(engines[0], [first, Mortal(engines[1].service)]) as (llm, replicas):
            reply = Reply(seed=3)
            for number, piece in enumerate(llm.stream("The sea", seed=3, max_tokens=200, ignore_eos=True, logprobs=1)):
                reply.add(piece)
                if number == after:
                    assert replicas.remove("r0") is first
            assert content(reply) == expected
            moved += replicas.stats().moved_requests
            assert replicas.stats().replicas_lost == 0
    assert moved > 5


def test_requests_that_wait_for_a_lane_go_to_a_replica_that_joins(engines: list[LLM]) -> None:
    """The first replica has four lanes. Requests leave its queue, and the last events that it sends of them must not reach the
    caller."""
    expected = [content(replies(engines[0], "plain", seed)[0]) for seed in range(16)]
    got: list[Any] = [None] * 16
    with replicated(engines[0], [Mortal(engines[0].service)]) as (llm, replicas):

        def ask(seed: int) -> None:
            got[seed] = content(replies(llm, "plain", seed)[0])

        first, second = (engine.service for engine in engines[:2])
        first.pause()  # so that all requests have come before any has ended
        second.pause()  # so that the first replica's last events come while these requests wait
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(16)]
        try:
            for thread in threads:
                thread.start()
            while replicas.ongoing < 16:
                time.sleep(0.001)
            replicas.add("second", Mortal(second), fingerprint="one")
            while replicas.stats().moved_requests < 4:
                time.sleep(0.001)
            first.resume()
            while first.stats().running or first.stats().waiting:
                time.sleep(0.001)
        finally:
            first.resume()
            second.resume()
        for thread in threads:
            thread.join()
        assert {status.name: status.sent for status in replicas.statuses()}["second"] >= 4
        assert replicas.stats().replicas_lost == 0
    assert got == expected


def survives_growing_and_shrinking(engines: Sequence[LLM]) -> Counter[str]:
    """Run many requests while replicas join and leave as the load decides, without delays. Raise AssertionError if a reply is not
    that of one engine."""
    names = list(REQUESTS)
    work = [(names[number % len(names)], number) for number in range(40)]
    expected = [[content(reply) for reply in replies(engines[0], *one)] for one in work]
    config = AutoscalingConfig(1, 3, target_ongoing_requests=3, upscale_delay=0, downscale_delay=0)
    got: list[list[Any]] = [[] for _ in work]
    seen: Counter[str] = Counter()
    with replicated(engines[0], [Mortal(engines[0].service)]) as (llm, replicas):
        members, change, over = ["r0"], None, threading.Event()

        def scale() -> None:
            nonlocal change
            while not over.wait(0.002):
                desired = config.desired(replicas.ongoing, lanes=replicas.capacity.lanes)
                count, change = scaled(config, change, replicas=len(members), desired=desired, now=0.0)
                while len(members) < count:
                    seen["joined"] += 1
                    client = Mortal(engines[seen["joined"] % 3].service)
                    members.append(f"r{seen['joined']}")
                    replicas.add(members[-1], client, fingerprint="one")
                while len(members) > count:
                    seen["left"] += 1
                    replicas.remove(members.pop(seen["left"] % len(members)))

        def ask(index: int) -> None:
            try:
                got[index] = [content(reply) for reply in replies(llm, *work[index])]
            except OnedrawError as error:
                got[index] = [error]

        scaler = threading.Thread(target=scale)
        scaler.start()
        for first in range(0, len(work), 10):  # Between two waves the load falls.
            threads = [threading.Thread(target=ask, args=(index,)) for index in range(first, first + 10)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        over.set()
        scaler.join()
        seen["moved"] = replicas.stats().moved_requests
        assert replicas.stats().replicas_lost == 0
    assert got == expected
    return seen


def test_replicas_that_come_and_go_with_the_load_change_no_reply(engines: list[LLM]) -> None:
    seen = survives_growing_and_shrinking(engines)
    assert seen["joined"] >= 4
    assert seen["left"] >= 4
    assert seen["moved"] >= 4


# ---------------------------------------------------------------------------------------------- planted faults


def holds(engines: Sequence[LLM]) -> bool:
    try:
        for name in ("plain", "penalties", "schema"):
            survives_every_death(engines, name, seed=4)
    except AssertionError:
        return False
    return True


def test_a_given_token_too_few_is_caught(engines: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    right = Stream.continuation

    def short(self: Stream) -> Request:
        request = right(self)
        return replace(request, given=request.given[:-1])

    assert holds(engines)
    monkeypatch.setattr(Stream, "continuation", short)
    assert not holds(engines)
    with pytest.raises(AssertionError):
        survives_growing_and_shrinking(engines)


def test_an_event_that_is_delivered_twice_is_caught(engines: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the sink gets the last event before the death once more when the reply continues."""
    right = Stream.deliver
    last: dict[str, Event] = {}

    def repeated(self: Stream, event: Event) -> bool:
        if self.attempt and self.request.id in last:
            self.sink(last.pop(self.request.id))
        elif event.finish is None:
            last[self.request.id] = event
        return right(self, event)

    monkeypatch.setattr(Stream, "deliver", repeated)
    assert not holds(engines)


def test_late_events_of_a_replica_that_was_left_are_caught(engines: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: events of every attempt are passed on, whatever attempt the stream is at."""
    right = ReplicaSet._event

    def pass_on(self: ReplicaSet, stream: Stream, attempt: int, event: Event) -> None:
        while stream.replica is None and not stream.done:  # Until the stream has its next replica, an event is no late one.
            time.sleep(0.001)
        right(self, stream, stream.attempt, event)

    monkeypatch.setattr(ReplicaSet, "_event", pass_on)
    with pytest.raises(AssertionError):
        test_a_replica_that_leaves_gives_its_running_requests_away(engines)
    with pytest.raises(AssertionError):
        test_requests_that_wait_for_a_lane_go_to_a_replica_that_joins(engines)
