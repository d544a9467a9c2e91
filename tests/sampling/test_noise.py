"""Noise as a function of (seed, position, id): uniform, independent of its neighbours, accurate at both ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from onedraw.sampling.noise import BITS, child_seed, gumbel, gumbel_of, key, mix64, prompt_seed, uniform_bits
from onedraw.types import SEED_LIMIT

SEEDS = (0, 1, 2, 12345, SEED_LIMIT - 1)


def plain_bits(seed: int, position: int, token: int) -> int:
    """The definition for one token, in Python integers."""

    def mix(word: int) -> int:
        word ^= word >> 16
        word = word * 0x7FEB352D % 2**32
        word ^= word >> 15
        word = word * 0x846CA68B % 2**32
        return word ^ word >> 16

    first, second = key(seed, position)
    return mix((mix(token ^ first) + second) % 2**32) >> 8


def chi_squared(observed: np.ndarray) -> float:
    return float(stats.chisquare(observed.ravel()).pvalue)


def test_the_integers_equal_the_definition() -> None:
    for seed in SEEDS:
        for position in (0, 1, 77, 2**31):
            found = uniform_bits(seed, position, 1000)
            assert [plain_bits(seed, position, token) for token in range(1000)] == found.tolist()


def test_the_64_bit_mixing_equals_published_values() -> None:
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_known_values_never_change() -> None:
    """A change here would change the answer of every seed."""
    assert key(0, 0) == (3852329422, 2136138994)
    assert uniform_bits(7, 3, 4).tolist() == [6357202, 9863323, 10488285, 4332496]
    assert (child_seed(7, 1), prompt_seed(7, 1)) == (4340910594384551, 4035309384849142)


def test_a_larger_vocabulary_only_adds_tokens() -> None:
    assert np.array_equal(uniform_bits(3, 9, 50), uniform_bits(3, 9, 5000)[:50])


def test_noise_is_finite_and_accurate_at_both_ends() -> None:
    ends = np.array([0, 1, 2, 1000, 2**23 - 1, 2**23, 2**23 + 1, 2**24 - 1000, 2**24 - 2, 2**24 - 1], dtype=np.uint32)
    found = gumbel_of(ends)
    for bits, value in zip(ends.tolist(), found.tolist(), strict=True):
        small, rest = (bits + 0.5) / 2**BITS, (2**BITS - bits - 0.5) / 2**BITS
        exact = -math.log(-(math.log(small) if small < 0.5 else math.log1p(-rest)))
        assert value == pytest.approx(exact, rel=1e-6, abs=1e-7)
    assert found.min() > -2.86
    assert found.max() < 17.33
    assert np.all(np.diff(found) > 0)


def test_noise_is_monotonic_in_the_bits() -> None:
    bits = np.unique(np.concatenate([np.arange(2**12), np.arange(2**23 - 2**12, 2**23 + 2**12), np.arange(2**24 - 2**12, 2**24)]))
    assert np.all(np.diff(gumbel_of(bits.astype(np.uint32))) >= 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_bits_are_uniform_over_ids_and_over_positions(seed: int) -> None:
    over_ids = uniform_bits(seed, 5, 2**17)
    over_positions = np.concatenate([uniform_bits(seed, position, 32) for position in range(4096)])
    for sample in (over_ids, over_positions):
        for shift in (0, 8, 16):  # low, middle and upper bits
            assert chi_squared(np.bincount((sample >> np.uint32(shift)) & np.uint32(255), minlength=256)) > 1e-5


def test_neighbouring_ids_positions_and_seeds_are_independent() -> None:
    ids = uniform_bits(11, 40, 2**16)
    pairs = {
        "ids": (ids[:-1], ids[1:]),
        "far ids": (ids[:-1024], ids[1024:]),
        "positions": (ids, uniform_bits(11, 41, 2**16)),
        "seeds": (ids, uniform_bits(12, 40, 2**16)),
        "seed and position": (ids, uniform_bits(12, 39, 2**16)),
        "child": (ids, uniform_bits(child_seed(11, 1), 40, 2**16)),
    }
    for name, (left, right) in pairs.items():
        for shift in (20, 0):
            table = np.bincount((left >> np.uint32(shift) & np.uint32(15)) * 16 + (right >> np.uint32(shift) & np.uint32(15)))
            assert chi_squared(table) > 1e-5, name
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / math.sqrt(len(left)), name


def test_one_token_is_independent_from_position_to_position() -> None:
    rows = np.stack([uniform_bits(3, position, 8) for position in range(20000)])
    for column in rows.T:
        table = np.bincount((column[:-1] >> np.uint32(20)) * 16 + (column[1:] >> np.uint32(20)), minlength=256)
        assert chi_squared(table) > 1e-5


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = np.concatenate([gumbel(seed, 8, 2**14) for seed in range(16)]).astype(np.float64)
    error = 1 / math.sqrt(len(noise))
    assert abs(noise.mean() - np.euler_gamma) < 5 * math.pi / math.sqrt(6) * error
    assert abs(noise.var() - math.pi**2 / 6) < 5 * 3 * error
    assert abs(stats.skew(noise) - 1.1395) < 0.1
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-5


def test_child_and_prompt_seeds_are_distinct_and_in_range() -> None:
    seeds = {seed for parent in SEEDS for make in (child_seed, prompt_seed) for seed in (make(parent, i) for i in range(1, 200))}
    assert len(seeds) == len(SEEDS) * 2 * 199
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)
    assert all(child_seed(seed, 0) == prompt_seed(seed, 0) == seed for seed in SEEDS)


def frequencies(draws: int) -> float:
    """p-value of the argmax of logits plus noise, one draw per seed, against the softmax."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0, 1.5], dtype=np.float32)
    sampled = np.array([np.argmax(logits + gumbel(seed, 17, 8)) for seed in range(draws)])
    shares = np.exp(logits.astype(np.float64))
    return float(stats.chisquare(np.bincount(sampled, minlength=8), draws * shares / shares.sum()).pvalue)


def test_the_argmax_of_logits_plus_noise_has_the_softmax_distribution() -> None:
    assert frequencies(20_000) > 1e-4


@pytest.mark.long
def test_the_argmax_of_logits_plus_noise_has_the_softmax_distribution_over_a_million_seeds() -> None:
    assert frequencies(1_000_000) > 1e-4


@pytest.mark.long
def test_bits_are_uniform_over_sixteen_million_draws() -> None:
    counts = np.zeros(4096, dtype=np.int64)
    for position in range(256):
        counts += np.bincount(uniform_bits(99, position, 2**16) >> np.uint32(12), minlength=4096)
    assert chi_squared(counts) > 1e-5
