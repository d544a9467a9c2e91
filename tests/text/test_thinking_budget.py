"""The thinking budget: where it ends the reasoning, with which text, and that drafts do not change it."""

from __future__ import annotations

import numpy as np
import pytest

from onedraw.sampling.adjustments import mask_to_bools
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


def forced(constraint: ThinkingBudget, output: str, drafts: str = "") -> str | None:
    """The one character that is allowed next; None if every token is."""
    bits = constraint.allowed(ids(output), ids(drafts))
    if bits is None:
        return None
    (token,) = np.flatnonzero(mask_to_bools(bits, TOKENIZER.vocab_size))
    return TOKENIZER.decode([int(token)])


def test_reasoning_over_its_budget_is_ended_with_the_familys_closing_text() -> None:
    constraint, output = budget(5), "so it"
    assert forced(constraint, "so i") is None
    for character in THINK.closing:
        assert forced(constraint, output) == character
        output += character
    assert forced(constraint, output) is None
    assert forced(constraint, output + "The answer") is None


def test_reasoning_that_ends_within_its_budget_is_not_constrained() -> None:
    assert forced(budget(20), "yes</think>" + "a long answer that goes on and on") is None


def test_a_budget_of_zero_ends_reasoning_at_once_but_only_where_it_was_opened() -> None:
    assert forced(budget(0), "") == "\n"
    assert forced(budget(0, "may"), "") is None
    assert forced(budget(0, "may"), "<think") is None
    assert forced(budget(0, "may"), "<think>") == "\n"
    assert forced(budget(0, "may"), "plain text <think>") is None


@pytest.mark.parametrize("cut", range(12))
def test_drafts_count_like_output(cut: int) -> None:
    output = "so it" + THINK.closing[:7]
    assert forced(budget(5), output[:cut], output[cut:]) == THINK.closing[7]


def test_each_branch_of_a_draft_tree_has_its_own_state() -> None:
    constraint = budget(5)
    assert forced(constraint, "so", " it") == "\n"
    assert forced(constraint, "so", " i") is None
    assert forced(constraint, "s", "o</") is None
    assert forced(constraint, "so", " it\n") == "<"
    assert forced(constraint, "so", "me") is None


def test_reasoning_is_not_ended_inside_a_character() -> None:
    constraint, half = budget(3), ids("abé")
    assert constraint.allowed(half[:3], []) is None
    assert forced(constraint, "abé") == "\n"
    assert [missing_bytes(0, text.encode()[:-1]) for text in ("a", "é", "世", "🌍")] == [0, 1, 1, 1]
    assert missing_bytes(3, "🌍".encode()[1:]) == 0
    assert missing_bytes(2, b"a") == 0


def test_the_mask_of_one_token_has_one_bit() -> None:
    for token in (0, 31, 32, 258):
        assert np.flatnonzero(mask_to_bools(single_token_mask(token), 259)).tolist() == [token]


def test_prefix_states_equal_a_computation_from_the_start() -> None:
    rng = np.random.default_rng(1)
    states: PrefixStates[tuple[int, ...]] = PrefixStates((), lambda state, token: (*state, token))
    tokens = rng.integers(0, 2, 60).tolist()
    for _ in range(300):
        output = tokens[: int(rng.integers(0, 61))]
        drafts = rng.integers(0, 2, int(rng.integers(0, 5))).tolist()
        assert states.after(output, drafts) == (*output, *drafts)


def test_the_common_prefix_of_two_lists() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 3, 4]) == 3
    assert common_prefix([1, 2, 3], [1, 9, 3]) == 1
    assert common_prefix([], [1]) == 0
    assert common_prefix([*range(40)], [*range(5), 99, *range(6, 40)]) == 5
