"""Who guesses and how much, put together."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from onedraw.speculation.proposer import chain
from onedraw.speculation.speculator import DEVICE, NOTHING, Proposal, Speculator
from onedraw.types import Draft, History, Request, SamplingParams

REQUEST = Request(id="r", prompt=(1, 2, 3), params=SamplingParams(max_tokens=1000))
HISTORY = History(REQUEST.prompt)
OWN = chain((50, 51, 52, 53, 54, 55, 56))
TREE = (*OWN, Draft(60, -1), Draft(61, -1), Draft(62, 0), Draft(63, 1), Draft(64, 7))


@dataclass
class Constant:
    """Always proposes the same, and notes what it was asked."""

    tokens: tuple[int, ...] = tuple(range(10, 80))
    name: str = "constant"
    rooms: list[int] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def propose(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
        self.rooms.append(room)
        return chain(self.tokens)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def ask(speculator: Speculator, own: tuple[Draft, ...] = (), *, room: int = 20, running: int = 1, name: str = "r") -> Proposal:
    return speculator.propose(replace(REQUEST, id=name), HISTORY, own, room=room, running=running)


def live(
    speculator: Speculator, turns: int, kept: dict[str, int], own: tuple[Draft, ...] = (), running: int = 1
) -> list[Proposal]:
    """Turns in which each source keeps at most so many drafts."""
    guesses = []
    for _ in range(turns):
        proposal = ask(speculator, own, running=running)
        guesses.append(proposal)
        if proposal.drafts:
            drafted = len(proposal.drafts)
            speculator.learn("r", proposal.source, drafted=drafted, kept=min(kept[proposal.source], drafted))
    return guesses


def test_the_first_proposer_with_something_wins() -> None:
    speculator = Speculator([Constant((), "silent"), Constant(name="a"), Constant(name="b")])
    assert ask(speculator).source == "a"


def test_without_proposers_the_backend_guesses_and_without_any_nobody() -> None:
    assert ask(Speculator(), OWN).source == DEVICE
    assert ask(Speculator()) == NOTHING


def test_a_forced_length_is_kept_to_whatever_happens() -> None:
    speculator = Speculator([Constant()], draft_tokens=9)
    assert {len(g.drafts) for g in live(speculator, 50, {"constant": 0}, running=200)} == {9}
    assert len(ask(speculator, room=4).drafts) == 4
    assert len(ask(Speculator(draft_tokens=3), OWN).drafts) == 3
    assert ask(Speculator([Constant()], draft_tokens=0), OWN) == NOTHING


def test_a_forced_length_counts_the_depth_of_a_tree() -> None:
    assert ask(Speculator(draft_tokens=7), TREE).drafts == TREE
    assert ask(Speculator(draft_tokens=4), TREE).drafts == OWN[:4]


def test_drafts_never_exceed_the_room() -> None:
    for own in ((), OWN, TREE):
        for room in range(-1, 9):
            for forced in (None, 5, 64):
                proposal = ask(Speculator([Constant()] if not own else [], draft_tokens=forced), own, room=room)
                assert len(proposal.drafts) <= max(room, 0)
                if own:
                    assert proposal.drafts == own[: len(proposal.drafts)]


def test_a_request_that_wants_no_drafts_gets_none() -> None:
    proposer = Constant()
    request = replace(REQUEST, speculate=False)
    assert Speculator([proposer]).propose(request, HISTORY, OWN, room=9, running=1) == NOTHING
    assert proposer.rooms == []


def test_good_drafts_grow_and_bad_ones_shrink_to_a_probe() -> None:
    good = live(Speculator([Constant()]), 30, {"constant": 99})
    assert len(good[-1].drafts) > len(good[0].drafts) > 1
    bad = [len(g.drafts) for g in live(Speculator([Constant()]), 400, {"constant": 0})]
    assert bad[0] > 1
    tail = bad[100:]
    assert max(tail) <= 2
    assert 0 < sum(1 for n in tail if n) <= 6
    assert bad.index(0) < 30


def test_a_proposer_that_becomes_right_is_found_again() -> None:
    speculator = Speculator([Constant()])
    live(speculator, 200, {"constant": 0})
    assert len(live(speculator, 150, {"constant": 99})[-1].drafts) > 8


def test_a_full_turn_carries_next_to_no_drafts_even_fair_ones() -> None:
    speculator, rng = Speculator([Constant()]), random.Random(1)
    drafted = 0
    for _ in range(640):
        proposal = ask(speculator, running=256)
        drafted += len(proposal.drafts)
        kept = next((i for i in range(len(proposal.drafts)) if rng.random() > 0.6), len(proposal.drafts))
        if proposal.drafts:
            speculator.learn("r", proposal.source, drafted=len(proposal.drafts), kept=kept)
    assert 0 < drafted < 32
    assert len(ask(speculator).drafts) > 1


def test_dear_tokens_shorten_drafts_and_free_ones_lengthen_them() -> None:
    dear, free = Speculator([Constant()]), Speculator([Constant()])
    for turn in range(60):
        tokens = 1 + turn % 5
        dear.observe(tokens=tokens, rows=1, seconds=0.01 + 0.01 * tokens)
        free.observe(tokens=tokens, rows=1, seconds=0.01 + 1e-5 * tokens)
    assert len(ask(dear).drafts) < len(ask(Speculator([Constant()])).drafts) < len(ask(free).drafts)


def test_the_backend_guesses_where_a_proposer_is_clearly_worse_and_the_proposer_is_still_probed() -> None:
    speculator = Speculator([Constant()])
    live(speculator, 20, {"constant": 0, DEVICE: 5}, OWN)
    later = [g.source for g in live(speculator, 300, {"constant": 0, DEVICE: 5}, OWN)]
    assert later.count(DEVICE) > 280
    assert later.count("constant") >= 3


def test_a_proposer_that_is_as_good_as_the_backend_goes_first() -> None:
    speculator = Speculator([Constant()])
    assert {g.source for g in live(speculator, 100, {"constant": 5, DEVICE: 5}, OWN)} == {"constant"}


def test_a_short_guess_gives_way_to_a_long_one_of_the_backend() -> None:
    speculator = Speculator([Constant((7,))])
    assert ask(speculator, OWN).source == DEVICE
    assert ask(speculator).source == "constant"


def test_a_tree_is_cut_from_its_end_and_only_to_a_chain() -> None:
    speculator = Speculator()
    for turn in range(60):
        speculator.observe(tokens=1 + turn % 5, rows=1, seconds=0.01 + 1e-5 * (turn % 5))
    assert ask(speculator, TREE).drafts == TREE
    assert ask(speculator, TREE, room=9).drafts == TREE[:9]
    crowded = ask(speculator, TREE, running=400).drafts
    assert crowded == OWN[: len(crowded)]


def test_a_tree_kept_to_its_depth_has_not_failed() -> None:
    told, untold = Speculator(), Speculator()
    for _ in range(30):
        ask(told, TREE)
        ask(untold, TREE)
        told.learn("r", DEVICE, drafted=12, kept=7, depth=7)
        untold.learn("r", DEVICE, drafted=12, kept=7)
    assert told._records["r"][DEVICE].acceptance.rate > 0.99
    assert untold._records["r"][DEVICE].acceptance.rate < 0.95


def test_a_new_request_profits_from_what_others_showed() -> None:
    speculator = Speculator([Constant()])
    first = len(ask(speculator).drafts)
    live(speculator, 60, {"constant": 99})
    assert len(ask(speculator, name="new").drafts) > first


def test_a_request_that_is_over_leaves_nothing_behind() -> None:
    proposer = Constant()
    speculator = Speculator([proposer])
    ask(speculator)
    speculator.forget("r")
    speculator.learn("r", "constant", drafted=3, kept=1)
    speculator.forget("r")
    assert speculator._records == {}
    assert proposer.forgotten == ["r", "r"]


def test_the_counters_add_up() -> None:
    speculator = Speculator([Constant()])
    empty = speculator.stats()
    assert (empty.drafts, empty.accepted_per_position, empty.by_source) == (0, (0,) * 16, {})
    ask(speculator)
    speculator.learn("r", "constant", drafted=4, kept=2)
    speculator.learn("r", "constant", drafted=4, kept=0)
    speculator.learn("r", DEVICE, drafted=30, kept=20, depth=25)
    stats = speculator.stats()
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (3, 38, 22)
    assert stats.accepted_per_position == (2, 2, *(1,) * 14)
    assert stats.by_source == {"constant": (2, 8, 2), DEVICE: (1, 30, 20)}
    assert stats.propose_seconds > 0.0
    with pytest.raises(AttributeError):
        stats.drafts = 4  # type: ignore[misc]
