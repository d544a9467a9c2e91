"""Delta steps of a tree's branches side by side: a program has several strands, each a warp that walks some of the branches.

In: what `steps` takes (`triton_delta_steps.py`), with an order that has as many columns as strands. Out: the same bits. A
strand steps through the known tokens and then through drafts, of which it repeats those on the way to a branch where another
strand, or it itself, has been before: a repeated step computes what it computed then, so nothing is read back. One strand alone
would be stepping through the tree branch by branch, each step waiting for the last; side by side they wait together.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - kernels know tuples of tiles by their sums, not by unpacking
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.delta import Drafted, Gated
from onedraw.backends.torch.ops.cuda.delta_recurrent import COLUMNS
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel

FROM_KNOWN, AGAIN = 1, 2  # of an entry: from the state behind the known tokens; a step that was taken before, and leaves nothing


@triton.jit
def _lines(line, row, KEY_DIM: tl.constexpr, PARTS: tl.constexpr):
    """Keys or queries of all strands, by parts: [strands * 8] each."""
    found = ()
    for part in tl.static_range(PARTS):
        if PARTS * 8 == KEY_DIM:
            found = found + (tl.load(line + row + part * 8),)
        else:
            found = found + (tl.load(line + row + part * 8, mask=row + part * 8 < KEY_DIM, other=0.0),)
    return found


@triton.jit
def _sums(state, line, PARTS: tl.constexpr, STRANDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Eight sums over every eighth row, one after the other, which are then added by halves: for every row of its strand."""
    total = state[0] * line[0][:, None]
    for part in tl.static_range(1, PARTS):
        total = tl.fma(state[part], tl.broadcast_to(line[part][:, None], total.shape), total)
    whole = tl.sum(tl.reshape(total, (STRANDS, 8, COLUMNS)), 1)
    return tl.reshape(tl.broadcast_to(whole[:, None, :], (STRANDS, 8, COLUMNS)), (STRANDS * 8, COLUMNS))


@triton.jit(do_not_specialize=["tokens"])
def _strands(
    q,
    k,
    v,
    gates,
    states,
    out,
    changes,
    paths,
    order,
    places,
    tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRANDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Eight rows of every strand's state lie one below the other in a tile, four columns of a row in each thread: so a strand is
    a warp, and no sum leaves it."""
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
        line = tl.arange(0, STRANDS * 8)
        strand, row = line // 8, line % 8
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        wide = (column < VALUE_DIM)[None, :]
        at = states + (lane * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + row[:, None] * VALUE_DIM + column[None, :]
        state = ()
        for part in tl.static_range(PARTS):
            there = (row + part * 8 < KEY_DIM)[:, None] & wide & (fresh == 0)
            state = state + (tl.load(at + part * 8 * VALUE_DIM, mask=there, other=0.0),)
        behind_known = state
        keys, queries = k + key_head * KEY_DIM, q + key_head * KEY_DIM
        values = v + head * VALUE_DIM + column[None, :]
        decays, betas = gates + tokens * VALUE_HEADS + head, gates + 2 * tokens * VALUE_HEADS + head
        entries = order + first + strand
        last = count - 1
        entry = tl.load(entries)
        entry_ahead = tl.load(entries + tl.minimum(last, 1) * STRANDS)
        token = (entry >> 2).to(tl.int64)
        key = _lines(keys + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS)
        query = _lines(queries + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS)
        value = tl.load(values + token[:, None] * VALUE_HEADS * VALUE_DIM, mask=wide, other=0.0)
        decay, beta = tl.load(decays + token * VALUE_HEADS), tl.load(betas + token * VALUE_HEADS)
        place = tl.load(places + token).to(tl.int64)
        for index in range(count):
            ahead = (entry_ahead >> 2).to(tl.int64)
            entry_behind = tl.load(entries + tl.minimum(index + 2, last) * STRANDS)
            key_ahead = _lines(keys + ahead * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS)
            query_ahead = _lines(queries + ahead * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS)
            value_ahead = tl.load(values + ahead[:, None] * VALUE_HEADS * VALUE_DIM, mask=wide, other=0.0)
            decay_ahead, beta_ahead = tl.load(decays + ahead * VALUE_HEADS), tl.load(betas + ahead * VALUE_HEADS)
            place_ahead = tl.load(places + ahead).to(tl.int64)
            back = ((entry & 1) != 0)[:, None]
            faded = ()
            for part in tl.static_range(PARTS):
                faded = faded + (tl.where(back, behind_known[part], state[part]) * decay[:, None],)
            change = (value - _sums(faded, key, PARTS, STRANDS, COLUMNS)) * beta[:, None]
            state = ()
            for part in tl.static_range(PARTS):
                state = state + (tl.fma(tl.broadcast_to(key[part][:, None], change.shape), change, faded[part]),)
            seen = _sums(state, query, PARTS, STRANDS, COLUMNS)
            # A step that is repeated leaves nothing; what is known, the first strand leaves.
            leaves = ((entry & 2) == 0) & ((index >= known) | (strand == 0)) & (row == 0)
            tl.store(out + (token[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :], seen, mask=leaves[:, None] & wide)
            left = changes + (place[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
            tl.store(left, change, mask=(leaves & (place >= 0))[:, None] & wide)
            if index == known - 1:
                tl.debug_barrier()  # all strands have read the lane
                behind_known = state
                for part in tl.static_range(PARTS):
                    home = ((row + part * 8 < KEY_DIM) & (strand == 0))[:, None] & wide
                    tl.store(at + part * 8 * VALUE_DIM, state[part], mask=home)
            entry, entry_ahead, token, place = entry_ahead, entry_behind, ahead, place_ahead
            key, query, value, decay, beta = key_ahead, query_ahead, value_ahead, decay_ahead, beta_ahead


def strands(
    gated: Gated,
    states: Tensor,
    out: Tensor,
    *,
    paths: Tensor,
    order: Tensor,
    drafted: Drafted,
    count: int,
    pdl: bool = False,
) -> None:
    """As `triton_delta_steps.steps`. A path has `count` entries for each of its steps, one per strand: a token times four, and
    FROM_KNOWN or AGAIN or both. Where a strand goes to another branch, it starts behind the known tokens and takes the drafts
    before the branch once more."""
    _, value_heads, key_dim, value_dim = states.shape
    if len(paths):
        _strands[(triton.cdiv(value_dim, COLUMNS), value_heads, len(paths))](
            gated.q,
            gated.k,
            gated.v,
            gated.gates,
            states,
            out,
            drafted.changes,
            paths,
            order,
            drafted.places,
            len(gated.q),
            KEY_HEADS=gated.q.shape[1],
            VALUE_HEADS=value_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            PARTS=max(triton.cdiv(key_dim, 8), 2),
            COLUMNS=COLUMNS,
            STRANDS=count,
            PDL=pdl,
            num_warps=count,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
