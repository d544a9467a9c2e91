"""The thinking budget: where it closes, with which words, whatever is only supposed so far."""

from __future__ import annotations

import numpy as np
import pytest

from onedraw.sampling.adjustments import unpacked
from onedraw.text.constraints.base import PrefixStates, common_prefix
from onedraw.text.constraints.thinking_budget import ThinkingBudget, missing_bytes, single_token_mask
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.reasoning import InitialThinking, ReasoningSyntax

TOKENIZER = fake_tokenizer()
THINK = ReasoningSyntax("<think>", "</think>", "\n</think>\n\n")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False)


def budget(limit: int, thinking: InitialThinking = "open") -> ThinkingBudget:
    return ThinkingBudget(THINK, limit=limit, closing=ids(THINK.closing), token_bytes=TOKENIZER.token_bytes, thinking=thinking)


def only(constraint: ThinkingBudget, said: str, drafts: str = "") -> str | None:
    """The one character that may follow; None if any may."""
    bits = constraint.allowed(ids(said), ids(drafts))
    if bits is None:
        return None
    (token,) = np.flatnonzero(unpacked(bits, TOKENIZER.vocab_size))
    return TOKENIZER.decode([int(token)])


def test_thinking_that_used_up_its_tokens_is_closed_with_the_familys_words() -> None:
    constraint, said = budget(5), "so it"
    assert only(constraint, "so i") is None
    for character in THINK.closing:
        assert only(constraint, said) == character
        said += character
    assert only(constraint, said) is None
    assert only(constraint, said + "The answer") is None


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    assert only(budget(20), "yes</think>" + "a long answer that goes on and on") is None


def test_a_budget_of_nothing_closes_at_once_and_only_what_was_opened() -> None:
    assert only(budget(0), "") == "\n"
    assert only(budget(0, "may"), "") is None
    assert only(budget(0, "may"), "<think") is None
    assert only(budget(0, "may"), "<think>") == "\n"
    assert only(budget(0, "may"), "plain text <think>") is None


@pytest.mark.parametrize("cut", range(12))
def test_what_is_supposed_counts_as_what_was_said(cut: int) -> None:
    said = "so it" + THINK.closing[:7]
    assert only(budget(5), said[:cut], said[cut:]) == THINK.closing[7]


def test_another_branch_of_a_tree_is_walked_from_where_it_parts() -> None:
    constraint = budget(5)
    assert only(constraint, "so", " it") == "\n"
    assert only(constraint, "so", " i") is None
    assert only(constraint, "s", "o</") is None
    assert only(constraint, "so", " it\n") == "<"
    assert only(constraint, "so", "me") is None


def test_a_character_is_not_cut_in_two() -> None:
    constraint, half = budget(3), ids("abé")
    assert constraint.allowed(half[:3], []) is None
    assert only(constraint, "abé") == "\n"
    assert [missing_bytes(0, text.encode()[:-1]) for text in ("a", "é", "世", "🌍")] == [0, 1, 1, 1]
    assert missing_bytes(3, "🌍".encode()[1:]) == 0
    assert missing_bytes(2, b"a") == 0


def test_a_set_of_one_has_one_token() -> None:
    for token in (0, 31, 32, 258):
        assert np.flatnonzero(unpacked(single_token_mask(token), 259)).tolist() == [token]


def test_a_walk_gives_what_a_walk_from_the_start_gives() -> None:
    rng = np.random.default_rng(1)
    walk: PrefixStates[tuple[int, ...]] = PrefixStates((), lambda state, token: (*state, token))
    truth = rng.integers(0, 2, 60).tolist()
    for _ in range(300):
        output = truth[: int(rng.integers(0, 61))]
        drafts = rng.integers(0, 2, int(rng.integers(0, 5))).tolist()
        assert walk.after(output, drafts) == (*output, *drafts)


def test_two_lists_share_what_they_both_begin_with() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 3, 4]) == 3
    assert common_prefix([1, 2, 3], [1, 9, 3]) == 1
    assert common_prefix([], [1]) == 0
    assert common_prefix([*range(40)], [*range(5), 99, *range(6, 40)]) == 5
