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
state of the last split, maximum and sums, as it stands. A tile per node merges the splits before it, goes on from there with
the blocks that hold its path, and ends.
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

from onedraw.backends.torch.kernels.forms import TODAY, Forms
from onedraw.backends.torch.kernels.triton_key_blocks import left_by, mix, mix_codes, places_of
from onedraw.backends.torch.kernels.triton_linear import SMALL_SHARED, launch_options, shared_memory
from onedraw.backends.torch.kernels.triton_math import let_next_start, wait_for_inputs
from onedraw.backends.torch.kernels.triton_merge import fold, folded, merge_splits, split_at, start_of

Ints = npt.NDArray[np.int64]
SPLITS = (256, 512, 1024)  # keys
NEAR, FAR = 2048, 8192  # positions behind which the second and the third count hold
TILE_WORDS = 8
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
    """Which split a position lies in: `SPLITS` keys each up to position 2,048, up to 8,192, and from there on. So short
    contexts have enough of them to keep a device busy, and long ones not more than it takes time to merge."""
    low, middle, high = SPLITS
    first = NEAR // low - NEAR // middle
    second = first + FAR // middle - FAR // high
    return np.minimum(position // low, np.minimum(position // middle + first, position // high + second))


@triton.jit(do_not_specialize=["merged", "path_width", "table_width"])
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
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    HIGH: tl.constexpr,
    ALL: tl.constexpr,
    OWN: tl.constexpr,
    CODED: tl.constexpr,
    AHEAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    EARLY: tl.constexpr,
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
    carried = tl.load(tiles + tile * 8 + 2)
    tail = tl.load(tiles + tile * 8 + 6)
    path = paths
    if OWN:
        path = paths + first * path_width
    if ALL:
        begin_split = split_at(low, LOW, MIDDLE, HIGH)
        end_split = split_at(high, LOW, MIDDLE, HIGH) + 1
    else:  # the last ones, which are the longest, begin first
        begin_split = tl.load(tiles + tile * 8 + 7) + tl.num_programs(2) - 1 - tl.program_id(2)
        end_split = begin_split + 1
        if (start_of(begin_split, LOW, MIDDLE, HIGH) > high) | (start_of(end_split, LOW, MIDDLE, HIGH) <= low):
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
    q_at = q + token.to(tl.int64)[:, None] * q_stride + query_head[:, None] * D + d[None, :]
    pages = table + row * table_width
    begin = tl.maximum(start_of(begin_split, LOW, MIDDLE, HIGH), low // BLOCK_KEYS * BLOCK_KEYS)
    at = places_of(begin, low, high, tail, path, pages, head, path_width, table_width, KV, PAGE, BLOCK_KEYS, OWN)
    wait_for_inputs(PDL)
    kind = q.dtype.element_ty
    if CODED:  # even and odd dimensions by themselves, see `mix_codes`
        two = tl.arange(0, BLOCK_D // 2)
        narrow = two < D // 2
        even_at = q + token.to(tl.int64)[:, None] * q_stride + query_head[:, None] * D + 2 * two[None, :]
        even_query = tl.load(even_at, mask=live[:, None] & narrow[None, :], other=0.0)
        odd_query = tl.load(even_at + 1, mask=live[:, None] & narrow[None, :], other=0.0)
    else:
        query = tl.load(q_at, mask=live[:, None] & wide[None, :], other=0.0)
    ones = tl.full((BLOCK_KEYS, 8), 1.0, dtype=kind)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    if OWN:
        line = tl.load(lines + token)
        first_split = split_at(tl.load(firsts + first), LOW, MIDDLE, HIGH)
        if GROUP:
            # What goes on is on its way while the splits before it are merged, in as many rows as there are heads.
            goes_on = live & (begin_split == carried)
            part = (begin_split * merged + line).to(tl.int64) * HEADS + query_head
            peak_on, total_on, mixed_on = left_by(part_mixed, part_peak, part_total, part, goes_on, d, wide, D)
            one = tl.arange(0, GROUP_ROWS)
            peak_g, total_g, mixed_g = folded(
                first_split,
                begin_split,
                part_mixed,
                part_peak,
                part_total,
                tl.load(lines + first),
                merged,
                head * PER + one,
                (one < PER) & (count > 0),
                HEADS,
                D,
                BLOCK_D,
                GROUP_ROWS,
                GROUP,
            )
            TIMES: tl.constexpr = BLOCK_M // GROUP_ROWS
            peak = tl.reshape(tl.broadcast_to(peak_g[None, :], (TIMES, GROUP_ROWS)), (BLOCK_M,))
            total = tl.reshape(tl.broadcast_to(total_g[None, :], (TIMES, GROUP_ROWS)), (BLOCK_M,))
            mixed = tl.reshape(tl.broadcast_to(mixed_g[None, :, :], (TIMES, GROUP_ROWS, BLOCK_D)), (BLOCK_M, BLOCK_D))
        else:
            for split in tl.range(first_split, begin_split, num_stages=AHEAD):
                part = (split * merged + line).to(tl.int64) * HEADS + query_head
                peak_s, total_s, mixed_s = left_by(part_mixed, part_peak, part_total, part, live, d, wide, D)
                peak, total, mixed = fold(peak, total, mixed, peak_s, total_s, mixed_s)
    for split in range(begin_split, end_split):
        peak_s = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        sums_s = tl.zeros((BLOCK_M, 8), dtype=tl.float32)
        mixed_s = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        if OWN and GROUP:
            again = split == begin_split  # a path may reach into a second split, which begins with nothing
            peak_s = tl.where(again, peak_on, peak_s)
            sums_s += tl.where(again, total_on, 0.0)[:, None]
            mixed_s = tl.where(again, mixed_on, 0.0)
        elif OWN:
            goes_on = live & (split == carried)
            part = (split * merged + line).to(tl.int64) * HEADS + query_head
            peak_s = tl.load(part_peak + part, mask=goes_on, other=float("-inf"))
            sums_s += tl.load(part_total + part, mask=goes_on, other=0.0)[:, None]
            mixed_s = tl.load(part_mixed + part[:, None] * D + d[None, :], mask=goes_on[:, None] & wide[None, :], other=0.0)
        if CODED:
            even, odd = tl.split(tl.reshape(mixed_s, (BLOCK_M, BLOCK_D // 2, 2)))
        begin = tl.maximum(start_of(split, LOW, MIDDLE, HIGH), low // BLOCK_KEYS * BLOCK_KEYS)
        stop = tl.minimum(start_of(split + 1, LOW, MIDDLE, HIGH), high + 1)
        # Blocks that every query sees, then the others. The next block is looked up while one is computed with, so that no
        # fetching waits for where to fetch.
        middle = begin
        if not OWN and not CODED:
            seen = tl.minimum(stop, tl.min(tl.where(live, highest, 2147483646), 0) + 1)
            middle = tl.where(begin >= tl.max(tl.where(live, lowest, 0), 0), seen // BLOCK_KEYS * BLOCK_KEYS, begin)
            if EARLY and begin < middle:
                # The scores of a block are on their way while those of the block before it weigh its values; one block more than
                # is weighed has its scores taken, which nobody looks at.
                key = tl.load(keys + (at.to(tl.int64) * D)[:, None] + d[None, :], mask=wide[None, :], other=0.0)
                scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32")
                for start in tl.range(begin, middle, BLOCK_KEYS, num_stages=STAGES):
                    place = at.to(tl.int64) * D
                    at = places_of(
                        start + BLOCK_KEYS, low, high, tail, path, pages, head, path_width, table_width, KV, PAGE, BLOCK_KEYS, OWN
                    )
                    key = tl.load(keys + (at.to(tl.int64) * D)[:, None] + d[None, :], mask=wide[None, :], other=0.0)
                    value = tl.load(values + place[:, None] + d[None, :], mask=wide[None, :], other=0.0)
                    coming = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32")
                    peak_s, sums_s, mixed_s = mix(scores * scale, value, ones, peak_s, sums_s, mixed_s, IEEE)
                    scores = coming
            elif not EARLY:
                for start in tl.range(begin, middle, BLOCK_KEYS, num_stages=STAGES):
                    place = at.to(tl.int64) * D
                    at = places_of(
                        start + BLOCK_KEYS, low, high, tail, path, pages, head, path_width, table_width, KV, PAGE, BLOCK_KEYS, OWN
                    )
                    key = tl.load(keys + place[:, None] + d[None, :], mask=wide[None, :], other=0.0)
                    value = tl.load(values + place[:, None] + d[None, :], mask=wide[None, :], other=0.0)
                    scores = tl.dot(query, tl.trans(key), input_precision="ieee" if IEEE else "tf32") * scale
                    peak_s, sums_s, mixed_s = mix(scores, value, ones, peak_s, sums_s, mixed_s, IEEE)
        for start in tl.range(tl.maximum(begin, middle), stop, BLOCK_KEYS, num_stages=STAGES):
            position = start + tl.arange(0, BLOCK_KEYS)
            there = (position >= low) & (position <= high)
            here = at
            at = places_of(
                start + BLOCK_KEYS, low, high, tail, path, pages, head, path_width, table_width, KV, PAGE, BLOCK_KEYS, OWN
            )
            sees = (position[None, :] >= lowest[:, None]) & (position[None, :] <= highest[:, None])
            if CODED:
                peak_s, sums_s, even, odd = mix_codes(
                    keys, values, key_scales, value_scales, even_query, odd_query, here, there, sees, two, narrow, ones, scale,
                    peak_s, sums_s, even, odd, D, CODED, IEEE
                )  # fmt: skip
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
    let_next_start(PDL)
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
    forms: Forms = TODAY,
    pdl: bool = False,
) -> Tensor:
    """q [T, H * D] (rows of stride 1) over page stores [P * K, S * D]. `scales` of codes: [P * K, S]."""
    out = torch.empty(len(q), heads * dim, dtype=q.dtype, device=q.device)
    block_d = triton.next_power_of_2(dim) if scales is None else max(triton.next_power_of_2(dim), 32)
    # Parts wait in one place: those of a tree's node may come from tiles of two heights.
    splits = max((group.splits for group in sets if not group.together), default=0)
    merged = sum(len(group.tokens) for group in sets)
    peak, total = (torch.empty(splits, merged, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    mixed = torch.empty(splits, merged, heads, dim, dtype=torch.float32, device=q.device)
    splits_given = dict(zip(("LOW", "MIDDLE", "HIGH"), SPLITS, strict=True))
    for group in sets:
        _attend[(len(group.tiles), kv_heads, 1 if group.together else group.launched)](
            q,
            keys if scales is None else keys.view(torch.int16),
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
            **splits_given,
            ALL=group.together,
            OWN=group.kind == OWN,
            CODED=0 if scales is None else 1 if keys.dtype == torch.int8 else 2,
            AHEAD=_ahead(group.height, block_d, shared_memory(q.device)),
            GROUP=forms.group,
            GROUP_ROWS=triton.next_power_of_2(heads // kv_heads),
            EARLY=forms.early and group.height >= 128,
            IEEE=q.dtype == torch.float32,
            STAGES=stages or _stages(group.height, block_d, q.dtype.itemsize, shared_memory(q.device), forms.stages),
            PDL=pdl,
            num_warps=warps or _warps(group.height, block_d, group.together),
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    for group in sets:
        if group.kind == WHOLE and len(group.tokens):
            merge_splits[(len(group.tokens), heads)](
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
                **splits_given,
                GROUP=forms.group,
                AHEAD=min(12, triton.next_power_of_2(group.splits) + 1),
                PDL=pdl,
                num_warps=max(1, min(4, block_d // 64)),
                enable_fp_fusion=False,
                **launch_options(pdl),
            )
    return out


def block_keys(dim: int) -> int:
    """Keys per block. Small ones leave room for several on their way, on a small card too."""
    return 64 if dim <= 128 else 32


def _warps(height: int, block_d: int, together: bool) -> int:
    """Registers for the sums: those of a split, and where one program walks all of them those of the splits before it."""
    sums = height * block_d * (2 if together else 1)
    return 16 if sums > 32768 else 8 if sums > 16384 or height >= 128 or block_d >= 512 else 4


def _stages(height: int, block_d: int, itemsize: int, shared: int, high: int = 3) -> int:
    """Blocks of keys and values in shared memory at once, up to three, of a high tile up to `high`: one is computed with, the
    others are on their way. Where the matrix unit cannot read it there, the one that is computed with takes no room."""
    keys = block_keys(block_d)
    room = min(shared, 224 * 1024) - height * (block_d * itemsize + keys * 4) - 8 * 1024
    reads = height >= 64 and shared > SMALL_SHARED
    return max(1, min(high if height >= 128 else 3, room // (2 * keys * block_d * itemsize) + (not reads)))


def _ahead(height: int, block_d: int, shared: int) -> int:
    """Parts of earlier splits that a tile which carries them on has on their way: as many as there is room for, up to eight."""
    part = height * block_d * 4
    return max(1, min(8, (shared - part // 2 - 8 * 1024) // part + 1))
