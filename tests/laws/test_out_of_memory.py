"""The contract when the device runs out of memory in the middle of a step: rows are preempted, no reply ends or changes."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onedraw.backends.base import StepHandle
from onedraw.backends.fake import FakeBackend
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.sampling import sampler as sampler_module
from onedraw.engine.engine import Engine
from onedraw.engine.scheduler import ScheduledRow
from onedraw.engine.step_size import LEAST_TOKENS
from onedraw.errors import OutOfMemory
from onedraw.types import History, Outcome, Plan, Request, Row, SamplingParams
from tests.laws.harness import Answer, Schedule, plain, run, same
from tests.laws.test_fake import KINDS, Scenario, proposer_for, random_scenario
from tests.support import tiny
from tests.support.torch_backend import make_backend

EXERCISED: Counter[str] = Counter()


class SmallMemory(FakeBackend):
    """Some steps run out of memory when they are submitted or collected, and leave states and pages of their rows in ruins."""

    def __init__(self, *, seed: int, rate: float = 0.3, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._rng, self._rate = np.random.default_rng(seed), rate
        self._failing: dict[StepHandle, Plan] = {}
        self.failed: Counter[str] = Counter()

    def submit(self, plan: Plan) -> StepHandle:
        kind = self._rng.choice(["submit", "collect"]) if self._fits_not(plan) and self._rng.random() < self._rate else ""
        if kind == "submit":
            self._ruin(plan, "submitted ahead" if plan.rows[0].awaits_token else "submit")
        handle = super().submit(plan)
        if kind == "collect":
            self._failing[handle] = plan
        return handle

    def collect(self, handle: StepHandle) -> Outcome:
        outcome = super().collect(handle)
        if handle in self._failing:
            self._ruin(self._failing.pop(handle), "collect")
        return outcome

    def _fits_not(self, plan: Plan) -> bool:
        """The smallest possible step always has enough memory."""
        tokens = sum(len(row.tokens) + len(row.drafts) for row in plan.rows)
        return len(plan.rows) > 1 or tokens > max(self.capacity.chunk, LEAST_TOKENS)

    def _ruin(self, plan: Plan, where: str) -> None:
        self.failed[where] += 1
        for row in plan.rows:
            self._lanes[row.lane] = b"ruined"
            for slot in range(row.start, row.stop):
                self._put(row, slot, [7] * len(row.pages))
        raise OutOfMemory("planted")


def ruined_scenario(seed: int, kind: str) -> tuple[Scenario, list[Answer]]:
    scenario = random_scenario(seed, kind)
    rng = np.random.default_rng(seed + 4)
    scenario.backend |= [{}, {"max_in_flight": 2}, {"async_scheduling": True}][int(rng.integers(0, 3))]
    backend = SmallMemory(**scenario.backend, seed=seed)
    proposer = proposer_for(seed, scenario) if seed % 2 else None
    got, stats = run(backend, scenario.requests, Schedule(**scenario.schedule, proposer=proposer))  # audits after every step
    assert stats.out_of_memory_steps == backend.failed.total()
    failed = bool(backend.failed)
    EXERCISED.update(backend.failed)
    EXERCISED.update(kept=stats.accepted_tokens * failed, hits=stats.prefix_hits * failed, restores=stats.restores * failed)
    EXERCISED.update(overlapped=stats.overlapped_steps * failed, ahead=stats.steps_ahead * failed)
    return scenario, got


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40), kind=st.sampled_from(KINDS))
def test_a_device_without_memory_ends_and_changes_no_reply(seed: int, kind: str) -> None:
    scenario, got = ruined_scenario(seed, kind)
    assert same(got, scenario.expected)


def test_steps_failed_in_every_way() -> None:
    """Runs after the law above, in the same process."""
    wanted = ("submit", "submitted ahead", "collect", "kept", "hits", "restores", "overlapped", "ahead")
    for seed in range(300):
        if all(EXERCISED[what] > 0 for what in wanted):
            break
        scenario, got = ruined_scenario(seed, KINDS[seed % 4])
        assert same(got, scenario.expected)
    assert all(EXERCISED[what] > 0 for what in wanted), EXERCISED


def test_rows_that_are_not_computed_again_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the rows of the step go on from the states that it left."""

    def step_raised(self: Engine, members: list[ScheduledRow], error: BaseException) -> None:
        self._totals["out_of_memory_steps"] += 1

    monkeypatch.setattr(Engine, "_step_raised", step_raised)
    for seed in range(60):
        try:
            scenario, got = ruined_scenario(seed, "recurrent")
        except AssertionError:  # noticed by the backend or by the allocator's audit
            return
        if not same(got, scenario.expected):
            return
    pytest.fail("the fault went unnoticed in 60 schedules")


# ---------------------------------------------------------------------- what the engine does


def request(name: str, length: int = 5, **params: Any) -> Request:
    given = {"max_tokens": 40, "checksums": True, "seed": length, **params}
    return Request(name, tuple(i * i % 60 for i in range(length)), SamplingParams(**given))


class Limited(FakeBackend):
    """Has memory for steps of at most `rows` rows and `tokens` tokens; records the sizes of those that ran."""

    def __init__(self, *, rows: int = 99, tokens: int = 10**6, **sizes: Any) -> None:
        super().__init__(vocab=61, **sizes)
        self.rows, self.tokens, self.ran = rows, tokens, list[tuple[int, int]]()

    def submit(self, plan: Plan) -> StepHandle:
        size = len(plan.rows), sum(len(row.tokens) for row in plan.rows)
        if size[0] > self.rows or size[1] > self.tokens:
            raise OutOfMemory("planted")
        self.ran.append(size)
        return super().submit(plan)


def test_the_oldest_rows_go_on_and_the_newest_wait() -> None:
    requests = [request(name) for name in "abcdefgh"]
    backend = Limited(rows=5, lanes=8, pages=200)
    got, stats = run(backend, requests, Schedule(reuse=True))
    assert same(got, plain(lambda: FakeBackend(vocab=61), requests))
    assert stats.out_of_memory_steps >= 1
    assert max(rows for rows, _ in backend.ran) == 4


def test_steps_grow_again_when_the_memory_is_back() -> None:
    requests = [request(name, max_tokens=300) for name in "abcdefgh"]

    class Restored(Limited):
        def collect(self, handle: StepHandle) -> Outcome:
            self.rows = 99 if len(self.ran) > 100 else self.rows
            return super().collect(handle)

    backend = Restored(rows=2, lanes=8, pages=800, max_context=400)
    got, _ = run(backend, requests, Schedule(reuse=True))
    assert not any(answer.error for answer in got)
    assert max(rows for rows, _ in backend.ran[:100]) == 2
    assert max(rows for rows, _ in backend.ran) == 8


def test_a_request_that_no_step_is_small_enough_for_fails_alone() -> None:
    class Refusing(FakeBackend):
        def submit(self, plan: Plan) -> StepHandle:
            if any(row.request_id == "large" for row in plan.rows):
                raise OutOfMemory("planted")
            return super().submit(plan)

    requests = [request("first"), request("large", 7), request("later", 6)]
    got, stats = run(Refusing(vocab=61, lanes=3), requests, Schedule(arrivals=(0, 3, 5)))
    assert [answer.error for answer in got] == [None, "no_room", None]
    expected = plain(lambda: FakeBackend(vocab=61), requests)
    assert same([got[0], got[2]], [expected[0], expected[2]])
    assert stats.failed_steps == 1


# ---------------------------------------------------------------------- a real model


def plant(backend: TorchBackend, fails: Callable[[int, int], bool]) -> None:
    """Layers raise what torch raises without memory, where `fails` says so. The smallest possible step has enough."""
    real, calls = backend.eager_runner.run_layers, Counter[str]()

    def run_layers(laid: Any, number: int, before: Any) -> Any:
        found = real(laid, number, before)  # states and pages are written by now
        rows, tokens = laid.step.plan.rows, sum(len(row.tokens) for row in laid.step.plan.rows)
        calls["steps"] += 1
        if fails(calls["steps"], tokens) and (len(rows) > 1 or tokens > 64):
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return found

    backend.eager_runner.run_layers = run_layers  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["qwen2", "qwen3_5_odd"])
@pytest.mark.parametrize("cuts", [(), (1,)])
def test_a_real_model_that_runs_out_of_memory_gives_the_same_tokens(name: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    folder = tiny.write_safetensors(name, tmp_path / name)
    requests = [request(f"r{i}", 9 + 30 * i, max_tokens=20, temperature=1.0, frequency_penalty=0.3) for i in range(4)]
    expected = plain(lambda: make_backend(folder, kernels=False, check=False, lanes=1), requests)
    backend = make_backend(folder, kernels=False, check=False, cuts=cuts, overlap=bool(cuts))
    plant(backend, lambda step, tokens: step % 4 == 3 and step < 60)
    got, stats = run(backend, requests, Schedule(reuse=True, step_tokens=64))
    backend.close()
    assert stats.out_of_memory_steps >= 1
    assert same(got, expected)


def test_penalties_count_every_token_after_memory_ran_out_while_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler had noted the tokens of its lanes as counted when memory ran out. The requests were resumed in the same lanes,
    and their penalties lacked these tokens."""
    folder = tiny.write_safetensors("qwen2", tmp_path / "qwen2")
    strong: dict[str, Any] = {"temperature": 0.7, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "max_tokens": 24}
    requests = [request(f"r{i}", 9 + 5 * i, **strong) for i in range(4)]
    expected = plain(lambda: make_backend(folder, kernels=False, check=False, lanes=1), requests)
    real, seen = sampler_module._add, Counter[str]()

    def add(counts: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        several = len({lane for lane, _ in pairs}) > 1  # the smallest step has enough memory
        seen["calls"] += several
        if several and seen["calls"] % 3 == 2 and seen["failed"] < 3:
            seen["failed"] += 1
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        real(counts, pairs)

    monkeypatch.setattr(sampler_module, "_add", add)
    got, stats = run(make_backend(folder, kernels=False, check=False), requests, Schedule())
    assert stats.out_of_memory_steps == seen["failed"] > 0
    assert same(got, expected)


def test_a_prompt_of_6000_tokens_on_a_hybrid_with_little_memory_ends_no_stream(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("qwen3_5_odd", tmp_path / "hybrid")
    sizes: dict[str, Any] = {"kernels": False, "check": False, "max_context": 6400, "pages": 850}
    streams = [request(f"stream-{i}", 20 + i, max_tokens=60) for i in range(3)]
    requests = [*streams, request("long", 6000, max_tokens=3)]
    expected = plain(lambda: make_backend(folder, **{**sizes, "lanes": 1}), requests)
    backend = make_backend(folder, **sizes)
    plant(backend, lambda step, tokens: tokens > 200)
    got, stats = run(backend, requests, Schedule(reuse=True, step_tokens=512, arrivals=(0, 0, 0, 10)))
    assert stats.out_of_memory_steps >= 1
    assert same(got, expected)


def test_the_tensors_of_a_failed_step_are_freed(tmp_path: Path) -> None:
    """Also while an exception that refers to the step's frames is alive."""
    folder = tiny.write_safetensors("qwen2", tmp_path / "qwen2")
    backend = make_backend(folder, kernels=False, check=False)
    alive: list[Any] = []
    real = backend.eager_runner.run_layers

    def run_layers(*given: Any) -> Any:
        found = real(*given)
        alive.append(weakref.ref(found.x))
        raise torch.OutOfMemoryError("CUDA out of memory (planted)")

    backend.eager_runner.run_layers = run_layers  # type: ignore[method-assign]
    row = Row("r", 0, ((0, 1),), 0, (1, 2, 3), (), 3, True, SamplingParams(), History((1, 2, 3)))
    gc.disable()
    try:
        with pytest.raises(OutOfMemory, match="planted"):
            backend.submit(Plan((row,)))
        assert [reference() for reference in alive] == [None]
    finally:
        gc.enable()
    assert backend._in_flight.free_slots == [0]
