"""Gated DeltaNet on a GPU: the state step by step, for what was generated or drafted, and kept drafts brought to their lanes.

In: every token's queries, keys, values and gates, the lanes' states, and paths. Out: what the state gave at every token; states
move on in place. A path is what one program steps through: the known tokens of a row, and behind them a chain of drafts; trees
are for `triton_strands.py`. Drafts never touch a lane: they leave decay, key and change behind, from which `commit` repeats the
step. One program is one warp that has some columns of the state in registers, by parts
of so many rows that a column's sums never leave the warp; what the next step reads is on its way while one works. Sums have
one order for any number of columns: eight of them over every eighth row, which are then added by halves.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - kernels know tuples of tiles by their sums, not by unpacking
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.delta import Drafted, Gated, sizes_of
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import INTERPRETED, begin_kernel

COLUMNS, MANY_COLUMNS, MANY_PATHS = 16, 32, 4  # of the state that one warp steps; many where many paths have no drafts
COMMIT_COLUMNS = 32
PATH_WORDS = 5  # lane, first of its entries in the order, entries, known, fresh


@triton.jit
def _added(key, change, state):
    """state + key ⊗ change, each rounded once."""
    return tl.fma(tl.broadcast_to(key[:, None], state.shape), tl.broadcast_to(change[None, :], state.shape), state)


@triton.jit
def _parts(line, row, KEY_DIM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """A key or a query, by parts. A part has fewer numbers than a warp has threads, so each thread reads its own from memory."""
    found = ()
    for part in tl.static_range(PARTS):
        if PARTS * ROWS == KEY_DIM:
            found = found + (tl.load(line + row + part * ROWS),)
        else:
            found = found + (tl.load(line + row + part * ROWS, mask=row + part * ROWS < KEY_DIM, other=0.0),)
    return found


@triton.jit
def _read(lines, token, row, wide, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
          VALUE_DIM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """What a step takes of its token: key, query, value, decay, beta. `lines`: where those of this head begin."""
    key = _parts(lines[0] + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
    query = _parts(lines[1] + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
    value = tl.load(lines[2] + token * VALUE_HEADS * VALUE_DIM, mask=wide, other=0.0)
    return key, query, value, tl.load(lines[3] + token * VALUE_HEADS), tl.load(lines[4] + token * VALUE_HEADS)


@triton.jit
def _sums(state, line, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Eight sums over every eighth row, one after the other, the fifth added to the first and so on down to ROWS sums."""
    total = state[0] * line[0][:, None]
    if ROWS == 8:
        for part in tl.static_range(1, PARTS):
            total = tl.fma(state[part], tl.broadcast_to(line[part][:, None], total.shape), total)
    else:
        other = state[1] * line[1][:, None]
        for part in tl.static_range(2, PARTS, 2):
            total = tl.fma(state[part], tl.broadcast_to(line[part][:, None], total.shape), total)
            other = tl.fma(state[part + 1], tl.broadcast_to(line[part + 1][:, None], total.shape), other)
        total = total + other
    return total


@triton.jit
def _moved(state, key, change, PARTS: tl.constexpr):
    found = ()
    for part in tl.static_range(PARTS):
        found = found + (_added(key[part], change, state[part]),)
    return found


@triton.jit
def _write(to, found, place, head, row, column, wide, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Columns of a head, where there is a place for them. Of the threads that have them those of the first row write them."""
    at = to + (place * VALUE_HEADS + head) * VALUE_DIM + row[:, None] * 0 + column[None, :]
    tl.store(at, found[None, :], mask=(row == 0)[:, None] & wide[None, :] & (place >= 0))


@triton.jit(do_not_specialize=["tokens"])
def _steps(
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
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One path, for one head and some columns of its state."""
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
        wide = column < VALUE_DIM
        at = states + (lane * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + row[:, None] * VALUE_DIM + column[None, :]
        state = ()
        for part in tl.static_range(PARTS):
            there = (row + part * ROWS < KEY_DIM)[:, None] & wide[None, :] & (fresh == 0)
            state = state + (tl.load(at + part * ROWS * VALUE_DIM, mask=there, other=0.0),)
        keys, queries = k + key_head * KEY_DIM, q + key_head * KEY_DIM
        values = v + head * VALUE_DIM + column
        decays, betas = gates + tokens * VALUE_HEADS + head, gates + 2 * tokens * VALUE_HEADS + head
        lines = (keys, queries, values, decays, betas)
        last = first + count - 1
        token = (tl.load(order + first) >> 2).to(tl.int64)
        key, query, value, decay, beta = _read(lines, token, row, wide, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PARTS, ROWS)
        if DRAFTS:
            ahead = (tl.load(order + tl.minimum(first + 1, last)) >> 2).to(tl.int64)
            far = (tl.load(order + tl.minimum(first + 2, last)) >> 2).to(tl.int64)
            read_ahead = _read(lines, ahead, row, wide, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PARTS, ROWS)
            place, place_ahead = tl.load(places + token).to(tl.int64), tl.load(places + ahead).to(tl.int64)
        # What a step read is added up and written while the next one works.
        seen = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
        seen_at = tl.full((), -1, dtype=tl.int64)
        for index in range(count):
            if DRAFTS:  # a step is shorter than the way to what it reads, so that is asked for two steps before
                read_far = _read(lines, far, row, wide, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PARTS, ROWS)
                place_far = tl.load(places + far).to(tl.int64)
                farther = (tl.load(order + tl.minimum(first + index + 3, last)) >> 2).to(tl.int64)
            _write(out, tl.sum(seen, 0), seen_at, head, row, column, wide, VALUE_HEADS, VALUE_DIM)
            faded = ()
            for part in tl.static_range(PARTS):
                faded = faded + (state[part] * decay,)
            change = (value - tl.sum(_sums(faded, key, PARTS, ROWS), 0)) * beta
            seen_at = token
            state = _moved(faded, key, change, PARTS)
            seen = _sums(state, query, PARTS, ROWS)
            if DRAFTS:
                _write(changes, change, place, head, row, column, wide, VALUE_HEADS, VALUE_DIM)
            if index == known - 1:
                for part in tl.static_range(PARTS):
                    there = (row + part * ROWS < KEY_DIM)[:, None] & wide[None, :]
                    tl.store(at + part * ROWS * VALUE_DIM, state[part], mask=there)
            if DRAFTS:
                token, ahead, far, place, place_ahead = ahead, far, farther, place_ahead, place_far
                key, query, value, decay, beta = read_ahead
                read_ahead = read_far
            elif index < count - 1:
                token = (tl.load(order + first + index + 1) >> 2).to(tl.int64)
                key, query, value, decay, beta = _read(
                    lines, token, row, wide, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PARTS, ROWS
                )
        _write(out, tl.sum(seen, 0), seen_at, head, row, column, wide, VALUE_HEADS, VALUE_DIM)


def steps(
    gated: Gated,
    states: Tensor,
    out: Tensor,
    *,
    paths: Tensor,
    order: Tensor,
    drafted: Drafted | None = None,
    pdl: bool = False,
) -> None:
    """Step through paths [P, 5] int32, each in a lane of its own. An entry of `order` [n] int32 is a token times four. The
    lane's state is taken before, and written after the path's known tokens; a path without known tokens leaves the lane alone.
    Drafts leave their changes behind. out [T, Hv, Dv] float32. Branches are for `strands` (`triton_strands.py`)."""
    _, value_heads, key_dim, value_dim = states.shape
    columns = MANY_COLUMNS if drafted is None and len(paths) >= MANY_PATHS and not INTERPRETED else COLUMNS
    rows = 128 // columns  # a warp has four columns of one row in each thread
    if len(paths):
        _steps[(triton.cdiv(value_dim, columns), value_heads, len(paths))](
            gated.q,
            gated.k,
            gated.v,
            gated.gates,
            states,
            out,
            None if drafted is None else drafted.changes,
            paths,
            order,
            None if drafted is None else drafted.places,
            len(gated.q),
            **sizes_of(states, key_heads=gated.q.shape[1]),
            PARTS=max(triton.cdiv(key_dim, rows), 2),
            ROWS=rows,
            BLOCK_V=columns,
            DRAFTS=drafted is not None,
            PDL=pdl,
            num_warps=1,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )


@triton.jit(do_not_specialize=["width"])
def _commit(
    states,
    decays,
    keys,
    changes,
    lanes,
    places,
    width,
    per_states,
    per_held,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """The step's own products and sums, from what the step left behind. per_states: numbers of one layer's states; per_held:
    places that one layer holds."""
    begin_kernel(PDL)
    PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    layer = (tl.program_id(2) // PARTS).to(tl.int64)
    states += layer * per_states
    decays += layer * per_held * VALUE_HEADS
    keys += layer * per_held * KEY_HEADS * KEY_DIM
    changes += layer * per_held * VALUE_HEADS * VALUE_DIM
    kept = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    lane = tl.load(lanes + kept).to(tl.int64)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) % PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
    wide, high = column < VALUE_DIM, row < KEY_DIM
    whole = high[:, None] & wide[None, :]
    at = states + ((lane * VALUE_HEADS + head) * KEY_DIM + row[:, None]) * VALUE_DIM + column[None, :]
    if tl.load(places + kept * width) >= 0:
        state = tl.load(at, mask=whole, other=0.0)
        for index in range(width):
            place = tl.load(places + kept * width + index).to(tl.int64)
            if place >= 0:
                key = tl.load(keys + (place * KEY_HEADS + key_head) * KEY_DIM + row, mask=high, other=0.0)
                change = tl.load(changes + (place * VALUE_HEADS + head) * VALUE_DIM + column, mask=wide, other=0.0)
                faded = state * tl.load(decays + place * VALUE_HEADS + head)
                state = _added(key, change, faded)
        tl.store(at, state, mask=whole)


def commit(states: Tensor, *, held: tuple[Tensor, Tensor, Tensor], lanes: Tensor, places: Tensor, pdl: bool = False) -> None:
    """Bring kept drafts to their lanes [n]: places [n, longest] int32 in order of position, -1 behind the last. States and
    what is held are one layer's, or those of many with the layers in front; all contiguous."""
    layers = states.shape[0] if states.dim() == 5 else 1
    value_heads, key_dim, value_dim = states.shape[-3:]
    decays, keys, changes = held
    if len(lanes) and places.shape[1]:
        _commit[(len(lanes), value_heads, layers * triton.cdiv(value_dim, COMMIT_COLUMNS))](
            states,
            decays,
            keys,
            changes,
            lanes,
            places,
            places.shape[1],
            states.numel() // layers,
            decays.shape[-2],
            **sizes_of(states, key_heads=keys.shape[-2]),
            BLOCK_K=triton.next_power_of_2(key_dim),
            BLOCK_V=COMMIT_COLUMNS,
            PDL=pdl,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
