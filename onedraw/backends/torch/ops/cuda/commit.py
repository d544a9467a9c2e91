"""After the choosing, still on the device: which drafts are kept, and kept drafts brought home.

In: what was chosen at every token of a turn, and the rows' drafts. Out: the kept drafts' places, and keys and values moved to
the slots of their positions. The walk is that of `sampling/verify.py`: parents stand before their children, so one pass finds
the whole path. The host walks by itself when the tokens arrive; this one only spares the device the waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel

# -------------------- Tokens that never leave the device: what a turn chose is what the turn behind it begins wi


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"


BLOCK = 256


def awaited(given: Tensor, last: Tensor) -> Tensor:
    """given [n] tokens, last [lanes + 1] → [n]. Where a lane's law left no token, anything: nobody hears of that row."""
    found = torch.empty_like(given)
    _awaited[(triton.cdiv(len(given), BLOCK),)](given, last, found, len(given), BLOCK=BLOCK)
    return found


def leave(answers: Tensor, lanes: Tensor, last: Tensor) -> None:
    """last[lanes] = answers[:, 0]; answers [T, columns], lanes [T]. Padding has the lane behind the last."""
    _leave[(triton.cdiv(len(lanes), BLOCK),)](answers, lanes, last, len(lanes), answers.stride(0), BLOCK=BLOCK)


@triton.jit(do_not_specialize=["count"])
def _awaited(given, last, found, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    token = tl.load(given + place, mask=there, other=0)
    unknown = token < 0
    chosen = tl.load(last + (-1 - token), mask=there & unknown, other=0)
    tl.store(found + place, tl.where(unknown, tl.maximum(chosen, 0).to(token.dtype), token), mask=there)


@triton.jit(do_not_specialize=["count", "stride"])
def _leave(answers, lanes, last, count, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    lane = tl.load(lanes + place, mask=there, other=0)
    tl.store(last + lane, tl.load(answers + place * stride, mask=there, other=0), mask=there)


# -------------------- After the choosing, still on the device: which drafts are kept, and kept drafts brought ho


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"


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
    begin_kernel(PDL)
    row = tl.program_id(0)
    first = tl.load(rows + row * 5)
    count = tl.load(rows + row * 5 + 1)
    lane = tl.load(rows + row * 5 + 2)
    base = tl.load(rows + row * 5 + 3)
    place = tl.arange(0, BLOCK)
    inside = place < count - 1
    parent = tl.load(parents + first + 1 + place, mask=inside, other=-2)
    token = tl.load(tokens + first + 1 + place, mask=inside, other=-1)
    answer = tl.load(chosen + first + 1 + place, mask=inside, other=0)
    path = tl.full((BLOCK,), -1, dtype=tl.int32)
    depth = 0
    choice = tl.load(chosen + first)
    index = tl.min(tl.where((parent == -1) & (token == choice), place, BLOCK), 0)
    while index < BLOCK:  # a draft is kept: its children stand behind it
        path = tl.where(place == depth, index, path)
        choice = tl.sum(tl.where(place == index, answer, 0), 0)
        depth += 1
        index = tl.min(tl.where((parent == index) & (place > index) & (token == choice), place, BLOCK), 0)
    tl.store(kept + row * width + place, path, mask=place < width)
    tl.store(places + row * width + place, tl.where(path >= 0, base + path, -1), mask=place < width)
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
    stores,
    kept,
    rows,
    table,
    width,
    table_width,
    KV: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, head and layer: all are read before any is written."""
    begin_kernel(PDL)
    row = (tl.program_id(0) // KV).to(tl.int64)
    head = tl.program_id(0) % KV
    depth = tl.arange(0, WIDTH)
    index = tl.load(kept + row * width + depth, mask=depth < width, other=-1)
    moved = index > depth
    if tl.max(moved.to(tl.int32), 0) == 0:
        return
    stop = tl.load(rows + row * 5 + 4)
    source, target = stop + index, stop + depth
    from_page = tl.load(table + row * table_width + source // PAGE, mask=moved, other=0).to(tl.int64)
    to_page = tl.load(table + row * table_width + target // PAGE, mask=moved, other=0).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    here = (((from_page * KV + head) * PAGE + source % PAGE) * WORDS)[:, None] + at[None, :]
    there = (((to_page * KV + head) * PAGE + target % PAGE) * WORDS)[:, None] + at[None, :]
    mask = moved[:, None] & (at < WORDS)[None, :]
    for part in tl.static_range(2):
        store = tl.load(stores + tl.program_id(1) * 2 + part).to(tl.pointer_type(tl.int32))
        numbers = tl.load(store + here, mask=mask, other=0)
        tl.debug_barrier()
        tl.store(store + there, numbers, mask=mask)


def move_kept(
    stores: Tensor,
    walked: Walked,
    *,
    rows: Tensor,
    table: Tensor,
    kv_heads: int,
    head_bytes: int,
    page_size: int,
    pdl: bool = False,
) -> None:
    """Nodes of trees to the slots of their positions, in the pages [R, W] of their rows. `stores` [L, 2] int64: where keys and
    values of the layers, or their scales, lie; `head_bytes`, a multiple of 4: what one position of one head takes."""
    width, words = walked.kept.shape[1], head_bytes // 4
    block = min(64, triton.next_power_of_2(words))
    _move[(len(rows) * kv_heads, len(stores), triton.cdiv(words, block))](
        stores, walked.kept, rows, table, width, table.shape[1],
        KV=kv_heads, WORDS=words, BLOCK=block, WIDTH=triton.next_power_of_2(width), PAGE=page_size, PDL=pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
