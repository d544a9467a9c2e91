"""The sampling rule, compared with arithmetic by hand or in plain Python."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from onedraw.sampling.law import NO_TOKEN, checksum, law, sample
from onedraw.sampling.logprobs import logprobs
from onedraw.sampling.noise import gumbel
from onedraw.types import DryParams, History, SamplingParams

EMPTY = History((0,))


def sampled_id(logits: np.ndarray, params: SamplingParams, history: History, drafts: tuple[int, ...] = ()) -> int:
    found = sample(logits, params, history, drafts)
    return NO_TOKEN if found is None else found.token


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def kept(scores: np.ndarray) -> list[int]:
    return np.flatnonzero(scores > -np.inf).tolist()


# ── what is left to choose from ───────────────────────────────────────────────────────────────────────────────────


def test_the_best_score_is_zero() -> None:
    assert law(floats(1, 3, 2), SamplingParams(temperature=0.5), EMPTY).tolist() == [-4, 0, -2]
    assert law(floats(1, 3, 2), SamplingParams(temperature=0), EMPTY).tolist() == [-2, 0, -1]


def test_top_k_keeps_every_token_not_below_the_kth_value() -> None:
    logits = floats(5, 3, 3, 3, 1)
    assert kept(law(logits, SamplingParams(top_k=2), EMPTY)) == [0, 1, 2, 3]
    assert kept(law(logits, SamplingParams(top_k=1), EMPTY)) == [0]
    assert kept(law(logits, SamplingParams(top_k=4), EMPTY)) == [0, 1, 2, 3]
    assert kept(law(logits, SamplingParams(top_k=5), EMPTY)) == [0, 1, 2, 3, 4]
    assert kept(law(logits, SamplingParams(top_k=500), EMPTY)) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_with_enough_mass() -> None:
    logits = np.log(floats(0.5, 0.25, 0.15, 0.1))
    for top_p, count in ((0.01, 1), (0.4, 1), (0.6, 2), (0.74, 2), (0.8, 3), (0.95, 4)):
        assert kept(law(logits, SamplingParams(top_p=top_p), EMPTY)) == list(range(count))


def test_top_p_keeps_ties_together() -> None:
    assert kept(law(floats(2, 2, 2, 2, -9), SamplingParams(top_p=0.5), EMPTY)) == [0, 1, 2, 3]
    assert kept(law(floats(2, 2, -9), SamplingParams(top_p=1e-9), EMPTY)) == [0, 1]


def test_top_p_applies_to_the_tokens_that_top_k_leaves() -> None:
    logits = np.log(floats(0.4, 0.3, 0.2, 0.1))
    assert kept(law(logits, SamplingParams(top_p=0.5), EMPTY)) == [0, 1]
    assert kept(law(logits, SamplingParams(top_p=0.5, top_k=2), EMPTY)) == [0]  # 0.4 of 0.7 is over a half


def test_min_p_is_relative_to_the_best_and_after_temperature() -> None:
    logits = np.log(floats(0.6, 0.3, 0.07, 0.03))
    assert kept(law(logits, SamplingParams(min_p=0.1), EMPTY)) == [0, 1, 2]
    assert kept(law(logits, SamplingParams(min_p=0.1, temperature=0.5), EMPTY)) == [0, 1]
    assert kept(law(floats(1, 1, 0), SamplingParams(min_p=1.0), EMPTY)) == [0, 1]


def test_temperature_zero_is_not_filtered() -> None:
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=0.5)
    assert kept(law(floats(1, 2, 3), params, EMPTY)) == [0, 1, 2]


# ── what is done to the logits ────────────────────────────────────────────────────────────────────────────────────


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    history = History((0,), [1])
    found = law(floats(2, -2, 2, -2, 10), SamplingParams(temperature=0, repetition_penalty=2), history, (2,))
    assert found.tolist() == [1 - 10, -4 - 10, 1 - 10, -2 - 10, 0]


def test_frequency_and_presence_count_output_and_drafts_only() -> None:
    history = History((0, 0, 3), [1, 1, 2])
    params = SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=1.0)
    assert law(floats(0, 0, 0, 0, 10), params, history, (2,)).tolist() == [-10, -12, -12, -10, 0]


def test_the_order_is_bias_then_penalties_then_bans() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2, logit_bias=((0, 3.0), (1, 100.0)), bad_words=((1,),))
    found = law(floats(1, 1, 0), params, History((0, 1)))
    assert found.tolist() == [0, -math.inf, -2]  # (1 + 3) / 2, not 1 / 2 + 3


def test_dry_lowers_the_scores() -> None:
    params = SamplingParams(temperature=0, dry=DryParams(multiplier=3.0, allowed_length=1))
    assert law(floats(0, 0, 5), params, History((0, 1), [0])).tolist() == [-5, -8, 0]


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    params = SamplingParams(logit_bias=((99, 5.0),), bad_words=((99,),), min_tokens=1, stop_ids=frozenset({99}), temperature=0)
    assert law(floats(0, 1), params, EMPTY).tolist() == [-1, 0]


# ── the token ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tie_goes_to_the_lowest_id() -> None:
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_k=1, temperature=50)):
        assert sampled_id(floats(1, 7, 7, 7), params, EMPTY) == 1


def test_a_top_k_of_one_is_greedy_at_any_temperature() -> None:
    """Dividing before subtracting the best would make a tie of neighbouring floats at high temperature."""
    close = floats(20.0, np.nextafter(np.float32(20), np.float32(21)), 3)
    for temperature in (0, 1e-30, 0.3, 1, 7, 100):
        assert sampled_id(close, SamplingParams(top_k=1, temperature=temperature), EMPTY) == 1


def test_a_tiny_temperature_is_greedy_not_an_overflow() -> None:
    assert sampled_id(floats(30, 29.9, -30), SamplingParams(temperature=1e-45), EMPTY) == 0


def test_the_noise_is_that_of_the_absolute_position() -> None:
    logits = np.zeros(50, dtype=np.float32)
    history = History((1, 2, 3), [4])
    assert sampled_id(logits, SamplingParams(seed=9), history, (5, 6)) == int(gumbel(9, 6, 50).argmax())


def test_a_draft_and_a_known_token_in_its_position_sample_the_same() -> None:
    rng = np.random.default_rng(1)
    params = SamplingParams(
        seed=3, repetition_penalty=1.3, frequency_penalty=0.4, dry=DryParams(multiplier=1.0, allowed_length=1)
    )
    for _ in range(50):
        logits = rng.normal(size=12).astype(np.float32)
        tokens = rng.integers(0, 12, size=9).tolist()
        known = sample(logits, params, History(tuple(tokens[:4]), tokens[4:]))
        assert known == sample(logits, params, History(tuple(tokens[:4]), tokens[4:7]), tokens[7:])


def test_banning_every_token_gives_no_token() -> None:
    banned = SamplingParams(bad_words=tuple((i,) for i in range(3)))
    assert sampled_id(floats(1, 2, 3), banned, EMPTY) == NO_TOKEN
    assert sample(floats(1, 2, 3), banned, EMPTY) is None
    assert sampled_id(floats(-np.inf, -np.inf), SamplingParams(), EMPTY) == NO_TOKEN


@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(bad_words=((1,),))])
def test_non_finite_logits_give_no_token(fault: float, params: SamplingParams) -> None:
    assert sampled_id(floats(1, fault, 2), params, EMPTY) == NO_TOKEN


def filtered_frequencies(draws: int) -> float:
    """p-value of sampled tokens over many seeds, against the distribution that the filters leave."""
    logits = floats(2, 1.5, 1.5, 1, 0.5, 0, -1, -4)
    params = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05}
    counts = np.zeros(8)
    for seed in range(draws):
        counts[sampled_id(logits, SamplingParams(seed=seed, **params), EMPTY)] += 1  # type: ignore[arg-type]
    left = [0, 1, 2, 3]  # by hand: the shares of the top six are .39 .21 .21 .11 .06 .03, and the first four have .91
    weights = np.exp(logits[left].astype(np.float64) / 0.8)
    assert counts[4:].sum() == 0
    return float(stats.chisquare(counts[left], draws * weights / weights.sum()).pvalue)


def test_sampled_tokens_have_the_filtered_distribution() -> None:
    assert filtered_frequencies(5_000) > 1e-4


@pytest.mark.long
def test_sampled_tokens_have_the_filtered_distribution_over_many_seeds() -> None:
    assert filtered_frequencies(300_000) > 1e-4


# ── an oracle in exact fractions ──────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=30),
    st.integers(0, 8),
    st.sampled_from([1.0, 0.95, 0.5, 0.3, 0.01]),
    st.sampled_from([0.0, 0.05, 0.4]),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_filters_equal_a_slow_search(values: list[int], top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    shares = {i: Fraction(math.exp((v - max(values)) / temperature)) for i, v in enumerate(values)}
    left = [i for i in shares if shares[i] >= min_p]
    if top_k:
        floor = sorted((shares[i] for i in shares), reverse=True)[min(top_k, len(values)) - 1]
        left = [i for i in left if shares[i] >= floor]
    if top_p < 1:
        total = sum(shares[i] for i in left)
        for level in sorted({shares[i] for i in left}, reverse=True):
            group = [i for i in left if shares[i] >= level]
            if sum(shares[i] for i in group) >= Fraction(top_p) * total:
                left = group
                break
    assert kept(law(floats(*values), params, EMPTY)) == left


# ── logprobs and checksums ────────────────────────────────────────────────────────────────────────────────────────


def test_logprobs_are_the_log_softmax() -> None:
    logits = np.random.default_rng(0).normal(scale=4, size=500).astype(np.float32)
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    found = logprobs(logits, 123, 10)
    order = np.argsort(-logits)[:10]
    assert found.logprob == pytest.approx(exact[123], abs=2e-6)
    assert [token for token, _ in found.top] == order.tolist()
    assert [value for _, value in found.top] == pytest.approx(exact[order].tolist(), abs=2e-6)


def test_equal_logprobs_are_listed_by_id_without_excluded_tokens() -> None:
    found = logprobs(floats(0.0, -np.inf, -0.0, 0.0, -3), 4, 5)
    assert [token for token, _ in found.top] == [0, 2, 3, 4]


def test_a_certain_token_has_logprob_zero() -> None:
    assert str(logprobs(floats(-np.inf, 3), 1, 0).logprob) == "0.0"


def test_processed_logprobs_are_those_of_the_sampling_rule_and_raw_ones_of_the_model() -> None:
    logits = np.log(floats(0.4, 0.3, 0.2, 0.1))
    for mode, top in (("raw", [0.4, 0.3, 0.2, 0.1]), ("processed", [0.4 / 0.7, 0.3 / 0.7])):
        params = SamplingParams(top_k=2, logprobs=4, logprobs_mode=mode)  # type: ignore[arg-type]
        found = sample(logits, params, EMPTY)
        assert found is not None
        assert found.logprobs is not None
        assert [math.exp(value) for _, value in found.logprobs.top] == pytest.approx(top, rel=1e-5)


def test_tokens_that_are_asked_for_have_their_logprobs_wherever_they_rank() -> None:
    logits = np.log(floats(0.4, 0.3, 0.2, 0.1))
    for mode, values in (("raw", [0.1, 0.4]), ("processed", [0.0, 0.4 / 0.7])):
        params = SamplingParams(top_k=2, logprobs=1, logprobs_mode=mode, logprob_token_ids=(3, 0))  # type: ignore[arg-type]
        found = sample(logits, params, EMPTY)
        assert found is not None
        assert found.logprobs is not None
        assert [token for token, _ in found.logprobs.asked] == [3, 0]
        assert [math.exp(value) for _, value in found.logprobs.asked] == pytest.approx(values, rel=1e-5)
        assert [token for token, _ in found.logprobs.alternatives] == [0, 3]


def test_a_checksum_changes_with_any_bit_of_logits_and_scores() -> None:
    rng = np.random.default_rng(2)
    logits, scores = rng.normal(size=(2, 300)).astype(np.float32)
    whole = checksum(logits, scores)
    assert 0 <= whole < 2**63
    for place in (0, 17, 299):
        for values in (logits, scores):
            before = values[place]
            values[place] = np.nextafter(before, np.float32(9))
            assert checksum(logits, scores) != whole
            values[place] = before
    assert checksum(scores, logits) != whole
    assert checksum(logits[::-1], scores) != whole
    assert checksum(logits, scores) == whole
