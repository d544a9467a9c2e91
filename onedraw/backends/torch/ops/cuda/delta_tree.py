"""Gated DeltaNet in recurrent form for verify trees: branches processed in parallel, one warp each.

In: the inputs of `recurrent_delta`, with as many entries per time step as there are parallel branches. Out: the bits that
`recurrent_delta` would give. Each warp processes the known tokens and then some branches of the tree. Where it moves to another
branch, it restarts from the state after the known tokens and repeats the drafts on the way; a repeated update gives the same
bits, so no state is read back. One warp alone would process the branches one after the other, with the latency of every update;
in parallel the latencies overlap.

The state of a head is a matrix, whose rows are divided into parts of eight. A program has some columns of it, once for every
branch (BRANCHES), and a tile is the eight rows of a part for all branches. An entry names one token of a path, as 4 * token plus
flags; a path is the work of one program. Restarts and repeats are flags of entries.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - Triton concatenates tuples with +, unpacking is not supported
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.delta import DeltaQkv, DraftIncrements
from onedraw.backends.torch.ops.cuda.delta_recurrent import COLUMNS
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel

# Flags of an entry. RESTART: first set the state to the one before the drafts. REPEAT: the draft was already processed on another
# branch, so update the state and store no output.
RESTART, REPEAT = 1, 2


@triton.jit
def _load_parts(vectors, row, KEY_DIM: tl.constexpr, PARTS: tl.constexpr):
    """Load the key or query of each branch's token as a tuple of parts. A part has eight values for each branch, [BRANCHES * 8],
    because a tile has eight rows of each branch's state."""
    values = ()
    for part in tl.static_range(PARTS):
        if PARTS * 8 == KEY_DIM:
            values = values + (tl.load(vectors + row + part * 8),)
        else:
            values = values + (tl.load(vectors + row + part * 8, mask=row + part * 8 < KEY_DIM, other=0.0),)
    return values


@triton.jit
def _state_dot(state, vectors, PARTS: tl.constexpr, BRANCHES: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of the state times keys or queries: eight partial sums over every eighth row, added pairwise. The result is
    repeated in all eight rows of a branch."""
    total = state[0] * vectors[0][:, None]
    for part in tl.static_range(1, PARTS):
        total = tl.fma(state[part], tl.broadcast_to(vectors[part][:, None], total.shape), total)
    sums = tl.sum(tl.reshape(total, (BRANCHES, 8, COLUMNS)), 1)
    return tl.reshape(tl.broadcast_to(sums[:, None, :], (BRANCHES, 8, COLUMNS)), (BRANCHES * 8, COLUMNS))


@triton.jit(do_not_specialize=["tokens"])
def _tree_delta(
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
    COLUMNS: tl.constexpr,
    BRANCHES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process one path, for one head and some columns of its state. A tile has eight rows of each branch's state, and a thread
    four columns of a row: so a branch is a warp, and no sum crosses warps."""
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
        tile_row = tl.arange(0, BRANCHES * 8)
        branch, row = tile_row // 8, tile_row % 8
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        column_mask = (column < VALUE_DIM)[None, :]
        state_ptrs = states + (lane * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + row[:, None] * VALUE_DIM + column[None, :]
        state = ()
        for part in tl.static_range(PARTS):
            mask = (row + part * 8 < KEY_DIM)[:, None] & column_mask & (fresh == 0)
            state = state + (tl.load(state_ptrs + part * 8 * VALUE_DIM, mask=mask, other=0.0),)
        known_state = state
        keys, queries = k + key_head * KEY_DIM, q + key_head * KEY_DIM
        values = v + head * VALUE_DIM + column[None, :]
        decays, betas = gates + tokens * VALUE_HEADS + head, gates + 2 * tokens * VALUE_HEADS + head
        entry_ptrs = entries + first + branch
        last = count - 1
        entry = tl.load(entry_ptrs)
        entry_ahead = tl.load(entry_ptrs + tl.minimum(last, 1) * BRANCHES)
        token = (entry >> 2).to(tl.int64)
        key = _load_parts(keys + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS)
        query = _load_parts(queries + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS)
        value = tl.load(values + token[:, None] * VALUE_HEADS * VALUE_DIM, mask=column_mask, other=0.0)
        decay, beta = tl.load(decays + token * VALUE_HEADS), tl.load(betas + token * VALUE_HEADS)
        slot = tl.load(draft_slots + token).to(tl.int64)
        for index in range(count):
            next_token = (entry_ahead >> 2).to(tl.int64)
            entry_far = tl.load(entry_ptrs + tl.minimum(index + 2, last) * BRANCHES)
            key_ahead = _load_parts(keys + next_token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS)
            query_ahead = _load_parts(queries + next_token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS)
            value_ahead = tl.load(values + next_token[:, None] * VALUE_HEADS * VALUE_DIM, mask=column_mask, other=0.0)
            decay_ahead, beta_ahead = tl.load(decays + next_token * VALUE_HEADS), tl.load(betas + next_token * VALUE_HEADS)
            slot_ahead = tl.load(draft_slots + next_token).to(tl.int64)
            restart = ((entry & 1) != 0)[:, None]
            decayed = ()
            for part in tl.static_range(PARTS):
                decayed = decayed + (tl.where(restart, known_state[part], state[part]) * decay[:, None],)
            change = (value - _state_dot(decayed, key, PARTS, BRANCHES, COLUMNS)) * beta[:, None]
            state = ()
            for part in tl.static_range(PARTS):
                state = state + (tl.fma(tl.broadcast_to(key[part][:, None], change.shape), change, decayed[part]),)
            output = _state_dot(state, query, PARTS, BRANCHES, COLUMNS)
            # Repeated updates store nothing; outputs of known tokens are stored by the first branch.
            stores = ((entry & 2) == 0) & ((index >= known) | (branch == 0)) & (row == 0)
            tl.store(
                out + (token[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :],
                output,
                mask=stores[:, None] & column_mask,
            )
            change_ptrs = changes + (slot[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
            tl.store(change_ptrs, change, mask=(stores & (slot >= 0))[:, None] & column_mask)
            if index == known - 1:
                tl.debug_barrier()  # all branches must have read the lane's state before it is overwritten
                known_state = state
                for part in tl.static_range(PARTS):
                    state_mask = ((row + part * 8 < KEY_DIM) & (branch == 0))[:, None] & column_mask
                    tl.store(state_ptrs + part * 8 * VALUE_DIM, state[part], mask=state_mask)
            entry, entry_ahead, token, slot = entry_ahead, entry_far, next_token, slot_ahead
            key, query, value, decay, beta = key_ahead, query_ahead, value_ahead, decay_ahead, beta_ahead


def tree_delta(
    qkv: DeltaQkv,
    states: Tensor,
    out: Tensor,
    *,
    paths: Tensor,
    entries: Tensor,
    drafts: DraftIncrements,
    branches: int,
    pdl: bool = False,
) -> None:
    """Like `recurrent_delta`, but each time step of a path has one entry per parallel branch: 4 * token, plus RESTART and
    REPEAT."""
    _, value_heads, key_dim, value_dim = states.shape
    if len(paths):
        _tree_delta[(triton.cdiv(value_dim, COLUMNS), value_heads, len(paths))](
            qkv.q,
            qkv.k,
            qkv.v,
            qkv.gates,
            states,
            out,
            drafts.changes,
            paths,
            entries,
            drafts.slots,
            len(qkv.q),
            KEY_HEADS=qkv.q.shape[1],
            VALUE_HEADS=value_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            PARTS=max(triton.cdiv(key_dim, 8), 2),
            COLUMNS=COLUMNS,
            BRANCHES=branches,
            PDL=pdl,
            num_warps=branches,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
