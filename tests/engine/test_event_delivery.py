"""When events are delivered: at once if `submit` computes the step, after the next submit if it only starts the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onedraw.backends.base import StepHandle
from onedraw.backends.fake import FakeBackend
from onedraw.engine.engine import Engine, Event
from onedraw.engine.scheduler import Fetch, Scheduler
from onedraw.errors import StepFailed
from onedraw.memory.allocator import Allocator
from onedraw.speculation.speculator import Speculator
from onedraw.types import Plan, Request, SamplingParams


class Logged(FakeBackend):
    def __init__(self, *, log: list[str], starts: int = 256, fails_at: int | None = None) -> None:
        super().__init__(async_tokens=starts, lanes=2)
        self._log, self._left = log, fails_at

    def submit(self, plan: Plan) -> StepHandle:
        self._log.append(f"submit {'+'.join(str(len(row.tokens)) for row in plan.rows)}")
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("planted")
        return super().submit(plan)


def engine_of(backend: FakeBackend, fetch: Fetch | None = None) -> Engine:
    capacity = backend.capacity
    allocator = Allocator(capacity, reuse=False)
    scheduler = Scheduler(allocator=allocator, capacity=capacity, speculator=Speculator(), step_tokens=64, fetch=fetch)
    return Engine(backend=backend, scheduler=scheduler)


def logging_sink(log: list[str], name: str) -> Callable[[Event], None]:
    def sink(event: Event) -> None:
        end = event.finish if event.error is None else type(event.error).__name__
        log.append(f"{name} {len(event.sampled)} {end}")

    return sink


def request(name: str, prompt: int, new: int) -> Request:
    return Request(name, (1,) * prompt, SamplingParams(seed=1, max_tokens=new))


@pytest.mark.parametrize("starts", [0, 256])
def test_events_are_delivered_after_the_next_submit_if_it_only_starts_the_step(starts: int) -> None:
    log: list[str] = []
    engine = engine_of(Logged(starts=starts, log=log))
    engine.add(request("a", 5, 3), logging_sink(log, "a"))
    while engine.busy:
        engine.step()
    delivered = ["a 1 None", "a 1 None", "a 1 length"]
    if starts:
        assert log == ["submit 5", "submit 1", delivered[0], "submit 1", delivered[1], delivered[2]]
    else:
        assert log == ["submit 5", delivered[0], "submit 1", delivered[1], "submit 1", delivered[2]]


def test_no_event_waits_for_a_prompt() -> None:
    log: list[str] = []
    engine = engine_of(Logged(log=log))
    engine.add(request("a", 5, 4), logging_sink(log, "a"))
    engine.step()
    engine.add(request("b", 7, 1), logging_sink(log, "b"))
    engine.step()
    assert log == ["submit 5", "a 1 None", "submit 1+7"]


def test_no_event_waits_for_a_step_that_submit_computes() -> None:
    log: list[str] = []
    engine = engine_of(Logged(log=log, starts=1))
    engine.add(request("a", 3, 2), logging_sink(log, "a"))
    engine.add(request("b", 3, 2), logging_sink(log, "b"))
    while engine.busy:
        engine.step()
    assert log == ["submit 3+3", "a 1 None", "b 1 None", "submit 1+1", "a 1 length", "b 1 length"]


def test_no_event_waits_for_the_disk() -> None:
    """Admission may look for a snapshot first."""
    log: list[str] = []
    engine = engine_of(Logged(log=log), fetch=lambda history: log.append(f"look up {len(history)}"))
    engine.add(request("a", 5, 3), logging_sink(log, "a"))
    engine.step()
    engine.add(request("b", 1, 1), logging_sink(log, "b"))
    engine.step()
    assert log == ["look up 5", "submit 5", "a 1 None", "look up 1", "submit 1+1"]


def test_sampled_tokens_are_delivered_before_a_failure_or_cancellation() -> None:
    log: list[str] = []
    engine = engine_of(Logged(log=log, fails_at=2))
    engine.add(request("a", 5, 4), logging_sink(log, "a"))
    for _ in range(3):
        engine.step()
    assert log == ["submit 5", "submit 1", "a 1 None", "submit 1", "a 1 None", "a 0 StepFailed"]
    assert not engine.busy
    log.clear()
    engine = engine_of(Logged(log=log))
    engine.add(request("a", 5, 4), logging_sink(log, "a"))
    engine.step()
    engine.cancel("a")
    assert log == ["submit 5", "a 1 None", "a 0 cancelled"]


def test_a_sink_that_raises_does_not_keep_others_from_their_events() -> None:
    log: list[str] = []
    engine = engine_of(Logged(log=log))

    def breaks(event: Event) -> None:
        log.append("broken")
        raise ValueError("planted")

    engine.add(request("a", 2, 4), breaks)
    engine.add(request("b", 2, 4), logging_sink(log, "b"))
    engine.step()
    with pytest.raises(ValueError, match="planted"):
        engine.step()
    engine.fail_all(StepFailed("over"))
    assert log == ["submit 2+2", "submit 1+1", "broken", "b 1 None", "broken", "b 0 StepFailed"]
    assert not engine.busy
