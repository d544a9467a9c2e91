"""Drafts from the reply that the caller predicted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.speculation.proposers import PredictionProposer, chain
from onedraw.types import History, Request, SamplingParams

PARAMS = SamplingParams(max_tokens=1000)
WORDS = tuple(range(100, 140))  # a prediction without repeated tokens


class Reply:
    """A growing reply with a prediction."""

    def __init__(self, predicted: tuple[int, ...]) -> None:
        self.request = Request(id="r", prompt=(1, 2), params=PARAMS, predicted=predicted)
        self.history = History((1, 2))
        self.proposer = PredictionProposer()

    def after(self, *tokens: int, room: int = 3) -> list[int]:
        """The drafts after `tokens` are added to the reply."""
        self.history.output.extend(tokens)
        drafts = self.proposer.propose(self.request, self.history, room).drafts
        assert drafts == chain(tuple(d.token for d in drafts))
        return [d.token for d in drafts]


def test_a_right_prediction_is_followed_to_its_end() -> None:
    reply = Reply(WORDS)
    assert reply.after() == [100, 101, 102]
    assert reply.after(100) == [101, 102, 103]
    assert reply.after(101, 102, 103, 104) == [105, 106, 107]
    assert reply.after(*WORDS[5:38], room=10) == [138, 139]
    assert reply.after(138, 139) == []
    assert reply.after(7) == []


def test_one_replaced_token_does_not_stop_the_drafts() -> None:
    reply = Reply(WORDS)
    reply.after(100, 101)
    assert reply.after(7) == [103, 104, 105]
    assert reply.after(103) == [104, 105, 106]


def test_a_removed_passage_is_skipped() -> None:
    reply = Reply(WORDS)
    reply.after(100, 101)
    assert reply.after(110) == [103, 104, 105]  # so far 110 may replace 102
    assert reply.after(111) == [112, 113, 114]
    assert reply.after(112) == [113, 114, 115]


def test_drafts_resume_after_an_inserted_passage() -> None:
    reply = Reply(WORDS)
    reply.after(100, 101)
    reply.after(7)
    assert reply.after(8) == []
    assert reply.after(9) == []
    assert reply.after(102) == []
    assert reply.after(103) == [104, 105, 106]


def test_a_match_ahead_is_preferred_to_a_match_behind() -> None:
    predicted = (1, 2, 3, 50, 1, 2, 4, 51, 1, 2, 5, 52)
    reply = Reply(predicted)
    reply.after(1, 2, 3, 50)
    reply.after(60)
    reply.after(61)
    assert reply.after(1, 2) == [4, 51, 1]
    reply.after(60)
    reply.after(61)
    assert reply.after(1, 2) == [5, 52]
    reply.after(5, 52, 60, 61)
    assert reply.after(1, 2) == [5, 52]  # no match ahead: the latest one behind


def test_a_match_of_three_tokens_is_preferred_to_one_of_two() -> None:
    reply = Reply((1, 2, 3, 4, 9, 9, 2, 3, 7))
    reply.after(60, 61)
    assert reply.after(1, 2, 3) == [4, 9, 9]


def test_a_wrong_prediction_gets_no_drafts() -> None:
    reply = Reply(WORDS)
    reply.after(5)
    assert all(reply.after(token) == [] for token in (6, 7, 8, 9))


def test_an_empty_prediction_gives_no_drafts_and_stores_no_state() -> None:
    reply = Reply(())
    assert reply.after(5) == []
    assert reply.proposer._alignments == {}


def test_a_forgotten_request_has_no_state() -> None:
    reply = Reply(WORDS)
    reply.after(100)
    reply.proposer.forget("r")
    reply.proposer.forget("never seen")
    assert reply.proposer._alignments == {}


def test_the_same_id_with_a_new_reply_starts_at_the_beginning() -> None:
    reply = Reply(WORDS)
    reply.after(*WORDS[:9])
    reply.history.output.clear()
    assert reply.after(100) == [101, 102, 103]


@settings(max_examples=300, deadline=None)
@given(
    predicted=st.lists(st.integers(0, 3), min_size=1, max_size=20).map(tuple),
    growth=st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.integers(0, 6)), max_size=15),
)
def test_drafts_are_always_a_passage_of_the_prediction(predicted: tuple[int, ...], growth: list[tuple[list[int], int]]) -> None:
    reply = Reply(predicted)
    for tokens, room in growth:
        drafts = tuple(reply.after(*tokens, room=room))
        assert len(drafts) <= room
        assert any(predicted[i : i + len(drafts)] == drafts for i in range(len(predicted) + 1))


@settings(max_examples=200, deadline=None)
@given(
    head=st.lists(st.integers(0, 9), max_size=20),
    tail=st.lists(st.integers(10, 10_000), min_size=4, max_size=20, unique=True),
    other=st.lists(st.integers(20_000, 20_009), min_size=1, max_size=10),
)
def test_after_any_deviation_the_common_tail_is_drafted_again(head: list[int], tail: list[int], other: list[int]) -> None:
    """Two tokens of a tail without repetitions are enough to find it, whatever comes before."""
    reply = Reply((*head, *tail))
    for token in other:
        reply.after(token)
    reply.after(tail[0])
    assert reply.after(tail[1], room=50) == tail[2:]
