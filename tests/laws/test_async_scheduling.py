"""The contract where turns are sent off behind turns that are under way, before their tokens are known: whoever stops, is
cancelled, arrives or drafts meanwhile, tokens and scores are those that a request has alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
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
from onedraw.speculation.proposer import chain
from onedraw.speculation.speculator import Speculator
from onedraw.types import History, Outcome, Plan, Request, Row, RowOutcome, SamplingParams
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, run
from tests.laws.test_fake import KINDS, Scenario, proposer_for, random_scenario, same
from tests.laws.test_modern import LATE, REQUESTS
from tests.laws.test_modern import same as torch_same
from tests.support import tiny
from tests.support.torch_backend import make_backend

EXERCISED: Counter[str] = Counter()


class Watching(FakeBackend):
    """Notes what happened to rows that were sent off ahead."""

    noted: ClassVar[Counter[str]] = Counter()

    def run(self, row: Row) -> RowOutcome:
        size = self.capacity.page_size
        self.noted["rows"] += row.awaits_token
        self.noted["borders"] += row.awaits_token and row.start % size == 0
        self.noted["counting"] += row.awaits_token and row.params.counts_history
        return super().run(row)


def met_ahead(seed: int, kind: str | None = None, *, drafting: bool = False) -> tuple[Scenario, list[Answer]]:
    """Drawn worlds on a backend that goes ahead, with a request or two cancelled on the way. Every other one is told of a turn
    when the next is under way."""
    scenario = random_scenario(seed, kind)
    scenario.backend |= {"async_scheduling": True, "async_tokens": 256 * (seed // 2 % 2)}
    rng = np.random.default_rng(seed + 2)
    gone = {int(i) for i in rng.integers(0, len(scenario.requests), 2)}
    cancels = tuple((int(rng.integers(0, 25)), i) for i in sorted(gone))
    Watching.noted = Counter()
    got, stats = scenario.run(Watching, proposer=proposer_for(seed, scenario) if drafting else None, cancels=cancels)
    EXERCISED.update(Watching.noted)
    EXERCISED.update(turns=stats.steps_ahead, cancelled=sum(a.finish == "cancelled" for a in got if stats.steps_ahead))
    chosen = sum(len(a.tokens) for a in got)
    EXERCISED.update(stopped=sum(a.finish == "stop" for a in got if stats.steps_ahead), chosen=chosen)
    EXERCISED.update(
        drafted=stats.accepted_tokens * bool(stats.steps_ahead), preempted=stats.preemptions * bool(stats.steps_ahead)
    )
    EXERCISED.update(restores=stats.restores * bool(stats.steps_ahead), hits=stats.prefix_hits * bool(stats.steps_ahead))
    for i in gone:
        if got[i].finish == "cancelled":
            assert got[i].tokens == scenario.expected[i].tokens[: len(got[i].tokens)]
            assert got[i].checksums == scenario.expected[i].checksums[: len(got[i].tokens)]
            scenario.expected[i] = got[i]
    return scenario, got


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40), kind=st.sampled_from(KINDS), drafting=st.booleans())
def test_a_turn_sent_off_before_its_tokens_are_known_changes_nothing(seed: int, kind: str, drafting: bool) -> None:
    scenario, got = met_ahead(seed, kind, drafting=drafting)
    assert same(got, scenario.expected)


def test_the_schedules_went_ahead() -> None:
    """Runs after the law above, in the same process."""
    wanted = ("rows", "borders", "counting", "turns", "cancelled", "stopped", "drafted", "preempted", "restores", "hits")
    for seed in range(300):
        if all(EXERCISED[what] > 0 for what in wanted):
            break
        scenario, got = met_ahead(seed, drafting=bool(seed % 2))
        assert same(got, scenario.expected)
    assert all(EXERCISED[what] > 0 for what in wanted), EXERCISED


# ---------------------------------------------------------------------- who goes ahead, and when


def ask(name: str, max_tokens: int = 8, **params: object) -> Request:
    given = SamplingParams(**{"max_tokens": max_tokens, "checksums": True, "seed": len(name), **params})  # type: ignore[arg-type]
    return Request(name, tuple(range(1, 6)), given)


class Noting(FakeBackend):
    """Notes who rides in which plan, and when each comes back."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(vocab=61, async_scheduling=True, **sizes)  # type: ignore[arg-type]
        self.log: list[str] = []

    def submit(self, plan: Plan) -> StepHandle:
        self.log.append(f"{'+' if plan.rows[0].awaits_token else ''}{','.join(row.request_id for row in plan.rows)}")
        return super().submit(plan)

    def collect(self, ticket: StepHandle) -> Outcome:
        self.log.append("back")
        return super().collect(ticket)


def test_plain_decoding_always_has_a_turn_behind_the_one_under_way() -> None:
    backend = Noting(lanes=2)
    run(backend, [ask("a")], Schedule())
    # The prompt chooses the first token; then a chain, one ahead, up to the last of eight.
    assert backend.log == ["a", "back", "a", *["+a", "back"] * 6, "back"]


@pytest.mark.parametrize("step_tokens", [1, 2, 4])
def test_who_is_computed_again_a_token_at_a_time_has_nothing_sent_off_behind_a_known_token(step_tokens: int) -> None:
    asked = [ask(name, max_tokens=24, temperature=1.0, seed=seed) for seed, name in enumerate("abc")]
    told = []
    for ahead in (False, True):
        backend = FakeBackend(pages=14, lanes=3, page_size=4, max_context=56, async_scheduling=ahead)
        answers, stats = run(backend, asked, Schedule(step_tokens=step_tokens))
        assert stats.preemptions
        told.append(answers)
    assert told[0] == told[1]


def test_who_arrives_is_taken_in_when_the_chain_is_back_and_goes_ahead_with_the_others() -> None:
    backend = Noting(lanes=2)
    run(backend, [ask("a", 12), ask("b", 12)], Schedule(arrivals=(0, 4)))
    joined = backend.log.index("a,b")
    assert backend.log[joined - 2 : joined] == ["back", "back"]  # not one turn later than the one that was sent off already
    assert backend.log.count("+a,b") > 3


@pytest.mark.parametrize("given", [{"logprobs": 1}, {"bad_words": ((3, 4),)}], ids=["logprobs", "bad words"])
def test_what_the_host_makes_of_a_token_is_waited_for(given: dict[str, object]) -> None:
    backend = Noting(lanes=2)
    run(backend, [ask("a", **given)], Schedule())
    assert not any(line.startswith("+") for line in backend.log)


def test_who_has_drafts_waits_and_who_is_silent_goes_ahead() -> None:
    asked = [ask("a", 30)]
    expected = plain(lambda: FakeBackend(vocab=61), asked)
    backend = Noting(lanes=2)
    answers = {"a": expected[0].tokens}
    got, stats = run(backend, asked, Schedule(proposer=KnownAnswerProposer(answers, 61, empty_every=5)))
    assert same(got, expected)
    assert stats.steps_ahead
    assert stats.accepted_tokens


def test_a_probe_is_carried_though_turns_go_ahead() -> None:
    """A source that does not pay is tried again now and then; a chain of turns ahead does not use its tries up."""

    class Wrong:
        name = "wrong"

        def forget(self, request_id: str) -> None: ...

        def propose(self, request: Request, history: History, room: int):  # type: ignore[no-untyped-def]
            return chain((60,) * room)

    class Steady(Noting):
        """What a turn costs is known, and not the clock's."""

        def submit(self, plan: Plan) -> StepHandle:
            self.tokens = sum(max(len(row.tokens), 1) + len(row.drafts) for row in plan.rows)
            return super().submit(plan)

        def collect(self, ticket: StepHandle) -> Outcome:
            return dataclasses.replace(super().collect(ticket), seconds=1.0 + 0.05 * self.tokens)

    speculator = Speculator([Wrong()])
    _, stats = run(Steady(lanes=1), [ask("a", 150)], Schedule(speculator=speculator))
    assert stats.steps_ahead > 60
    assert stats.drafts > 3


def test_a_turn_that_fails_fails_its_rows_and_the_one_behind_it_is_dropped() -> None:
    class Fragile(Noting):
        def collect(self, ticket: StepHandle) -> Outcome:
            outcome = super().collect(ticket)
            if ticket == 3:
                raise RuntimeError("planted")
            return outcome

    got, stats = run(Fragile(lanes=2), [ask("a"), ask("later")], Schedule(arrivals=(0, 9)))
    assert [a.error for a in got] == ["internal_error", None]
    assert stats.failed_steps == 1
    (expected,) = plain(lambda: FakeBackend(vocab=61), [ask("later")])
    assert same(got[1:], [expected])


def test_a_turn_that_cannot_be_sent_off_ahead_fails_its_rows_alone() -> None:
    class Refusing(Noting):
        def submit(self, plan: Plan) -> StepHandle:
            if len(self.log) > 6 and plan.rows[0].awaits_token and plan.rows[0].request_id == "a":
                raise RuntimeError("planted")
            return super().submit(plan)

    got, stats = run(Refusing(lanes=2), [ask("a"), ask("later")], Schedule(arrivals=(0, 9)))
    assert [a.error for a in got] == ["internal_error", None]
    assert stats.failed_steps == 1


def test_a_reply_that_stops_is_told_at_once_and_keeps_its_pages_until_the_turn_behind_it_is_back() -> None:
    (whole,) = plain(lambda: FakeBackend(vocab=61), [ask("a")])
    asked = ask("a", stop_ids=frozenset({whole.tokens[3]}))
    heard: list[str | None] = []
    backend = Noting(lanes=2)
    allocator = Allocator(backend.capacity, reuse=False)
    scheduler = Scheduler(allocator=allocator, capacity=backend.capacity, speculator=Speculator(), step_tokens=64)
    engine = Engine(backend=backend, scheduler=scheduler)
    engine.add(asked, lambda event: heard.append(event.finish))
    while "stop" not in heard:
        engine.step()
    assert allocator.pages_held > 0  # a row of it is under way
    assert engine.busy
    engine.step()
    assert allocator.pages_held == 0
    assert not engine.busy


# ---------------------------------------------------------------------- planted faults


def stale_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is given the token before the one it awaits."""
    real = FakeBackend.awaited
    before: dict[int, int] = {}

    def awaited(self: FakeBackend, row: Row) -> Row:
        found = real(self, row)
        stale = before.get(row.lane, found.tokens[0])
        before[row.lane] = found.tokens[0]
        return dataclasses.replace(row, tokens=(stale,))

    monkeypatch.setattr(FakeBackend, "awaited", awaited)


def stepped_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was sent off ahead moves its state again when it comes back."""
    real = FakeBackend.run

    def run_twice(self: FakeBackend, row: Row) -> RowOutcome:
        outcome = real(self, row)
        if row.awaits_token:
            self.commit(row, self._states(row), len(row.tokens))
        return outcome

    monkeypatch.setattr(FakeBackend, "run", run_twice)


def page_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row under way writes to is given back when the row before it is settled."""
    real = Lease.commit
    monkeypatch.setattr(Lease, "commit", lambda self, length, history, ahead=0: real(self, length, history))


def history_short_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice is made as if the token that the row awaited had not been said."""
    real = FakeBackend.sample
    monkeypatch.setattr(
        FakeBackend, "sample", lambda self, row, logits, drafts: real(self, row, logits, drafts[row.awaits_token :])
    )


FAULTS = [stale_token, stepped_twice, page_given_away, history_short_by_one]


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
    pytest.fail("nobody noticed")


# ---------------------------------------------------------------------- real models


@pytest.mark.parametrize("name", ["qwen3_5_odd", "gemma4_e2b"])
def test_a_real_model_says_the_same_with_turns_ahead(name: str, tmp_path: Path) -> None:
    """States, shared keys, layers with inputs of their own: without a device that keeps tokens the host reads them."""
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
        assert torch_same(got, expected)
        counted.update(ahead=stats.steps_ahead, kept=stats.accepted_tokens, hits=stats.prefix_hits)
    assert all(counted.values()), counted


def test_a_stage_on_a_thread_of_its_own_has_no_turn_behind_it(tmp_path: Path) -> None:
    """It would read the history when the engine has added to it already."""
    folder = tiny.write_safetensors("llama", tmp_path / "llama")
    expected = plain(lambda: make_backend(folder, lanes=1, check=False), REQUESTS[:2])
    got, stats = run(make_backend(folder, ahead=True, overlap=True, check=False), REQUESTS[:2], Schedule())
    assert torch_same(got, expected)
    assert not stats.steps_ahead
