"""After sampling, on the device: verify drafts, move kept keys and values, and remember the last token of each lane.

In: the token sampled at every position of a step, and the rows' drafts. Out: the kept drafts and their rollback slots; keys and
values moved to the slots of their positions; tokens for the next step. Drafts are kept by the rule of `sampling/verify.py`:
parents come before their children, so one pass finds the whole path. The host repeats the verification when the sampled tokens
arrive; verifying on the device lets the next step start without waiting for the host. Axes: T tokens, R rows, W the most drafts
of a row, K taps of the convolution, L layers. A row is the work of one sequence in one step; a lane is the slot of its recurrent
state; the rollback buffer holds the state increments of drafts, from which `recurrent_rollback.py` advances the lanes.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel

ROW_WORDS = 5  # columns of `rows`: first token, tokens, lane, first slot in the rollback buffer, KV slot of the first draft
BLOCK = 256  # tokens per program of `resolve_pending_tokens` and `store_last_tokens`


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """The kept drafts of each row in order of position; -1 follows the last one."""

    kept: Tensor  # [R, W] int32: index of the draft among the row's drafts
    slots: Tensor  # [R, W] int32: slot of the draft in the rollback buffer
    lanes: Tensor  # [R] int32: the lane of each row
    window_sources: Tensor  # [R, 1 + K] int32: for `shift_conv_windows`: lane (-1: none), rows of its K - 1 new inputs, padding


@triton.jit(do_not_specialize=["width", "slot_count"])
def _verify_drafts(
    samples,
    tokens,
    parents,
    rows,
    kept,
    slots,
    lanes,
    window_sources,
    width,
    slot_count,
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
    draft = tl.arange(0, BLOCK)
    is_draft = draft < count - 1
    parent = tl.load(parents + first + 1 + draft, mask=is_draft, other=-2)
    token = tl.load(tokens + first + 1 + draft, mask=is_draft, other=-1)
    sampled_after = tl.load(samples + first + 1 + draft, mask=is_draft, other=0)
    path = tl.full((BLOCK,), -1, dtype=tl.int32)
    depth = 0
    sampled = tl.load(samples + first)
    next_draft = tl.min(tl.where((parent == -1) & (token == sampled), draft, BLOCK), 0)
    while next_draft < BLOCK:  # this draft is kept; its children come after it
        path = tl.where(draft == depth, next_draft, path)
        sampled = tl.sum(tl.where(draft == next_draft, sampled_after, 0), 0)
        depth += 1
        next_draft = tl.min(tl.where((parent == next_draft) & (draft > next_draft) & (token == sampled), draft, BLOCK), 0)
    tl.store(kept + row * width + draft, path, mask=draft < width)
    tl.store(slots + row * width + draft, tl.where(path >= 0, base + path, -1), mask=draft < width)
    tl.store(lanes + row, lane)
    tl.debug_barrier()
    tl.store(window_sources + row * (TAPS + 1), tl.where(depth > 0, lane, -1))
    for tap in tl.static_range(TAPS - 1):
        old = depth + tap < TAPS - 1
        new = tl.load(slots + row * width + depth + tap - (TAPS - 1), mask=depth + tap >= TAPS - 1, other=0)
        tl.store(window_sources + row * (TAPS + 1) + 1 + tap, tl.where(old, slot_count + lane * (TAPS - 1) + depth + tap, new))
    tl.store(window_sources + row * (TAPS + 1) + TAPS, -1)


def verify_drafts(
    samples: Tensor,
    *,
    tokens: Tensor,
    parents: Tensor,
    rows: Tensor,
    longest: int,
    taps: int = 1,
    slot_count: int = 0,
    pdl: bool = False,
) -> VerifiedDrafts:
    """Find the drafts of each row that equal the sampled tokens. samples and tokens [T] int64, parents [T] int32 (index of a
    draft's parent among the row's drafts, -1 for the row's last known token), rows [R, ROW_WORDS] int32. `longest`: the most
    tokens of a row.

    `taps` (of the convolution) and `slot_count` (of the rollback buffer) are needed for the window sources.
    """
    count, width, device = len(rows), max(longest - 1, 1), samples.device
    kept, slots = (torch.empty(count, width, dtype=torch.int32, device=device) for _ in range(2))
    lanes = torch.empty(count, dtype=torch.int32, device=device)
    window_sources = torch.empty(count, taps + 1, dtype=torch.int32, device=device)
    _verify_drafts[(count,)](
        samples, tokens, parents, rows, kept, slots, lanes, window_sources, width, slot_count,
        TAPS=taps, BLOCK=triton.next_power_of_2(width), PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return VerifiedDrafts(kept, slots, lanes, window_sources)


@triton.jit(do_not_specialize=["width"])
def _move_kept_kv(
    stores,
    kept,
    rows,
    page_table,
    width,
    table_width,
    KV_HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Move the entries of one row, head and layer. All positions are read before any is written, because a target may be another
    draft's source."""
    begin_kernel(PDL)
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    depth = tl.arange(0, MAX_DEPTH)
    index = tl.load(kept + row * width + depth, mask=depth < width, other=-1)
    moved = index > depth
    if tl.max(moved.to(tl.int32), 0) == 0:
        return
    first_slot = tl.load(rows + row * 5 + 4)
    source, target = first_slot + index, first_slot + depth
    from_page = tl.load(page_table + row * table_width + source // PAGE_SIZE, mask=moved, other=0).to(tl.int64)
    to_page = tl.load(page_table + row * table_width + target // PAGE_SIZE, mask=moved, other=0).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source_offsets = (((from_page * KV_HEADS + head) * PAGE_SIZE + source % PAGE_SIZE) * WORDS)[:, None] + word[None, :]
    target_offsets = (((to_page * KV_HEADS + head) * PAGE_SIZE + target % PAGE_SIZE) * WORDS)[:, None] + word[None, :]
    mask = moved[:, None] & (word < WORDS)[None, :]
    for kind in tl.static_range(2):
        store = tl.load(stores + tl.program_id(1) * 2 + kind).to(tl.pointer_type(tl.int32))
        numbers = tl.load(store + source_offsets, mask=mask, other=0)
        tl.debug_barrier()
        tl.store(store + target_offsets, numbers, mask=mask)


def move_kept_kv(
    stores: Tensor,
    verified: VerifiedDrafts,
    *,
    rows: Tensor,
    page_table: Tensor,
    kv_heads: int,
    head_bytes: int,
    page_size: int,
    pdl: bool = False,
) -> None:
    """Move the KV entries of kept tree nodes to the slots of their positions, in the pages [R, W] of the rows. `stores` [L, 2]
    int64: addresses of each layer's keys and values, or of their scales. `head_bytes`: size of one position of one head, a
    multiple of 4."""
    width, words = verified.kept.shape[1], head_bytes // 4
    block = min(64, triton.next_power_of_2(words))
    _move_kept_kv[(len(rows) * kv_heads, len(stores), triton.cdiv(words, block))](
        stores, verified.kept, rows, page_table, width, page_table.shape[1],
        KV_HEADS=kv_heads, WORDS=words, BLOCK=block, MAX_DEPTH=triton.next_power_of_2(width), PAGE_SIZE=page_size, PDL=pdl,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip


# ------------------------------------------------------------------ tokens of the next step


def resolve_pending_tokens(tokens: Tensor, last: Tensor) -> Tensor:
    """Replace each token of -1 - lane by the token that the lane sampled last: tokens [n], last [lanes + 1] → [n]. If no token
    was sampled for that lane, the replacement is arbitrary, and the row's results are discarded."""
    resolved = torch.empty_like(tokens)
    _resolve_pending_tokens[(triton.cdiv(len(tokens), BLOCK),)](tokens, last, resolved, len(tokens), BLOCK=BLOCK)
    return resolved


def store_last_tokens(samples: Tensor, lanes: Tensor, last: Tensor) -> None:
    """Remember the sampled tokens of these lanes: last[lanes] = samples[:, 0], for samples [T, columns] and lanes [T]. Padding
    rows have the lane after the last real one."""
    _store_last_tokens[(triton.cdiv(len(lanes), BLOCK),)](samples, lanes, last, len(lanes), samples.stride(0), BLOCK=BLOCK)


@triton.jit(do_not_specialize=["count"])
def _resolve_pending_tokens(tokens, last, resolved, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    token = tl.load(tokens + index, mask=mask, other=0)
    pending = token < 0
    last_token = tl.load(last + (-1 - token), mask=mask & pending, other=0)
    tl.store(resolved + index, tl.where(pending, tl.maximum(last_token, 0).to(token.dtype), token), mask=mask)


@triton.jit(do_not_specialize=["count", "stride"])
def _store_last_tokens(samples, lanes, last, count, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    lane = tl.load(lanes + index, mask=mask, other=0)
    tl.store(last + lane, tl.load(samples + index * stride, mask=mask, other=0), mask=mask)
