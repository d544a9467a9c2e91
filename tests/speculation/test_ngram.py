"""Drafts from the sequence's own tokens."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.speculation.proposers import LONGEST_MATCH, NO_PROPOSAL, NgramProposer, Proposal, SuffixIndex, chain
from onedraw.types import Draft, History, Request, SamplingParams

PARAMS = SamplingParams(max_tokens=1000)


def request(prompt: tuple[int, ...], name: str = "r") -> Request:
    return Request(id=name, prompt=prompt, params=PARAMS)


def proposed(tokens: tuple[int, ...], room: int, **options: int) -> list[int]:
    drafts = NgramProposer(**options).propose(request(tokens), History(tokens), room).drafts
    assert drafts == chain(tuple(d.token for d in drafts))
    return [d.token for d in drafts]


def oracle(tokens: list[int], *, start: int, shortest: int, room: int) -> Proposal:
    """Compare the last tokens with every earlier position from `start` on that ends with the same `shortest` tokens, the latest
    first and at most as many as the index compares."""
    places = [e for e in range(len(tokens) - 1, start + shortest - 1, -1) if tokens[e - shortest : e] == tokens[-shortest:]]
    best, match = 0, 0
    for end in places[: SuffixIndex.PLACES]:
        agree = 0
        while agree < LONGEST_MATCH and end - agree > start and tokens[end - agree - 1] == tokens[len(tokens) - agree - 1]:
            agree += 1
        if agree > match:
            best, match = end, agree
    if not match or not room:
        return NO_PROPOSAL
    text = list(tokens)
    for i in range(room):
        text.append(text[best + i])
    return Proposal(chain(tuple(text[len(tokens) :])), "ngram", match)


@settings(max_examples=400, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    growth=st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 9)), max_size=15),
    shortest=st.integers(1, 4),
    reach=st.integers(5, 40),
)
def test_a_growing_index_finds_the_same_as_a_full_search(
    prompt: list[int], growth: list[tuple[list[int], int]], shortest: int, reach: int
) -> None:
    proposer = NgramProposer(shortest, reach)
    history = History(tuple(prompt))
    start: int | None = None
    for more, room in growth:
        history.output.extend(more)
        if room and start is None:
            start = max(len(history) - reach, 0)
        found = proposer.propose(request(history.prompt), history, room)
        tokens = [*history.prompt, *history.output]
        assert found == oracle(tokens, start=start or 0, shortest=shortest, room=room)


def test_the_match_is_the_number_of_tokens_that_agree_up_to_eight() -> None:
    def match(tokens: tuple[int, ...]) -> int:
        return NgramProposer().propose(request(tokens), History(tokens), 1).match

    assert match((1, 2, 3, 9, 2, 3)) == 2
    assert match((1, 2, 3, 9, 1, 2, 3)) == 3
    assert match((*range(20), *range(20))) == LONGEST_MATCH


def test_the_longest_suffix_is_preferred_to_a_later_short_one() -> None:
    assert proposed((1, 2, 3, 4, 9, 3, 4, 8, 1, 2, 3, 4), 1) == [9]


def test_among_equal_suffixes_the_latest_is_used() -> None:
    assert proposed((5, 6, 1, 5, 6, 2, 7, 5, 6), 2) == [2, 7]


def test_periodic_text_is_continued_periodically() -> None:
    assert proposed((9, 1, 2, 3, 1, 2, 3), 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert proposed((4, 4, 4), 5) == [4] * 5


def test_text_without_repetition_gets_no_drafts() -> None:
    assert proposed((1, 2, 3, 4, 5), 4) == []
    assert proposed((1,), 4) == []
    assert proposed((1, 2, 1, 2), 0) == []


def test_a_suffix_below_the_shortest_length_is_ignored() -> None:
    assert proposed((7, 1, 8, 7), 2) == []
    assert proposed((7, 1, 8, 7), 2, shortest=1) == [1, 8]


def test_the_same_history_again_gives_the_same_drafts() -> None:
    """A preempted sequence resumes with the tokens it had."""
    proposer, tokens = NgramProposer(), (1, 2, 3, 1, 2)
    history = History(tokens)
    first = proposer.propose(request(tokens), history, 3)
    assert proposer.propose(request(tokens), history, 3) == first
    history.output.append(3)
    assert proposer.propose(request(tokens), history, 2).drafts == chain((1, 2))


def test_requests_have_separate_indexes_and_a_forgotten_one_has_none() -> None:
    proposer = NgramProposer()
    assert proposer.propose(request((1, 2, 3, 1, 2), "a"), History((1, 2, 3, 1, 2)), 1).drafts == (Draft(3, -1),)
    assert proposer.propose(request((4, 1, 2), "b"), History((4, 1, 2)), 1) == NO_PROPOSAL
    proposer.forget("a")
    proposer.forget("never seen")
    assert proposer.propose(request((8, 1, 2), "a"), History((8, 1, 2)), 1) == NO_PROPOSAL


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="shortest"):
        NgramProposer(shortest=3, reach=2)


# ---------------------------------------------------------------------- cost


@dataclass(slots=True)
class CountingHistory(History):
    """Counts the tokens that are read."""

    read: int = 0

    def slice(self, start: int, stop: int) -> list[int]:
        tokens = History.slice(self, start, stop)
        self.read += len(tokens)
        return tokens


def cost_of_a_step(context: int) -> tuple[int, int]:
    """Lines run and tokens read by the step after `context` tokens and 3 new ones."""
    history = CountingHistory((1, 2, *range(context)))
    proposer, own_request = NgramProposer(reach=10**6), request(history.prompt)
    proposer.propose(own_request, history, 8)
    history.output.extend([-1, 1, 2])
    history.read = lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    gc.disable()  # so that finalizers of other objects are not counted
    sys.settrace(count)
    try:
        proposer.propose(own_request, history, 8)
    finally:
        sys.settrace(before)
        gc.enable()
    return lines, history.read


def test_the_cost_of_a_step_does_not_depend_on_the_context_length() -> None:
    short, long = cost_of_a_step(200), cost_of_a_step(50_000)
    assert short == long
    lines, read = long
    assert lines < 120
    assert read <= 3 + 8
