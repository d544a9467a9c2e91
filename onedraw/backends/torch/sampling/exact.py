"""Operations whose bits do not depend on the number of rows, the neighbours or the threads.

In: tensors on a CPU or a CUDA device. Out: the same numbers for a row, whatever is computed beside it. A row is one position to
sample at. A token's deficit is the best score minus its own, divided by the temperature: zero or more. A row's limit is the
largest deficit that its filters keep. Axes: C rows, V tokens of the vocabulary.

Three rules make the bits independent: functions that a CPU computes differently in its vector loop and in the tail run on whole
vectors only; sums over the vocabulary are sums of integers; among equal values, the lowest index is selected explicitly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from onedraw.sampling.logprobs import MASS_BITS

WIDTH = 64  # elements of a whole vector; a multiple of every vector width in use
LARGEST = torch.finfo(torch.float32).max
PIECE = 32768  # elements of one call; torch never splits so few among threads


def padded(width: int) -> int:
    """The next multiple of WIDTH."""
    return -(-width // WIDTH) * WIDTH


def apply_elementwise(function: Callable[..., Tensor], x: Tensor, out: Tensor | None = None) -> Tensor:
    """Apply `function` (exp, log, tanh …, one that takes `out=`) to every element, with bits independent of shape and threads.

    `out` may be `x` itself, and must be contiguous. On a CPU the last bit differs between the vector loop and the scalar tail,
    and torch splits large tensors among threads at unaligned places. So the function is called on pieces of whole vectors, each
    too small to be split.
    """
    if x.device.type != "cpu":
        return function(x, out=out) if out is not None else function(x)
    flat = x.reshape(-1)
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    target = result.view(-1)
    whole = flat.numel() // WIDTH * WIDTH
    for start in range(0, whole, PIECE):
        stop = min(start + PIECE, whole)
        function(flat[start:stop], out=target[start:stop])
    if whole < flat.numel():
        tail = torch.zeros(WIDTH, dtype=x.dtype)
        tail[: flat.numel() - whole] = flat[whole:]
        target[whole:] = function(tail)[: flat.numel() - whole]
    return result


class Scratch:
    """Buffers by name, kept between calls. Owner: the sampler.

    A buffer is valid until the same name is taken again. On a CPU, page faults in new large buffers cost more than the arithmetic
    in them. On a CUDA device the allocator reuses memory, so buffers are not kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer with undefined contents."""
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        count = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name] = torch.empty(count, dtype=dtype)
        return buffer[:count].view(shape)


def ordered_sum(x: Tensor) -> Tensor:
    """Sum over the last axis in one fixed order: pairs of neighbours, then pairs of these sums. [..., W] -> [...]

    One addition rounds the same everywhere, while the order of a library's own sum depends on the shape of the whole tensor.
    """
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], dim=-1)
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def masses(deficit: Tensor, scratch: Scratch, limit: Tensor | None = None) -> Tensor:
    """Probability masses floor(exp(-deficit) * 2^40) as integers, whose sums are exact in any order. A mass is 0 where the
    deficit exceeds `limit` [C, 1].

    [C, V] float32 -> int64
    """
    share = torch.neg(deficit, out=scratch.take("share", deficit.shape, torch.float32))
    apply_elementwise(torch.exp, share, out=share).mul_(2.0**MASS_BITS)
    if limit is not None:
        share *= scratch.take("within", deficit.shape, torch.float32).copy_(deficit).le_(limit)
    return scratch.take("masses", deficit.shape, torch.int64).copy_(share)


def reach(deficit: Tensor, weights: Tensor, target: Tensor, scratch: Scratch) -> Tensor:
    """For each row the smallest value t for which sum(weights where deficit <= t) >= target.

    deficit [C, V] float32, zero or more; weights [C, V] int64; target [C] int64, from 1 to the sum of the row's weights -> [C]
    float32. Floats that are not negative are ordered like their bits. So a histogram of the weights over the upper bits gives the
    bin in which the running sum reaches the target, a histogram over the next bits a finer bin inside it, and the last bits the
    value.
    """
    bits = deficit.view(torch.int32)
    place = scratch.take("place", bits.shape, torch.int32)
    bins = scratch.take("bins", bits.shape, torch.int64)
    found = torch.zeros(len(bits), 1, dtype=torch.int32, device=bits.device)
    for shift, width in ((20, 2048), (10, 1024), (0, 1024)):
        found *= width
        # Bin 0 counts values below the bin that was found so far, the last bin values above it.
        torch.bitwise_right_shift(bits, shift, out=place)
        bins.copy_(place.sub_(found - 1).clamp_(0, width + 1))
        histogram = torch.zeros(len(bits), width + 2, dtype=torch.int64, device=bits.device)
        running = histogram.scatter_add_(1, bins, weights).cumsum(1)
        found += ((running < target[:, None]).sum(1, keepdim=True) - 1).to(torch.int32)
    return found.view(torch.float32)[:, 0]


def drop_beyond(values: Tensor, deficit: Tensor, limit: Tensor, scratch: Scratch) -> None:
    """Make `values` too small to be sampled, in place, where the deficit exceeds the row's limit.   [C, V], [C, V], [C, 1]"""
    # A comparison in place gives 1.0 and 0.0, which is several times faster than a mask of booleans.
    beyond = scratch.take("within", deficit.shape, torch.float32).copy_(deficit).gt_(limit)
    values.sub_(beyond, alpha=LARGEST)


def first_best(values: Tensor) -> Tensor:
    """For each row the lowest index among the largest values; `values` is overwritten.   [C, V] float32 -> [C] int64

    If a row has a NaN, its largest value is NaN, which equals nothing; the index is then that of the last column.
    """
    width = values.shape[1]
    best = values.amax(1, keepdim=True)
    marked = values.eq_(best).mul_(_countdown(width, values.device)).amax(1)
    return width - marked.clamp_(min=1).to(torch.int64)


@lru_cache(maxsize=8)
def _countdown(width: int, device: torch.device) -> Tensor:
    """The numbers from `width` down to 1, which are exact in float32 for any vocabulary below 2^24."""
    return torch.arange(width, 0, -1, dtype=torch.float32, device=device)


def likeliest(deficit: Tensor, count: int) -> Tensor:
    """For each row the `count` smallest deficits, among equals those of the lowest token ids. Each is one int64: the bits of the
    deficit in the upper half, the token id in the lower half."""
    ids = torch.arange(deficit.shape[1], dtype=torch.int64, device=deficit.device)
    keys = deficit.view(torch.int32).to(torch.int64) << 32 | ids
    return keys.topk(count, dim=1, largest=False, sorted=True).values
