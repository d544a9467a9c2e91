"""The contract with several steps in flight: neither the other requests nor the time at which a step is collected change the
tokens and scores of a request."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onedraw.backends.fake import FakeBackend
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.runner.pipeline import ResidualStream
from onedraw.checkpoints.open import open_checkpoint
from onedraw.engine.engine import Engine, Sink
from onedraw.engine.scheduler import ScheduledRow, Scheduler
from onedraw.engine.sequence import Sequence
from onedraw.models.registry import read_model_info
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, run, same
from tests.laws.test_fake import KINDS, Scenario, proposer_for, random_scenario
from tests.laws.test_modern_drafters import TRAINED, dense, dflash, mtp
from tests.laws.test_modern_drafters import requests_of as drafted_requests
from tests.laws.test_split import LATE, REQUESTS, splits_of
from tests.support import tiny
from tests.support.torch_backend import make_backend

EXERCISED: Counter[str] = Counter()


def overlapping_scenario(seed: int, kind: str | None = None) -> Scenario:
    """A random scenario on a backend that accepts two or three steps in flight."""
    scenario = random_scenario(seed, kind)
    scenario.backend |= {
        "max_in_flight": 2 + seed % 2,
        "min_step_rows": 1 + seed // 2 % 3,
        "lanes": max(scenario.backend["lanes"], 2),
    }
    return scenario


def run_with_cancels(seed: int, kind: str | None = None) -> tuple[Scenario, list[Answer]]:
    """A run in which one or two requests are cancelled; their expected answers are cut where they stopped."""
    scenario = overlapping_scenario(seed, kind)
    rng = np.random.default_rng(seed + 2)
    cancelled = {int(i) for i in rng.integers(0, len(scenario.requests), 2)}
    got, stats = scenario.run(
        proposer=proposer_for(seed, scenario), cancels=tuple((int(rng.integers(0, 25)), i) for i in sorted(cancelled))
    )
    EXERCISED.update(cancelled=sum(answer.finish == "cancelled" for answer in got))
    EXERCISED.update(overlapped=stats.overlapped_steps, preempted=stats.preemptions * bool(stats.overlapped_steps))
    EXERCISED.update(kept=stats.accepted_tokens, rejected=stats.draft_tokens - stats.accepted_tokens)
    EXERCISED.update(restores=stats.restores, hits=stats.prefix_hits, saved=stats.checkpoints_saved)
    for i in cancelled:
        if got[i].finish == "cancelled":
            count = len(got[i].tokens)
            scenario.expected[i] = dataclasses.replace(
                scenario.expected[i], tokens=scenario.expected[i].tokens[:count], checksums=scenario.expected[i].checksums[:count]
            )
            partial = {"finish": "cancelled", "scored": got[i].scored, "logprobs": got[i].logprobs, "error": None}
            scenario.expected[i] = dataclasses.replace(scenario.expected[i], **partial)
    return scenario, got


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40), kind=st.sampled_from(KINDS))
def test_several_steps_in_flight_change_nothing(seed: int, kind: str) -> None:
    scenario, got = run_with_cancels(seed, kind)
    assert same(got, scenario.expected)


def test_the_schedules_overlapped() -> None:
    """Runs after the law above, in the same process."""
    wanted = ("overlapped", "preempted", "cancelled", "kept", "rejected", "restores", "hits", "saved")
    for seed in range(300):
        if all(EXERCISED[what] > 0 for what in wanted):
            break
        scenario, got = run_with_cancels(seed)
        assert same(got, scenario.expected)
    assert all(EXERCISED[what] > 0 for what in wanted), EXERCISED


# ---------------------------------------------------------------------- which sequences share a step


def request(name: str, length: int = 5) -> Request:
    return Request(name, tuple(range(1, length + 1)), SamplingParams(max_tokens=6, checksums=True, seed=length))


class RecordingBackend(FakeBackend):
    """Records the request ids of each submitted plan."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(vocab=61, **sizes)
        self.plans: list[list[str]] = []

    def submit(self, plan):  # type: ignore[no-untyped-def]
        self.plans.append([row.request_id for row in plan.rows])
        return super().submit(plan)


@pytest.mark.parametrize(("count", "sizes"), [(1, {1}), (2, {1}), (3, {1, 2}), (5, {2, 3}), (8, {4})])
def test_two_steps_in_flight_share_the_sequences_evenly(count: int, sizes: set[int]) -> None:
    backend = RecordingBackend(max_in_flight=2, lanes=8)
    run(backend, [request(f"q{i}") for i in range(count)], Schedule())
    assert {len(plan) for plan in backend.plans[:6]} == sizes


@pytest.mark.parametrize(("count", "sizes"), [(2, {2}), (3, {3}), (5, {3, 2}), (8, {4})])
def test_sequences_below_the_minimum_number_of_rows_share_one_step(count: int, sizes: set[int]) -> None:
    backend = RecordingBackend(max_in_flight=2, min_step_rows=3, lanes=8)
    run(backend, [request(f"q{i}") for i in range(count)], Schedule())
    assert {len(plan) for plan in backend.plans[:6]} == sizes


def test_two_long_prompts_get_a_step_each_below_the_minimum_number_of_rows_too() -> None:
    backend = RecordingBackend(max_in_flight=2, min_step_rows=64, lanes=8)
    _, stats = run(backend, [request("one", 40), request("two", 41)], Schedule(step_tokens=16))
    assert backend.plans[:2] == [["one"], ["two"]]
    assert stats.overlapped_steps


def test_one_sequence_has_one_step_in_flight_at_a_time() -> None:
    _, stats = run(FakeBackend(vocab=61, max_in_flight=2), [request("alone")], Schedule())
    assert stats.steps == 6
    assert stats.overlapped_steps == 0


def test_a_failing_step_fails_only_its_own_rows() -> None:
    class FailingBackend(FakeBackend):
        def collect(self, handle):  # type: ignore[no-untyped-def]
            outcome = super().collect(handle)
            if handle == 3:
                raise RuntimeError("planted")
            return outcome

    requests = [request("one"), request("two", 7)]
    expected = plain(lambda: FakeBackend(vocab=61), requests)
    got, stats = run(FailingBackend(vocab=61, max_in_flight=2), requests, Schedule())
    assert [answer.error for answer in got].count("internal_error") == stats.failed_steps == 1
    assert sum(same([answer], [whole]) for answer, whole in zip(got, expected, strict=True)) == 1


def test_an_engine_that_shuts_down_waits_for_steps_in_flight() -> None:
    from onedraw.errors import ShuttingDown

    events: list[str | None] = []
    engine = engine_of(FakeBackend(vocab=61, max_in_flight=2, lanes=2))
    for name in ("one", "two", "three"):
        engine.add(request(name), lambda event: events.append(event.error and event.error.code))
    engine.step()
    assert engine.busy
    engine.fail_all(ShuttingDown("over"))
    assert not engine.busy
    assert [event for event in events if event] == ["shutting_down"] * 3
    engine.scheduler.allocator.audit_all()
    assert engine.scheduler.allocator.pages_held == 0


def engine_of(backend: FakeBackend) -> Engine:
    from onedraw.memory.allocator import Allocator
    from onedraw.speculation.speculator import Speculator

    allocator = Allocator(backend.capacity, reuse=True)
    scheduler = Scheduler(allocator=allocator, capacity=backend.capacity, speculator=Speculator([]), step_tokens=64)
    return Engine(backend=backend, scheduler=scheduler)


# ---------------------------------------------------------------------- stages with their own threads

FAMILIES = ("qwen2", "qwen3_5_odd", "gemma4_e4b")
SIZES = {"kernels": False, "check": False, "max_context": 160, "pages": 80, "drafts": 48, "checkpoints": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("overlap")
    return {name: tiny.write_safetensors(name, place / name) for name in FAMILIES}


def answers_of(folder: Path, **changes: Any) -> tuple[list[Answer], KnownAnswerProposer]:
    one_lane = make_backend(folder, **{**SIZES, **changes, "lanes": 1})
    expected = plain(lambda: one_lane, REQUESTS)
    return expected, KnownAnswerProposer({r.id: a.tokens for r, a in zip(REQUESTS, expected, strict=True)}, tiny.VOCAB)


def with_slow_sampling(backend: TorchBackend) -> TorchBackend:
    """The last stage waits before it samples, so that other steps are submitted and collected meanwhile."""
    real = backend.eager_runner.sample

    def sample(*given: Any) -> Any:
        time.sleep(0.002)
        return real(*given)

    backend.eager_runner.sample = sample  # type: ignore[method-assign]
    return backend


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_that_run_at_the_same_time_change_no_bit(folders: dict[str, Path], name: str) -> None:
    expected, drafts = answers_of(folders[name])
    counted: Counter[str] = Counter()
    for number, cuts in enumerate(splits_of(folders[name])[::2]):
        proposer = dataclasses.replace(drafts, tree=bool(number % 2))
        schedule = Schedule(proposer=proposer, reuse=True, step_tokens=64, arrivals=LATE)
        backend = with_slow_sampling(make_backend(folders[name], cuts=cuts, overlap=True, **SIZES))
        got, stats = run(backend, REQUESTS, schedule)
        backend.close()
        assert same(got, expected), cuts
        counted.update(overlapped=stats.overlapped_steps, kept=stats.accepted_tokens, restores=stats.restores)
        counted.update(rejected=stats.draft_tokens - stats.accepted_tokens)
    assert all(counted.values()), counted


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_that_run_at_the_same_time_change_no_bit(folders: dict[str, Path], name: str) -> None:
    expected, drafts = answers_of(folders[name], kernels=True)
    backend = with_slow_sampling(
        make_backend(folders[name], cuts=splits_of(folders[name])[0], overlap=True, **{**SIZES, "kernels": True})
    )
    got, stats = run(backend, REQUESTS, Schedule(proposer=drafts, reuse=True, step_tokens=64, arrivals=LATE))
    backend.close()
    assert same(got, expected)
    assert stats.overlapped_steps


@pytest.mark.parametrize("name", ["dflash", "dense model", "mtp"])
def test_a_drafter_that_runs_while_stages_run_changes_no_bit(name: str, tmp_path: Path) -> None:
    target = tiny.write_safetensors("qwen3_5_mtp", tmp_path / "mtp") if name == "mtp" else TRAINED / "trained_qwen3_5"
    make = {"dflash": lambda: dflash(target, 0), "dense model": lambda: dense(target), "mtp": lambda: mtp(target)}[name]
    requests = drafted_requests(read_model_info(open_checkpoint(target)).spec.vocab)[:4]
    one_lane = make_backend(target, kernels=False, lanes=1, check=False)
    expected = plain(lambda: one_lane, requests)
    backend = make_backend(target, kernels=False, check=False, cuts=(2,), overlap=True, make_drafter=make())
    got, stats = run(backend, requests, Schedule(reuse=True, arrivals=(0, 0, 9, 9)))
    backend.close()
    assert same(got, expected)
    assert stats.overlapped_steps
    assert stats.accepted_tokens


def test_a_failing_stage_fails_only_its_own_step(folders: dict[str, Path]) -> None:
    backend = make_backend(folders["qwen2"], cuts=(1,), overlap=True, **SIZES)
    real, calls = backend.eager_runner.sample, itertools.count()

    def sample(*given: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("planted")
        return real(*given)

    backend.eager_runner.sample = sample  # type: ignore[method-assign]
    got, stats = run(backend, REQUESTS[:2], Schedule())
    assert sorted(answer.error or "" for answer in got) == ["", "internal_error"]
    assert stats.failed_steps == 1


def test_a_step_that_could_not_start_leaves_the_slots_of_other_steps_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = with_slow_sampling(make_backend(folders["qwen3_5_odd"], cuts=(1, 2), overlap=True, **SIZES))
    real_start, real_collect, calls = backend._start_eager, backend.collect, itertools.count()
    taken: list[int] = []

    def start(plan: Any, slot: int) -> Any:
        if next(calls) in (5, 7):
            raise RuntimeError("planted")
        taken.append(slot)
        assert len(set(taken)) == len(taken) <= 3
        return real_start(plan, slot)

    def collect(handle: Any) -> Any:
        taken.remove(backend._in_flight.steps[handle].slot)
        return real_collect(handle)

    monkeypatch.setattr(backend, "_start_eager", start)
    monkeypatch.setattr(backend, "collect", collect)
    _, stats = run(backend, REQUESTS, Schedule())
    backend.close()
    assert stats.failed_steps == 2
    assert sorted(backend._in_flight.free_slots) == [0, 1, 2]


def test_the_threads_of_the_stages_end_with_the_backend(folders: dict[str, Path]) -> None:
    def stages() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("onedraw-stage")}

    before = stages()
    closed = make_backend(folders["qwen2"], cuts=(1,), overlap=True, **SIZES)
    forgotten = make_backend(folders["qwen2"], cuts=(1, 2), overlap=True, **SIZES)
    assert len(stages() - before) == 5
    closed.close()
    assert len(stages() - before) == 3
    run(forgotten, REQUESTS[:1], Schedule())
    del forgotten
    deadline = time.monotonic() + 120
    while not stages() <= before:  # a stage thread may hold the last reference for a moment after its last result
        assert time.monotonic() < deadline, stages() - before
        gc.collect()
        time.sleep(0.01)


def one_rollback_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in flight use the same rollback buffer for their drafts."""
    real = TorchBackend._step
    monkeypatch.setattr(TorchBackend, "_step", lambda self, plan, slot: real(self, plan, 0))


def one_buffer_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the third stage keeps its inputs in the buffer that the next step overwrites at the second stage."""
    real = Transformer.advance

    def advance(self: Transformer, stream: ResidualStream, number: int, *given: Any, **how: Any) -> ResidualStream:
        stream = real(self, stream, number, *given, **how)
        stage = self.stages[number]
        if stage.entrance is None or stream.own is None:
            return stream
        rows = stage.entrance._inputs[: len(stream.own)].view(len(stream.own), -1, stream.own.shape[2])
        return dataclasses.replace(stream, own=rows[:, len(stage.layers) :])

    monkeypatch.setattr(Transformer, "advance", advance)


@pytest.mark.parametrize(
    ("fault", "name"),
    [(one_rollback_buffer, "qwen3_5_odd"), (one_buffer_of_inputs, "gemma4_e4b")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_shared_buffer_is_noticed(
    folders: dict[str, Path], fault: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, drafts = answers_of(folders[name])
    drafts = dataclasses.replace(drafts, empty_every=0)
    fault(monkeypatch)
    cuts, schedule = splits_of(folders[name])[-1], Schedule(proposer=drafts, step_tokens=64)
    assert len(cuts) == 2
    assert same(
        run(make_backend(folders[name], cuts=cuts, **SIZES), REQUESTS, schedule)[0], expected
    )  # no fault with one step in flight
    for _ in range(10):
        backend = with_slow_sampling(make_backend(folders[name], cuts=cuts, overlap=True, **SIZES))
        got, _ = run(backend, REQUESTS, schedule)
        if not same(got, expected):
            return
    pytest.fail("the fault went unnoticed in ten runs")


# ---------------------------------------------------------------------- planted faults


def scheduled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler does not record which sequences are in flight."""
    monkeypatch.setattr(Scheduler, "mark_in_flight", lambda self, members: None)


def frees_memory_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a cancelled request is freed while its row is still in flight."""

    def remove(self: Engine, request_id: str) -> tuple[Sequence, Sink]:
        sequence, sink = self._live.pop(request_id)
        self.scheduler.in_flight.pop(sequence, None)
        self.scheduler.finish(sequence)
        self.scheduler.speculator.forget(request_id)
        return sequence, sink

    def release_ended(self: Engine, members: list[ScheduledRow]) -> set[Sequence]:
        self.scheduler.mark_collected(members)
        return {member.sequence for member in members} - {sequence for sequence, _ in self._live.values()}

    monkeypatch.setattr(Engine, "_remove", remove)
    monkeypatch.setattr(Engine, "_release_ended", release_ended)


def preempts_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence with a row in flight is preempted."""
    real = Scheduler._add_row

    def add_row(self: Scheduler, *given: Any) -> bool:
        in_flight, self.in_flight = self.in_flight, Counter()
        try:
            return real(self, *given)
        finally:
            self.in_flight = in_flight

    monkeypatch.setattr(Scheduler, "_add_row", add_row)


@pytest.mark.parametrize("fault", [scheduled_twice, frees_memory_in_flight, preempts_in_flight], ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    for seed in range(150):
        try:
            scenario, got = run_with_cancels(seed)
        except (AssertionError, ValueError):  # noticed by the allocator's audit or by the backend
            return
        if not same(got, scenario.expected):
            return
    pytest.fail("the fault went unnoticed in 150 schedules")
