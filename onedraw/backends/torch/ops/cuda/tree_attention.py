"""Attention of the nodes of a draft tree: merges stored splits of the shared prefix, then reads the key blocks of the node's own
path.

A split is a range of key positions whose attention is computed by itself; its state is the running softmax of these keys. PDL is
programmatic dependent launch: a kernel may start while the one before it ends, and waits before it reads what that one writes.

In: queries, a layer's KV pages, and the states of the prefix's splits, which kernel `_attend` of `attention.py` stored. Out:
attention of each node. A program computes one node, one KV head and some value columns; columns are independent, so their number
per program changes no bit. The preceding kernel is `_attend`, whose programs have all waited for queries and keys before they let
this kernel start. So queries and keys may be read before the PDL wait, and this kernel computes the scores of the first block
before it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.ops.cuda.kv_quant import INT4, join_columns, split_columns
from onedraw.backends.torch.ops.cuda.online_softmax import (
    accumulate,
    accumulate_quantized,
    load_query_parts,
    merge_split,
    merge_split_range,
    path_key_slots,
    quantized_scores,
    split_index,
    split_start,
)
from onedraw.backends.torch.ops.cuda.triton_math import launch_dependents, wait_for_inputs


@triton.jit
def _repeat_rows(row_max, row_sum, acc, TIMES: tl.constexpr):
    """Repeat the rows of a state TIMES times, which makes it as high as a tile."""
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    row_max = tl.reshape(tl.broadcast_to(row_max[None, :], (TIMES, ROWS)), (TIMES * ROWS,))
    row_sum = tl.reshape(tl.broadcast_to(row_sum[None, :], (TIMES, ROWS)), (TIMES * ROWS,))
    acc = tl.reshape(tl.broadcast_to(acc[None, :, :], (TIMES, ROWS, COLUMNS)), (TIMES * ROWS, COLUMNS))
    return row_max, row_sum, acc


@triton.jit
def _path_block(start, low, high, tree_start, path, row_pages, head, path_width, first_key, last_key, KV_HEADS: tl.constexpr,
                PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):  # fmt: skip
    """The slots of a block's keys, a mask of the positions that this tile reads, and a mask of those that the node attends to."""
    position = start + tl.arange(0, BLOCK_KEYS)
    in_range = (position >= low) & (position <= high)
    slots = path_key_slots(start, low, high, tree_start, path, row_pages, head, path_width, KV_HEADS, PAGE_SIZE, BLOCK_KEYS)
    return slots, in_range, in_range & (position >= first_key) & (position <= last_key)


@triton.jit
def _accumulate_quantized(scores, values, value_scales, slots, in_range, word, ones, row_max, sums, acc, D: tl.constexpr,
                          KV_QUANT: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    PARTS: tl.constexpr = 4 if KV_QUANT == INT4 else 2
    accs = split_columns(acc, PARTS)
    row_max, sums, accs = accumulate_quantized(
        scores, values, value_scales, slots, in_range, word, ones, row_max, sums, accs, D, KV_QUANT, IEEE
    )
    return row_max, sums, join_columns(accs, PARTS)


@triton.jit(do_not_specialize=["merge_count", "path_width", "table_width"])
def attend_tree_paths(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    split_acc,
    split_max,
    split_sum,
    tiles,
    first_keys,
    last_keys,
    merge_rows,
    page_table,
    paths,
    merge_count,
    q_stride,
    table_width,
    path_width,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr,
    KV_QUANT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS_PER_LOAD: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile, which is one node and one KV head, for some value columns."""
    tile = tl.program_id(0) * 8
    head = tl.program_id(1)
    token = tl.load(tiles + tile)
    carried_split = tl.load(tiles + tile + 2)
    row = tl.load(tiles + tile + 3).to(tl.int64)
    low = tl.load(tiles + tile + 4)
    high = tl.load(tiles + tile + 5)
    tree_start = tl.load(tiles + tile + 6)
    is_node = tl.load(tiles + tile + 1) > 0  # a padding tile has no token
    HEADS_PER_KV: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, BLOCK_M)
    live = (m < HEADS_PER_KV) & is_node
    query_head = head * HEADS_PER_KV + m
    first_key, last_key, merge_row = tl.load(first_keys + token), tl.load(last_keys + token), tl.load(merge_rows + token)
    d = tl.arange(0, BLOCK_D)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < D
    path, row_pages = paths + token * path_width, page_table + row * table_width
    begin_split = split_index(low, FIRST_SPLIT)
    start_key = tl.maximum(split_start(begin_split, FIRST_SPLIT), low // BLOCK_KEYS * BLOCK_KEYS)
    dtype = q.dtype.element_ty
    q_ptrs = q + token.to(tl.int64) * q_stride + query_head[:, None] * D
    PARTS: tl.constexpr = 4 if KV_QUANT == INT4 else 2  # codes in a word of 16 bits
    if KV_QUANT:
        word = tl.arange(0, BLOCK_D // PARTS)
        queries = load_query_parts(q_ptrs, word, live[:, None] & (word < D // PARTS)[None, :], PARTS)
        column_word = tl.program_id(2) * (COLUMNS // PARTS) + tl.arange(0, COLUMNS // PARTS)
    else:
        query = tl.load(q_ptrs + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    ones = tl.full((BLOCK_KEYS, 8), 1.0, dtype=dtype)
    stop_key, split_stop = high + 1, split_start(begin_split + 1, FIRST_SPLIT)
    # The scores of the first block are computed before the PDL wait (see the module's docstring).
    slots, in_range, visible = _path_block(
        start_key, low, high, tree_start, path, row_pages, head, path_width, first_key, last_key, KV_HEADS, PAGE_SIZE, BLOCK_KEYS
    )
    if KV_QUANT:
        scores = quantized_scores(keys, key_scales, queries, slots, in_range, word, scale, D, KV_QUANT, IEEE)
    else:
        offsets = slots.to(tl.int64) * D
        key = tl.load(keys + offsets[:, None] + d[None, :], mask=in_range[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
        value = tl.load(values + offsets[:, None] + column[None, :], mask=in_range[:, None] & column_mask[None, :], other=0.0)
    scores = tl.where(live[:, None] & visible[None, :], scores, float("-inf"))
    wait_for_inputs(PDL)
    # Load the split that the path continues, and meanwhile merge the splits before it, in as many rows as there are heads.
    split_row = (begin_split * merge_count + merge_row).to(tl.int64) * HEADS + query_head
    continues = live & (begin_split == carried_split)
    row_max_s = tl.load(split_max + split_row, mask=continues, other=float("-inf"))
    sums_s = tl.zeros((BLOCK_M, 8), dtype=tl.float32) + tl.load(split_sum + split_row, mask=continues, other=0.0)[:, None]
    acc_ptrs = split_acc + split_row[:, None] * D + column[None, :]
    acc_s = tl.load(acc_ptrs, mask=continues[:, None] & column_mask[None, :], other=0.0)
    merge_head = tl.arange(0, MERGE_HEADS)
    row_max, row_sum, acc = merge_split_range(
        split_index(first_key, FIRST_SPLIT),
        begin_split,
        split_acc,
        split_max,
        split_sum,
        merge_row,
        merge_count,
        head * HEADS_PER_KV + merge_head,
        (merge_head < HEADS_PER_KV) & is_node,
        column,
        HEADS,
        D,
        SPLITS_PER_LOAD,
    )
    row_max, row_sum, acc = _repeat_rows(row_max, row_sum, acc, BLOCK_M // MERGE_HEADS)
    if KV_QUANT:
        row_max_s, sums_s, acc_s = _accumulate_quantized(
            scores, values, value_scales, slots, in_range, column_word, ones, row_max_s, sums_s, acc_s, D, KV_QUANT, IEEE
        )
    else:
        row_max_s, sums_s, acc_s = accumulate(scores, value, ones, row_max_s, sums_s, acc_s, IEEE)
    for start in tl.range(start_key + BLOCK_KEYS, stop_key, BLOCK_KEYS, num_stages=1):
        if start == split_stop:  # the path crosses into the next split, which starts from an empty state
            split_stop = split_start(split_index(start, FIRST_SPLIT) + 1, FIRST_SPLIT)
            row_max, row_sum, acc = merge_split(row_max, row_sum, acc, row_max_s, tl.max(sums_s, 1), acc_s)
            row_max_s = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
            sums_s = tl.zeros((BLOCK_M, 8), dtype=tl.float32)
            acc_s = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.float32)
        slots, in_range, visible = _path_block(
            start, low, high, tree_start, path, row_pages, head, path_width, first_key, last_key, KV_HEADS, PAGE_SIZE, BLOCK_KEYS
        )
        if KV_QUANT:
            scores = quantized_scores(keys, key_scales, queries, slots, in_range, word, scale, D, KV_QUANT, IEEE)
            scores = tl.where(live[:, None] & visible[None, :], scores, float("-inf"))
            row_max_s, sums_s, acc_s = _accumulate_quantized(
                scores, values, value_scales, slots, in_range, column_word, ones, row_max_s, sums_s, acc_s, D, KV_QUANT, IEEE
            )
        else:
            offsets = slots.to(tl.int64) * D
            key = tl.load(keys + offsets[:, None] + d[None, :], mask=in_range[:, None] & (d < D)[None, :], other=0.0)
            value = tl.load(values + offsets[:, None] + column[None, :], mask=in_range[:, None] & column_mask[None, :], other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
            scores = tl.where(live[:, None] & visible[None, :], scores, float("-inf"))
            row_max_s, sums_s, acc_s = accumulate(scores, value, ones, row_max_s, sums_s, acc_s, IEEE)
    row_max, row_sum, acc = merge_split(row_max, row_sum, acc, row_max_s, tl.max(sums_s, 1), acc_s)
    launch_dependents(PDL)
    result = tl.div_rn(acc, tl.broadcast_to(row_sum[:, None], (BLOCK_M, COLUMNS))).to(out.dtype.element_ty)
    out_ptrs = out + (token.to(tl.int64) * HEADS + query_head)[:, None] * D + column[None, :]
    tl.store(out_ptrs, result, mask=live[:, None] & column_mask[None, :])
