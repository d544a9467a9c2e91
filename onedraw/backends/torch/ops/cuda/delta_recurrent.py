"""Gated DeltaNet in recurrent form: the state updated token by token, for generated tokens and chains of drafts.

In: queries, keys, values and gates of every token, the lanes' states, and paths. Out: the state's output at every token; states
are updated in place. A path is the work of one program: the known tokens of a row, then a chain of drafts (for trees, see
`delta_tree.py`). Drafts never change a lane's state: they store decay, key and change in the rollback buffer, from which
`recurrent_rollback.py` repeats the update of the drafts that are kept. Axes: T tokens, P paths, Hv value heads, Dv their size.
A lane is the slot of a sequence's recurrent state. An entry names one token of a path, as 4 * token (the two lower bits are
flags, for trees only). PDL is programmatic dependent launch.

A program is one warp that holds some columns of the state in registers. The rows of the state are divided into parts of ROWS
rows, few enough that all threads that sum a column are in the warp; the inputs of later tokens are prefetched. The order of a sum
is the same for any number of columns: eight partial sums over every eighth row, which are then added pairwise.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - Triton concatenates tuples with +, unpacking is not supported
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.delta import DeltaQkv, DraftIncrements, state_sizes
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import INTERPRETED, begin_kernel

COLUMNS, MANY_COLUMNS, MANY_PATHS = 16, 32, 4  # state columns per warp: MANY_COLUMNS for MANY_PATHS or more paths without drafts
# Columns of `paths`: lane, first entry, number of entries, entries of known tokens, whether the state starts at zero.
PATH_WORDS = 5


@triton.jit
def _rank_one_update(key, change, state):
    """The state after one update, state + key ⊗ change, by fused multiply-add."""
    return tl.fma(tl.broadcast_to(key[:, None], state.shape), tl.broadcast_to(change[None, :], state.shape), state)


@triton.jit
def _load_parts(vector, row, KEY_DIM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """A key or a query as a tuple of parts of ROWS values. A part has at most as many values as a warp has threads, so that each
    thread loads its own."""
    values = ()
    for part in tl.static_range(PARTS):
        if PARTS * ROWS == KEY_DIM:
            values = values + (tl.load(vector + row + part * ROWS),)
        else:
            values = values + (tl.load(vector + row + part * ROWS, mask=row + part * ROWS < KEY_DIM, other=0.0),)
    return values


@triton.jit
def _load_token(head_ptrs, token, row, column_mask, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
                VALUE_DIM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Key, query, value, decay and beta of a token, by pointers `head_ptrs` to those of this head at token 0."""
    key = _load_parts(head_ptrs[0] + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
    query = _load_parts(head_ptrs[1] + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
    value = tl.load(head_ptrs[2] + token * VALUE_HEADS * VALUE_DIM, mask=column_mask, other=0.0)
    return key, query, value, tl.load(head_ptrs[3] + token * VALUE_HEADS), tl.load(head_ptrs[4] + token * VALUE_HEADS)


@triton.jit
def _state_dot(state, vector, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """The columns of the state times a key or query: eight partial sums over every eighth row, added pairwise down to ROWS
    sums."""
    total = state[0] * vector[0][:, None]
    if ROWS == 8:
        for part in tl.static_range(1, PARTS):
            total = tl.fma(state[part], tl.broadcast_to(vector[part][:, None], total.shape), total)
    else:
        odd_total = state[1] * vector[1][:, None]
        for part in tl.static_range(2, PARTS, 2):
            total = tl.fma(state[part], tl.broadcast_to(vector[part][:, None], total.shape), total)
            odd_total = tl.fma(state[part + 1], tl.broadcast_to(vector[part + 1][:, None], total.shape), odd_total)
        total = total + odd_total
    return total


@triton.jit
def _updated_state(state, key, change, PARTS: tl.constexpr):
    values = ()
    for part in tl.static_range(PARTS):
        values = values + (_rank_one_update(key[part], change, state[part]),)
    return values


@triton.jit
def _store_columns(target, values, index, head, row, column, column_mask, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Store columns of a head at `index`, unless it is negative. Only the threads of the first row store."""
    ptrs = target + (index * VALUE_HEADS + head) * VALUE_DIM + row[:, None] * 0 + column[None, :]
    tl.store(ptrs, values[None, :], mask=(row == 0)[:, None] & column_mask[None, :] & (index >= 0))


@triton.jit(do_not_specialize=["tokens"])
def _recurrent_delta(
    q,
    k,
    v,
    gates,
    states,
    out,
    changes,
    paths,
    entries,
    draft_slots,
    tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process one path, for one head and some columns of its state."""
    begin_kernel(PDL)
    path = tl.program_id(2) * 5
    count = tl.load(paths + path + 2)
    if count > 0:
        lane = tl.load(paths + path).to(tl.int64)
        first = tl.load(paths + path + 1)
        known = tl.load(paths + path + 3)
        fresh = tl.load(paths + path + 4)
        head = tl.program_id(1)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        row = tl.arange(0, ROWS)
        column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        column_mask = column < VALUE_DIM
        state_ptrs = states + (lane * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + row[:, None] * VALUE_DIM + column[None, :]
        state = ()
        for part in tl.static_range(PARTS):
            mask = (row + part * ROWS < KEY_DIM)[:, None] & column_mask[None, :] & (fresh == 0)
            state = state + (tl.load(state_ptrs + part * ROWS * VALUE_DIM, mask=mask, other=0.0),)
        keys, queries = k + key_head * KEY_DIM, q + key_head * KEY_DIM
        values = v + head * VALUE_DIM + column
        decays, betas = gates + tokens * VALUE_HEADS + head, gates + 2 * tokens * VALUE_HEADS + head
        head_ptrs = (keys, queries, values, decays, betas)
        last = first + count - 1
        token = (tl.load(entries + first) >> 2).to(tl.int64)
        key, query, value, decay, beta = _load_token(
            head_ptrs, token, row, column_mask, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PARTS, ROWS
        )
        if DRAFTS:
            next_token = (tl.load(entries + tl.minimum(first + 1, last)) >> 2).to(tl.int64)
            far_token = (tl.load(entries + tl.minimum(first + 2, last)) >> 2).to(tl.int64)
            token_ahead = _load_token(
                head_ptrs, next_token, row, column_mask, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PARTS, ROWS
            )
            slot, slot_ahead = tl.load(draft_slots + token).to(tl.int64), tl.load(draft_slots + next_token).to(tl.int64)
        # The output of a token is reduced and stored during the update for the next token, which hides the latency of the
        # reduction.
        output = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
        output_token = tl.full((), -1, dtype=tl.int64)
        for index in range(count):
            if DRAFTS:  # an update is shorter than the latency of its loads, so they are issued two tokens ahead
                token_far = _load_token(
                    head_ptrs, far_token, row, column_mask, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PARTS, ROWS
                )
                slot_far = tl.load(draft_slots + far_token).to(tl.int64)
                farther_token = (tl.load(entries + tl.minimum(first + index + 3, last)) >> 2).to(tl.int64)
            _store_columns(out, tl.sum(output, 0), output_token, head, row, column, column_mask, VALUE_HEADS, VALUE_DIM)
            decayed = ()
            for part in tl.static_range(PARTS):
                decayed = decayed + (state[part] * decay,)
            change = (value - tl.sum(_state_dot(decayed, key, PARTS, ROWS), 0)) * beta
            output_token = token
            state = _updated_state(decayed, key, change, PARTS)
            output = _state_dot(state, query, PARTS, ROWS)
            if DRAFTS:
                _store_columns(changes, change, slot, head, row, column, column_mask, VALUE_HEADS, VALUE_DIM)
            if index == known - 1:
                for part in tl.static_range(PARTS):
                    mask = (row + part * ROWS < KEY_DIM)[:, None] & column_mask[None, :]
                    tl.store(state_ptrs + part * ROWS * VALUE_DIM, state[part], mask=mask)
            if DRAFTS:
                token, next_token, far_token, slot, slot_ahead = next_token, far_token, farther_token, slot_ahead, slot_far
                key, query, value, decay, beta = token_ahead
                token_ahead = token_far
            elif index < count - 1:
                token = (tl.load(entries + first + index + 1) >> 2).to(tl.int64)
                key, query, value, decay, beta = _load_token(
                    head_ptrs, token, row, column_mask, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PARTS, ROWS
                )
        _store_columns(out, tl.sum(output, 0), output_token, head, row, column, column_mask, VALUE_HEADS, VALUE_DIM)


def recurrent_delta(
    qkv: DeltaQkv,
    states: Tensor,
    out: Tensor,
    *,
    paths: Tensor,
    entries: Tensor,
    drafts: DraftIncrements | None = None,
    pdl: bool = False,
) -> None:
    """Process paths [P, PATH_WORDS] int32, each of a different lane. Entries [n] int32 are 4 * token. A lane's state is read
    before its path and written after the known tokens; a path without known tokens does not write it. Drafts store their changes
    in the rollback buffer. The state's output is stored in out [T, Hv, Dv] float32."""
    _, value_heads, key_dim, value_dim = states.shape
    columns = MANY_COLUMNS if drafts is None and len(paths) >= MANY_PATHS and not INTERPRETED else COLUMNS
    rows = 128 // columns  # each thread of a warp holds four columns of one row
    if len(paths):
        _recurrent_delta[(triton.cdiv(value_dim, columns), value_heads, len(paths))](
            qkv.q,
            qkv.k,
            qkv.v,
            qkv.gates,
            states,
            out,
            None if drafts is None else drafts.changes,
            paths,
            entries,
            None if drafts is None else drafts.slots,
            len(qkv.q),
            **state_sizes(states, key_heads=qkv.q.shape[1]),
            PARTS=max(triton.cdiv(key_dim, rows), 2),
            ROWS=rows,
            BLOCK_V=columns,
            DRAFTS=drafts is not None,
            PDL=pdl,
            num_warps=1,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
