"""The scheduler: fairness, chunks, token budgets, preemption."""

from __future__ import annotations

from typing import Any

import pytest

from onedraw.backends.base import Capacity, PageGroup
from onedraw.engine.fairness import PATIENCE
from onedraw.engine.scheduler import ScheduledRow, Scheduler
from onedraw.engine.sequence import Sequence
from onedraw.memory.allocator import Allocator
from onedraw.speculation.proposers import Proposal, Proposer, chain
from onedraw.speculation.speculator import Speculator
from onedraw.types import History, Request, RowOutcome, SampledToken, SamplingParams


def make(
    *,
    step_tokens: int = 8,
    lanes: int = 4,
    pages: int = 64,
    chunk: int = 1,
    proposers: tuple[Proposer, ...] = (),
    window: int | None = None,
    checkpoints: int = 0,
    draft_positions: int | None = None,
    fair: bool = True,
    turn_tokens: int = 64,
    step_seconds: float | None = None,
) -> Scheduler:
    capacity = Capacity(
        vocab=50,
        max_context=200,
        lanes=lanes,
        groups=(PageGroup(pages, window),),
        page_size=4,
        chunk=chunk,
        checkpoints=checkpoints,
        draft_positions=draft_positions,
    )
    allocator = Allocator(capacity, reuse=checkpoints > 0)
    return Scheduler(
        allocator=allocator,
        capacity=capacity,
        speculator=Speculator(proposers, draft_tokens=64),
        step_tokens=step_tokens,
        fair=fair,
        turn_tokens=turn_tokens,
        step_seconds=step_seconds,
    )


class Eager:
    """Drafts as many tokens as there is room for."""

    name = "eager"

    def propose(self, request: Request, history: History, room: int) -> Proposal:
        return Proposal(chain((2,) * room), self.name)

    def forget(self, request_id: str) -> None: ...


def add(scheduler: Scheduler, name: str, length: int, max_tokens: int = 50, **turn: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    sequence = Sequence(Request(id=name, prompt=(1,) * length, params=params, **turn))
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler) -> dict[str, ScheduledRow]:
    """One step in which every row samples token 2."""
    members = scheduler.plan()
    for member in members:
        sequence = member.sequence
        sequence.accept(member.row, RowOutcome((SampledToken(2),) if member.row.samples else ()))
        assert sequence.lease is not None
        sequence.lease.commit(sequence.computed, sequence.history)
    return {m.row.request_id: m for m in members}


def test_a_long_prompt_never_starves_running_sequences() -> None:
    scheduler = make(step_tokens=8)
    add(scheduler, "short", 3)
    step(scheduler)
    add(scheduler, "long", 60)
    for _ in range(5):
        rows = step(scheduler)
        assert rows["short"].row.samples
        assert len(rows["long"].row.tokens) == 7


def test_a_prompt_is_cut_by_measured_time_only_while_a_reply_waits_for_the_step() -> None:
    scheduler = make(step_tokens=180, step_seconds=0.1)
    add(scheduler, "first", 100)
    members = scheduler.plan()
    assert [len(m.row.tokens) for m in members] == [100]
    for member in members:
        member.sequence.accept(member.row, RowOutcome((SampledToken(2),)))
    scheduler.record_step(members, 0.15)
    add(scheduler, "second", 150)
    rows = step(scheduler)
    assert len(rows["first"].row.tokens) == 1
    assert len(rows["second"].row.tokens) == 66  # 0.1 s at 0.15 s per 100 tokens
    scheduler.finish(rows["first"].sequence)
    assert len(step(scheduler)["second"].row.tokens) == 84


def test_replies_in_the_background_do_not_cut_a_prompt() -> None:
    scheduler = make(step_tokens=180, step_seconds=0.1)
    add(scheduler, "line", 3, background=True)
    step(scheduler)
    add(scheduler, "slow", 100)
    members = scheduler.plan()
    scheduler.record_step(members, 10.0)
    for member in members:
        member.sequence.accept(member.row, RowOutcome((SampledToken(2),)))
    scheduler.finish(members[-1].sequence)
    add(scheduler, "prompt", 150)
    assert len(step(scheduler)["prompt"].row.tokens) == 150


def test_running_sequences_never_starve_a_prompt() -> None:
    scheduler = make(step_tokens=2, lanes=4)
    for i in range(3):
        add(scheduler, f"s{i}", 1)
    step(scheduler)
    add(scheduler, "prompt", 5)
    assert len(step(scheduler)["prompt"].row.tokens) == 1


def test_prompt_rows_stop_at_multiples_of_the_chunk() -> None:
    scheduler = make(step_tokens=10, chunk=4)
    add(scheduler, "a", 19)
    stops = []
    for _ in range(3):
        stops.append(step(scheduler)["a"].row.stop)
    assert stops == [8, 16, 19]


def test_drafts_leave_every_running_sequence_its_token() -> None:
    scheduler = make(step_tokens=6, lanes=4, proposers=(Eager(),))
    for i in range(4):
        add(scheduler, f"s{i}", 1)
    members = scheduler.plan()
    assert len(members) == 4
    assert sum(1 + len(m.row.drafts) for m in members) <= 6


def test_the_latest_sequence_is_preempted_first_and_resumes_first() -> None:
    scheduler = make(step_tokens=100, lanes=2, pages=6)
    first, second = add(scheduler, "first", 8), add(scheduler, "second", 8)
    while not scheduler.preemptions:
        step(scheduler)
    assert first in scheduler.running
    assert list(scheduler.waiting) == [second]
    assert second.computed == 0
    assert len(second.history.output) > 0  # sampled tokens stay
    scheduler.allocator.audit_all()


def test_drafts_of_a_step_fit_the_rollback_buffer() -> None:
    scheduler = make(step_tokens=100, lanes=4, proposers=(Eager(),), draft_positions=5)
    for i in range(4):
        add(scheduler, f"s{i}", 1)
    members = scheduler.plan()
    assert [len(m.row.drafts) for m in members] == [5, 0, 0, 0]


def test_a_row_is_no_longer_than_the_pages_left_by_the_window() -> None:
    scheduler = make(step_tokens=100, pages=6, window=8, chunk=4)
    add(scheduler, "long", 90)
    rows = [step(scheduler)["long"].row for _ in range(8)]
    assert (
        max(len(row.tokens) for row in rows) == 12
    )  # the largest multiple of the chunk within the 14 positions left by the window
    assert all(row.stop % 4 == 0 or row.stop == 90 for row in rows if row.start < 90)
    assert rows[-1].samples
    assert scheduler.preemptions == 0


def test_a_whole_prompt_from_a_checkpoint_generates_at_once_from_a_row_without_tokens() -> None:
    scheduler = make(proposers=(Eager(),), checkpoints=2)
    add(scheduler, "first", 6)
    (save,) = step(scheduler)["first"].row.saves
    add(scheduler, "again", 6)
    row = step(scheduler)["again"].row
    assert (row.start, row.tokens, row.drafts, row.restore, row.samples) == (6, (), (), save.slot, True)
    assert len(row.copies) == 1
    assert step(scheduler)["again"].row.tokens == (2,)
    scheduler.allocator.audit_all()


def test_a_row_that_saves_a_checkpoint_carries_no_drafts() -> None:
    """Then its last state is the state after the prompt, however a backend rolls back drafts."""
    scheduler = make(step_tokens=20, proposers=(Eager(),), checkpoints=2)
    add(scheduler, "short", 1)
    row = step(scheduler)["short"].row
    assert len(row.saves) == 1
    assert not row.drafts
    assert step(scheduler)["short"].row.drafts


# ---------------------------------------------------------------------- turns


def test_a_small_request_waits_one_step_behind_128_choices() -> None:
    scheduler = make(step_tokens=64, lanes=8, pages=400)
    for choice in range(128):
        add(scheduler, f"n-{choice}", 40, caller="many", parent="n")
    for _ in range(10):
        step(scheduler)
    add(scheduler, "small", 3, caller="one")
    assert step(scheduler)["small"].row.samples
    assert scheduler.turn_preemptions == 1
    assert len(scheduler.running) == 8
    scheduler.allocator.audit_all()


def test_a_small_request_of_the_same_caller_waits_one_step_too() -> None:
    scheduler = make(step_tokens=64, lanes=8, pages=400)
    for choice in range(128):
        add(scheduler, f"n-{choice}", 40, caller="one", parent="n")
    for _ in range(10):
        step(scheduler)
    add(scheduler, "small", 3, caller="one")
    assert step(scheduler)["small"].row.samples


def test_in_strict_order_a_request_waits_for_all_before_it() -> None:
    scheduler = make(step_tokens=64, lanes=2, pages=400, fair=False)
    for choice in range(6):
        add(scheduler, f"n-{choice}", 4, max_tokens=3, caller="many", parent="n")
    add(scheduler, "small", 3, caller="one")
    running = []
    while "small" not in running:
        running += step_and_finish(scheduler)
    assert running.index("small") == len(running) - 1
    assert all(f"n-{choice}" in running for choice in range(6))
    assert scheduler.turn_preemptions == 0


def test_a_small_prompt_is_not_behind_the_rest_of_a_long_one() -> None:
    scheduler = make(step_tokens=8)
    add(scheduler, "long", 150, caller="a")
    step(scheduler)
    add(scheduler, "small", 5, caller="b")
    steps = 0
    while "small" not in step(scheduler):
        steps += 1
    assert steps <= 1


@pytest.mark.parametrize("fair", [True, False])
def test_background_requests_get_the_lanes_that_others_leave(fair: bool) -> None:
    scheduler = make(lanes=2, fair=fair)
    for name in ("line-1", "line-2", "line-3"):
        add(scheduler, name, 3, caller="one in the background", background=True)
    assert set(step(scheduler)) == {"line-1", "line-2"}
    for name in ("chat-1", "chat-2"):
        add(scheduler, name, 3, max_tokens=3, caller="one")
        assert name in step(scheduler)
    assert set(step(scheduler)) == {"chat-1", "chat-2"}
    for sequence in [one for one in scheduler.running if one.request.id == "chat-1"]:
        scheduler.finish(sequence)
    assert set(step(scheduler)) == {"chat-2", "line-1"}


def test_callers_over_the_number_of_lanes_take_turns() -> None:
    scheduler = make(step_tokens=64, lanes=2, pages=400, turn_tokens=4)
    for caller in range(5):
        add(scheduler, f"c{caller}", 2, max_tokens=40, caller=f"c{caller}")
    first: dict[str, int] = {}
    for number in range(16):
        for name in step(scheduler):
            first.setdefault(name, number)
        assert len(scheduler.running) == 2
    assert sorted(first.values()) == [0, 0, 4, 4, 8]


def test_missing_pages_are_taken_from_the_caller_with_most_rows_and_only_if_that_is_sufficient() -> None:
    scheduler = make(step_tokens=64, lanes=8, pages=13)
    for choice in range(4):
        add(scheduler, f"n-{choice}", 8, caller="many", parent=f"n-{choice}")
    step(scheduler)
    before = len(scheduler.running)
    assert before == 4
    add(scheduler, "too large", 50, caller="other")  # needs all pages, of which the oldest row keeps its own
    assert "too large" not in step(scheduler)
    assert (scheduler.turn_preemptions, len(scheduler.running)) == (0, before)
    add(scheduler, "small", 6, caller="third")
    assert "small" in step(scheduler)
    assert scheduler.turn_preemptions == 1
    scheduler.allocator.audit_all()


def test_a_large_request_is_passed_by_small_ones_a_few_times_only() -> None:
    scheduler = make(step_tokens=64, lanes=8, pages=12)
    add(scheduler, "first", 20, caller="a", max_tokens=12)
    step(scheduler)
    add(scheduler, "large", 40, caller="b", max_tokens=1)
    served: list[str] = []
    for number in range(40):
        add(scheduler, f"small-{number}", 2, caller=f"c{number}", max_tokens=1)
        served += step_and_finish(scheduler)
    before = [name for name in served[: served.index("large")] if name.startswith("small")]
    assert len(before) == PATIENCE


def step_and_finish(scheduler: Scheduler) -> list[str]:
    """One step, after which sequences that have all their tokens are removed."""
    rows = step(scheduler)
    for member in rows.values():
        if member.sequence.lease is not None and member.sequence.room == 0:
            scheduler.finish(member.sequence)
    return list(rows)
