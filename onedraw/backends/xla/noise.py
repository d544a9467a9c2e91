"""The noise of `sampling/noise.py` for many positions at once: the same integers, XLA's logarithms.

In: the two words of each position's key. Out: Gumbel noise, float32.
"""

from __future__ import annotations

import jax.numpy as jnp

from onedraw.backends.xla.platform import Array
from onedraw.sampling.noise import BITS, HALF, MULTIPLIERS_32, SHIFTS_32


def uniform_bits(keys: Array, vocab: int) -> Array:
    """24 uniform bits for every token id.   [C, 2] uint32 -> [C, V] uint32"""
    words = jnp.arange(vocab, dtype=jnp.uint32)[None] ^ keys[:, :1]
    words = _mix32(words) + keys[:, 1:]
    return _mix32(words) >> (32 - BITS)


def gumbel(keys: Array, vocab: int) -> Array:
    """-log(-log u) for every token id.   [C, 2] uint32 -> [C, V] float32"""
    bits = uniform_bits(keys, vocab)
    whole = bits.astype(jnp.float32)
    below = (whole + 0.5) * 2.0**-BITS  # u, exact in the lower half
    above = jnp.minimum((2.0**BITS - whole - 0.5) * 2.0**-BITS, 0.5)  # 1 - u, exact in the upper half
    return -jnp.log(-jnp.where(bits < HALF, jnp.log(below), jnp.log1p(-above)))


def _mix32(words: Array) -> Array:
    first, second, third = SHIFTS_32
    words = (words ^ words >> first) * jnp.uint32(MULTIPLIERS_32[0])
    words = (words ^ words >> second) * jnp.uint32(MULTIPLIERS_32[1])
    return words ^ words >> third
