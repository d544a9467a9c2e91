"""Host-side adjustments: DRY, bad words, minimum length; DRY compared with a slow oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.sampling.adjustments import LONGEST_REPETITION, NO_ADJUSTMENT, HistoryTokens, adjustment, dry_penalties
from onedraw.types import DryParams, History, SamplingParams
from tests.support.count_calls import count_calls


def slow_dry(tokens: list[int], dry: DryParams) -> dict[int, float]:
    """For every earlier position, count one by one how many tokens before it equal the last ones."""
    tokens = tokens[-dry.range :] if dry.range else tokens
    longest: dict[int, int] = {}
    for place in range(len(tokens)):  # the token that followed a repetition
        length = 0
        while length < place and length < LONGEST_REPETITION:
            token = tokens[place - 1 - length]
            if token != tokens[-1 - length] or token in dry.breakers:
                break
            length += 1
        if length >= dry.allowed_length and tokens[place] not in dry.breakers:
            longest[tokens[place]] = max(longest.get(tokens[place], 0), length)
    return {token: dry.multiplier * dry.base ** (n - dry.allowed_length) for token, n in longest.items()}


tokens_lists = st.lists(st.integers(0, 3), max_size=60)
dry_params = st.builds(
    DryParams,
    multiplier=st.sampled_from([0.5, 1.0]),
    base=st.sampled_from([1.0, 1.75]),
    allowed_length=st.integers(1, 4),
    range=st.sampled_from([0, 1, 2, 10, 30]),
    breakers=st.frozensets(st.integers(0, 3), max_size=2),
)


@settings(max_examples=500)
@given(tokens_lists, dry_params)
def test_dry_equals_the_slow_search(tokens: list[int], dry: DryParams) -> None:
    assert dict(dry_penalties(np.array(tokens, dtype=np.int64), dry)) == pytest.approx(slow_dry(tokens, dry))


def test_dry_penalizes_the_token_that_would_continue_a_repetition() -> None:
    dry = DryParams(multiplier=2.0, base=3.0, allowed_length=2)
    history = History((1, 2, 3, 4, 9), [1, 2, 3])
    assert adjustment(SamplingParams(dry=dry), history).penalized == ((4, 6.0),)


def test_dry_counts_drafts_as_history() -> None:
    dry = DryParams(multiplier=1.0)
    params = SamplingParams(dry=dry)
    assert adjustment(params, History((1, 2, 3), [1]), (2,)) == adjustment(params, History((1, 2, 3), [1, 2]))
    assert adjustment(params, History((1, 2, 3), [1])) == NO_ADJUSTMENT


def test_a_repetition_longer_than_the_cap_is_penalized_like_one_of_its_length() -> None:
    dry = DryParams(multiplier=1.0, base=1.1, allowed_length=2)
    found = dict(dry_penalties(np.zeros(500, dtype=np.int64), dry))
    assert found == {0: pytest.approx(1.1 ** (LONGEST_REPETITION - 2))}


def test_a_huge_base_gives_the_largest_penalty_not_an_error() -> None:
    found = dict(dry_penalties(np.zeros(500, dtype=np.int64), DryParams(multiplier=1.0, base=1e300)))
    assert np.isfinite(np.float32(found[0]))


def test_dry_is_fast_for_a_long_repetitive_history() -> None:
    """The worst case is one repeated token: every position matches. So is any number of tokens that a repetition may need."""
    tokens = np.zeros(100_000, dtype=np.int64)
    for allowed_length in (2, LONGEST_REPETITION):
        dry = DryParams(multiplier=1.0, allowed_length=allowed_length)
        _, calls = count_calls(lambda dry=dry: dry_penalties(tokens, dry))
        assert calls < 4 * LONGEST_REPETITION + 100  # walks of whole arrays, a few for each length of a match


@settings(max_examples=200)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=300), st.lists(st.integers(0, 9), max_size=5)), max_size=6))
def test_cached_tokens_equal_the_history(steps: list[tuple[list[int], list[int]]]) -> None:
    history, cached = History((3, 1)), HistoryTokens()
    for grown, drafts in steps:
        history.output.extend(grown)
        assert cached.read(history, drafts).tolist() == [*history.prompt, *history.output, *drafts]
    shorter = History((3, 1), history.output[:1])
    assert cached.read(shorter, ()).tolist() == [*shorter.prompt, *shorter.output]


def test_single_token_bad_words_are_always_banned() -> None:
    assert adjustment(SamplingParams(bad_words=((7,), (3,))), History((1,))).banned == (3, 7)


def test_a_bad_word_is_banned_where_its_prefix_ends_the_output() -> None:
    params = SamplingParams(bad_words=((1, 2, 3), (2, 5)))
    assert adjustment(params, History((0,), [1, 2])).banned == (3, 5)
    assert adjustment(params, History((0,), [1]), (2,)).banned == (3, 5)
    assert adjustment(params, History((0,), [2])).banned == (5,)
    assert adjustment(params, History((0,), [2, 1])).banned == ()


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    assert adjustment(SamplingParams(bad_words=((1, 2),)), History((1,))).banned == ()
    assert adjustment(SamplingParams(bad_words=((1, 2, 3),)), History((1,), [2])).banned == ()


def test_stop_ids_are_banned_until_min_tokens_are_sampled() -> None:
    params = SamplingParams(min_tokens=2, stop_ids=frozenset({9, 4}))
    assert adjustment(params, History((1, 2, 3), [5])).banned == (4, 9)
    assert adjustment(params, History((1, 2, 3), [5]), (6,)).banned == ()
    assert adjustment(params, History((1, 2, 3), [5, 6])).banned == ()


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12).map(tuple),
    st.lists(st.integers(0, 2), max_size=6),
    st.lists(st.integers(0, 2), max_size=3).map(tuple),
)
def test_banned_words_equal_a_search_through_all_of_them(
    words: tuple[tuple[int, ...], ...], output: list[int], drafts: tuple[int, ...]
) -> None:
    tail = (*output, *drafts)
    expected = {word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]}
    cached = HistoryTokens()
    for known in (None, cached, cached):
        assert set(adjustment(SamplingParams(bad_words=words), History((0,), output), drafts, known).banned) == expected


def test_many_bad_words_cost_a_position_as_much_as_one() -> None:
    """Regression: every position looked at all words, so 16,000 of them made each step of everyone's take a quarter of a second.
    Here that would take minutes."""
    words = tuple((n // 200, n % 200, n) for n in range(40_000))
    params, history, cached = SamplingParams(bad_words=words), History((0,), [7] * 5_000), HistoryTokens()
    for n in range(20_000):
        assert adjustment(params, history, (n // 200, n % 200), cached).banned == (n,)
