"""Noise as a pure function of (seed, position, token id). There is no random generator with state.

The input is a seed below 2^53, an absolute position and the size of the vocabulary V. The output is one integer for each token
id, and from these the Gumbel noise that sampling adds to the scores.

The integers are the definition, so every backend must compute the same ones:

    k0, k1 = low and high half of mix64(mix64(seed ^ _NOISE_DOMAIN) + position)
    bits   = mix32(mix32(id ^ k0) + k1) >> 8                24 bits, all modulo 2^32
    u      = (bits + 1/2) / 2^24                            never 0, never 1
    g      = -log(-log u)                                   float32, within [-2.86, 17.33]

log u is computed in float32 from an exact argument: as log(u) for u in the lower half of (0, 1), as log1p(-(1 - u)) in the upper
half. So it is accurate near 0 and near 1, and everything is finite.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from onedraw.types import SEED_LIMIT

BITS = 24  # bits of a random integer; float32 represents every integer of 24 bits exactly
HALF = 2 ** (BITS - 1)  # integers below this one give a u in the lower half of (0, 1)
BLOCK = 32  # keys are computed for this many positions at once

# These multipliers and shifts come from well-known hash finalizers. Each step is a bijection, and together they mix all bits.
MULTIPLIERS_32 = (0x7FEB352D, 0x846CA68B)
SHIFTS_32 = (16, 15, 16)
_MULTIPLIERS_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK_64 = 2**64 - 1

# Each use of a seed has a domain constant of its own, so that for example the seed of a choice (one of the n replies to a prompt)
# is independent of the noise of its request.
_NOISE_DOMAIN = 0x6F6E65647261776E
_CHILD_DOMAIN = 0x6368696C64726E21
_PROMPT_DOMAIN = 0x70726F6D70747321
_WIDE_DOMAIN = 0x7769646573656564

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


def key(seed: int, position: int) -> tuple[int, int]:
    """Return two 32-bit words. For one seed, no two positions have the same pair."""
    return _keys(seed, position // BLOCK)[position % BLOCK]


@lru_cache(maxsize=1024)
def _keys(seed: int, block: int) -> list[tuple[int, int]]:
    """Return the keys of a block of positions, since those after the requested one are needed soon."""
    words = (_hash(seed, position, _NOISE_DOMAIN) for position in range(BLOCK * block, BLOCK * (block + 1)))
    return [(word & 0xFFFFFFFF, word >> 32) for word in words]


def uniform_bits(seed: int, position: int, vocab: int) -> Words:
    """Return 24 uniform bits for every token id.   [V]"""
    return _bits_at(seed, position, _ids(vocab))


def _bits_at(seed: int, position: int, ids: Words) -> Words:
    first, second = key(seed, position)
    words = ids ^ np.uint32(first)
    _mix32(words)
    words += np.uint32(second)
    _mix32(words)
    words >>= np.uint32(32 - BITS)
    return words


def gumbel(seed: int, position: int, vocab: int) -> Floats:
    """Return the noise of one position.   [V]"""
    return gumbel_of(uniform_bits(seed, position, vocab))


def gumbel_at(seed: int, position: int, ids: npt.NDArray[np.int64]) -> Floats:
    """Return the noise of one position at some token ids, in their order."""
    return gumbel_of(_bits_at(seed, position, ids.astype(np.uint32)))


def gumbel_of(bits: Words) -> Floats:
    """Return -log(-log u) for 24-bit integers, in float32."""
    whole = bits.astype(np.float32)
    below = (whole + np.float32(0.5)) * np.float32(2.0**-BITS)  # u, exact in the lower half
    # 1 - u is exact in the upper half. Elsewhere it is not used; it is limited to one half there, since it could round to 1.
    above = np.minimum((np.float32(2.0**BITS) - whole - np.float32(0.5)) * np.float32(2.0**-BITS), np.float32(0.5))
    logarithm: Floats = np.where(bits < HALF, np.log(below), np.log1p(-above))
    noise: Floats = -np.log(-logarithm)
    return noise


def child_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of n. Choice 0 has the request's own seed."""
    return seed if index == 0 else _hash(seed, index, _CHILD_DOMAIN) % SEED_LIMIT


def prompt_seed(seed: int, index: int) -> int:
    """Return the seed of prompt `index` of a list. Prompt 0 has the request's own seed."""
    return seed if index == 0 else _hash(seed, index, _PROMPT_DOMAIN) % SEED_LIMIT


def hashed_seed(seed: int) -> int:
    """Return a seed below SEED_LIMIT that is computed from any 64-bit integer by a hash."""
    return _hash(seed & _MASK_64, 0, _WIDE_DOMAIN) % SEED_LIMIT


def _hash(seed: int, number: int, domain: int) -> int:
    return mix64(_seed_hash(seed, domain) + number & _MASK_64)


@lru_cache(maxsize=4096)
def _seed_hash(seed: int, domain: int) -> int:
    """Return the part of the hash that is the same for all positions of a request."""
    return mix64(seed ^ domain)


def mix64(word: int) -> int:
    word = (word ^ word >> 30) * _MULTIPLIERS_64[0] & _MASK_64
    word = (word ^ word >> 27) * _MULTIPLIERS_64[1] & _MASK_64
    return word ^ word >> 31


def _mix32(words: Words) -> None:
    """Mix 32-bit words in place: shift, multiply, shift, multiply, shift."""
    first, second, third = SHIFTS_32
    words ^= words >> np.uint32(first)
    words *= np.uint32(MULTIPLIERS_32[0])
    words ^= words >> np.uint32(second)
    words *= np.uint32(MULTIPLIERS_32[1])
    words ^= words >> np.uint32(third)


@lru_cache(maxsize=8)
def _ids(vocab: int) -> Words:
    ids = np.arange(vocab, dtype=np.uint32)
    ids.flags.writeable = False
    return ids
