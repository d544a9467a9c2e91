"""After the choosing, still on the device: which drafts are kept, and kept drafts brought home.

In: what was chosen at every token of a turn, and the rows' drafts. Out: the kept drafts' places, and keys and values (with
their scales, where they are codes) moved to the slots of their positions. The walk is that of `sampling/verify.py`: parents
stand before their children, so one pass finds the whole path. The host walks by itself when the tokens arrive; this one only
spares the device the waiting.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.codes import bits
from onedraw.backends.torch.kernels.triton_linear import launch_options
from onedraw.backends.torch.kernels.triton_math import let_next_start, wait_for_inputs
from onedraw.backends.torch.pages import PageStore

ROW_WORDS = 5  # first token, tokens, lane, first place in the rollback buffer, slot of the first draft


@dataclass(frozen=True, slots=True)
class Walked:
    """The kept drafts of each row, in order, -1 behind the last."""

    kept: Tensor  # [R, W] int32: by index in the row
    places: Tensor  # [R, W] int32: in the rollback buffer
    lanes: Tensor  # [R] int32
    sources: Tensor  # [R, 1 + K] int32: what the windows of the convolution become; see `shift_windows`


@triton.jit(do_not_specialize=["width", "held"])
def _walk(
    chosen,
    tokens,
    parents,
    rows,
    kept,
    places,
    lanes,
    sources,
    width,
    held,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    first = tl.load(rows + row * 5)
    count = tl.load(rows + row * 5 + 1)
    lane = tl.load(rows + row * 5 + 2)
    base = tl.load(rows + row * 5 + 3)
    last = -1
    depth = 0
    choice = tl.load(chosen + first)
    for index in range(0, count - 1):
        at = first + 1 + index
        if (tl.load(parents + at) == last) & (tl.load(tokens + at) == choice):
            tl.store(kept + row * width + depth, index)
            tl.store(places + row * width + depth, base + index)
            choice = tl.load(chosen + at)
            last = index
            depth += 1
    place = tl.arange(0, BLOCK)
    rest = (place >= depth) & (place < width)
    tl.store(kept + row * width + place, -1, mask=rest)
    tl.store(places + row * width + place, -1, mask=rest)
    tl.store(lanes + row, lane)
    tl.debug_barrier()
    tl.store(sources + row * (TAPS + 1), tl.where(depth > 0, lane, -1))
    for tap in tl.static_range(TAPS - 1):
        old = depth + tap < TAPS - 1
        new = tl.load(places + row * width + depth + tap - (TAPS - 1), mask=depth + tap >= TAPS - 1, other=0)
        tl.store(sources + row * (TAPS + 1) + 1 + tap, tl.where(old, held + lane * (TAPS - 1) + depth + tap, new))
    tl.store(sources + row * (TAPS + 1) + TAPS, -1)


def walk(
    chosen: Tensor,
    *,
    tokens: Tensor,
    parents: Tensor,
    rows: Tensor,
    longest: int,
    taps: int = 1,
    held: int = 0,
    pdl: bool = False,
) -> Walked:
    """chosen and tokens [T] int64, parents [T] int32 (of drafts), rows [R, ROW_WORDS] int32; `longest`: tokens of a row.

    `taps` of the convolution and `held`, the places that the rollback buffer has, are for the windows.
    """
    count, width, device = len(rows), max(longest - 1, 1), chosen.device
    kept, places = (torch.empty(count, width, dtype=torch.int32, device=device) for _ in range(2))
    lanes = torch.empty(count, dtype=torch.int32, device=device)
    sources = torch.empty(count, taps + 1, dtype=torch.int32, device=device)
    _walk[(count,)](
        chosen, tokens, parents, rows, kept, places, lanes, sources, width, held,
        TAPS=taps, BLOCK=triton.next_power_of_2(width), PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return Walked(kept, places, lanes, sources)


@triton.jit(do_not_specialize=["width"])
def _move(
    keys,
    values,
    key_scales,
    value_scales,
    kept,
    rows,
    table,
    width,
    table_width,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    CODED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A kept draft never stands before its depth, so in order of depth nothing is overwritten before it is read."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    stop = tl.load(rows + row * 5 + 4)
    at = tl.arange(0, BLOCK_D)
    for depth in range(width):
        index = tl.load(kept + row * width + depth)
        moved = index > depth
        source, target = stop + index, stop + depth
        from_page = tl.load(table + row * table_width + source // PAGE, mask=moved, other=0).to(tl.int64)
        to_page = tl.load(table + row * table_width + target // PAGE, mask=moved, other=0).to(tl.int64)
        from_slot = (from_page * KV + head) * PAGE + source % PAGE
        to_slot = (to_page * KV + head) * PAGE + target % PAGE
        here, there = from_slot * D + at, to_slot * D + at
        mask = (at < D) & moved
        tl.store(keys + there, tl.load(keys + here, mask=mask, other=0.0), mask=mask)
        tl.store(values + there, tl.load(values + here, mask=mask, other=0.0), mask=mask)
        if CODED:
            tl.store(key_scales + to_slot, tl.load(key_scales + from_slot, mask=moved, other=0.0), mask=moved)
            tl.store(value_scales + to_slot, tl.load(value_scales + from_slot, mask=moved, other=0.0), mask=moved)


def move_kept(
    store: PageStore,
    walked: Walked,
    *,
    rows: Tensor,
    table: Tensor,
    kv_heads: int,
    dim: int,
    page_size: int,
    pdl: bool = False,
) -> None:
    """Nodes of trees to the slots of their positions, in the pages [R, W] of their rows."""
    scales = store.key_scales, store.value_scales
    _move[(len(rows), kv_heads)](
        bits(store.keys), bits(store.values), *scales, walked.kept, rows, table, walked.kept.shape[1], table.shape[1],
        KV=kv_heads, D=dim, BLOCK_D=triton.next_power_of_2(dim), PAGE=page_size, CODED=store.key_scales is not None,
        PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
