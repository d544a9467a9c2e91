"""Paged attention with Triton: one kernel for decode tokens, chains of drafts, verify trees, prompt chunks and sliding windows.

In: queries [T, H * D], a layer's KV pages, and the range of keys of every token. Out: [T, H * D]. Axes: T tokens, H query heads,
K KV heads, D the size of a head, P pages, S positions of a page, R rows (the work of one sequence in one step each), W the most
pages of a row, N tiles, t tokens of a set of tiles. PDL is programmatic dependent launch: a kernel may start while the one before
it ends, and waits before it reads what that one writes.

A tile holds a few neighbouring queries of one row, times the query heads that share a KV head. Keys are read in blocks of 32 or
64 absolute positions (`block_keys`, a function of the head size alone). A split is a range of absolute positions: inside it
blocks are accumulated in order by online softmax, and splits are merged from front to back. Either one program processes all
splits of its tile (`SEQUENTIAL`), or each split has its own program and `merge_splits` merges them: the same operations in the
same order. The row sum of the softmax is computed by `tl.dot` like the weighted values, since the order of `tl.sum` depends on
the tile's layout. Masked keys add exact zeros. Quantized keys and values (codes with a scale per head and position) enter as
(q · code) times the key's scale, and as the softmax weight times the value's scale. So batch size, prompt chunking, tile
height and split parallelism never change a bit of a row.

The nodes of a verify tree share all key blocks that end before the drafts begin (TREE_PREFIX): tiles of many nodes read these and
store the state of every split. Then `attend_tree_paths` has one tile per node (TREE_PATH): it merges the stored splits, and
continues the last of them with the blocks that hold the node's path.
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

from onedraw.backends.torch.ops.cuda.hadamard import transform_outputs
from onedraw.backends.torch.ops.cuda.kv_quant import FP8, INT4, INT8, join_columns, split_columns
from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED, launch_options, shared_memory
from onedraw.backends.torch.ops.cuda.online_softmax import (
    accumulate,
    accumulate_quantized,
    key_slots,
    load_query_parts,
    merge_split,
    merge_splits,
    quantized_scores,
    split_index,
    split_start,
)
from onedraw.backends.torch.ops.cuda.tree_attention import attend_tree_paths
from onedraw.backends.torch.ops.cuda.triton_math import launch_dependents, wait_for_inputs

Ints = npt.NDArray[np.int64]
FIRST_SPLIT = 128  # keys in each of the first splits; later splits are longer (`split_indices`)
LOG2_E = math.log2(math.e)
TILE_WORDS = 8  # number of columns of `TileSet.tiles`, which describe one tile
TREE_COLUMNS = 64  # value columns per program of `attend_tree_paths`
# Kinds of tiles, by the keys that they read. FULL: all keys of a token; TREE_PREFIX: the key blocks that all nodes of a tree
# share; TREE_PATH: the remaining key blocks of one node.
FULL, TREE_PREFIX, TREE_PATH = range(3)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Key ranges of a step's tokens, for layers of one attention shape. All int32, on the device."""

    rows: Tensor  # [T]: the row of each token
    first_keys: Tensor  # [T]: the first position that each token attends to
    last_keys: Tensor  # [T]: the last position that each token attends to
    merge_rows: Tensor  # [T]: the index of each token in the buffers of split states
    page_table: Tensor  # [R, W]: the pages of each row
    paths: Tensor | None  # [T, depth]: slots of the drafts on a node's path, relative to the first draft; None without trees
    page_size: int


@dataclass(frozen=True, slots=True)
class TileSet:
    """Tiles of one height and kind, launched together."""

    height: int  # rows of a tile: queries times query heads per KV head
    # [N, TILE_WORDS] int32: first token, token count, split that a TREE_PATH tile continues (-1: none), row, first and last
    # position to read, position of the first draft, first split
    tiles: Tensor
    merge_tokens: Tensor  # [t] int32: tokens whose splits are stored to be merged; empty if `sequential`
    splits: int  # one more than the index of the last split of any token
    grid_splits: int  # the largest number of splits that a tile reads
    sequential: bool  # whether one program processes all splits of a tile
    kind: int = FULL


def split_indices(position: Ints) -> Ints:
    """The split of a position. Splits have 128 keys up to position 1,024, 256 up to 2,048, 512 up to 8,192, and 1,024 beyond:
    short contexts have enough splits to fill the device, and long ones few enough to merge quickly."""
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
    # Index tensors are written only by the host, so loading them before the PDL wait is safe.
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
    else:  # programs of the last splits, which are the longest, start first
        begin_split = tl.load(tiles + tile * 8 + 7) + tl.num_programs(2) - 1 - tl.program_id(2)
        end_split = begin_split + 1
        if (split_start(begin_split, FIRST_SPLIT) > high) | (split_start(end_split, FIRST_SPLIT) <= low):
            wait_for_inputs(PDL)  # wait anyway: a kernel that waits for this one takes the kernels before it as ended too
            return
    HEADS_PER_KV: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, BLOCK_M)
    live = m // HEADS_PER_KV < count
    token = first + tl.maximum(tl.minimum(m // HEADS_PER_KV, count - 1), 0)  # clamped, as padding tiles have no token
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
    PARTS: tl.constexpr = 4 if KV_QUANT == INT4 else 2  # codes in a word of 16 bits
    if KV_QUANT:
        word = tl.arange(0, BLOCK_D // PARTS)
        queries = load_query_parts(q_ptrs, word, live[:, None] & (word < D // PARTS)[None, :], PARTS)
    else:
        query = tl.load(q_ptrs + d[None, :], mask=live[:, None] & d_mask[None, :], other=0.0)
    ones = tl.full((BLOCK_KEYS, 8), 1.0, dtype=dtype)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for split in range(begin_split, end_split):  # variables ending in _s hold the state of this split
        row_max_s = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        sums_s = tl.zeros((BLOCK_M, 8), dtype=tl.float32)
        acc_s = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        if KV_QUANT:
            accs = split_columns(acc_s, PARTS)
        start_key = tl.maximum(split_start(split, FIRST_SPLIT), low // BLOCK_KEYS * BLOCK_KEYS)
        stop_key = tl.minimum(split_start(split + 1, FIRST_SPLIT), high + 1)
        # The blocks that no query masks come first, then the others. The slots of the next block are loaded while one is
        # computed.
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
                scores = quantized_scores(keys, key_scales, queries, slots, in_range, word, scale, D, KV_QUANT, IEEE)
                scores = tl.where(visible, scores, float("-inf"))
                row_max_s, sums_s, accs = accumulate_quantized(
                    scores, values, value_scales, slots, in_range, word, ones, row_max_s, sums_s, accs, D, KV_QUANT, IEEE
                )
            else:
                offsets = slots.to(tl.int64) * D
                key = tl.load(keys + offsets[:, None] + d[None, :], mask=in_range[:, None] & d_mask[None, :], other=0.0)
                value = tl.load(values + offsets[:, None] + d[None, :], mask=in_range[:, None] & d_mask[None, :], other=0.0)
                scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
                scores = tl.where(visible, scores, float("-inf"))
                row_max_s, sums_s, acc_s = accumulate(scores, value, ones, row_max_s, sums_s, acc_s, IEEE)
        if KV_QUANT:
            acc_s = join_columns(accs, PARTS)
        row_sum_s = tl.max(sums_s, 1)
        if SEQUENTIAL:
            row_max, row_sum, acc = merge_split(row_max, row_sum, acc, row_max_s, row_sum_s, acc_s)
        else:
            row_max, row_sum, acc = row_max_s, row_sum_s, acc_s
    launch_dependents(PDL)  # not before the wait above: `attend_tree_paths` reads queries and keys before its own wait
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
    """Attention of q [T, H * D] (each row contiguous) over KV pages [P * K, S * D] → [T, H * D]. `scales`: those of quantized
    keys and values, [P * K, S] each. If they are of 4 bits, q is transformed like the keys, and the output is transformed
    back."""
    out = torch.empty(len(q), heads * dim, dtype=q.dtype, device=q.device)
    kv_quant = 0 if scales is None else {torch.int8: INT8, torch.float8_e4m3fn: FP8, torch.uint8: INT4}[keys.dtype].value
    # `tl.dot` needs 16 columns or more, here for each of the 2 codes (or 4 of int4) in a word: 32, or 64.
    block_d = max(triton.next_power_of_2(dim), {0: 1, INT4.value: 64}.get(kv_quant, 32))
    splits = max((tile_set.splits for tile_set in tile_sets if not tile_set.sequential), default=0)
    merge_count = sum(len(tile_set.merge_tokens) for tile_set in tile_sets)
    split_max, split_sum = (torch.empty(splits, merge_count, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    split_acc = torch.empty(splits, merge_count, heads, dim, dtype=torch.float32, device=q.device)
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
    splits_per_load = 8 if block_d < 256 else 16  # splits that one iteration of the merge loads
    assert not tile_sets or tile_sets[0].kind != TREE_PATH, "TREE_PATH tiles continue the splits of TREE_PREFIX tiles"
    for tile_set in tile_sets:
        if tile_set.kind == TREE_PATH:
            assert metadata.paths is not None, "TREE_PATH tiles need paths"
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
    if kv_quant == INT4.value:
        transform_outputs(out, heads=heads, dim=dim, pdl=pdl)
    return out


def block_keys(dim: int) -> int:
    """Keys per block: few enough that several blocks of keys and values fit into shared memory, also on small cards."""
    return 64 if dim <= 128 else 32


def _warps(height: int, block_d: int, sequential: bool) -> int:
    """The number of warps that gives a program registers for the accumulator of a split and, if `sequential`, for the accumulator
    of the splits before it."""
    sums = height * block_d * (2 if sequential else 1)
    return 16 if sums > 32768 else 8 if sums > 16384 or height >= 128 or block_d >= 512 else 4


def _stages(height: int, block_d: int, itemsize: int, shared: int) -> int:
    """Pipeline stages: blocks of keys and values that are in shared memory at once, at most three. If the MMA instructions cannot
    read operands from shared memory, the current block is in registers and takes no space. For tiles of 64 rows, the stages take
    so little that two programs fit on a multiprocessor."""
    keys, block = block_keys(block_d), 2 * block_keys(block_d) * block_d * itemsize
    from_shared = height >= 64 and shared > SMALL_SHARED
    if from_shared and height == 64:
        return max(1, min(3, (shared // 2 - height * block_d * itemsize) // block))
    space = min(shared, 224 * 1024) - height * (block_d * itemsize + keys * 4) - 8 * 1024
    return max(1, min(3, space // block + (not from_shared)))
