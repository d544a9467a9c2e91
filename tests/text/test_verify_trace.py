"""The printed walks say what verification did."""

from __future__ import annotations

import pytest

from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.verify_trace import Step, VerifyTracer, lines, walk
from onedraw.types import Draft, History, Row, RowOutcome, SampledToken, SamplingParams


def row(*drafts: tuple[int, int]) -> Row:
    """A row that knows tokens up to position 10, with drafts (token, parent)."""
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


def chosen(*tokens: int, kept: tuple[int, ...] = (), no_token_left: bool = False) -> RowOutcome:
    return RowOutcome(tuple(SampledToken(token) for token in tokens), kept=kept, no_token_left=no_token_left)


def test_a_chain_is_kept_until_the_first_unequal_choice() -> None:
    assert walk(row((5, -1), (6, 0), (7, 1), (8, 2)), chosen(5, 6, 9, kept=(0, 1))) == [
        Step(10, 5, 5, True),
        Step(11, 6, 6, True),
        Step(12, 7, 9, False),
        Step(13, 8, None, False),
    ]


def test_of_a_tree_one_path_is_kept() -> None:
    tree = row((5, -1), (6, 0), (7, -1), (8, 2), (9, 2), (3, 4))
    assert walk(tree, chosen(7, 9, 4, kept=(2, 4))) == [
        Step(10, 5, 7, False),
        Step(11, 6, None, False),
        Step(10, 7, 7, True),
        Step(11, 8, 9, False),
        Step(11, 9, 9, True),
        Step(12, 3, 4, False),
    ]


def test_of_two_equal_siblings_the_first_is_kept() -> None:
    assert [step.kept for step in walk(row((5, -1), (5, -1)), chosen(5, 6, kept=(0,)))] == [True, False]


def test_where_the_law_left_no_token_no_choice_is_shown() -> None:
    assert walk(row((5, -1), (6, 0)), chosen(5, kept=(0,), no_token_left=True)) == [
        Step(10, 5, 5, True),
        Step(11, 6, None, False),
    ]


def test_a_line_has_ids_and_texts() -> None:
    told = lines(row((5, -1), (6, 0), (7, 1)), chosen(5, 9, kept=(0,)), {5: " a", 6: '"', 7: "\n", 9: "é"}.__getitem__)
    assert told == [
        'verify r 10: draft 5 " a", choice 5 " a", kept',
        'verify r 11: draft 6 "\\"", choice 9 "é", not kept',
        'verify r 12: draft 7 "\\n", not reached, not kept',
    ]


def test_the_tracer_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    VerifyTracer(fake_tokenizer())(row((5, -1)), chosen(6))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("verify r 10: draft 5 ")
    assert err.endswith("not kept\n")
