"""The contract under both scheduling policies: whose turn it is changes when a request runs, never its tokens or scores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onedraw.backends.base import StepHandle
from onedraw.backends.fake import FakeBackend
from onedraw.engine.scheduler import Scheduler
from onedraw.engine.sequence import Sequence
from onedraw.engine.stats import Stats
from onedraw.memory.allocator import Lease
from onedraw.types import Plan
from tests.laws.harness import Answer, Schedule, run, same
from tests.laws.test_fake import KINDS, Scenario, proposer_for, random_scenario

EXERCISED: Counter[str] = Counter()
COUNTED = ("orders", "turns", "past_turn", "cached", "kept", "restores", "ahead", "overlapped", "background")


class Ordered(FakeBackend):
    """Logs the request ids of every plan."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.plans: list[tuple[str, ...]] = []

    def submit(self, plan: Plan) -> StepHandle:
        self.plans.append(tuple(row.request_id for row in plan.rows))
        return super().submit(plan)


def shared_scenario(seed: int, kind: str) -> Scenario:
    """A random scenario whose requests belong to a few callers, some as choices of one request, some in the background."""
    scenario, rng = random_scenario(seed, kind), np.random.default_rng(seed + 3)
    for index, request in enumerate(scenario.requests):
        caller = f"caller-{rng.integers(0, 3)}"
        parent = f"{caller}-n" if rng.random() < 0.4 else ""
        background = bool(rng.random() < 0.3)
        scenario.requests[index] = replace(request, caller=caller, parent=parent, background=background)
    scenario.backend["lanes"] = min(scenario.backend["lanes"], 3)
    if rng.random() < 0.3:
        scenario.backend |= {"max_in_flight": 2}
    elif rng.random() < 0.5:
        scenario.backend |= {"async_scheduling": True}
    scenario.schedule |= {"turn_tokens": int(rng.choice([1, 2, 64]))}
    return scenario


def both_orders(seed: int, kind: str, scheduler: type[Scheduler] = Scheduler) -> tuple[Scenario, list[Answer], list[Answer]]:
    scenario = shared_scenario(seed, kind)
    proposer = proposer_for(seed, scenario) if seed % 2 else None

    def answers(fair: bool) -> tuple[list[Answer], Stats, list[tuple[str, ...]]]:
        backend = Ordered(**scenario.backend)
        schedule = Schedule(**scenario.schedule, proposer=proposer, fair=fair, scheduler=scheduler)
        found, stats = run(backend, scenario.requests, schedule)
        return found, stats, backend.plans

    (fair, stats, plans), (strict, strict_stats, strict_plans) = answers(True), answers(False)
    kinds = {request.background for request in scenario.requests}
    assert strict_stats.turn_preemptions == 0 or len(kinds) == 2  # strict order, too, preempts background rows for others
    happened = bool(stats.turn_preemptions)
    EXERCISED.update(
        orders=plans != strict_plans,
        turns=stats.turn_preemptions,
        past_turn=stats.turn_preemptions * (scenario.schedule["turn_tokens"] < 64),
        cached=stats.prefix_hits * happened,
        kept=stats.accepted_tokens * happened,
        restores=stats.restores * happened,
        ahead=stats.steps_ahead * happened,
        overlapped=stats.overlapped_steps * happened,
        background=strict_stats.turn_preemptions,
    )
    return scenario, fair, strict


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40), kind=st.sampled_from(KINDS))
def test_neither_turns_nor_strict_order_change_tokens_or_scores(seed: int, kind: str) -> None:
    scenario, fair, strict = both_orders(seed, kind)
    assert same(fair, scenario.expected)
    assert same(strict, scenario.expected)


def test_the_orders_differed_and_rows_were_preempted_for_others() -> None:
    """Runs after the law above, in the same process."""
    for seed in range(300):
        if all(EXERCISED[what] > 0 for what in COUNTED):
            break
        test_neither_turns_nor_strict_order_change_tokens_or_scores.hypothesis.inner_test(seed, KINDS[seed % 4])  # type: ignore[attr-defined]
    assert all(EXERCISED[what] > 0 for what in COUNTED), EXERCISED


class ForgetsAToken(Scheduler):
    """A sequence that makes room for another loses its last token."""

    def preempt(self, sequence: Sequence, *, last: bool) -> None:
        super().preempt(sequence, last=last)
        if sequence.history.output:
            sequence.history.output.pop()


class KeepsComputed(Scheduler):
    """A sequence that is admitted again counts as computed as far as it was before."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.computed: dict[str, int] = {}

    def preempt(self, sequence: Sequence, *, last: bool) -> None:
        self.computed[sequence.request.id] = sequence.computed
        super().preempt(sequence, last=last)

    def _allocate(self, sequence: Sequence) -> Lease | None:
        lease = super()._allocate(sequence)
        if lease is not None and lease.reserve(known := self.computed.get(sequence.request.id, 0)):
            lease.cached = max(lease.cached, known)
        return lease


@pytest.mark.parametrize("faulty", [ForgetsAToken, KeepsComputed], ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(faulty: type[Scheduler]) -> None:
    for seed in range(60):
        try:
            scenario, fair, _ = both_orders(seed, KINDS[seed % 4], faulty)
        except AssertionError:  # noticed by the backend or by the allocator's audit
            return
        if not same(fair, scenario.expected):
            return
    pytest.fail("the fault went unnoticed in 60 schedules")
