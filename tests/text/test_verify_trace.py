"""The trace of verification: which token was sampled at each draft, and whether the draft was kept."""

from __future__ import annotations

import pytest

from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.verify_trace import DraftResult, VerifyTracer, draft_results, trace_lines
from onedraw.types import Draft, History, Row, RowOutcome, SampledToken, SamplingParams


def row(*drafts: tuple[int, int]) -> Row:
    """A row whose tokens end at position 10, with drafts (token, parent)."""
    history = History((1,) * 10)
    return Row(
        request_id="r",
        lane=0,
        pages=((0,),),
        start=9,
        tokens=(1,),
        drafts=tuple(Draft(*draft) for draft in drafts),
        prompt_stop=10,
        samples=True,
        params=SamplingParams(),
        history=history,
    )


def outcome(*tokens: int, kept: tuple[int, ...] = (), no_token_left: bool = False) -> RowOutcome:
    return RowOutcome(tuple(SampledToken(token) for token in tokens), kept=kept, no_token_left=no_token_left)


def test_a_chain_is_kept_up_to_the_first_draft_that_differs() -> None:
    assert draft_results(row((5, -1), (6, 0), (7, 1), (8, 2)), outcome(5, 6, 9, kept=(0, 1))) == [
        DraftResult(10, 5, 5, True),
        DraftResult(11, 6, 6, True),
        DraftResult(12, 7, 9, False),
        DraftResult(13, 8, None, False),
    ]


def test_one_path_of_a_tree_is_kept() -> None:
    tree = row((5, -1), (6, 0), (7, -1), (8, 2), (9, 2), (3, 4))
    assert draft_results(tree, outcome(7, 9, 4, kept=(2, 4))) == [
        DraftResult(10, 5, 7, False),
        DraftResult(11, 6, None, False),
        DraftResult(10, 7, 7, True),
        DraftResult(11, 8, 9, False),
        DraftResult(11, 9, 9, True),
        DraftResult(12, 3, 4, False),
    ]


def test_the_first_of_two_equal_siblings_is_kept() -> None:
    assert [result.kept for result in draft_results(row((5, -1), (5, -1)), outcome(5, 6, kept=(0,)))] == [True, False]


def test_no_sampled_token_is_shown_where_none_was_allowed() -> None:
    assert draft_results(row((5, -1), (6, 0)), outcome(5, kept=(0,), no_token_left=True)) == [
        DraftResult(10, 5, 5, True),
        DraftResult(11, 6, None, False),
    ]


def test_a_line_shows_ids_and_texts() -> None:
    lines = trace_lines(row((5, -1), (6, 0), (7, 1)), outcome(5, 9, kept=(0,)), {5: " a", 6: '"', 7: "\n", 9: "é"}.__getitem__)
    assert lines == [
        'verify r 10: draft 5 " a", sampled 5 " a", kept',
        'verify r 11: draft 6 "\\"", sampled 9 "é", not kept',
        'verify r 12: draft 7 "\\n", not reached, not kept',
    ]


def test_the_tracer_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    VerifyTracer(fake_tokenizer())(row((5, -1)), outcome(6))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("verify r 10: draft 5 ")
    assert err.endswith("not kept\n")
