"""The contract under async scheduling: a step is submitted before the tokens of the previous step are known. Requests that
stop, are cancelled, arrive or draft meanwhile change no tokens and no scores of any request."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onedraw.backends.base import StepHandle
from onedraw.backends.fake import FakeBackend
from onedraw.engine.engine import Engine
from onedraw.engine.scheduler import Scheduler
from onedraw.memory.allocator import Allocator, Lease
from onedraw.speculation.proposers import Proposal, chain
from onedraw.speculation.speculator import Speculator
from onedraw.text.constraints.base import token_mask
from onedraw.types import DryParams, History, Outcome, Plan, Request, Row, RowOutcome, SamplingParams, TokenMask
from tests.laws.harness import Answer, KnownAnswerProposer, LiveConstraint, Schedule, plain, run, same
from tests.laws.test_fake import KINDS, Scenario, proposer_for, random_scenario
from tests.laws.test_modern import LATE, REQUESTS
from tests.support import tiny
from tests.support.torch_backend import make_backend

EXERCISED: Counter[str] = Counter()


class CountingBackend(FakeBackend):
    """Counts rows that were submitted before their input token was known."""

    counted: ClassVar[Counter[str]] = Counter()

    def run(self, row: Row) -> RowOutcome:
        size = self.capacity.page_size
        self.counted["rows"] += row.awaits_token
        self.counted["page_starts"] += row.awaits_token and row.start % size == 0
        self.counted["penalties"] += row.awaits_token and row.params.counts_history
        return super().run(row)


def run_ahead(seed: int, kind: str | None = None, *, drafting: bool = False) -> tuple[Scenario, list[Answer]]:
    """A random scenario on a backend with async scheduling, with one or two requests cancelled. For half of
    the seeds `submit` returns before the step has run (`async_tokens`)."""
    scenario = random_scenario(seed, kind)
    scenario.backend |= {"async_scheduling": True, "async_tokens": 256 * (seed // 2 % 2)}
    rng = np.random.default_rng(seed + 2)
    cancelled = {int(i) for i in rng.integers(0, len(scenario.requests), 2)}
    cancels = tuple((int(rng.integers(0, 25)), i) for i in sorted(cancelled))
    CountingBackend.counted = Counter()
    got, stats = scenario.run(CountingBackend, proposer=proposer_for(seed, scenario) if drafting else None, cancels=cancels)
    EXERCISED.update(CountingBackend.counted)
    EXERCISED.update(steps=stats.steps_ahead, cancelled=sum(a.finish == "cancelled" for a in got if stats.steps_ahead))
    sampled = sum(len(a.tokens) for a in got)
    EXERCISED.update(stopped=sum(a.finish == "stop" for a in got if stats.steps_ahead), sampled=sampled)
    EXERCISED.update(
        drafted=stats.accepted_tokens * bool(stats.steps_ahead), preempted=stats.preemptions * bool(stats.steps_ahead)
    )
    EXERCISED.update(restores=stats.restores * bool(stats.steps_ahead), hits=stats.prefix_hits * bool(stats.steps_ahead))
    for i in cancelled:
        if got[i].finish == "cancelled":
            assert got[i].tokens == scenario.expected[i].tokens[: len(got[i].tokens)]
            assert got[i].checksums == scenario.expected[i].checksums[: len(got[i].tokens)]
            scenario.expected[i] = got[i]
    return scenario, got


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40), kind=st.sampled_from(KINDS), drafting=st.booleans())
def test_a_step_submitted_before_its_tokens_are_known_changes_nothing(seed: int, kind: str, drafting: bool) -> None:
    scenario, got = run_ahead(seed, kind, drafting=drafting)
    assert same(got, scenario.expected)


def test_the_schedules_exercised_async_scheduling() -> None:
    """Runs after the law above, in the same process."""
    wanted = ("rows", "page_starts", "penalties", "steps", "cancelled", "stopped", "drafted", "preempted", "restores", "hits")
    for seed in range(300):
        if all(EXERCISED[what] > 0 for what in wanted):
            break
        scenario, got = run_ahead(seed, drafting=bool(seed % 2))
        assert same(got, scenario.expected)
    assert all(EXERCISED[what] > 0 for what in wanted), EXERCISED


# ---------------------------------------------------------------------- which rows are submitted ahead, and when


def request(name: str, max_tokens: int = 8, **params: object) -> Request:
    given = SamplingParams(**{"max_tokens": max_tokens, "checksums": True, "seed": len(name), **params})  # type: ignore[arg-type]
    return Request(name, tuple(range(1, 6)), given)


class RecordingBackend(FakeBackend):
    """Logs the request ids of each submitted plan ("+": submitted ahead), and "back" for each collected outcome."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(vocab=61, async_scheduling=True, **sizes)  # type: ignore[arg-type]
        self.log: list[str] = []

    def submit(self, plan: Plan) -> StepHandle:
        self.log.append(f"{'+' if plan.rows[0].awaits_token else ''}{','.join(row.request_id for row in plan.rows)}")
        return super().submit(plan)

    def collect(self, handle: StepHandle) -> Outcome:
        self.log.append("back")
        return super().collect(handle)


def test_plain_decoding_always_has_a_second_step_in_flight() -> None:
    backend = RecordingBackend(lanes=2)
    run(backend, [request("a")], Schedule())
    # The prompt step samples the first token; each later step is submitted one step ahead, up to the last of eight tokens.
    assert backend.log == ["a", "back", "a", *["+a", "back"] * 6, "back"]


@pytest.mark.parametrize("step_tokens", [1, 2, 4])
def test_a_sequence_recomputed_one_token_at_a_time_has_no_step_submitted_ahead_of_a_known_token(step_tokens: int) -> None:
    requests = [request(name, max_tokens=24, temperature=1.0, seed=seed) for seed, name in enumerate("abc")]
    found = []
    for ahead in (False, True):
        backend = FakeBackend(pages=14, lanes=3, page_size=4, max_context=56, async_scheduling=ahead)
        answers, stats = run(backend, requests, Schedule(step_tokens=step_tokens))
        assert stats.preemptions
        found.append(answers)
    assert found[0] == found[1]


def test_a_new_request_joins_when_the_submitted_steps_are_collected_and_is_then_scheduled_ahead_too() -> None:
    backend = RecordingBackend(lanes=2)
    run(backend, [request("a", 12), request("b", 12)], Schedule(arrivals=(0, 4)))
    joined = backend.log.index("a,b")
    assert backend.log[joined - 2 : joined] == ["back", "back"]  # no step after the one that was already submitted
    assert backend.log.count("+a,b") > 3


class EveryOther:
    """A constraint that allows the tokens of one parity, which follows from the tokens before."""

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask:
        return token_mask(range(sum((*output, *drafts)) % 2, 61, 2), 61)


@pytest.mark.parametrize(
    "given",
    [{"logprobs": 1}, {"bad_words": ((3, 4), (5,))}, {"dry": DryParams(0.8, allowed_length=1)}, {"constraint": EveryOther()}],
    ids=lambda given: next(iter(given)),
)
def test_a_row_whose_sampling_depends_on_the_last_token_on_the_host_is_submitted_ahead_too(given: dict[str, object]) -> None:
    constraint = given.get("constraint")
    spec = None if constraint is None else LiveConstraint(constraint)  # type: ignore[arg-type]
    params = {name: value for name, value in given.items() if name != "constraint"}
    requests = [dataclasses.replace(request("a", **params), constraint=spec), request("b")]
    expected = plain(lambda: FakeBackend(vocab=61), requests)
    backend = RecordingBackend(lanes=2)
    got, stats = run(backend, requests, Schedule())
    assert same(got, expected)
    assert stats.steps_ahead > 4
    assert backend.log.count("+a,b") == stats.steps_ahead


def test_a_row_with_drafts_waits_and_a_row_without_drafts_is_submitted_ahead() -> None:
    requests = [request("a", 30)]
    expected = plain(lambda: FakeBackend(vocab=61), requests)
    backend = RecordingBackend(lanes=2)
    answers = {"a": expected[0].tokens}
    got, stats = run(backend, requests, Schedule(proposer=KnownAnswerProposer(answers, 61, empty_every=5)))
    assert same(got, expected)
    assert stats.steps_ahead
    assert stats.accepted_tokens


def test_a_probe_of_a_proposer_runs_although_steps_are_submitted_ahead() -> None:
    """A proposer that costs more than it gains is probed from time to time; steps submitted ahead do not use up its probes."""

    class WrongProposer:
        name = "wrong"

        def forget(self, request_id: str) -> None: ...

        def propose(self, request: Request, history: History, room: int) -> Proposal:
            return Proposal(chain((60,) * room), self.name)

    class FixedCost(RecordingBackend):
        """Reports step times that depend on the number of tokens alone, not on the clock."""

        def submit(self, plan: Plan) -> StepHandle:
            self.tokens = sum(max(len(row.tokens), 1) + len(row.drafts) for row in plan.rows)
            return super().submit(plan)

        def collect(self, handle: StepHandle) -> Outcome:
            return dataclasses.replace(super().collect(handle), seconds=1.0 + 0.05 * self.tokens)

    speculator = Speculator([WrongProposer()])
    _, stats = run(FixedCost(lanes=1), [request("a", 150)], Schedule(speculator=speculator))
    assert stats.steps_ahead > 60
    assert stats.drafts > 3


def test_a_failing_step_fails_its_rows_and_the_step_submitted_behind_it_is_dropped() -> None:
    class Fragile(RecordingBackend):
        def collect(self, handle: StepHandle) -> Outcome:
            outcome = super().collect(handle)
            if handle == 3:
                raise RuntimeError("planted")
            return outcome

    got, stats = run(Fragile(lanes=2), [request("a"), request("later")], Schedule(arrivals=(0, 9)))
    assert [a.error for a in got] == ["internal_error", None]
    assert stats.failed_steps == 1
    (expected,) = plain(lambda: FakeBackend(vocab=61), [request("later")])
    assert same(got[1:], [expected])


def test_a_step_that_cannot_be_submitted_ahead_fails_only_its_own_rows() -> None:
    class Refusing(RecordingBackend):
        def submit(self, plan: Plan) -> StepHandle:
            if len(self.log) > 6 and plan.rows[0].awaits_token and plan.rows[0].request_id == "a":
                raise RuntimeError("planted")
            return super().submit(plan)

    got, stats = run(Refusing(lanes=2), [request("a"), request("later")], Schedule(arrivals=(0, 9)))
    assert [a.error for a in got] == ["internal_error", None]
    assert stats.failed_steps == 1


def test_a_reply_that_stops_ends_at_once_and_keeps_its_pages_until_the_next_step_is_collected() -> None:
    (whole,) = plain(lambda: FakeBackend(vocab=61), [request("a")])
    stopping = request("a", stop_ids=frozenset({whole.tokens[3]}))
    finishes: list[str | None] = []
    backend = RecordingBackend(lanes=2)
    allocator = Allocator(backend.capacity, reuse=False)
    scheduler = Scheduler(allocator=allocator, capacity=backend.capacity, speculator=Speculator(), step_tokens=64)
    engine = Engine(backend=backend, scheduler=scheduler)
    engine.add(stopping, lambda event: finishes.append(event.finish))
    while "stop" not in finishes:
        engine.step()
    assert allocator.pages_held > 0  # one of its rows is still in flight
    assert engine.busy
    engine.step()
    assert allocator.pages_held == 0
    assert not engine.busy


# ---------------------------------------------------------------------- planted faults


def stale_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row receives the token before the one it awaits."""
    real = FakeBackend.awaited
    before: dict[int, int] = {}

    def awaited(self: FakeBackend, row: Row) -> Row:
        found = real(self, row)
        stale = before.get(row.lane, found.tokens[0])
        before[row.lane] = found.tokens[0]
        return dataclasses.replace(row, tokens=(stale,))

    monkeypatch.setattr(FakeBackend, "awaited", awaited)


def committed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was submitted ahead advances its state a second time."""
    real = FakeBackend.run

    def run_twice(self: FakeBackend, row: Row) -> RowOutcome:
        outcome = real(self, row)
        if row.awaits_token:
            self.commit(row, self._states(row), len(row.tokens))
        return outcome

    monkeypatch.setattr(FakeBackend, "run", run_twice)


def page_freed_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that a row in flight writes to is freed when the row before it is committed."""
    real = Lease.commit
    monkeypatch.setattr(Lease, "commit", lambda self, length, history, ahead=0: real(self, length, history))


def history_short_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is sampled with a history that lacks the token the row awaited."""
    real = FakeBackend.sample
    monkeypatch.setattr(
        FakeBackend, "sample", lambda self, row, logits, drafts: real(self, row, logits, drafts[row.awaits_token :])
    )


FAULTS = [stale_token, committed_twice, page_freed_in_flight, history_short_by_one]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = [random_scenario(seed, "both") for seed in range(12)]
    fault(monkeypatch)
    for one in scenarios:
        one.backend |= {"async_scheduling": True}
        try:
            got, _ = one.run()
        except AssertionError:
            return
        if not same(got, one.expected):
            return
    pytest.fail("the fault went unnoticed in 12 schedules")


# ---------------------------------------------------------------------- real models


@pytest.mark.parametrize("name", ["qwen3_5_odd", "gemma4_e2b"])
def test_a_real_model_gives_the_same_answers_with_async_scheduling(name: str, tmp_path: Path) -> None:
    """Recurrent states, shared keys and per-layer inputs, on a backend whose host reads the sampled tokens."""
    folder = tiny.write_safetensors(name, tmp_path / name)
    expected = plain(lambda: make_backend(folder, lanes=1, check=False), REQUESTS)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(REQUESTS, expected, strict=True)}, tiny.VOCAB, empty_every=2)
    counted: Counter[str] = Counter()
    for schedule in (
        Schedule(),
        Schedule(reuse=True, arrivals=LATE, step_tokens=64),
        Schedule(proposer=drafts, arrivals=(3, 0, 1, 9, 4), reuse=True),
    ):
        backend = make_backend(folder, ahead=True, check=False)
        got, stats = run(backend, REQUESTS, schedule)
        assert same(got, expected)
        counted.update(ahead=stats.steps_ahead, kept=stats.accepted_tokens, hits=stats.prefix_hits)
    assert all(counted.values()), counted


def test_a_stage_with_its_own_thread_has_no_step_submitted_behind_it(tmp_path: Path) -> None:
    """Its thread would read the history after the engine has appended to it."""
    folder = tiny.write_safetensors("llama", tmp_path / "llama")
    expected = plain(lambda: make_backend(folder, lanes=1, check=False), REQUESTS[:2])
    got, stats = run(make_backend(folder, ahead=True, overlap=True, check=False), REQUESTS[:2], Schedule())
    assert same(got, expected)
    assert not stats.steps_ahead
