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

from onedraw.backends.torch.ops.cuda.attention_merge import (
    block_places,
    code_scores,
    fold,
    merge_splits,
    mix,
    mix_codes,
    split_at,
    start_of,
)
from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED, launch_options, shared_memory
from onedraw.backends.torch.ops.cuda.tree_attention import attend_own
from onedraw.backends.torch.ops.cuda.triton_math import let_next_start, wait_for_inputs

Ints = npt.NDArray[np.int64]
LEAST = 128  # keys of the first splits
LOG2_E = math.log2(math.e)
TILE_WORDS = 8
OWN_COLUMNS = 64  # of the values, that a program has of a tree's node
# A tile reads everything by position; of a tree the blocks that all its nodes have in common, or a node's own blocks.
WHOLE, SHARED, OWN = range(3)


@dataclass(frozen=True, slots=True)
class View:
    """What the tokens of a turn see, for layers of one kind. All int32, on the device."""

    rows: Tensor  # [T] row of each token
    firsts: Tensor  # [T] first position each token sees
    ends: Tensor  # [T] last position each token sees
    lines: Tensor  # [T] place of each token among those whose splits are merged, in order of the sets
    table: Tensor  # [R, W] pages
    paths: Tensor | None  # [T, depth] slots of a node's path, counted from its tail; None where no row branches
    page_size: int


@dataclass(frozen=True, slots=True)
class TileSet:
    """Tiles of one height, launched together."""

    height: int  # queries times query heads per key head
    tiles: Tensor  # [N, 8] int32: first token, tokens, the split that is carried on, row, positions to read from and to, tail,
    # first split
    tokens: Tensor  # [t] int32: the tokens whose parts are kept until they are merged; empty where `together`
    splits: int  # behind the last split that any token sees
    launched: int  # the largest number of splits that a tile reads
    together: bool  # one program walks all splits of a tile
    kind: int = WHOLE


def split_of(position: Ints) -> Ints:
    """Which split a position lies in: 128 keys each up to position 1,024, 256 up to 2,048, 512 up to 8,192, and 1,024 from there
    on. So short contexts have enough of them to keep a device busy, and long ones not more than it takes time to merge."""
    found = position // LEAST
    for doubled, ahead in ((1, 4), (2, 8), (3, 16)):
        found = np.minimum(found, position // (LEAST << doubled) + ahead)
    return found


@triton.jit(do_not_specialize=["merged", "table_width"])
def _attend(
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
    merged,
    q_stride,
    table_width,
    scale,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    ALL: tl.constexpr,
    CODED: tl.constexpr,
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
    if ALL:
        begin_split = split_at(low, LEAST)
        end_split = split_at(high, LEAST) + 1
    else:  # the last ones, which are the longest, begin first
        begin_split = tl.load(tiles + tile * 8 + 7) + tl.num_programs(2) - 1 - tl.program_id(2)
        end_split = begin_split + 1
        if (start_of(begin_split, LEAST) > high) | (start_of(end_split, LEAST) <= low):
            wait_for_inputs(PDL)  # who waits for this kernel waits for those before it
            return
    PER: tl.constexpr = HEADS // KV
    m = tl.arange(0, BLOCK_M)
    live = m // PER < count
    token = first + tl.maximum(tl.minimum(m // PER, count - 1), 0)  # an empty tile has none
    lowest = tl.where(live, tl.load(firsts + token), 2147483647)
    highest = tl.where(live, tl.load(ends + token), -1)
    d = tl.arange(0, BLOCK_D)
    wide = d < D
    query_head = head * PER + m % PER
    q_at = q + token.to(tl.int64)[:, None] * q_stride + query_head[:, None] * D
    pages = table + row * table_width
    begin = tl.maximum(start_of(begin_split, LEAST), low // BLOCK_KEYS * BLOCK_KEYS)
    at = block_places(begin, pages, head, table_width, KV, PAGE, BLOCK_KEYS)
    wait_for_inputs(PDL)
    kind = q.dtype.element_ty
    if CODED:  # even and odd dimensions by themselves, see `code_scores`
        two = tl.arange(0, BLOCK_D // 2)
        narrow = live[:, None] & (two < D // 2)[None, :]
        even_query = tl.load(q_at + 2 * two[None, :], mask=narrow, other=0.0)
        odd_query = tl.load(q_at + 2 * two[None, :] + 1, mask=narrow, other=0.0)
    else:
        query = tl.load(q_at + d[None, :], mask=live[:, None] & wide[None, :], other=0.0)
    ones = tl.full((BLOCK_KEYS, 8), 1.0, dtype=kind)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for split in range(begin_split, end_split):
        peak_s = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        sums_s = tl.zeros((BLOCK_M, 8), dtype=tl.float32)
        mixed_s = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        if CODED:
            even, odd = tl.split(tl.reshape(mixed_s, (BLOCK_M, BLOCK_D // 2, 2)))
        begin = tl.maximum(start_of(split, LEAST), low // BLOCK_KEYS * BLOCK_KEYS)
        stop = tl.minimum(start_of(split + 1, LEAST), high + 1)
        # Blocks that every query sees, then the others. The next block is looked up while one is computed with, so that no
        # fetching waits for where to fetch.
        middle = begin
        if not CODED:
            seen = tl.minimum(stop, tl.min(tl.where(live, highest, 2147483646), 0) + 1)
            middle = tl.where(begin >= tl.max(tl.where(live, lowest, 0), 0), seen // BLOCK_KEYS * BLOCK_KEYS, begin)
            for start in tl.range(begin, middle, BLOCK_KEYS, num_stages=STAGES):
                place = at.to(tl.int64) * D
                at = block_places(start + BLOCK_KEYS, pages, head, table_width, KV, PAGE, BLOCK_KEYS)
                key = tl.load(keys + place[:, None] + d[None, :], mask=wide[None, :], other=0.0)
                value = tl.load(values + place[:, None] + d[None, :], mask=wide[None, :], other=0.0)
                scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
                peak_s, sums_s, mixed_s = mix(scores, value, ones, peak_s, sums_s, mixed_s, IEEE)
        for start in tl.range(tl.maximum(begin, middle), stop, BLOCK_KEYS, num_stages=STAGES):
            position = start + tl.arange(0, BLOCK_KEYS)
            there = (position >= low) & (position <= high)
            here = at
            at = block_places(start + BLOCK_KEYS, pages, head, table_width, KV, PAGE, BLOCK_KEYS)
            sees = (position[None, :] >= lowest[:, None]) & (position[None, :] <= highest[:, None])
            if CODED:
                scores = code_scores(keys, key_scales, even_query, odd_query, here, there, two, scale, D, CODED, IEEE)
                scores = tl.where(sees, scores, float("-inf"))
                peak_s, sums_s, even, odd = mix_codes(
                    scores, values, value_scales, here, there, two, ones, peak_s, sums_s, even, odd, D, CODED, IEEE
                )
            else:
                place = here.to(tl.int64) * D
                key = tl.load(keys + place[:, None] + d[None, :], mask=there[:, None] & wide[None, :], other=0.0)
                value = tl.load(values + place[:, None] + d[None, :], mask=there[:, None] & wide[None, :], other=0.0)
                scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
                scores = tl.where(sees, scores, float("-inf"))
                peak_s, sums_s, mixed_s = mix(scores, value, ones, peak_s, sums_s, mixed_s, IEEE)
        if CODED:
            mixed_s = tl.reshape(tl.join(even, odd), (BLOCK_M, BLOCK_D))
        total_s = tl.max(sums_s, 1)
        if ALL:
            peak, total, mixed = fold(peak, total, mixed, peak_s, total_s, mixed_s)
        else:
            peak, total, mixed = peak_s, total_s, mixed_s
    let_next_start(PDL)  # not before the wait above: `attend_own` reads queries and keys without waiting again
    if ALL:
        result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], (BLOCK_M, BLOCK_D))).to(out.dtype.element_ty)
        o_at = out + (token.to(tl.int64) * HEADS + query_head)[:, None] * D + d[None, :]
        tl.store(o_at, result, mask=live[:, None] & wide[None, :])
    else:
        part = (begin_split * merged + tl.load(lines + token)).to(tl.int64) * HEADS + query_head
        tl.store(part_peak + part, peak, mask=live)
        tl.store(part_total + part, total, mask=live)
        tl.store(part_mixed + part[:, None] * D + d[None, :], mixed, mask=live[:, None] & wide[None, :])


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    view: View,
    sets: list[TileSet],
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
    splits = max((group.splits for group in sets if not group.together), default=0)
    merged = sum(len(group.tokens) for group in sets)
    peak, total = (torch.empty(splits, merged, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    mixed = torch.empty(splits, merged, heads, dim, dtype=torch.float32, device=q.device)
    coded = 0 if scales is None else 1 if keys.dtype == torch.int8 else 2
    stores = (keys, values) if scales is None else (keys.view(torch.int16), values.view(torch.int16))
    given = (q, *stores, *(scales or (None, None)), out, mixed, peak, total)
    seen, strides, scale = (view.firsts, view.ends, view.lines, view.table), (q.stride(0), view.table.shape[1]), scale * LOG2_E
    common = {"LEAST": LEAST, "HEADS": heads, "D": dim, "PDL": pdl}
    common |= {"enable_fp_fusion": False, **launch_options(pdl)}
    sizes = common | {"KV": kv_heads, "BLOCK_D": block_d, "PAGE": view.page_size, "BLOCK_KEYS": block_keys(dim), "CODED": coded}
    sizes["IEEE"] = q.dtype == torch.float32
    at_once = 8 if block_d < 256 else 16  # splits that are merged
    assert not sets or sets[0].kind != OWN, "what is a node's own is read behind what nodes share"
    for group in sets:
        if group.kind == OWN:
            assert view.paths is not None, "a node has a path"
            columns = min(block_d, OWN_COLUMNS)
            attend_own[(len(group.tiles), kv_heads, block_d // columns)](
                *(*given, group.tiles, *seen, view.paths, merged, *strides, view.paths.shape[1], scale),
                **sizes,
                BLOCK_M=group.height,
                COLUMNS=columns,
                GROUP=at_once,
                GROUP_ROWS=triton.next_power_of_2(heads // kv_heads),
                num_warps=4,
            )
        else:
            _attend[(len(group.tiles), kv_heads, 1 if group.together else group.launched)](
                *(*given, group.tiles, *seen, merged, *strides, scale),
                **sizes,
                BLOCK_M=group.height,
                ALL=group.together,
                STAGES=stages or _stages(group.height, block_d, q.dtype.itemsize, shared_memory(q.device)),
                num_warps=warps or _warps(group.height, block_d, group.together),
            )
    for group in sets:
        if group.kind == WHOLE and len(group.tokens):
            merge_splits[(len(group.tokens), heads)](
                *(out, mixed, peak, total, group.tokens, view.firsts, view.ends, view.lines, merged),
                **common,
                BLOCK_D=block_d,
                GROUP=at_once,
                num_warps=max(1, min(4, block_d // 64)),
            )
    return out


def block_keys(dim: int) -> int:
    """Keys per block. Small ones leave room for several on their way, on a small card too."""
    return 64 if dim <= 128 else 32


def _warps(height: int, block_d: int, together: bool) -> int:
    """Registers for the sums: those of a split, and where one program walks all of them those of the splits before it."""
    sums = height * block_d * (2 if together else 1)
    return 16 if sums > 32768 else 8 if sums > 16384 or height >= 128 or block_d >= 512 else 4


def _stages(height: int, block_d: int, itemsize: int, shared: int) -> int:
    """Blocks of keys and values in shared memory at once, up to three: one is computed with, the others are on their way. Where
    the matrix unit cannot read it there, the one that is computed with takes no room. Two tiles of 64 rows shall fit beside each
    other."""
    keys, block = block_keys(block_d), 2 * block_keys(block_d) * block_d * itemsize
    reads = height >= 64 and shared > SMALL_SHARED
    if reads and height == 64:
        return max(1, min(3, (shared // 2 - height * block_d * itemsize) // block))
    room = min(shared, 224 * 1024) - height * (block_d * itemsize + keys * 4) - 8 * 1024
    return max(1, min(3, room // block + (not reads)))
