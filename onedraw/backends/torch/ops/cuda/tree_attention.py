"""What is a tree node's own in attention: the splits before it merged, and the blocks that hold its path mixed in behind them.

In: queries, a layer's pages, and what tiles of many nodes left of every split that the nodes have in common. Out: the node's
attention. A program has one node, one key head and some columns of the values; columns know nothing of each other, so how many
it has changes no bit. The kernel in front of it is `_attend`, all of whose programs have waited for queries and keys before they
let this one start; so the first block's scores are taken before this one waits, while that one ends.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.ops.cuda.attention_merge import (
    code_scores,
    fold,
    folded,
    mix,
    mix_codes,
    path_places,
    split_at,
    start_of,
)
from onedraw.backends.torch.ops.cuda.triton_math import let_next_start, wait_for_inputs


@triton.jit
def _repeated(peak, total, mixed, TIMES: tl.constexpr):
    """States of a few rows as those of a tile that has them TIMES times."""
    ROWS: tl.constexpr = mixed.shape[0]
    COLUMNS: tl.constexpr = mixed.shape[1]
    peak = tl.reshape(tl.broadcast_to(peak[None, :], (TIMES, ROWS)), (TIMES * ROWS,))
    total = tl.reshape(tl.broadcast_to(total[None, :], (TIMES, ROWS)), (TIMES * ROWS,))
    mixed = tl.reshape(tl.broadcast_to(mixed[None, :, :], (TIMES, ROWS, COLUMNS)), (TIMES * ROWS, COLUMNS))
    return peak, total, mixed


@triton.jit
def _block(start, low, high, tail, path, pages, head, path_width, lowest, highest, KV: tl.constexpr, PAGE: tl.constexpr,
           BLOCK_KEYS: tl.constexpr):  # fmt: skip
    """Of the keys of a block: where they lie, which of them are the node's to read, which it sees."""
    position = start + tl.arange(0, BLOCK_KEYS)
    inside = (position >= low) & (position <= high)
    at = path_places(start, low, high, tail, path, pages, head, path_width, KV, PAGE, BLOCK_KEYS)
    return at, inside, inside & (position >= lowest) & (position <= highest)


@triton.jit
def _mix_codes(scores, values, value_scales, here, there, pair, ones, peak, sums, mixed, D: tl.constexpr, CODED: tl.constexpr,
               IEEE: tl.constexpr):  # fmt: skip
    even, odd = tl.split(tl.reshape(mixed, (mixed.shape[0], mixed.shape[1] // 2, 2)))
    peak, sums, even, odd = mix_codes(
        scores, values, value_scales, here, there, pair, ones, peak, sums, even, odd, D, CODED, IEEE
    )
    return peak, sums, tl.reshape(tl.join(even, odd), (mixed.shape[0], mixed.shape[1]))


@triton.jit(do_not_specialize=["merged", "path_width", "table_width"])
def attend_own(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    part_mixed,
    part_peak,
    part_total,
    tiles,
    firsts,
    ends,
    lines,
    table,
    paths,
    merged,
    q_stride,
    table_width,
    path_width,
    scale,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    CODED: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One node, which is a tile by itself, and one key head."""
    tile = tl.program_id(0) * 8
    head = tl.program_id(1)
    token = tl.load(tiles + tile)
    carried = tl.load(tiles + tile + 2)
    row = tl.load(tiles + tile + 3).to(tl.int64)
    low = tl.load(tiles + tile + 4)
    high = tl.load(tiles + tile + 5)
    tail = tl.load(tiles + tile + 6)
    there = tl.load(tiles + tile + 1) > 0  # padding is no node
    PER: tl.constexpr = HEADS // KV
    m = tl.arange(0, BLOCK_M)
    live = (m < PER) & there
    query_head = head * PER + m
    lowest, highest, line = tl.load(firsts + token), tl.load(ends + token), tl.load(lines + token)
    d = tl.arange(0, BLOCK_D)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    wide = column < D
    path, pages = paths + token * path_width, table + row * table_width
    begin_split = split_at(low, LEAST)
    begin = tl.maximum(start_of(begin_split, LEAST), low // BLOCK_KEYS * BLOCK_KEYS)
    kind = q.dtype.element_ty
    q_at = q + token.to(tl.int64) * q_stride + query_head[:, None] * D
    if CODED:  # even and odd dimensions by themselves, see `code_scores`
        two = tl.arange(0, BLOCK_D // 2)
        narrow = live[:, None] & (two < D // 2)[None, :]
        even_query = tl.load(q_at + 2 * two[None, :], mask=narrow, other=0.0)
        odd_query = tl.load(q_at + 2 * two[None, :] + 1, mask=narrow, other=0.0)
        pair = tl.program_id(2) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    else:
        query = tl.load(q_at + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    ones = tl.full((BLOCK_KEYS, 8), 1.0, dtype=kind)
    stop, border = high + 1, start_of(begin_split + 1, LEAST)
    # The first block, before the others are here.
    at, inside, sees = _block(begin, low, high, tail, path, pages, head, path_width, lowest, highest, KV, PAGE, BLOCK_KEYS)
    if CODED:
        scores = code_scores(keys, key_scales, even_query, odd_query, at, inside, two, scale, D, CODED, IEEE)
    else:
        place = at.to(tl.int64) * D
        key = tl.load(keys + place[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
        value = tl.load(values + place[:, None] + column[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
    scores = tl.where(live[:, None] & sees[None, :], scores, float("-inf"))
    wait_for_inputs(PDL)
    # What goes on is on its way while the splits before it are merged, in as many rows as there are heads.
    part = (begin_split * merged + line).to(tl.int64) * HEADS + query_head
    goes_on = live & (begin_split == carried)
    peak_s = tl.load(part_peak + part, mask=goes_on, other=float("-inf"))
    sums_s = tl.zeros((BLOCK_M, 8), dtype=tl.float32) + tl.load(part_total + part, mask=goes_on, other=0.0)[:, None]
    on_at = part_mixed + part[:, None] * D + column[None, :]
    mixed_s = tl.load(on_at, mask=goes_on[:, None] & wide[None, :], other=0.0)
    one = tl.arange(0, GROUP_ROWS)
    peak, total, mixed = folded(
        split_at(lowest, LEAST),
        begin_split,
        part_mixed,
        part_peak,
        part_total,
        line,
        merged,
        head * PER + one,
        (one < PER) & there,
        column,
        HEADS,
        D,
        GROUP,
    )
    peak, total, mixed = _repeated(peak, total, mixed, BLOCK_M // GROUP_ROWS)
    if CODED:
        peak_s, sums_s, mixed_s = _mix_codes(
            scores, values, value_scales, at, inside, pair, ones, peak_s, sums_s, mixed_s, D, CODED, IEEE
        )
    else:
        peak_s, sums_s, mixed_s = mix(scores, value, ones, peak_s, sums_s, mixed_s, IEEE)
    for start in tl.range(begin + BLOCK_KEYS, stop, BLOCK_KEYS, num_stages=1):
        if start == border:  # a path may reach into another split, which begins with nothing
            border = start_of(split_at(start, LEAST) + 1, LEAST)
            peak, total, mixed = fold(peak, total, mixed, peak_s, tl.max(sums_s, 1), mixed_s)
            peak_s = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
            sums_s = tl.zeros((BLOCK_M, 8), dtype=tl.float32)
            mixed_s = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.float32)
        at, inside, sees = _block(start, low, high, tail, path, pages, head, path_width, lowest, highest, KV, PAGE, BLOCK_KEYS)
        if CODED:
            scores = code_scores(keys, key_scales, even_query, odd_query, at, inside, two, scale, D, CODED, IEEE)
            scores = tl.where(live[:, None] & sees[None, :], scores, float("-inf"))
            peak_s, sums_s, mixed_s = _mix_codes(
                scores, values, value_scales, at, inside, pair, ones, peak_s, sums_s, mixed_s, D, CODED, IEEE
            )
        else:
            place = at.to(tl.int64) * D
            key = tl.load(keys + place[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
            value = tl.load(values + place[:, None] + column[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
            scores = tl.where(live[:, None] & sees[None, :], scores, float("-inf"))
            peak_s, sums_s, mixed_s = mix(scores, value, ones, peak_s, sums_s, mixed_s, IEEE)
    peak, total, mixed = fold(peak, total, mixed, peak_s, tl.max(sums_s, 1), mixed_s)
    let_next_start(PDL)
    result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], (BLOCK_M, COLUMNS))).to(out.dtype.element_ty)
    o_at = out + (token.to(tl.int64) * HEADS + query_head)[:, None] * D + column[None, :]
    tl.store(o_at, result, mask=live[:, None] & wide[None, :])
