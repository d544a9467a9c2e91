"""Splits of attention merged from front to back: what every split of a row left, its maximum, its sums and its mixture.

In: parts of splits in memory. Out: one state for all of them, in registers, or the rows' attention itself. A group of splits is
asked for at once, so that a wait is one for all of them; the order of the merging, and so its bits, is that of the splits for
any size of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.ops.cuda.kv_quant import halves
from onedraw.backends.torch.ops.cuda.triton_math import let_next_start, looked_up, wait_for_inputs

# -------------------- Blocks of keys in a tile of attention: where they lie, and how one more is mixed in.


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"


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


# -------------------- Splits of attention merged from front to back: what every split of a row left, its maximum


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - kernels know tuples of tiles by their sums, not by unpacking


@triton.jit
def split_at(position, LEAST: tl.constexpr):
    """Which split a position lies in: see `split_of`."""
    low = tl.minimum(position // LEAST, position // (2 * LEAST) + 4)
    return tl.minimum(low, tl.minimum(position // (4 * LEAST) + 8, position // (8 * LEAST) + 16))


@triton.jit
def start_of(split, LEAST: tl.constexpr):
    low = tl.maximum(split * LEAST, (split - 4) * (2 * LEAST))
    return tl.maximum(low, tl.maximum((split - 8) * (4 * LEAST), (split - 16) * (8 * LEAST)))


@triton.jit
def fold(peak, total, mixed, peak_s, total_s, mixed_s):
    """One more split behind those so far; a split in which a row sees nothing leaves it as it is."""
    top = tl.maximum(peak, peak_s)
    safe = tl.where(top == float("-inf"), 0.0, top)
    before, now = tl.exp2(peak - safe), tl.exp2(peak_s - safe)
    seen = total_s != 0.0
    total = tl.where(seen, tl.fma(total, before, total_s * now), total)
    mixed = tl.where(seen[:, None], tl.fma(mixed, before[:, None], mixed_s * now[:, None]), mixed)
    return tl.where(seen, top, peak), total, mixed


@triton.jit
def _group(
    split,
    stop,
    part_mixed,
    part_peak,
    part_total,
    line,
    merged,
    heads,
    live,
    column,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The next splits' parts; behind the last there is none, which nobody sees."""
    peaks, totals, mixtures = (), (), ()
    for ahead in tl.static_range(GROUP):
        there = live & (split + ahead < stop)
        part = ((split + ahead) * merged + line).to(tl.int64) * HEADS + heads
        peaks = peaks + (tl.load(part_peak + part, mask=there, other=float("-inf")),)
        totals = totals + (tl.load(part_total + part, mask=there, other=0.0),)
        inside = there[:, None] & (column < D)[None, :]
        mixtures = mixtures + (tl.load(part_mixed + part[:, None] * D + column[None, :], mask=inside, other=0.0),)
    return peaks, totals, mixtures


@triton.jit
def folded(
    begin,
    stop,
    part_mixed,
    part_peak,
    part_total,
    line,
    merged,
    heads,
    live,
    column,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Splits [begin, stop) of one token's `heads` [ROWS] and values' columns [C]: maximum and sum [ROWS], mixture [ROWS, C]."""
    peak = tl.full((heads.shape[0],), float("-inf"), dtype=tl.float32)
    total = tl.zeros((heads.shape[0],), dtype=tl.float32)
    mixed = tl.zeros((heads.shape[0], column.shape[0]), dtype=tl.float32)
    for split in tl.range(begin, stop, GROUP, num_stages=1):
        peaks, totals, mixtures = _group(
            split, stop, part_mixed, part_peak, part_total, line, merged, heads, live, column, HEADS, D, GROUP
        )
        for one in tl.static_range(GROUP):
            peak, total, mixed = fold(peak, total, mixed, peaks[one], totals[one], mixtures[one])
    return peak, total, mixed


@triton.jit(do_not_specialize=["merged"])
def merge_splits(
    out,
    part_mixed,
    part_peak,
    part_total,
    tokens,
    firsts,
    ends,
    lines,
    merged,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and head."""
    token = tl.load(tokens + tl.program_id(0))
    line = tl.load(lines + token)
    head = tl.program_id(1)
    begin = split_at(tl.load(firsts + token), LEAST)
    stop = split_at(tl.load(ends + token), LEAST) + 1
    wait_for_inputs(PDL)
    d = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    _, total, mixed = folded(
        begin, stop, part_mixed, part_peak, part_total, line, merged, head + one, one == 0, d, HEADS, D, GROUP
    )
    let_next_start(PDL)
    result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], (1, BLOCK_D))).to(out.dtype.element_ty)
    at = out + ((token.to(tl.int64) * HEADS + head) * D + one)[:, None] + d[None, :]
    tl.store(at, result, mask=(d < D)[None, :])
