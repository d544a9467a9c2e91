"""Operations whose bits do not depend on the number of rows, the neighbours or the threads.

In: tensors on a CPU or a CUDA device. Out: the same numbers for a row, whatever is computed beside it.

Three habits do it: functions that a CPU computes differently in its vector loop and in the tail run on whole
vectors only; sums over the vocabulary are sums of integers; the first of equals is asked for explicitly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onedraw.sampling.law import MASS_BITS

WIDTH = 64  # elements; a multiple of every vector width in use
PIECE = 32768  # elements; torch never splits so few among threads


def padded(width: int) -> int:
    """The next multiple of WIDTH."""
    return -(-width // WIDTH) * WIDTH


def apply_elementwise(function: Callable[..., Tensor], x: Tensor, out: Tensor | None = None) -> Tensor:
    """`function` (exp, log, tanh …, one that takes `out=`) of every element, bits independent of shape and threads.

    `out` may be `x` itself; it is contiguous where given. On a CPU the last bit differs between vector loop and
    scalar tail, and torch splits large tensors among threads at unaligned places: so pieces of whole vectors, each
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


def masses(deficit: Tensor) -> Tensor:
    """floor(exp(-deficit) * 2^40), integers that add up exactly in any order.   [C, V] float32 -> int64"""
    share = -deficit
    return apply_elementwise(torch.exp, share, out=share).mul_(2.0**MASS_BITS).to(torch.int64)


def reach(deficit: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Per row the smallest value t with sum(weights where deficit <= t) >= target.

    deficit [C, V] float32, zero or more; weights [C, V] int64; target [C] int64, from 1 to the row's sum -> [C] float32.
    Floats that are not negative have the order of their bits. So: a histogram of the weights over the upper bits, the
    bin where the running sum reaches the target, a histogram of the next bits inside that bin, and again.
    """
    bits = deficit.view(torch.int32)
    found = torch.zeros(len(bits), 1, dtype=torch.int32, device=bits.device)
    for shift, width in ((20, 2048), (10, 1024), (0, 1024)):
        found *= width
        # Bin 0 takes what lies below the bin found so far, the last one what lies above.
        bins = (bits >> shift).sub_(found).clamp_(-1, width).add_(1).to(torch.int64)
        histogram = torch.zeros(len(bits), width + 2, dtype=torch.int64, device=bits.device)
        running = histogram.scatter_add_(1, bins, weights).cumsum(1)
        found += ((running < target[:, None]).sum(1, keepdim=True) - 1).to(torch.int32)
    return found.view(torch.float32)[:, 0]


def first_best(values: Tensor) -> Tensor:
    """Per row the lowest index among the largest values.   [C, V] -> [C] int64"""
    ids = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
    best = values.amax(1, keepdim=True)
    return torch.where(values == best, ids, values.shape[1]).amin(1).to(torch.int64)


def likeliest(deficit: Tensor, count: int) -> Tensor:
    """Per row the `count` smallest deficits, the lowest id first among equals, as int64 (bits of the deficit, id)."""
    ids = torch.arange(deficit.shape[1], dtype=torch.int64, device=deficit.device)
    keys = deficit.view(torch.int32).to(torch.int64) << 32 | ids
    return keys.topk(count, dim=1, largest=False, sorted=True).values
