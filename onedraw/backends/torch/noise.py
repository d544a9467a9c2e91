"""The noise of `sampling/noise.py` for many positions at once: the same integers, this backend's logarithms.

In: the two words of each position's key. Out: Gumbel noise, float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from onedraw.backends.torch.exact import Scratch, apply_elementwise
from onedraw.sampling.noise import BITS, MULTIPLIERS_32, SHIFTS_32


def key_words(keys: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys as two columns of int32, which wraps like the unsigned definition.   [C, 1] each"""
    words = torch.tensor(keys, dtype=torch.int64).to(torch.int32).to(device)
    return words[:, :1], words[:, 1:]


def uniform_bits(first: Tensor, second: Tensor, vocab: int, scratch: Scratch) -> Tensor:
    """24 uniform bits for every token id.   [C, 1] and [C, 1] -> [C, V] int32"""
    words, spare = (scratch.take(name, (len(first), vocab), torch.int32) for name in ("words", "spare"))
    torch.bitwise_xor(_ids(vocab, first.device), first, out=words)
    _mix32(words, spare)
    words += second
    _mix32(words, spare)
    return _shift(words, 32 - BITS, words)


def gumbel(first: Tensor, second: Tensor, vocab: int, scratch: Scratch) -> Tensor:
    """-log(-log u) for every token id.   [C, 1] and [C, 1] -> [C, V] float32"""
    odd = uniform_bits(first, second, vocab, scratch).mul_(2).add_(1)  # u * 2^25
    rest, upper = (scratch.take(name, odd.shape, torch.int32) for name in ("rest", "spare"))
    above, below = (scratch.take(name, odd.shape, torch.float32) for name in ("above", "below"))
    # Without a branch: `below` is u in the lower half and 1 in the upper, `above` is u - 1 in the upper half and 0 in
    # the lower, both exact. So one of the two logarithms is 0.
    torch.sub(odd, _word(2 ** (BITS + 1), odd.device), out=rest)
    torch.sub(_word(2**BITS, odd.device), odd, out=upper).bitwise_right_shift_(_word(31, odd.device))
    rest &= upper
    above.copy_(rest).mul_(2.0 ** -(BITS + 1))
    below.copy_(odd.sub_(rest)).mul_(2.0 ** -(BITS + 1))
    apply_elementwise(torch.log, below, out=below)
    noise = apply_elementwise(torch.log1p, above, out=above).add_(below).neg_()
    return apply_elementwise(torch.log, noise, out=noise).neg_()


@lru_cache(maxsize=8)
def _ids(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, dtype=torch.int32, device=device)


def _mix32(words: Tensor, spare: Tensor) -> None:
    first, second, third = SHIFTS_32
    words ^= _shift(words, first, spare)
    words *= _word(MULTIPLIERS_32[0], words.device)
    words ^= _shift(words, second, spare)
    words *= _word(MULTIPLIERS_32[1], words.device)
    words ^= _shift(words, third, spare)


def _shift(words: Tensor, count: int, out: Tensor) -> Tensor:
    """A shift that brings in zeros; torch's own copies the sign."""
    torch.bitwise_right_shift(words, _word(count, words.device), out=out)
    return out.bitwise_and_(_word(2 ** (32 - count) - 1, words.device))


@lru_cache(maxsize=64)
def _word(value: int, device: torch.device) -> Tensor:
    """A 32-bit constant. Kept as a tensor, since torch converts a Python number at every use."""
    return torch.tensor(value - 2**32 if value >= 2**31 else value, dtype=torch.int32, device=device)
