"""Who runs and how much: fairness, chunks, budgets."""

from __future__ import annotations

from onedraw.backends.base import Capacity, PageGroup
from onedraw.engine.scheduler import Member, Scheduler
from onedraw.engine.sequence import Sequence
from onedraw.memory.ledger import Ledger
from onedraw.speculation.proposer import Proposer, chain
from onedraw.speculation.speculator import Speculator
from onedraw.types import Choice, Draft, History, Request, RowOutcome, SamplingParams


def make(
    *, turn_tokens: int = 8, lanes: int = 4, pages: int = 64, chunk: int = 1, proposers: tuple[Proposer, ...] = ()
) -> Scheduler:
    groups = (PageGroup(pages),)
    capacity = Capacity(vocab=50, max_context=200, lanes=lanes, groups=groups, page_size=4, chunk=chunk)
    ledger = Ledger(capacity, reuse=False)
    return Scheduler(ledger=ledger, capacity=capacity, speculator=Speculator(proposers, draft_tokens=64), turn_tokens=turn_tokens)


def add(scheduler: Scheduler, name: str, length: int, max_tokens: int = 50) -> Sequence:
    sequence = Sequence(Request(id=name, prompt=(1,) * length, params=SamplingParams(max_tokens=max_tokens)))
    scheduler.waiting.append(sequence)
    return sequence


def step(scheduler: Scheduler) -> dict[str, Member]:
    """One turn in which every row chooses token 2."""
    members = scheduler.plan()
    for member in members:
        member.sequence.accept(member.row, RowOutcome((Choice(2),) if member.row.chooses else ()))
    return {m.row.request_id: m for m in members}


def test_a_long_prompt_never_starves_what_runs() -> None:
    scheduler = make(turn_tokens=8)
    add(scheduler, "short", 3)
    step(scheduler)
    add(scheduler, "long", 60)
    for _ in range(5):
        turn = step(scheduler)
        assert turn["short"].row.chooses
        assert len(turn["long"].row.tokens) == 7


def test_what_runs_never_starves_a_prompt() -> None:
    scheduler = make(turn_tokens=2, lanes=4)
    for i in range(3):
        add(scheduler, f"s{i}", 1)
    step(scheduler)
    add(scheduler, "prompt", 5)
    assert len(step(scheduler)["prompt"].row.tokens) == 1


def test_prompt_rows_stop_at_multiples_of_the_chunk() -> None:
    scheduler = make(turn_tokens=10, chunk=4)
    add(scheduler, "a", 19)
    stops = []
    for _ in range(3):
        stops.append(step(scheduler)["a"].row.stop)
    assert stops == [8, 16, 19]


def test_drafts_leave_every_running_sequence_its_token() -> None:
    class Eager:
        name = "eager"

        def propose(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
            return chain((2,) * room)

        def forget(self, request_id: str) -> None: ...

    scheduler = make(turn_tokens=6, lanes=4, proposers=(Eager(),))
    for i in range(4):
        add(scheduler, f"s{i}", 1)
    members = scheduler.plan()
    assert len(members) == 4
    assert sum(1 + len(m.row.drafts) for m in members) <= 6


def test_the_latest_comer_is_driven_out_first_and_waits_in_front() -> None:
    scheduler = make(turn_tokens=100, lanes=2, pages=6)
    first, second = add(scheduler, "first", 8), add(scheduler, "second", 8)
    while not scheduler.preemptions:
        step(scheduler)
    assert first in scheduler.running
    assert scheduler.waiting[0] is second
    assert second.computed == 0
    assert len(second.history.output) > 0  # what was chosen stays chosen
    scheduler.ledger.audit()
