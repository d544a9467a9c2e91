"""Recorded drafts: the first ones are right, the others wrong."""

from __future__ import annotations

from onedraw.lab.recorded_drafts import RecordedProposer
from onedraw.speculation.proposers import NO_PROPOSAL
from onedraw.types import History, Request, SamplingParams

REQUEST = Request("r", (1, 2), SamplingParams())


def test_the_first_drafts_are_right_and_the_rest_are_wrong() -> None:
    proposer = RecordedProposer(kept=2, length=4, vocab=10)
    proposer.answers = {(1, 2): (5, 6, 9, 8, 7)}
    assert [d.token for d in proposer.propose(REQUEST, History((1, 2)), 64).drafts] == [5, 6, 0, 9]
    assert [d.token for d in proposer.propose(REQUEST, History((1, 2), [5, 6, 9]), 64).drafts] == [8, 7]


def test_it_drafts_nothing_without_an_answer_and_no_more_than_there_is_room() -> None:
    proposer = RecordedProposer(kept=2, length=4, vocab=10)
    assert proposer.propose(REQUEST, History((1, 2)), 64) == NO_PROPOSAL
    proposer.answers = {(1, 2): (5, 6, 9)}
    assert len(proposer.propose(REQUEST, History((1, 2)), 1).drafts) == 1
