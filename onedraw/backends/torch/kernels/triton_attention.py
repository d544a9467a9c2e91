"""Paged attention on a GPU, in one form for all rows: single tokens, drafts, nodes of trees, prompt chunks, windows.

In: queries [T, H, D], a layer's pages, and for every token what it sees. Out: [T, H * D].

A tile is a few neighbouring queries of one row times the G query heads that share a key head. Keys are read in blocks of
64 or 128 absolute positions, by the size of a head alone; blocks are taken one after the other inside a split of 512
absolute positions, with a running maximum; splits are merged from front to back. One program may walk all splits of its
tile (`ALL`), or each split has a program and a second kernel merges: the same operations in the same order. The sum of a
row's weights is taken by the matrix unit like the values' sum, since a library sum would follow the tile's layout. What a
query does not see adds exact zeros. Keys and values may be codes of 8 bits with scales (`codes.py`): a score is (q · code)
times the key's scale, and the weight that meets a value's code is the weight times the value's scale. So neither batch, nor
chunk, nor tile, nor the parallel form changes a bit of a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.codes import bits
from onedraw.backends.torch.kernels.triton_codes import halves, numbers
from onedraw.backends.torch.kernels.triton_linear import launch_options, shared_memory
from onedraw.backends.torch.kernels.triton_math import let_next_start, wait_for_inputs

SPLIT = 512  # keys per split
TILE_WORDS = 8
# A tile reads everything by position; of a tree what its nodes have in common, what is a node's own, or all of one node's.
WHOLE, SHARED, OWN, NODE = range(4)


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
    tiles: Tensor  # [N, 8] int32: first token, tokens, kind, row, lowest and highest position they see, tail, first split
    tokens: Tensor  # [t] int32: the tokens to be merged after all sets; empty where `together`
    splits: int  # behind the last split that any token sees
    launched: int  # the largest number of splits that a tile reads
    together: bool  # one program walks all splits of a tile


@triton.jit
def _fold(peak, total, mixed, peak_s, total_s, mixed_s):
    """One more split behind those so far; a split in which a row sees nothing leaves it as it is."""
    top = tl.maximum(peak, peak_s)
    safe = tl.where(top == float("-inf"), 0.0, top)
    before, now = tl.exp2(peak - safe), tl.exp2(peak_s - safe)
    seen = total_s != 0.0
    total = tl.where(seen, tl.fma(total, before, total_s * now), total)
    mixed = tl.where(seen[:, None], tl.fma(mixed, before[:, None], mixed_s * now[:, None]), mixed)
    return tl.where(seen, top, peak), total, mixed


@triton.jit(do_not_specialize=["merged", "path_width"])
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
    SPLIT_KEYS: tl.constexpr,
    ALL: tl.constexpr,
    TREE: tl.constexpr,
    CODED: tl.constexpr,
    IEEE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles + tile * 8)
    count = tl.load(tiles + tile * 8 + 1)
    row = tl.load(tiles + tile * 8 + 3).to(tl.int64)
    low = tl.load(tiles + tile * 8 + 4)
    high = tl.load(tiles + tile * 8 + 5)
    tail = 2147483647
    if TREE:
        kind = tl.load(tiles + tile * 8 + 2)
        tail = tl.load(tiles + tile * 8 + 6)
        edge = tail // SPLIT_KEYS * SPLIT_KEYS
        high = tl.where(kind == 1, tl.minimum(high, edge - 1), high)
        low = tl.where(kind == 2, tl.maximum(low, edge), low)
    if ALL:
        begin_split = low // SPLIT_KEYS
        end_split = high // SPLIT_KEYS + 1
    else:
        begin_split = tl.load(tiles + tile * 8 + 7) + tl.program_id(2)
        end_split = begin_split + 1
        if (begin_split * SPLIT_KEYS > high) | (end_split * SPLIT_KEYS <= low):
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
    q_at = q + token.to(tl.int64)[:, None] * q_stride + query_head[:, None] * D + d[None, :]
    query = tl.load(q_at, mask=live[:, None] & wide[None, :], other=0.0)
    ones = tl.full((BLOCK_KEYS, 16), 1.0, dtype=query.dtype)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for split in range(begin_split, end_split):
        peak_s = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        sums_s = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
        mixed_s = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        if CODED:  # values of two neighbouring dimensions lie in 16 bits, and are summed apart
            two = tl.arange(0, BLOCK_D // 2)
            even, odd = tl.split(tl.reshape(mixed_s, (BLOCK_M, BLOCK_D // 2, 2)))
        begin = tl.maximum(split * SPLIT_KEYS, low // BLOCK_KEYS * BLOCK_KEYS)
        stop = tl.minimum((split + 1) * SPLIT_KEYS, high + 1)
        for start in tl.range(begin, stop, BLOCK_KEYS, num_stages=STAGES):
            position = start + tl.arange(0, BLOCK_KEYS)
            there = (position >= low) & (position <= high)
            slot = position
            if TREE:
                depth = tl.minimum(tl.maximum(position - tail, 0), path_width - 1)
                own = position >= tail
                step = tl.load(paths + first * path_width + depth, mask=own & there, other=0)
                slot = tl.where(own, tail + step, position)
            page = tl.load(table + row * table_width + slot // PAGE, mask=there, other=0).to(tl.int64)
            at = (page * KV + head) * PAGE + slot % PAGE
            place = at * D
            key = tl.load(keys + place[:, None] + d[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            by = scale
            if CODED:
                key = numbers(key, query.dtype)
                by = (tl.load(key_scales + at, mask=there, other=0.0) * scale)[None, :]
            scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * by
            sees = (position[None, :] >= lowest[:, None]) & (position[None, :] <= highest[:, None])
            scores = tl.where(sees, scores, float("-inf"))
            top = tl.maximum(peak_s, tl.max(scores, 1))
            safe = tl.where(top == float("-inf"), 0.0, top)
            fade = tl.exp2(peak_s - safe)
            mixing = tl.exp2(scores - safe[:, None])
            weight = mixing.to(query.dtype)
            if not CODED:
                value = tl.load(values + place[:, None] + d[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            sums_s = tl.dot(weight, ones, sums_s * fade[:, None], input_precision="ieee" if IEEE else "tf32")
            if CODED:
                pairs = tl.load(
                    values + (at * (D // 2))[:, None] + two[None, :], mask=there[:, None] & (two < D // 2)[None, :], other=0
                )
                lower, upper = halves(pairs, query.dtype, keys.dtype.element_ty == tl.uint8)
                weight = (mixing * tl.load(value_scales + at, mask=there, other=0.0)[None, :]).to(query.dtype)
                even = tl.dot(weight, lower, even * fade[:, None], input_precision="ieee" if IEEE else "tf32")
                odd = tl.dot(weight, upper, odd * fade[:, None], input_precision="ieee" if IEEE else "tf32")
            else:
                mixed_s = tl.dot(weight, value, mixed_s * fade[:, None], input_precision="ieee" if IEEE else "tf32")
            peak_s = top
        if CODED:
            mixed_s = tl.reshape(tl.join(even, odd), (BLOCK_M, BLOCK_D))
        total_s = tl.max(sums_s, 1)
        if ALL:
            peak, total, mixed = _fold(peak, total, mixed, peak_s, total_s, mixed_s)
        else:
            peak, total, mixed = peak_s, total_s, mixed_s
    let_next_start(PDL)
    if ALL:
        result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], (BLOCK_M, BLOCK_D))).to(out.dtype.element_ty)
        o_at = out + (token.to(tl.int64) * HEADS + query_head)[:, None] * D + d[None, :]
        tl.store(o_at, result, mask=live[:, None] & wide[None, :])
    else:
        place = (begin_split * merged + tl.load(lines + token)).to(tl.int64) * HEADS + query_head
        tl.store(part_peak + place, peak, mask=live)
        tl.store(part_total + place, total, mask=live)
        tl.store(part_mixed + place[:, None] * D + d[None, :], mixed, mask=live[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["merged"])
def _merge(
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
    SPLIT_KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Front to back over the splits of one token and head; AHEAD of them are on their way."""
    wait_for_inputs(PDL)
    token = tl.load(tokens + tl.program_id(0))
    line = tl.load(lines + token)
    head = tl.program_id(1)
    begin = tl.load(firsts + token) // SPLIT_KEYS
    stop = tl.load(ends + token) // SPLIT_KEYS + 1
    d = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    peak = tl.full((1,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    mixed = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    for split in tl.range(begin, stop, num_stages=AHEAD):
        place = (split * merged + line).to(tl.int64) * HEADS + head + one
        peak_s = tl.load(part_peak + place)
        total_s = tl.load(part_total + place)
        mixed_s = tl.load(part_mixed + place[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        peak, total, mixed = _fold(peak, total, mixed, peak_s, total_s, mixed_s)
    let_next_start(PDL)
    result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], (1, BLOCK_D))).to(out.dtype.element_ty)
    at = out + ((token.to(tl.int64) * HEADS + head) * D + one)[:, None] + d[None, :]
    tl.store(at, result, mask=(d < D)[None, :])


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
    block_d = triton.next_power_of_2(dim)
    # Parts wait in one place: those of a tree's node may come from tiles of two heights.
    splits = max((group.splits for group in sets if not group.together), default=0)
    merged = sum(len(group.tokens) for group in sets)
    peak, total = (torch.empty(splits, merged, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    mixed = torch.empty(splits, merged, heads, dim, dtype=torch.float32, device=q.device)
    for group in sets:
        _attend[(len(group.tiles), kv_heads, 1 if group.together else group.launched)](
            q,
            bits(keys),
            values if scales is None else values.view(torch.int16),
            *(scales or (None, None)),
            out,
            mixed,
            peak,
            total,
            group.tiles,
            view.firsts,
            view.ends,
            view.lines,
            view.table,
            view.paths,
            merged,
            q.stride(0),
            view.table.shape[1],
            0 if view.paths is None else view.paths.shape[1],
            scale * math.log2(math.e),
            HEADS=heads,
            KV=kv_heads,
            D=dim,
            BLOCK_D=block_d,
            PAGE=view.page_size,
            BLOCK_M=group.height,
            BLOCK_KEYS=block_keys(dim),
            SPLIT_KEYS=SPLIT,
            ALL=group.together,
            TREE=view.paths is not None,
            CODED=scales is not None,
            IEEE=q.dtype == torch.float32,
            STAGES=stages or _stages(group.height, block_d, q.dtype.itemsize, shared_memory(q.device)),
            PDL=pdl,
            num_warps=warps or _warps(group.height, block_d),
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    for group in sets:
        if len(group.tokens):
            _merge[(len(group.tokens), heads)](
                out,
                mixed,
                peak,
                total,
                group.tokens,
                view.firsts,
                view.ends,
                view.lines,
                merged,
                HEADS=heads,
                D=dim,
                BLOCK_D=block_d,
                SPLIT_KEYS=SPLIT,
                AHEAD=min(12, triton.next_power_of_2(group.splits) + 1),
                PDL=pdl,
                num_warps=max(1, min(4, block_d // 64)),
                enable_fp_fusion=False,
                **launch_options(pdl),
            )
    return out


def block_keys(dim: int) -> int:
    """Keys per block. Wide heads would not fit into a small card's shared memory otherwise."""
    return 128 if dim <= 128 else 64


def _warps(height: int, block_d: int) -> int:
    return 8 if height >= 128 or block_d >= 512 or (height >= 64 and block_d >= 256) else 4


def _stages(height: int, block_d: int, itemsize: int, shared: int) -> int:
    """Blocks of keys and values on their way: the pages are looked up two steps ahead, and then come as many as fit."""
    keys = block_keys(block_d)
    block = 2 * keys * block_d * itemsize
    room = min(shared, 200 * 1024) - height * (block_d * itemsize + keys * 4) - 8 * 1024
    return 2 + min(2, room // block) if room >= block else 1
