"""Draft length: the decision, and the estimates it is based on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.speculation.draft_length import (
    LAST_PROBE_GAP,
    PAYS,
    PRIOR_ACCEPTANCE,
    PRIOR_TOKEN_SHARE,
    Acceptance,
    CostMeter,
    Probe,
    RowCost,
    StepCosts,
    best_chain_length,
    best_draft_counts,
    best_tree_size,
    expected_kept,
    speed,
    split_by_match,
)

rates = st.floats(0.0, 1.0)
costs = st.builds(RowCost, st.floats(0.0, 10.0), st.floats(1e-4, 5.0), st.floats(0.0, 1.0))


def kept_of(rate: float, depth: int) -> float:
    return expected_kept([rate] * depth)


# ---------------------------------------------------------------------- decision


@settings(max_examples=500, deadline=None)
@given(chances=st.lists(rates, max_size=20), cost=costs, running=st.integers(1, 300))
def test_every_draft_of_a_chain_pays_off(chances: list[float], cost: RowCost, running: int) -> None:
    """Each draft makes the row faster by the asked margin, and the next one would not."""
    count = best_chain_length(chances, cost=cost, running=running)

    def seconds(k: int) -> float:
        return cost.base_seconds / running + cost.row_seconds + cost.token_seconds * (1 + k)

    def pays(k: int) -> bool:
        gain = prod(chances[: k + 1]) / (1 + expected_kept(chances[:k]))
        return gain > PAYS * cost.token_seconds / seconds(k)

    assert all(map(pays, range(count)))
    assert count == len(chances) or not pays(count)
    assert speed(expected_kept(chances[:count]), count, cost=cost, running=running) >= speed(0.0, 0, cost=cost, running=running)


@settings(max_examples=300, deadline=None)
@given(
    rates=st.lists(rates, min_size=1, max_size=5),
    cost=costs,
    drafting=costs,
    others=st.integers(0, 20),
    limit=st.integers(0, 3),
)
def test_rows_that_share_the_drafter_decide_as_well_as_any_fixed_choice(
    rates: list[float], cost: RowCost, drafting: RowCost, others: int, limit: int
) -> None:
    """The counts are never slower than no drafts, nor than the same number for all rows by more than a rounding."""
    running = len(rates) + others

    def tokens_per_second(counts: list[int]) -> float:
        seconds = cost.base_seconds + running * (cost.row_seconds + cost.token_seconds) + cost.token_seconds * sum(counts)
        if any(counts):
            seconds += (
                drafting.base_seconds + drafting.row_seconds * sum(map(bool, counts)) + drafting.token_seconds * sum(counts)
            )
        return (running + sum(kept_of(rate, count) for rate, count in zip(rates, counts, strict=True))) / seconds

    counts = best_draft_counts(rates, cost=cost, drafting=drafting, running=running, limit=limit)
    best = max(tokens_per_second([k] * len(rates)) for k in range(limit + 1))
    assert all(0 <= count <= limit for count in counts)
    assert tokens_per_second(counts) >= tokens_per_second([0] * len(rates)) * (1 - 1e-9)
    assert tokens_per_second(counts) >= 0.85 * best


def test_a_step_in_which_no_row_samples_drafts_nothing() -> None:
    """A meter may have found that a step has no base cost; such a step once divided by zero."""
    free = RowCost(0.0, 0.01)
    assert best_draft_counts([], cost=free, drafting=free, running=0, limit=7) == []


def test_the_drafter_does_not_run_where_its_call_costs_more_than_it_brings() -> None:
    cost, call = RowCost(1.0, 0.05), RowCost(0.5, 0.02)
    assert best_draft_counts([0.25], cost=cost, drafting=call, running=1, limit=7) == [0]
    assert best_draft_counts([0.8], cost=cost, drafting=call, running=1, limit=7)[0] >= 3
    assert best_draft_counts([0.6, 0.0, 0.0, 0.0], cost=cost, drafting=call, running=4, limit=7) == [0, 0, 0, 0]
    assert min(best_draft_counts([0.7] * 4, cost=cost, drafting=call, running=4, limit=7)) > 0, "four rows share a call"


def test_a_drafter_that_has_much_to_catch_up_with_does_not_begin() -> None:
    cost, call = RowCost(1.0, 0.05), RowCost(0.2, 0.02)
    assert best_draft_counts([0.6], cost=cost, drafting=call, running=1, limit=7)[0] > 0
    assert best_draft_counts([0.6], cost=cost, drafting=call, running=1, limit=7, catch_up=[2.0]) == [0]
    first, second = best_draft_counts([0.6, 0.6], cost=cost, drafting=call, running=2, limit=7, catch_up=[0.0, 2.0])
    assert first > 0 == second


def test_a_draft_counts_if_all_before_it_are_kept() -> None:
    assert expected_kept([]) == 0.0
    assert expected_kept([0.5, 0.5, 1.0]) == pytest.approx(0.5 + 0.25 + 0.25)
    assert expected_kept([0.0, 1.0]) == 0.0


@settings(max_examples=300, deadline=None)
@given(rate=rates, better=rates, cost=costs, running=st.integers(1, 300), more=st.integers(0, 300))
def test_better_drafts_are_longer_and_larger_batches_shorten_them(
    rate: float, better: float, cost: RowCost, running: int, more: int
) -> None:
    rate, better = sorted((rate, better))
    few = best_chain_length([rate] * 32, cost=cost, running=running)
    assert best_chain_length([better] * 32, cost=cost, running=running) >= few
    assert best_chain_length([rate] * 32, cost=cost, running=running + more) <= few


def test_the_defaults_draft_moderately() -> None:
    assert 3 <= best_chain_length(PRIOR_ACCEPTANCE[:1] * 32, cost=RowCost(), running=1) <= 6


def test_poor_drafts_and_full_batches_get_length_zero() -> None:
    assert best_chain_length([0.02] * 32, cost=RowCost(), running=1) == 0
    assert best_chain_length([0.6] * 32, cost=RowCost(), running=128) == 0
    assert best_chain_length([0.0] * 32, cost=RowCost(1.0, 0.0), running=1) == 0


def test_certain_drafts_fill_the_room() -> None:
    assert best_chain_length([1.0] * 20, cost=RowCost(1.0, 0.05), running=1) == 20
    assert best_chain_length([0.6] * 0, cost=RowCost(), running=1) == 0


def test_the_fixed_cost_of_a_row_is_shared_by_its_drafts() -> None:
    """At a long context each row reads its own keys. Its drafts share that cost, so they pay off even in a full batch."""
    assert best_chain_length([0.6] * 32, cost=RowCost(1.0, 0.002, 0.06), running=64) > 3


def test_a_tree_is_used_whole_if_tokens_are_cheap_and_shortened_to_its_chain_if_not() -> None:
    shape = {"chain": 7, "depth": 7, "nodes": 24}
    nodes, kept = best_tree_size(0.65, **shape, cost=RowCost(1.0, 0.002), running=1)
    assert (nodes, kept) == (24, kept_of(0.65, 7))
    nodes, kept = best_tree_size(0.65, **shape, cost=RowCost(1.0, 0.1), running=1)
    assert 0 < nodes < 7
    assert kept < kept_of(0.65, nodes)
    assert best_tree_size(0.65, **shape, cost=RowCost(1.0, 0.1), running=64) == (0, 0.0)


# ---------------------------------------------------------------------- estimate of acceptance


def simulate(acceptance: Acceptance, rate: float, rows: int, length: int, rng: random.Random) -> None:
    for _ in range(rows):
        kept = next((i for i in range(length) if rng.random() >= rate), length)
        acceptance.update(depth=length, kept=kept)


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("length", [1, 4, 12])
def test_the_estimate_approaches_the_true_rate_at_any_length(rate: float, length: int) -> None:
    rng, estimates = random.Random(5), []
    for _ in range(300):
        acceptance = Acceptance()
        simulate(acceptance, rate, 40, length, rng)
        estimates.append(acceptance.rate)
    assert sum(estimates) / len(estimates) == pytest.approx(rate, abs=0.05)


def test_drafts_count_for_the_match_that_they_had() -> None:
    assert list(split_by_match(0, 5, 3)) == [(0, 5, 3)]
    assert list(split_by_match(0, 5, 5)) == [(0, 5, 5)]
    assert list(split_by_match(2, 7, 0)) == [(2, 1, 0)]
    assert list(split_by_match(2, 7, 2)) == [(2, 1, 1), (3, 1, 1), (4, 1, 0)]
    assert list(split_by_match(2, 2, 2)) == [(2, 1, 1), (3, 1, 1)]
    assert list(split_by_match(7, 7, 5)) == [(7, 1, 1), (8, 6, 4)]
    assert list(split_by_match(8, 7, 7)) == [(8, 7, 7)]


def test_the_estimate_falls_soon_after_a_source_gets_worse() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.update(depth=32, kept=32)
    assert acceptance.rate > 0.99
    failures = 0
    while acceptance.rate > 0.1:
        acceptance.update(depth=8, kept=0)
        failures += 1
    assert 3 < failures < 40


def test_a_row_without_drafts_leaves_the_estimate_unchanged() -> None:
    acceptance = Acceptance()
    acceptance.update(depth=0, kept=0)
    assert acceptance == Acceptance()


def test_a_new_request_starts_at_the_rate_of_its_source_and_learns_fast() -> None:
    source = Acceptance()
    for _ in range(100):
        source.update(depth=4, kept=0)
    fresh = source.prior_for_new_request()
    assert fresh.rate == pytest.approx(source.rate)
    for _ in range(2):
        fresh.update(depth=4, kept=4)
        source.update(depth=4, kept=4)
    assert fresh.rate > 0.5 > source.rate


def test_probes_become_rarer_until_their_source_pays_off() -> None:
    probe, tried = Probe(), [0]
    for step in range(1, 400):
        if step >= probe.due_at:
            probe.back_off(step)
            tried.append(step)
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps[:7] == [2, 4, 8, 16, 32, 64, 64]
    assert max(gaps) == LAST_PROBE_GAP
    probe.reset(400)
    assert probe.due_at == 402


# ---------------------------------------------------------------------- estimate of step cost


def fed(meter: CostMeter, steps: int, truth: RowCost, rng: random.Random, *, most_rows: int = 1, drafts: int = 8) -> CostMeter:
    """Observe noisy steps: up to a tenth more or less, and occasionally one that takes twenty times as long."""
    for _ in range(steps):
        rows = rng.randint(1, most_rows)
        tokens = rows + sum(rng.randint(0, drafts) for _ in range(rows))
        seconds = truth.base_seconds + rows * truth.row_seconds + tokens * truth.token_seconds
        meter.observe(tokens=tokens, rows=rows, seconds=seconds * rng.uniform(0.9, 1.1) * (20 if rng.random() < 0.01 else 1))
    return meter


@pytest.mark.parametrize("share", [0.005, 0.05, 0.3])
def test_the_cost_of_a_token_is_measured_through_noise(share: float) -> None:
    for seed in range(10):
        truth = RowCost(0.01, 0.01 * share)
        cost = fed(CostMeter(), 300, truth, random.Random(seed)).cost
        assert cost.token_seconds / (cost.base_seconds + cost.row_seconds) == pytest.approx(share, rel=0.5, abs=0.01)


def test_the_costs_of_rows_and_tokens_are_separated() -> None:
    for seed in range(10):
        cost = fed(CostMeter(), 400, RowCost(0.01, 0.0002, 0.004), random.Random(seed), most_rows=12).cost
        assert cost.token_seconds < 0.001
        assert cost.row_seconds == pytest.approx(0.004, rel=0.35)


def test_equal_steps_leave_the_prior_ratio() -> None:
    meter = CostMeter()
    for _ in range(100):
        meter.observe(tokens=1, rows=1, seconds=0.02)
    cost = meter.cost
    assert cost.token_seconds / cost.base_seconds == pytest.approx(PRIOR_TOKEN_SHARE, rel=1e-6)
    assert cost.base_seconds + cost.token_seconds == pytest.approx(0.02, rel=1e-6)


def test_without_observations_the_defaults_hold() -> None:
    meter = CostMeter()
    assert meter.cost == RowCost()
    meter.observe(tokens=0, rows=0, seconds=1.0)
    meter.observe(tokens=3, rows=1, seconds=0.0)
    meter.observe(tokens=3, rows=1, seconds=float("nan"))
    assert meter.cost == RowCost()


def test_a_warm_up_is_discarded_at_once() -> None:
    """The first steps compile kernels, so they say nothing about later steps."""
    meter = CostMeter()
    for _ in range(3):
        meter.observe(tokens=1, rows=1, seconds=8.0)
    fed(meter, 30, RowCost(0.01, 0.0005), random.Random(3))
    assert 0.003 < meter.cost.base_seconds < 0.02


def test_a_change_of_speed_is_followed() -> None:
    meter, rng = CostMeter(), random.Random(4)
    fed(meter, 300, RowCost(0.01, 0.0001), rng)
    fed(meter, 600, RowCost(0.02, 0.004), rng)
    assert meter.cost.token_seconds / meter.cost.base_seconds == pytest.approx(0.2, rel=0.4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 64), st.floats(1e-6, 100.0)), min_size=1, max_size=60))
def test_no_costs_are_ever_negative(steps: list[tuple[int, int, float]]) -> None:
    meter = CostMeter()
    for tokens, rows, seconds in steps:
        meter.observe(tokens=max(tokens, rows), rows=rows, seconds=seconds)
        cost = meter.cost
        assert cost.base_seconds >= 0.0
        assert cost.token_seconds > 0.0
        assert cost.row_seconds >= 0.0
        assert speed(1.0, 4, cost=cost, running=3) > 0.0


def test_a_step_in_which_no_row_samples_needs_no_drafts_even_if_its_fitted_cost_is_zero() -> None:
    assert best_draft_counts([], cost=RowCost(0.0, 1.0), drafting=RowCost(), running=0, limit=4) == []


def step_costs(steps: int, seconds: Callable[[int, int], float], rows: Sequence[int], seed: int) -> StepCosts:
    """Observe noisy steps with up to two drafts for some of their rows."""
    costs, rng = StepCosts(), random.Random(seed)
    for _ in range(steps):
        count = rng.choice(rows)
        tokens = count + rng.choice((0, 0, 0, 1, 2))
        costs.observe(tokens=tokens, rows=count, seconds=seconds(tokens, count) * rng.uniform(0.9, 1.1))
    return costs


def seconds_of(cost: RowCost, rows: int) -> float:
    return cost.base_seconds + rows * (cost.row_seconds + cost.token_seconds)


def test_a_jump_of_the_cost_beyond_some_number_of_tokens_is_seen_at_that_number_of_rows_alone() -> None:
    """As on a processor whose products take eight tokens at once."""
    for seed in range(10):
        costs = step_costs(600, lambda tokens, rows: 0.004 + 0.0002 * tokens + 0.004 * (tokens > 8), (1, 4, 8), seed)
        assert costs.of(8).token_seconds > 0.0015
        assert costs.of(4).token_seconds < 0.0008
        assert costs.of(1).token_seconds < 0.0008
        assert seconds_of(costs.of(8), 8) == pytest.approx(0.0056, rel=0.1)


def test_a_number_of_rows_that_was_not_seen_has_the_cost_of_the_fit() -> None:
    costs = step_costs(300, lambda tokens, rows: 0.01 + 0.0005 * tokens, (1, 2), 1)
    assert costs.of(5) == costs.cost
    assert costs.of(2) != costs.cost


def test_the_cost_of_steps_forgets_a_warm_up() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.observe(tokens=2, rows=2, seconds=8.0)
    for _ in range(10):
        costs.observe(tokens=2, rows=2, seconds=0.01)
    cost = costs.of(2)
    assert seconds_of(cost, 2) == pytest.approx(0.01, rel=0.01)


def test_the_cost_of_drafts_is_measured_at_a_new_number_of_rows_although_every_step_could_have_some() -> None:
    """With few rows a draft was nearly free, as where memory bounds the speed; it once was taken to be so with many rows too."""
    costs, drafted = StepCosts(), 0
    for rows, each in ((1, 1e-5), (4, 0.004)):
        for _ in range(40):
            drafts = 0 if costs.needs_plain_step(rows) else 4
            drafted += bool(drafts)
            costs.observe(tokens=rows + drafts, rows=rows, seconds=0.02 + each * drafts)
    assert drafted > 60
    assert costs.of(1).token_seconds < 0.001
    assert costs.of(4).token_seconds > 0.003
