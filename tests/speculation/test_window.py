"""How much to guess: the decision, and the estimates it reads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.speculation.draft_length import (
    LAST_PROBE_GAP,
    PRIOR_ACCEPTANCE,
    PRIOR_TOKEN_SHARE,
    Acceptance,
    CostMeter,
    Probe,
    RowCost,
    expected,
    how_many,
    how_much_of_a_tree,
    speed,
)

rates = st.floats(0.0, 1.0)
costs = st.builds(RowCost, st.floats(0.0, 10.0), st.floats(1e-4, 5.0), st.floats(0.0, 1.0))


# ---------------------------------------------------------------------- the decision


@settings(max_examples=500, deadline=None)
@given(rate=rates, cost=costs, running=st.integers(1, 300), limit=st.integers(0, 32))
def test_no_other_length_is_faster(rate: float, cost: RowCost, running: int, limit: int) -> None:
    """Against every length there is, its expectation summed term by term."""
    count = how_many(rate, cost=cost, running=running, limit=limit)
    assert 0 <= count <= limit

    def tokens_per_second(k: int) -> float:
        return (1 + sum(rate**i for i in range(1, k + 1))) / (
            cost.base_seconds / running + cost.row_seconds + cost.token_seconds * (1 + k)
        )

    best = max(tokens_per_second(k) for k in range(limit + 1))
    assert tokens_per_second(count) == pytest.approx(best, rel=1e-9)


@given(rate=rates, depth=st.integers(0, 40))
def test_the_expectation_is_the_sum_of_powers(rate: float, depth: int) -> None:
    assert expected(rate, depth) == pytest.approx(sum(rate**i for i in range(1, depth + 1)), rel=1e-6)


@settings(max_examples=300, deadline=None)
@given(rate=rates, better=rates, cost=costs, running=st.integers(1, 300), more=st.integers(0, 300))
def test_better_drafts_are_longer_and_fuller_turns_shorten_them(
    rate: float, better: float, cost: RowCost, running: int, more: int
) -> None:
    rate, better = sorted((rate, better))
    few = how_many(rate, cost=cost, running=running, limit=32)
    assert how_many(better, cost=cost, running=running, limit=32) >= few
    assert how_many(rate, cost=cost, running=running + more, limit=32) <= few


def test_the_defaults_draft_moderately() -> None:
    assert 3 <= how_many(PRIOR_ACCEPTANCE, cost=RowCost(), running=1, limit=32) <= 6


def test_hopeless_drafts_and_full_turns_go_to_nothing() -> None:
    assert how_many(0.02, cost=RowCost(), running=1, limit=32) == 0
    assert how_many(0.6, cost=RowCost(), running=128, limit=32) == 0
    assert how_many(0.0, cost=RowCost(1.0, 0.0), running=1, limit=32) == 0


def test_certain_drafts_fill_the_room() -> None:
    assert how_many(1.0, cost=RowCost(1.0, 0.5), running=1, limit=20) == 20
    assert how_many(0.6, cost=RowCost(), running=1, limit=0) == 0


def test_what_a_row_costs_by_itself_is_shared_by_its_drafts() -> None:
    """At a long context each row reads its own keys: drafts share that, so they stay worthwhile in a full turn."""
    assert how_many(0.6, cost=RowCost(1.0, 0.002, 0.06), running=64, limit=32) > 3


def test_a_tree_is_taken_whole_where_tokens_are_cheap_and_cut_to_its_chain_where_they_are_not() -> None:
    shape = {"chain": 7, "depth": 7, "nodes": 24}
    nodes, kept = how_much_of_a_tree(0.65, **shape, cost=RowCost(1.0, 0.002), running=1)
    assert (nodes, kept) == (24, expected(0.65, 7))
    nodes, kept = how_much_of_a_tree(0.65, **shape, cost=RowCost(1.0, 0.1), running=1)
    assert 0 < nodes < 7
    assert kept < expected(0.65, nodes)
    assert how_much_of_a_tree(0.65, **shape, cost=RowCost(1.0, 0.1), running=64) == (0, 0.0)


# ---------------------------------------------------------------------- what was kept


def simulate(acceptance: Acceptance, rate: float, rows: int, length: int, rng: random.Random) -> None:
    for _ in range(rows):
        kept = next((i for i in range(length) if rng.random() >= rate), length)
        acceptance.learn(depth=length, kept=kept)


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("length", [1, 4, 12])
def test_the_estimate_comes_near_the_truth_whatever_the_length(rate: float, length: int) -> None:
    rng, estimates = random.Random(5), []
    for _ in range(300):
        acceptance = Acceptance()
        simulate(acceptance, rate, 40, length, rng)
        estimates.append(acceptance.rate)
    assert sum(estimates) / len(estimates) == pytest.approx(rate, abs=0.05)


def test_a_source_that_stops_being_right_is_found_out_soon() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.learn(depth=32, kept=32)
    assert acceptance.rate > 0.99
    failures = 0
    while acceptance.rate > 0.1:
        acceptance.learn(depth=8, kept=0)
        failures += 1
    assert 3 < failures < 25


def test_nothing_drafted_teaches_nothing() -> None:
    acceptance = Acceptance()
    acceptance.learn(depth=0, kept=0)
    assert acceptance == Acceptance()


def test_a_new_request_begins_halfway_to_what_the_source_achieved() -> None:
    source = Acceptance()
    for _ in range(100):
        source.learn(depth=4, kept=0)
    assert source.successor().rate == pytest.approx(PRIOR_ACCEPTANCE / 2, abs=0.01)


def test_a_probe_comes_ever_more_rarely_until_its_source_pays_off() -> None:
    probe, gaps, waited = Probe(), [], 0
    for _ in range(400):
        waited += 1
        if probe.due():
            probe.spend()
            gaps.append(waited)
            waited = 0
    assert gaps[:6] == [4, 8, 16, 32, 64, 64]
    assert max(gaps) == LAST_PROBE_GAP
    probe.rest()
    assert [probe.due() for _ in range(4)] == [False, False, False, True]


# ---------------------------------------------------------------------- what turns cost


def fed(meter: CostMeter, turns: int, truth: RowCost, rng: random.Random, *, most_rows: int = 1, drafts: int = 8) -> CostMeter:
    """Turns with noise: a tenth up or down, and now and then one that takes twenty times as long."""
    for _ in range(turns):
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


def test_rows_and_tokens_are_told_apart() -> None:
    for seed in range(10):
        cost = fed(CostMeter(), 400, RowCost(0.01, 0.0002, 0.004), random.Random(seed), most_rows=12).cost
        assert cost.token_seconds < 0.001
        assert cost.row_seconds == pytest.approx(0.004, rel=0.35)


def test_turns_that_are_all_alike_leave_the_prior_proportion() -> None:
    meter = CostMeter()
    for _ in range(100):
        meter.observe(tokens=1, rows=1, seconds=0.02)
    cost = meter.cost
    assert cost.token_seconds / cost.base_seconds == pytest.approx(PRIOR_TOKEN_SHARE, rel=1e-6)
    assert cost.base_seconds + cost.token_seconds == pytest.approx(0.02, rel=1e-6)


def test_before_anything_is_seen_the_defaults_hold() -> None:
    meter = CostMeter()
    assert meter.cost == RowCost()
    meter.observe(tokens=0, rows=0, seconds=1.0)
    meter.observe(tokens=3, rows=1, seconds=0.0)
    meter.observe(tokens=3, rows=1, seconds=float("nan"))
    assert meter.cost == RowCost()


def test_a_warm_up_is_forgotten_at_once() -> None:
    """The first turns compile; they are no measure of the turns to come."""
    meter = CostMeter()
    for _ in range(3):
        meter.observe(tokens=1, rows=1, seconds=8.0)
    fed(meter, 30, RowCost(0.01, 0.0005), random.Random(3))
    assert 0.003 < meter.cost.base_seconds < 0.02


def test_a_change_of_pace_is_followed() -> None:
    meter, rng = CostMeter(), random.Random(4)
    fed(meter, 300, RowCost(0.01, 0.0001), rng)
    fed(meter, 600, RowCost(0.02, 0.004), rng)
    assert meter.cost.token_seconds / meter.cost.base_seconds == pytest.approx(0.2, rel=0.4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 64), st.floats(1e-6, 100.0)), min_size=1, max_size=60))
def test_no_costs_are_ever_negative(turns: list[tuple[int, int, float]]) -> None:
    meter = CostMeter()
    for tokens, rows, seconds in turns:
        meter.observe(tokens=max(tokens, rows), rows=rows, seconds=seconds)
        cost = meter.cost
        assert cost.base_seconds >= 0.0
        assert cost.token_seconds > 0.0
        assert cost.row_seconds >= 0.0
        assert speed(1.0, 4, cost=cost, running=3) > 0.0
