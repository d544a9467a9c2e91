"""Drafts from a recorded answer, with a planted lie."""

from __future__ import annotations

from onedraw.lab.recorded_drafts import RecordedProposer
from onedraw.types import History, Request, SamplingParams

REQUEST = Request("r", (1, 2), SamplingParams())


def test_the_first_drafts_are_the_truth_and_the_rest_are_not() -> None:
    proposer = RecordedProposer(kept=2, length=4, vocab=10)
    proposer.answers = {(1, 2): (5, 6, 9, 8, 7)}
    assert [d.token for d in proposer.propose(REQUEST, History((1, 2)), 64)] == [5, 6, 0, 9]
    assert [d.token for d in proposer.propose(REQUEST, History((1, 2), [5, 6, 9]), 64)] == [8, 7]


def test_it_is_silent_before_it_has_heard_the_answer_and_keeps_to_the_room() -> None:
    proposer = RecordedProposer(kept=2, length=4, vocab=10)
    assert proposer.propose(REQUEST, History((1, 2)), 64) == ()
    proposer.answers = {(1, 2): (5, 6, 9)}
    assert len(proposer.propose(REQUEST, History((1, 2)), 1)) == 1
