"""Paged attention on a GPU, in one form for all rows: single tokens, drafts, nodes of trees, prompt chunks, windows.

In: queries [T, H, D], a layer's pages, and for every token what it sees. Out: [T, H * D].

A tile is a few neighbouring queries of one row times the G query heads that share a key head. Keys are read in blocks of
32 or 64 absolute positions, by the size of a head alone; blocks are taken one after the other inside a split, which is a
range of absolute positions, with a running maximum; splits are merged from front to back. One program may walk all splits of its
tile (`ALL`), or each split has a program and a second kernel merges: the same operations in the same order. The sum of a
row's weights is taken by the matrix unit like the values' sum, since a library sum would follow the tile's layout. What a
query does not see adds exact zeros. Keys and values may be codes of 8 bits with scales (`codes.py`): a score is (q · code)
times the key's scale, and the weight that meets a value's code is the weight times the value's scale. So neither batch, nor
chunk, nor tile, nor the parallel form changes a bit of a row.

Nodes of a tree have all blocks in common that end before its drafts begin: tiles of many nodes read those, and leave the
state of the last split, maximum and sums, as it stands. A second kernel (`triton_own.py`) has a tile per node, which merges the
splits before it, goes on from there with the blocks that hold its path, and ends.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED, launch_options, shared_memory
from onedraw.backends.torch.ops.cuda.online_softmax import (
    accumulate,
    accumulate_quantized,
    key_slots,
    merge_split,
    merge_splits,
    quantized_scores,
    split_index,
    split_start,
)
from onedraw.backends.torch.ops.cuda.tree_attention import attend_tree_paths
from onedraw.backends.torch.ops.cuda.triton_math import launch_dependents, wait_for_inputs

Ints = npt.NDArray[np.int64]
FIRST_SPLIT = 128  # keys of the first splits
LOG2_E = math.log2(math.e)
TILE_WORDS = 8
TREE_COLUMNS = 64  # of the values, that a program has of a tree's node
# A tile reads everything by position; of a tree the blocks that all its nodes have in common, or a node's own blocks.
FULL, TREE_PREFIX, TREE_PATH = range(3)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What the tokens of a turn see, for layers of one kind. All int32, on the device."""

    rows: Tensor  # [T] row of each token
    first_keys: Tensor  # [T] first position each token sees
    last_keys: Tensor  # [T] last position each token sees
    merge_rows: Tensor  # [T] place of each token among those whose splits are merged, in order of the sets
    page_table: Tensor  # [R, W] pages
    paths: Tensor | None  # [T, depth] slots of a node's path, counted from its tail; None where no row branches
    page_size: int


@dataclass(frozen=True, slots=True)
class TileSet:
    """Tiles of one height, launched together."""

    height: int  # queries times query heads per key head
    tiles: Tensor  # [N, 8] int32: first token, tokens, the split that is carried on, row, positions to read from and to, tail,
    # first split
    merge_tokens: Tensor  # [t] int32: the tokens whose parts are kept until they are merged; empty where `together`
    splits: int  # behind the last split that any token sees
    grid_splits: int  # the largest number of splits that a tile reads
    sequential: bool  # one program walks all splits of a tile
    kind: int = FULL


def split_indices(position: Ints) -> Ints:
    """Which split a position lies in: 128 keys each up to position 1,024, 256 up to 2,048, 512 up to 8,192, and 1,024 from there
    on. So short contexts have enough of them to keep a device busy, and long ones not more than it takes time to merge."""
    index = position // FIRST_SPLIT
    for doublings, offset in ((1, 4), (2, 8), (3, 16)):
        index = np.minimum(index, position // (FIRST_SPLIT << doublings) + offset)
    return index


@triton.jit(do_not_specialize=["merge_count", "table_width"])
def _attend(
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
    merge_count,
    q_stride,
    table_width,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    KV_QUANT: tl.constexpr,
    IEEE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # What a turn is told, no kernel of the turn writes: it is read before waiting.
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles + tile * 8)
    count = tl.load(tiles + tile * 8 + 1)
    row = tl.load(tiles + tile * 8 + 3).to(tl.int64)
    low = tl.load(tiles + tile * 8 + 4)
    high = tl.load(tiles + tile * 8 + 5)
    if SEQUENTIAL:
        begin_split = split_index(low, FIRST_SPLIT)
        end_split = split_index(high, FIRST_SPLIT) + 1
    else:  # the last ones, which are the longest, begin first
        begin_split = tl.load(tiles + tile * 8 + 7) + tl.num_programs(2) - 1 - tl.program_id(2)
        end_split = begin_split + 1
        if (split_start(begin_split, FIRST_SPLIT) > high) | (split_start(end_split, FIRST_SPLIT) <= low):
            wait_for_inputs(PDL)  # who waits for this kernel waits for those before it
            return
    HEADS_PER_KV: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, BLOCK_M)
    live = m // HEADS_PER_KV < count
    token = first + tl.maximum(tl.minimum(m // HEADS_PER_KV, count - 1), 0)  # an empty tile has none
    first_key = tl.where(live, tl.load(first_keys + token), 2147483647)
    last_key = tl.where(live, tl.load(last_keys + token), -1)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < D
    query_head = head * HEADS_PER_KV + m % HEADS_PER_KV
    q_ptrs = q + token.to(tl.int64)[:, None] * q_stride + query_head[:, None] * D
    row_pages = page_table + row * table_width
    start_key = tl.maximum(split_start(begin_split, FIRST_SPLIT), low // BLOCK_KEYS * BLOCK_KEYS)
    next_slots = key_slots(start_key, row_pages, head, table_width, KV_HEADS, PAGE_SIZE, BLOCK_KEYS)
    wait_for_inputs(PDL)
    dtype = q.dtype.element_ty
    if KV_QUANT:  # even and odd dimensions by themselves, see `code_scores`
        pair = tl.arange(0, BLOCK_D // 2)
        pair_mask = live[:, None] & (pair < D // 2)[None, :]
        even_query = tl.load(q_ptrs + 2 * pair[None, :], mask=pair_mask, other=0.0)
        odd_query = tl.load(q_ptrs + 2 * pair[None, :] + 1, mask=pair_mask, other=0.0)
    else:
        query = tl.load(q_ptrs + d[None, :], mask=live[:, None] & d_mask[None, :], other=0.0)
    ones = tl.full((BLOCK_KEYS, 8), 1.0, dtype=dtype)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for split in range(begin_split, end_split):
        row_max_s = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        sums_s = tl.zeros((BLOCK_M, 8), dtype=tl.float32)
        acc_s = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        if KV_QUANT:
            even, odd = tl.split(tl.reshape(acc_s, (BLOCK_M, BLOCK_D // 2, 2)))
        start_key = tl.maximum(split_start(split, FIRST_SPLIT), low // BLOCK_KEYS * BLOCK_KEYS)
        stop_key = tl.minimum(split_start(split + 1, FIRST_SPLIT), high + 1)
        # Blocks that every query sees, then the others. The next block is looked up while one is computed with, so that no
        # fetching waits for where to fetch.
        masked_start = start_key
        if not KV_QUANT:
            common_stop = tl.minimum(stop_key, tl.min(tl.where(live, last_key, 2147483646), 0) + 1)
            masked_start = tl.where(
                start_key >= tl.max(tl.where(live, first_key, 0), 0), common_stop // BLOCK_KEYS * BLOCK_KEYS, start_key
            )
            for start in tl.range(start_key, masked_start, BLOCK_KEYS, num_stages=STAGES):
                offsets = next_slots.to(tl.int64) * D
                next_slots = key_slots(start + BLOCK_KEYS, row_pages, head, table_width, KV_HEADS, PAGE_SIZE, BLOCK_KEYS)
                key = tl.load(keys + offsets[:, None] + d[None, :], mask=d_mask[None, :], other=0.0)
                value = tl.load(values + offsets[:, None] + d[None, :], mask=d_mask[None, :], other=0.0)
                scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
                row_max_s, sums_s, acc_s = accumulate(scores, value, ones, row_max_s, sums_s, acc_s, IEEE)
        for start in tl.range(tl.maximum(start_key, masked_start), stop_key, BLOCK_KEYS, num_stages=STAGES):
            position = start + tl.arange(0, BLOCK_KEYS)
            in_range = (position >= low) & (position <= high)
            slots = next_slots
            next_slots = key_slots(start + BLOCK_KEYS, row_pages, head, table_width, KV_HEADS, PAGE_SIZE, BLOCK_KEYS)
            visible = (position[None, :] >= first_key[:, None]) & (position[None, :] <= last_key[:, None])
            if KV_QUANT:
                scores = quantized_scores(
                    keys, key_scales, even_query, odd_query, slots, in_range, pair, scale, D, KV_QUANT, IEEE
                )
                scores = tl.where(visible, scores, float("-inf"))
                row_max_s, sums_s, even, odd = accumulate_quantized(
                    scores, values, value_scales, slots, in_range, pair, ones, row_max_s, sums_s, even, odd, D, KV_QUANT, IEEE
                )
            else:
                offsets = slots.to(tl.int64) * D
                key = tl.load(keys + offsets[:, None] + d[None, :], mask=in_range[:, None] & d_mask[None, :], other=0.0)
                value = tl.load(values + offsets[:, None] + d[None, :], mask=in_range[:, None] & d_mask[None, :], other=0.0)
                scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
                scores = tl.where(visible, scores, float("-inf"))
                row_max_s, sums_s, acc_s = accumulate(scores, value, ones, row_max_s, sums_s, acc_s, IEEE)
        if KV_QUANT:
            acc_s = tl.reshape(tl.join(even, odd), (BLOCK_M, BLOCK_D))
        row_sum_s = tl.max(sums_s, 1)
        if SEQUENTIAL:
            row_max, row_sum, acc = merge_split(row_max, row_sum, acc, row_max_s, row_sum_s, acc_s)
        else:
            row_max, row_sum, acc = row_max_s, row_sum_s, acc_s
    launch_dependents(PDL)  # not before the wait above: `attend_own` reads queries and keys without waiting again
    if SEQUENTIAL:
        result = tl.div_rn(acc, tl.broadcast_to(row_sum[:, None], (BLOCK_M, BLOCK_D))).to(out.dtype.element_ty)
        out_ptrs = out + (token.to(tl.int64) * HEADS + query_head)[:, None] * D + d[None, :]
        tl.store(out_ptrs, result, mask=live[:, None] & d_mask[None, :])
    else:
        split_row = (begin_split * merge_count + tl.load(merge_rows + token)).to(tl.int64) * HEADS + query_head
        tl.store(split_max + split_row, row_max, mask=live)
        tl.store(split_sum + split_row, row_sum, mask=live)
        tl.store(split_acc + split_row[:, None] * D + d[None, :], acc, mask=live[:, None] & d_mask[None, :])


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    metadata: AttentionMetadata,
    tile_sets: list[TileSet],
    heads: int,
    kv_heads: int,
    dim: int,
    scale: float,
    warps: int | None = None,
    stages: int | None = None,
    pdl: bool = False,
) -> Tensor:
    """q [T, H * D] (rows of stride 1) over page stores [P * K, S * D]. `scales` of codes: [P * K, S]."""
    out = torch.empty(len(q), heads * dim, dtype=q.dtype, device=q.device)
    block_d = triton.next_power_of_2(dim) if scales is None else max(triton.next_power_of_2(dim), 32)
    splits = max((tile_set.splits for tile_set in tile_sets if not tile_set.sequential), default=0)
    merge_count = sum(len(tile_set.merge_tokens) for tile_set in tile_sets)
    split_max, split_sum = (torch.empty(splits, merge_count, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    split_acc = torch.empty(splits, merge_count, heads, dim, dtype=torch.float32, device=q.device)
    kv_quant = 0 if scales is None else 1 if keys.dtype == torch.int8 else 2
    stores = (keys, values) if scales is None else (keys.view(torch.int16), values.view(torch.int16))
    tensors = (q, *stores, *(scales or (None, None)), out, split_acc, split_max, split_sum)
    key_ranges, strides, scale = (
        (metadata.first_keys, metadata.last_keys, metadata.merge_rows, metadata.page_table),
        (q.stride(0), metadata.page_table.shape[1]),
        scale * LOG2_E,
    )
    common = {"FIRST_SPLIT": FIRST_SPLIT, "HEADS": heads, "D": dim, "PDL": pdl}
    common |= {"enable_fp_fusion": False, **launch_options(pdl)}
    options = common | {
        "KV_HEADS": kv_heads,
        "BLOCK_D": block_d,
        "PAGE_SIZE": metadata.page_size,
        "BLOCK_KEYS": block_keys(dim),
        "KV_QUANT": kv_quant,
    }
    options["IEEE"] = q.dtype == torch.float32
    splits_per_load = 8 if block_d < 256 else 16  # splits that are merged
    assert not tile_sets or tile_sets[0].kind != TREE_PATH, "what is a node's own is read behind what nodes share"
    for tile_set in tile_sets:
        if tile_set.kind == TREE_PATH:
            assert metadata.paths is not None, "a node has a path"
            columns = min(block_d, TREE_COLUMNS)
            attend_tree_paths[(len(tile_set.tiles), kv_heads, block_d // columns)](
                *(*tensors, tile_set.tiles, *key_ranges, metadata.paths, merge_count, *strides, metadata.paths.shape[1], scale),
                **options,
                BLOCK_M=tile_set.height,
                COLUMNS=columns,
                SPLITS_PER_LOAD=splits_per_load,
                MERGE_HEADS=triton.next_power_of_2(heads // kv_heads),
                num_warps=4,
            )
        else:
            _attend[(len(tile_set.tiles), kv_heads, 1 if tile_set.sequential else tile_set.grid_splits)](
                *(*tensors, tile_set.tiles, *key_ranges, merge_count, *strides, scale),
                **options,
                BLOCK_M=tile_set.height,
                SEQUENTIAL=tile_set.sequential,
                STAGES=stages or _stages(tile_set.height, block_d, q.dtype.itemsize, shared_memory(q.device)),
                num_warps=warps or _warps(tile_set.height, block_d, tile_set.sequential),
            )
    for tile_set in tile_sets:
        if tile_set.kind == FULL and len(tile_set.merge_tokens):
            merge_splits[(len(tile_set.merge_tokens), heads)](
                *(
                    out,
                    split_acc,
                    split_max,
                    split_sum,
                    tile_set.merge_tokens,
                    metadata.first_keys,
                    metadata.last_keys,
                    metadata.merge_rows,
                    merge_count,
                ),
                **common,
                BLOCK_D=block_d,
                SPLITS_PER_LOAD=splits_per_load,
                num_warps=max(1, min(4, block_d // 64)),
            )
    return out


def block_keys(dim: int) -> int:
    """Keys per block. Small ones leave room for several on their way, on a small card too."""
    return 64 if dim <= 128 else 32


def _warps(height: int, block_d: int, sequential: bool) -> int:
    """Registers for the sums: those of a split, and where one program walks all of them those of the splits before it."""
    sums = height * block_d * (2 if sequential else 1)
    return 16 if sums > 32768 else 8 if sums > 16384 or height >= 128 or block_d >= 512 else 4


def _stages(height: int, block_d: int, itemsize: int, shared: int) -> int:
    """Blocks of keys and values in shared memory at once, up to three: one is computed with, the others are on their way. Where
    the matrix unit cannot read it there, the one that is computed with takes no room. Two tiles of 64 rows shall fit beside each
    other."""
    keys, block = block_keys(block_d), 2 * block_keys(block_d) * block_d * itemsize
    from_shared = height >= 64 and shared > SMALL_SHARED
    if from_shared and height == 64:
        return max(1, min(3, (shared // 2 - height * block_d * itemsize) // block))
    space = min(shared, 224 * 1024) - height * (block_d * itemsize + keys * 4) - 8 * 1024
    return max(1, min(3, space // block + (not from_shared)))
