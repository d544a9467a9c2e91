"""Gated DeltaNet in chunked form: the state updated by chunks of 64 absolute positions, for prompts.

In: queries, keys, values and gates of every token, the lanes' states, and the tokens of each chunk. Out: the state's output at
every token; states are updated in place and saved to checkpoint slots. Axes: T tokens, Hk key heads, Hv value heads, Dk and Dv
their sizes, R spans (prompt positions of one row that a step computes). A lane is the slot of a sequence's recurrent state; a
checkpoint is a saved state of a prompt prefix. Formulas: Q and K are a chunk's queries and keys, β its update rates, D[i, j] the
product of the decays after token j up to token i.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.delta import DeltaQkv, state_sizes
from onedraw.backends.torch.ops.cuda.triton_math import exp

CHUNK = 64
CHUNK_COLUMNS, CHUNK_WARPS = 32, 4  # state columns and warps per program


@triton.jit(do_not_specialize=["tokens"])
def _invert_chunks(
    q,
    k,
    gates,
    inverse,
    scores,
    chunks,
    tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK_LENGTH: tl.constexpr,
):
    """Compute (I + tril₋₁(β K Kᵀ D))⁻¹ of one chunk and head by forward substitution, and tril(Q Kᵀ D), which the scan over the
    chunks multiplies with. tril₋₁ is the part below the diagonal."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    first = tl.load(chunks + chunk * 2).to(tl.int64)
    count = tl.load(chunks + chunk * 2 + 1)
    i = tl.arange(0, CHUNK_LENGTH)
    d = tl.arange(0, BLOCK_K)
    live = i < count
    key_offsets = ((first + i)[:, None] * KEY_HEADS + key_head) * KEY_DIM + d[None, :]
    key = tl.load(k + key_offsets, mask=live[:, None] & (d < KEY_DIM)[None, :], other=0.0)
    g = tl.load(gates + (first + i) * VALUE_HEADS + head, mask=live, other=0.0)
    beta = tl.load(gates + (2 * tokens + first + i) * VALUE_HEADS + head, mask=live, other=0.0)
    cum_log_decay = tl.cumsum(g, 0)
    log_decay = cum_log_decay[:, None] - cum_log_decay[None, :]
    lower = tl.dot(key, tl.trans(key), input_precision="tf32x3") * beta[:, None]
    lower = tl.where(i[:, None] > i[None, :], lower * exp(tl.where(i[:, None] > i[None, :], log_decay, 0.0)), 0.0)
    offset = (chunk * VALUE_HEADS + head).to(tl.int64) * CHUNK_LENGTH * CHUNK_LENGTH
    inverse_ptrs = inverse + offset
    tl.store(inverse_ptrs + i[:, None] * CHUNK_LENGTH + i[None, :], lower)
    query = tl.load(q + key_offsets, mask=live[:, None] & (d < KEY_DIM)[None, :], other=0.0)
    causal = i[:, None] >= i[None, :]
    qk = tl.dot(query, tl.trans(key), input_precision="tf32x3")
    qk = tl.where(causal, qk * exp(tl.where(causal, log_decay, 0.0)), 0.0)
    tl.store(scores + offset + i[:, None] * CHUNK_LENGTH + i[None, :], qk)
    tl.debug_barrier()
    row = tl.arange(0, CHUNK_LENGTH)
    solution = (row[:, None] == row[None, :]).to(tl.float32)
    for index in range(1, CHUNK_LENGTH):
        factors = tl.load(inverse_ptrs + index * CHUNK_LENGTH + row)
        row_update = tl.sum(factors[:, None] * solution, 0)
        solution = tl.where(row[:, None] == index, solution - row_update[None, :], solution)
    tl.debug_barrier()
    tl.store(inverse_ptrs + row[:, None] * CHUNK_LENGTH + row[None, :], solution)


@triton.jit(do_not_specialize=["tokens"])
def _scan_chunks(
    q,
    k,
    v,
    gates,
    inverse,
    scores,
    states,
    saved_states,
    out,
    chunks,
    spans,
    save_slots,
    tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK_LENGTH: tl.constexpr,
):
    """Process the chunks of one span in sequence, for one head and some columns of its state."""
    span = tl.program_id(0) * 4
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    lane = tl.load(spans + span).to(tl.int64)
    begin = tl.load(spans + span + 1)
    stop = tl.load(spans + span + 2)
    fresh = tl.load(spans + span + 3)
    i = tl.arange(0, CHUNK_LENGTH)
    d = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    column_mask, key_dim_mask = column < VALUE_DIM, d < KEY_DIM
    state_mask = key_dim_mask[:, None] & column_mask[None, :]
    state_offsets = d[:, None] * VALUE_DIM + column[None, :]
    state_ptrs = states + (lane * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + state_offsets
    state = tl.load(state_ptrs, mask=state_mask & (fresh == 0), other=0.0)
    for chunk in range(begin, stop):
        first = tl.load(chunks + chunk * 2).to(tl.int64)
        count = tl.load(chunks + chunk * 2 + 1)
        live = i < count
        key_offsets = ((first + i)[:, None] * KEY_HEADS + key_head) * KEY_DIM + d[None, :]
        key_mask = live[:, None] & key_dim_mask[None, :]
        value_offsets = ((first + i)[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
        value = tl.load(v + value_offsets, mask=live[:, None] & column_mask[None, :], other=0.0)
        g = tl.load(gates + (first + i) * VALUE_HEADS + head, mask=live, other=0.0)
        beta = tl.load(gates + (2 * tokens + first + i) * VALUE_HEADS + head, mask=live, other=0.0)
        cum_log_decay = tl.cumsum(g, 0)
        chunk_log_decay = tl.sum(g, 0)
        cum_decay = exp(cum_log_decay)
        retrieved = tl.dot(tl.load(k + key_offsets, mask=key_mask, other=0.0), state, input_precision="tf32x3")
        rhs = beta[:, None] * (value - cum_decay[:, None] * retrieved)
        square_offsets = (
            (chunk * VALUE_HEADS + head).to(tl.int64) * CHUNK_LENGTH * CHUNK_LENGTH + i[:, None] * CHUNK_LENGTH + i[None, :]
        )
        change = tl.dot(tl.load(inverse + square_offsets), rhs, input_precision="tf32x3")
        output = cum_decay[:, None] * tl.dot(tl.load(q + key_offsets, mask=key_mask, other=0.0), state, input_precision="tf32x3")
        output = output + tl.dot(tl.load(scores + square_offsets), change, input_precision="tf32x3")
        tl.store(out + value_offsets, output, mask=live[:, None] & column_mask[None, :])
        # Transposed keys, each multiplied by the decays of the tokens after it in the chunk.
        transposed_offsets = ((first + i)[None, :] * KEY_HEADS + key_head) * KEY_DIM + d[:, None]
        decayed_keys = (
            tl.load(k + transposed_offsets, mask=live[None, :] & key_dim_mask[:, None], other=0.0)
            * exp(chunk_log_decay - cum_log_decay)[None, :]
        )
        state = state * exp(chunk_log_decay) + tl.dot(decayed_keys, change, input_precision="tf32x3")
        save_slot = tl.load(save_slots + chunk).to(tl.int64)
        if save_slot >= 0:
            tl.store(
                saved_states + (save_slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + state_offsets, state, mask=state_mask
            )
    tl.store(state_ptrs, state, mask=state_mask)


def chunked_delta(
    qkv: DeltaQkv, states: Tensor, saved_states: Tensor, out: Tensor, *, chunks: Tensor, spans: Tensor, save_slots: Tensor
) -> None:
    """Process prompt positions. chunks [n, 2] int32: first token and token count (64, or fewer at a prompt's end), in order of
    spans. spans [R, 4] int32: lane, first chunk, end of its chunks, whether the state starts at zero. save_slots [n] int32: the
    checkpoint slot in which the state after a chunk is saved, or -1. States are updated in place; out [T, Hv, Dv] is written at
    the tokens of the chunks."""
    _, value_heads, key_dim, value_dim = states.shape
    if not len(chunks):
        return
    inverse, scores = (torch.empty(len(chunks), value_heads, CHUNK, CHUNK, device=out.device) for _ in range(2))
    _invert_chunks[(len(chunks), value_heads)](
        qkv.q,
        qkv.k,
        qkv.gates,
        inverse,
        scores,
        chunks,
        len(qkv.q),
        KEY_HEADS=qkv.q.shape[1],
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        CHUNK_LENGTH=CHUNK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _scan_chunks[(len(spans), value_heads, triton.cdiv(value_dim, CHUNK_COLUMNS))](
        qkv.q,
        qkv.k,
        qkv.v,
        qkv.gates,
        inverse,
        scores,
        states,
        saved_states,
        out,
        chunks,
        spans,
        save_slots,
        len(qkv.q),
        **state_sizes(states, key_heads=qkv.q.shape[1]),
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=CHUNK_COLUMNS,
        CHUNK_LENGTH=CHUNK,
        num_warps=CHUNK_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
