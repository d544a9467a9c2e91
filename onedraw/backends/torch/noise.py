"""The noise of `sampling/noise.py` for many positions at once: the same integers, this backend's logarithms.

In: the two words of each position's key. Out: Gumbel noise, float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onedraw.backends.torch.exact import apply_elementwise
from onedraw.sampling.noise import BITS, HALF, MULTIPLIERS_32, SHIFTS_32


def key_words(keys: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys as two columns of int32, which wraps like the unsigned definition.   [C, 1] each"""
    words = torch.tensor(keys, dtype=torch.int64).to(torch.int32).to(device)
    return words[:, :1], words[:, 1:]


def uniform_bits(first: Tensor, second: Tensor, vocab: int) -> Tensor:
    """24 uniform bits for every token id.   [C, 1] and [C, 1] -> [C, V] int32"""
    words = torch.arange(vocab, dtype=torch.int32, device=first.device) ^ first
    scratch = torch.empty_like(words)
    _mix32(words, scratch)
    words += second
    _mix32(words, scratch)
    _shift(words, 32 - BITS, words)
    return words


def gumbel(first: Tensor, second: Tensor, vocab: int) -> Tensor:
    """-log(-log u) for every token id.   [C, 1] and [C, 1] -> [C, V] float32"""
    bits = uniform_bits(first, second, vocab)
    below = bits.to(torch.float32)
    above = (2.0**BITS - below).sub_(0.5).mul_(-(2.0**-BITS)).clamp_(min=-0.5)
    below.add_(0.5).mul_(2.0**-BITS)
    apply_elementwise(torch.log, below, out=below)
    apply_elementwise(torch.log1p, above, out=above)
    noise = torch.where(bits < HALF, below, above).neg_()
    return apply_elementwise(torch.log, noise, out=noise).neg_()


def _mix32(words: Tensor, scratch: Tensor) -> None:
    first, second, third = SHIFTS_32
    words ^= _shift(words, first, scratch)
    words *= _signed(MULTIPLIERS_32[0])
    words ^= _shift(words, second, scratch)
    words *= _signed(MULTIPLIERS_32[1])
    words ^= _shift(words, third, scratch)


def _shift(words: Tensor, count: int, out: Tensor) -> Tensor:
    """A shift that brings in zeros; torch's own copies the sign."""
    torch.bitwise_right_shift(words, count, out=out)
    return out.bitwise_and_(2 ** (32 - count) - 1)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
