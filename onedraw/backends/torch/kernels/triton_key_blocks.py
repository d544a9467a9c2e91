"""Blocks of keys in a tile of attention: where they lie, and how one more is mixed in.

In: a block's positions, a row's pages, the state of a split so far. Out: places in the pages; the state with one more block: a
running maximum, the sum of the weights, the values they weigh.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.kernels.triton_codes import halves
from onedraw.backends.torch.kernels.triton_math import looked_up


@triton.jit
def block_places(start, table, head, table_width, KV: tl.constexpr, PAGE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Where the keys of a block lie, counted in slots of one head; anywhere in the row's pages for what is not read."""
    # Blocks begin at multiples of their length: the compiler sees it, and what is left of a division is a shift.
    at = (start // BLOCK_KEYS * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)).to(tl.uint32)
    page = looked_up(table + tl.minimum((at // PAGE).to(tl.int32), table_width - 1))
    return (page * KV + head) * PAGE + (at % PAGE).to(tl.int32)


@triton.jit
def path_places(
    start, low, high, tail, path, table, head, path_width, KV: tl.constexpr, PAGE: tl.constexpr, BLOCK_KEYS: tl.constexpr
):
    """The same on the path of a tree's node, whose steps lie behind the tail wherever they were written."""
    position = start + tl.arange(0, BLOCK_KEYS)
    there = (position >= low) & (position <= high)
    depth = tl.minimum(tl.maximum(position - tail, 0), path_width - 1)
    slot = tl.where(position >= tail, tail + looked_up(path + depth), position)
    page = looked_up(table + tl.where(there, slot // PAGE, 0))
    return (page * KV + head) * PAGE + slot % PAGE


@triton.jit
def mix(scores, value, ones, peak, sums, mixed, IEEE: tl.constexpr):
    """One more block of a split: its scores, and the values they weigh."""
    top = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(peak - safe)
    weight = tl.exp2(scores - safe[:, None]).to(value.dtype)
    sums = tl.dot(weight, ones, sums * fade[:, None], input_precision="ieee" if IEEE else "tf32")
    mixed = tl.dot(weight, value, mixed * fade[:, None], input_precision="ieee" if IEEE else "tf32")
    return top, sums, mixed


@triton.jit
def code_scores(keys, key_scales, even_query, odd_query, here, there, two, scale, D: tl.constexpr, CODED: tl.constexpr,
                IEEE: tl.constexpr):  # fmt: skip
    """Scores of a block of codes. Of two neighbouring dimensions, which lie in 16 bits, each has a product of its own."""
    inside = there[:, None] & (two < D // 2)[None, :]
    pair_at = (here.to(tl.int64) * (D // 2))[:, None] + two[None, :]
    lower, upper = halves(tl.load(keys + pair_at, mask=inside, other=0), even_query.dtype, CODED == 2)
    scores = tl.dot(even_query, tl.trans(lower), input_precision="ieee" if IEEE else "tf32")
    scores = tl.dot(odd_query, tl.trans(upper), scores, input_precision="ieee" if IEEE else "tf32")
    return scores * (tl.load(key_scales + here, mask=there, other=0.0) * scale)[None, :]


@triton.jit
def mix_codes(scores, values, value_scales, here, there, pair, ones, peak, sums, even, odd, D: tl.constexpr, CODED: tl.constexpr,
              IEEE: tl.constexpr):  # fmt: skip
    """`mix` for a block of codes, of the columns that lie in `pair`: even and odd ones have a mixture of their own."""
    kind = ones.dtype
    top = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(peak - safe)
    mixing = tl.exp2(scores - safe[:, None])
    sums = tl.dot(mixing.to(kind), ones, sums * fade[:, None], input_precision="ieee" if IEEE else "tf32")
    pair_at = (here.to(tl.int64) * (D // 2))[:, None] + pair[None, :]
    lower, upper = halves(tl.load(values + pair_at, mask=there[:, None] & (pair < D // 2)[None, :], other=0), kind, CODED == 2)
    weight = (mixing * tl.load(value_scales + here, mask=there, other=0.0)[None, :]).to(kind)
    even = tl.dot(weight, lower, even * fade[:, None], input_precision="ieee" if IEEE else "tf32")
    odd = tl.dot(weight, upper, odd * fade[:, None], input_precision="ieee" if IEEE else "tf32")
    return top, sums, even, odd
