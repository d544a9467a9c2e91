"""The speculator: which source drafts, and how many drafts a row carries."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from onedraw.speculation.draft_length import RowCost
from onedraw.speculation.proposers import NO_PROPOSAL, Proposal, chain
from onedraw.speculation.speculator import DEVICE, Speculator
from onedraw.types import Draft, History, Request, SamplingParams

REQUEST = Request(id="r", prompt=(1, 2, 3), params=SamplingParams(max_tokens=1000))
HISTORY = History(REQUEST.prompt)
STEP = RowCost(0.01, 0.0005)  # what a step costs in these tests
OWN = chain((50, 51, 52, 53, 54, 55, 56))
TREE = (*OWN, Draft(60, -1), Draft(61, -1), Draft(62, 0), Draft(63, 1), Draft(64, 7))


@dataclass
class Constant:
    """Always proposes the same tokens, and records its calls."""

    tokens: tuple[int, ...] = tuple(range(10, 80))
    match: int = 0
    name: str = "constant"
    rooms: list[int] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def propose(self, request: Request, history: History, room: int) -> Proposal:
        self.rooms.append(room)
        return Proposal(chain(self.tokens[:room]), self.name, self.match)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def propose(
    speculator: Speculator, own: tuple[Draft, ...] = (), *, room: int = 20, running: int = 1, name: str = "r"
) -> Proposal:
    return speculator.propose(replace(REQUEST, id=name), HISTORY, own, room=room, running=running)


def run_steps(
    speculator: Speculator, steps: int, kept: dict[str, int], own: tuple[Draft, ...] = (), running: int = 1
) -> list[Proposal]:
    """Steps in which each source keeps at most the given number of drafts."""
    proposals = []
    for _ in range(steps):
        proposal = propose(speculator, own, running=running)
        proposals.append(proposal)
        if proposal.drafts:
            drafted = len(proposal.drafts)
            counts = {"drafted": drafted, "kept": min(kept[proposal.source], drafted), "match": proposal.match}
            speculator.record_outcome("r", proposal.source, **counts)
        carried = 1 + len(proposal.drafts)
        speculator.record_step(tokens=carried, rows=1, seconds=STEP.base_seconds + STEP.token_seconds * carried)
    return proposals


def test_the_first_proposer_with_drafts_is_used() -> None:
    speculator = Speculator([Constant((), name="silent"), Constant(name="a"), Constant(name="b")])
    assert propose(speculator).source == "a"


def test_without_proposers_the_backends_drafts_are_used() -> None:
    assert propose(Speculator(), OWN).source == DEVICE
    assert propose(Speculator()) == NO_PROPOSAL


def test_a_forced_length_ignores_acceptance_and_batch_size() -> None:
    speculator = Speculator([Constant()], draft_tokens=9)
    assert {len(p.drafts) for p in run_steps(speculator, 50, {"constant": 0}, running=200)} == {9}
    assert len(propose(speculator, room=4).drafts) == 4
    assert len(propose(Speculator(draft_tokens=3), OWN).drafts) == 3
    assert propose(Speculator([Constant()], draft_tokens=0), OWN) == NO_PROPOSAL


def test_a_forced_length_counts_the_depth_of_a_tree() -> None:
    assert propose(Speculator(draft_tokens=7), TREE).drafts == TREE
    assert propose(Speculator(draft_tokens=4), TREE).drafts == OWN[:4]


def test_drafts_never_exceed_the_room() -> None:
    for own in ((), OWN, TREE):
        for room in range(-1, 9):
            for forced in (None, 5, 64):
                proposal = propose(Speculator([Constant()] if not own else [], draft_tokens=forced), own, room=room)
                assert len(proposal.drafts) <= max(room, 0)
                if own:
                    assert proposal.drafts == own[: len(proposal.drafts)]


def test_a_request_that_wants_no_drafts_gets_none() -> None:
    proposer = Constant()
    request = replace(REQUEST, speculate=False)
    assert Speculator([proposer]).propose(request, HISTORY, OWN, room=9, running=1) == NO_PROPOSAL
    assert proposer.rooms == []


def test_good_drafts_grow_and_bad_ones_shrink_to_a_probe() -> None:
    good = run_steps(Speculator([Constant()]), 30, {"constant": 99})
    assert len(good[-1].drafts) > len(good[0].drafts) > 1
    bad = [len(p.drafts) for p in run_steps(Speculator([Constant()]), 400, {"constant": 0})]
    assert bad[0] > 1
    tail = bad[100:]
    assert max(tail) <= 2
    assert 0 < sum(1 for n in tail if n) <= 6
    assert bad.index(0) < 30


def test_a_proposer_that_improves_is_used_again() -> None:
    speculator = Speculator([Constant()])
    run_steps(speculator, 200, {"constant": 0})
    assert len(run_steps(speculator, 150, {"constant": 99})[-1].drafts) > 8


def test_drafts_after_a_longer_match_are_used_where_those_after_a_short_one_do_not_pay_off() -> None:
    """With 6 rows a draft has to be kept in about half of the cases. At first both matches are judged by what is usual."""
    proposer = Constant(match=2)
    speculator = Speculator([proposer])
    run_steps(speculator, 200, {"constant": 0})
    assert not propose(speculator, running=6).drafts
    proposer.match = 8
    assert max(len(propose(speculator, running=6).drafts) for _ in range(4)) > 2


def test_a_proposer_that_has_nothing_to_use_is_asked_in_every_fourth_step() -> None:
    proposer = Constant(())
    speculator = Speculator([proposer])
    run_steps(speculator, 100, {})
    proposer.rooms.clear()
    run_steps(speculator, 100, {})
    assert len(proposer.rooms) == 25
    proposer.tokens = (7, 8)
    assert all(p.drafts for p in run_steps(speculator, 20, {"constant": 2})[4:])


def test_a_chain_that_is_kept_makes_its_later_drafts_likelier() -> None:
    short, long = (len(propose(Speculator([Constant(match=match)]), running=6).drafts) for match in (3, 6))
    assert short < long


def test_a_full_batch_carries_almost_no_drafts() -> None:
    speculator, rng = Speculator([Constant()]), random.Random(1)
    drafted = 0
    for _ in range(640):
        proposal = propose(speculator, running=256)
        drafted += len(proposal.drafts)
        kept = next((i for i in range(len(proposal.drafts)) if rng.random() > 0.6), len(proposal.drafts))
        if proposal.drafts:
            speculator.record_outcome("r", proposal.source, drafted=len(proposal.drafts), kept=kept)
        speculator.record_step(tokens=256 + len(proposal.drafts), rows=256, seconds=0.01 + 0.0005 * (256 + len(proposal.drafts)))
    assert 0 < drafted < 32
    assert len(propose(speculator).drafts) > 1


def test_expensive_tokens_shorten_drafts_and_cheap_ones_lengthen_them() -> None:
    expensive, cheap = Speculator([Constant()]), Speculator([Constant()])
    for step in range(60):
        tokens = 1 + step % 5
        expensive.record_step(tokens=tokens, rows=1, seconds=0.01 + 0.01 * tokens)
        cheap.record_step(tokens=tokens, rows=1, seconds=0.01 + 1e-5 * tokens)
    assert len(propose(expensive).drafts) < len(propose(Speculator([Constant()])).drafts) < len(propose(cheap).drafts)


def test_the_backends_drafts_replace_a_worse_proposer_which_is_still_probed() -> None:
    speculator = Speculator([Constant()])
    run_steps(speculator, 20, {"constant": 0, DEVICE: 5}, OWN)
    later = [p.source for p in run_steps(speculator, 300, {"constant": 0, DEVICE: 5}, OWN)]
    assert later.count(DEVICE) > 280
    assert later.count("constant") >= 3


def test_a_proposer_as_good_as_the_backend_is_preferred() -> None:
    speculator = Speculator([Constant()])
    assert {p.source for p in run_steps(speculator, 100, {"constant": 5, DEVICE: 5}, OWN)} == {"constant"}


def test_a_short_proposal_is_replaced_by_a_long_one_of_the_backend() -> None:
    speculator = Speculator([Constant((7,))])
    assert propose(speculator, OWN).source == DEVICE
    assert propose(speculator).source == "constant"


def test_a_tree_is_shortened_to_a_part_of_its_chain() -> None:
    speculator = Speculator()
    for step in range(60):
        speculator.record_step(tokens=1 + step % 5, rows=1, seconds=0.01 + 1e-5 * (step % 5))
    assert propose(speculator, TREE).drafts == TREE
    assert propose(speculator, TREE, room=9).drafts == TREE[:9]
    crowded = propose(speculator, TREE, running=400).drafts
    assert crowded == OWN[: len(crowded)]


def test_a_tree_kept_to_its_depth_counts_as_fully_accepted() -> None:
    with_depth, without_depth = Speculator(), Speculator()
    for _ in range(30):
        propose(with_depth, TREE)
        propose(without_depth, TREE)
        with_depth.record_outcome("r", DEVICE, drafted=12, kept=7, depth=7)
        without_depth.record_outcome("r", DEVICE, drafted=12, kept=7)
    assert propose(with_depth, OWN, running=4).drafts == OWN
    assert len(propose(without_depth, OWN, running=4).drafts) < len(OWN)


def test_a_new_request_starts_from_the_acceptance_of_others() -> None:
    speculator = Speculator([Constant()])
    first = len(propose(speculator).drafts)
    run_steps(speculator, 60, {"constant": 99})
    assert len(propose(speculator, name="new").drafts) > first


def test_an_ended_request_leaves_no_state() -> None:
    proposer = Constant()
    speculator = Speculator([proposer])
    propose(speculator)
    speculator.forget("r")
    speculator.record_outcome("r", "constant", drafted=3, kept=1)
    speculator.forget("r")
    assert proposer.forgotten == ["r", "r"]


def test_the_counters_add_up() -> None:
    speculator = Speculator([Constant()])
    empty = speculator.stats()
    assert (empty.drafts, empty.accepted_per_position, empty.by_source) == (0, (0,) * 16, {})
    propose(speculator)
    speculator.record_outcome("r", "constant", drafted=4, kept=2)
    speculator.record_outcome("r", "constant", drafted=4, kept=0)
    speculator.record_outcome("r", DEVICE, drafted=30, kept=20, depth=25)
    stats = speculator.stats()
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (3, 38, 22)
    assert stats.accepted_per_position == (2, 2, *(1,) * 14)
    assert stats.by_source == {"constant": (2, 8, 2), DEVICE: (1, 30, 20)}
    assert stats.propose_seconds > 0.0
    with pytest.raises(AttributeError):
        stats.drafts = 4  # type: ignore[misc]


def test_one_slow_first_call_does_not_turn_the_drafter_off_for_good() -> None:
    """The first call may compile kernels. Probes are paid for later if their price is more than can be saved up."""
    speculator, calls, count = Speculator(), 0, 0
    for _ in range(3000):
        propose(speculator, OWN if count else ())
        [count] = speculator.plan_drafter([REQUEST], limit=7)
        if count:
            speculator.record_outcome("r", DEVICE, drafted=count, kept=count)
        seconds = 0.0 if not count else 1.0 if not calls else 0.002
        calls += bool(count)
        speculator.record_step(
            tokens=1 + count, rows=1, seconds=0.01, drafting_rows=bool(count), drafted=count, drafter_seconds=seconds
        )
    assert calls > 1000


def drafting_steps(speculator: Speculator, steps: int, *, kept: int, call: float, catch_up: float) -> list[int]:
    """Steps of one request in which the backend's drafter takes `call` seconds, and `catch_up` for each step since it ran last.
    Return the steps in which it ran."""
    ran, behind, own = [], 0, 0
    for step in range(steps):
        propose(speculator, OWN[:own])
        if own:
            speculator.record_outcome("r", DEVICE, drafted=own, kept=min(own, kept))
        tokens = 1 + own
        [own] = speculator.plan_drafter([REQUEST], limit=7)
        seconds = call + catch_up * behind if own else 0.0
        behind = 0 if own else behind + 1
        speculator.record_step(
            tokens=tokens,
            rows=1,
            seconds=STEP.base_seconds + STEP.token_seconds * tokens,
            drafting_rows=bool(own),
            drafted=own,
            drafter_seconds=seconds,
        )
        if own:
            ran.append(step)
    return ran


def test_probes_of_the_drafter_stay_within_their_share_however_long_it_catches_up() -> None:
    for catch_up in (0.0, 1e-4, 3e-4):
        speculator = Speculator()
        drafting_steps(speculator, 300, kept=0, call=0.002, catch_up=catch_up)
        before = speculator.stats()
        ran = drafting_steps(speculator, 4000, kept=0, call=0.002, catch_up=catch_up)
        spent = speculator.stats().drafter_seconds - before.drafter_seconds
        assert ran
        assert spent < 0.01 * 4000 * (STEP.base_seconds + STEP.token_seconds)


def test_the_cost_of_catching_up_does_not_count_as_that_of_a_call() -> None:
    """It once did, so that a drafter which had stopped looked too expensive to run again."""
    speculator = Speculator()
    drafting_steps(speculator, 100, kept=7, call=0.002, catch_up=0.0)
    drafting_steps(speculator, 1000, kept=0, call=0.002, catch_up=1e-4)
    cost = speculator.stats().drafter_cost
    assert cost.base_seconds + cost.token_seconds < 0.003
    assert len(drafting_steps(speculator, 4000, kept=7, call=0.002, catch_up=1e-4)) > 1000
