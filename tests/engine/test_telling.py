"""When sinks hear of a turn: at once where `submit` computes, and where it only starts a turn, when the next is under way."""

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
    scheduler = Scheduler(allocator=allocator, capacity=capacity, speculator=Speculator(), turn_tokens=64, fetch=fetch)
    return Engine(backend=backend, scheduler=scheduler)


def hearing(log: list[str], name: str) -> Callable[[Event], None]:
    def hear(event: Event) -> None:
        end = event.finish if event.error is None else type(event.error).__name__
        log.append(f"{name} {len(event.sampled)} {end}")

    return hear


def request(name: str, prompt: int, new: int) -> Request:
    return Request(name, (1,) * prompt, SamplingParams(seed=1, max_tokens=new))


@pytest.mark.parametrize("starts", [0, 256])
def test_what_a_turn_gave_is_told_beside_the_next_where_that_is_only_started(starts: int) -> None:
    log: list[str] = []
    engine = engine_of(Logged(starts=starts, log=log))
    engine.add(request("a", 5, 3), hearing(log, "a"))
    while engine.busy:
        engine.step()
    told = ["a 1 None", "a 1 None", "a 1 length"]
    if starts:
        assert log == ["submit 5", "submit 1", told[0], "submit 1", told[1], told[2]]
    else:
        assert log == ["submit 5", told[0], "submit 1", told[1], "submit 1", told[2]]


def test_nobody_waits_for_a_prompt_to_hear_of_a_token() -> None:
    log: list[str] = []
    engine = engine_of(Logged(log=log))
    engine.add(request("a", 5, 4), hearing(log, "a"))
    engine.step()
    engine.add(request("b", 7, 1), hearing(log, "b"))
    engine.step()
    assert log == ["submit 5", "a 1 None", "submit 1+7"]


def test_nobody_waits_for_a_turn_that_is_too_large_to_be_only_started() -> None:
    log: list[str] = []
    engine = engine_of(Logged(log=log, starts=1))
    engine.add(request("a", 3, 2), hearing(log, "a"))
    engine.add(request("b", 3, 2), hearing(log, "b"))
    while engine.busy:
        engine.step()
    assert log == ["submit 3+3", "a 1 None", "b 1 None", "submit 1+1", "a 1 length", "b 1 length"]


def test_nobody_waits_for_the_disk() -> None:
    """Who is admitted may be looked up there first."""
    log: list[str] = []
    engine = engine_of(Logged(log=log), fetch=lambda history: log.append(f"look up {len(history)}"))
    engine.add(request("a", 5, 3), hearing(log, "a"))
    engine.step()
    engine.add(request("b", 1, 1), hearing(log, "b"))
    engine.step()
    assert log == ["look up 5", "submit 5", "a 1 None", "look up 1", "submit 1+1"]


def test_who_fails_or_is_cancelled_hears_first_what_was_chosen() -> None:
    log: list[str] = []
    engine = engine_of(Logged(log=log, fails_at=2))
    engine.add(request("a", 5, 4), hearing(log, "a"))
    for _ in range(3):
        engine.step()
    assert log == ["submit 5", "submit 1", "a 1 None", "submit 1", "a 1 None", "a 0 StepFailed"]
    assert not engine.busy
    log.clear()
    engine = engine_of(Logged(log=log))
    engine.add(request("a", 5, 4), hearing(log, "a"))
    engine.step()
    engine.cancel("a")
    assert log == ["submit 5", "a 1 None", "a 0 cancelled"]


def test_a_sink_that_breaks_keeps_nobody_from_hearing() -> None:
    log: list[str] = []
    engine = engine_of(Logged(log=log))

    def breaks(event: Event) -> None:
        log.append("broken")
        raise ValueError("planted")

    engine.add(request("a", 2, 4), breaks)
    engine.add(request("b", 2, 4), hearing(log, "b"))
    engine.step()
    with pytest.raises(ValueError, match="planted"):
        engine.step()
    engine.fail_all(StepFailed("over"))
    assert log == ["submit 2+2", "submit 1+1", "broken", "b 1 None", "broken", "b 0 StepFailed"]
    assert not engine.busy
