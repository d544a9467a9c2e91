"""Gated DeltaNet on a GPU: the state in chunks of 64 absolute positions, for prompts.

In: every token's queries, keys, values and gates, the lanes' states, and which tokens make which chunks. Out: what the state gave
at every token; states move on in place, and are saved where checkpoints want them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.delta import Gated, sizes_of
from onedraw.backends.torch.ops.cuda.triton_math import exp

CHUNK = 64
CHUNK_COLUMNS, CHUNK_WARPS = 32, 4  # of the state that one program takes through chunks


@triton.jit(do_not_specialize=["tokens"])
def _solve(
    q,
    k,
    gates,
    inverse,
    near,
    chunks,
    tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """(I + tril₋₁(β K Kᵀ D))⁻¹ of one chunk and head, row by row; and tril(Q Kᵀ D)."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    first = tl.load(chunks + chunk * 2).to(tl.int64)
    count = tl.load(chunks + chunk * 2 + 1)
    i = tl.arange(0, LENGTH)
    d = tl.arange(0, BLOCK_K)
    live = i < count
    heads = ((first + i)[:, None] * KEY_HEADS + key_head) * KEY_DIM + d[None, :]
    key = tl.load(k + heads, mask=live[:, None] & (d < KEY_DIM)[None, :], other=0.0)
    g = tl.load(gates + (first + i) * VALUE_HEADS + head, mask=live, other=0.0)
    beta = tl.load(gates + (2 * tokens + first + i) * VALUE_HEADS + head, mask=live, other=0.0)
    total = tl.cumsum(g, 0)
    apart = total[:, None] - total[None, :]
    lower = tl.dot(key, tl.trans(key), input_precision="tf32x3") * beta[:, None]
    lower = tl.where(i[:, None] > i[None, :], lower * exp(tl.where(i[:, None] > i[None, :], apart, 0.0)), 0.0)
    offset = (chunk * VALUE_HEADS + head).to(tl.int64) * LENGTH * LENGTH
    place = inverse + offset
    tl.store(place + i[:, None] * LENGTH + i[None, :], lower)
    query = tl.load(q + heads, mask=live[:, None] & (d < KEY_DIM)[None, :], other=0.0)
    below = i[:, None] >= i[None, :]
    seen = tl.dot(query, tl.trans(key), input_precision="tf32x3")
    seen = tl.where(below, seen * exp(tl.where(below, apart, 0.0)), 0.0)
    tl.store(near + offset + i[:, None] * LENGTH + i[None, :], seen)
    tl.debug_barrier()
    row = tl.arange(0, LENGTH)
    found = (row[:, None] == row[None, :]).to(tl.float32)
    for index in range(1, LENGTH):
        factors = tl.load(place + index * LENGTH + row)
        new = tl.sum(factors[:, None] * found, 0)
        found = tl.where(row[:, None] == index, found - new[None, :], found)
    tl.debug_barrier()
    tl.store(place + row[:, None] * LENGTH + row[None, :], found)


@triton.jit(do_not_specialize=["tokens"])
def _chunks(
    q,
    k,
    v,
    gates,
    inverse,
    near,
    states,
    saved,
    out,
    chunks,
    runs,
    slots,
    tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """The chunks of one run, one after the other, for one head and some columns of its state."""
    run = tl.program_id(0) * 4
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    lane = tl.load(runs + run).to(tl.int64)
    begin = tl.load(runs + run + 1)
    stop = tl.load(runs + run + 2)
    fresh = tl.load(runs + run + 3)
    i = tl.arange(0, LENGTH)
    d = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    wide, high = column < VALUE_DIM, d < KEY_DIM
    whole = high[:, None] & wide[None, :]
    inner = d[:, None] * VALUE_DIM + column[None, :]
    at = states + (lane * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + inner
    state = tl.load(at, mask=whole & (fresh == 0), other=0.0)
    for chunk in range(begin, stop):
        first = tl.load(chunks + chunk * 2).to(tl.int64)
        count = tl.load(chunks + chunk * 2 + 1)
        live = i < count
        heads = ((first + i)[:, None] * KEY_HEADS + key_head) * KEY_DIM + d[None, :]
        shown = live[:, None] & high[None, :]
        spot = ((first + i)[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
        value = tl.load(v + spot, mask=live[:, None] & wide[None, :], other=0.0)
        g = tl.load(gates + (first + i) * VALUE_HEADS + head, mask=live, other=0.0)
        beta = tl.load(gates + (2 * tokens + first + i) * VALUE_HEADS + head, mask=live, other=0.0)
        total = tl.cumsum(g, 0)
        last = tl.sum(g, 0)
        so_far = exp(total)
        held = tl.dot(tl.load(k + heads, mask=shown, other=0.0), state, input_precision="tf32x3")
        right = beta[:, None] * (value - so_far[:, None] * held)
        square = (chunk * VALUE_HEADS + head).to(tl.int64) * LENGTH * LENGTH + i[:, None] * LENGTH + i[None, :]
        change = tl.dot(tl.load(inverse + square), right, input_precision="tf32x3")
        seen = so_far[:, None] * tl.dot(tl.load(q + heads, mask=shown, other=0.0), state, input_precision="tf32x3")
        seen = seen + tl.dot(tl.load(near + square), change, input_precision="tf32x3")
        tl.store(out + spot, seen, mask=live[:, None] & wide[None, :])
        # Keys once more, lying: each fades by what comes behind it in the chunk.
        lying = ((first + i)[None, :] * KEY_HEADS + key_head) * KEY_DIM + d[:, None]
        faded = tl.load(k + lying, mask=live[None, :] & high[:, None], other=0.0) * exp(last - total)[None, :]
        state = state * exp(last) + tl.dot(faded, change, input_precision="tf32x3")
        slot = tl.load(slots + chunk).to(tl.int64)
        if slot >= 0:
            tl.store(saved + (slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + inner, state, mask=whole)
    tl.store(at, state, mask=whole)


def chunked(gated: Gated, states: Tensor, saved: Tensor, out: Tensor, *, chunks: Tensor, runs: Tensor, slots: Tensor) -> None:
    """Prompt positions. chunks [n, 2] int32: first token and tokens (64, at a prompt's end perhaps fewer), a run's chunks one
    behind the other. runs [R, 4] int32: lane, first chunk, chunk behind the last, fresh. slots [n] int32: the checkpoint that
    takes the state behind a chunk, or -1. Lanes move on in place; out [T, Hv, Dv] is written for the chunks' tokens."""
    _, value_heads, key_dim, value_dim = states.shape
    if not len(chunks):
        return
    inverse, near = (torch.empty(len(chunks), value_heads, CHUNK, CHUNK, device=out.device) for _ in range(2))
    _solve[(len(chunks), value_heads)](
        gated.q,
        gated.k,
        gated.gates,
        inverse,
        near,
        chunks,
        len(gated.q),
        KEY_HEADS=gated.q.shape[1],
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        LENGTH=CHUNK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _chunks[(len(runs), value_heads, triton.cdiv(value_dim, CHUNK_COLUMNS))](
        gated.q,
        gated.k,
        gated.v,
        gated.gates,
        inverse,
        near,
        states,
        saved,
        out,
        chunks,
        runs,
        slots,
        len(gated.q),
        **sizes_of(states, key_heads=gated.q.shape[1]),
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=CHUNK_COLUMNS,
        LENGTH=CHUNK,
        num_warps=CHUNK_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
