"""Gated DeltaNet on a GPU: what goes before the state, the state step by step and in chunks, and what comes after it.

In: projections of the turn's tokens, states and convolution windows of the lanes, and index tables. Out: what the state
gave at every token; states move on in place. The formulas stand in `layers/delta.py`. Everything between the projections
and the last product is float32.

A position's form follows its role: chunks of 64 absolute positions for a prompt, single steps for what was generated or
drafted. A path is what one program steps through: the known tokens of a row, and behind them its drafts, a chain or a tree
branch by branch. Drafts never touch a lane: they leave decay, key and change behind, from which `commit` repeats the step, and
so does a path that comes back to a branch. One program is one warp that has some columns of the state in registers, by parts
of so many rows that a column's sums never leave the warp; what the next step reads is on its way while one works. Sums have
one order for any number of columns: eight of them over every eighth row, which are then added by halves.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - kernels know tuples of tiles by their sums, not by unpacking
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.kernels.triton_linear import launch_options
from onedraw.backends.torch.kernels.triton_math import INTERPRETED, exp, let_next_start, sigmoid, silu, softplus, wait_for_inputs
from onedraw.models.spec import DeltaSpec

CHUNK = 64
COLUMNS, MANY_COLUMNS, MANY_PATHS = 16, 32, 4  # of the state that one warp steps; many where many paths have no drafts
COMMIT_COLUMNS = 32
WINDOW_BLOCK = 256  # channels of a window that a program of `close` moves on
CHUNK_COLUMNS, CHUNK_WARPS = 32, 4  # of the state that one program takes through chunks
PATH_WORDS = 5  # lane, first of its entries in the order, entries, known, fresh
FROM_KNOWN, AGAIN = 1, 2  # of an entry: from the state behind the known tokens; a draft whose change is there already
L2_EPS = 1e-6


def why_not(spec: DeltaSpec) -> str:
    """Why these kernels cannot compute a layer; nothing where they can. A column's eight sums over every eighth row are made
    by parts of four rows or of eight, in pairs: a head that is no whole number of eights would leave one without its other."""
    heads = {"key heads": spec.key_dim, "value heads": spec.value_dim}
    for name, size in heads.items():
        if size % 8 or size < 16:
            return f"{name} {size} wide, where kernels take multiples of 8 from 16 on"
    if spec.value_heads % spec.key_heads:
        return f"{spec.value_heads} value heads to {spec.key_heads} key heads, which is no whole number for each"
    if spec.conv < 2 or spec.conv & (spec.conv - 1):
        return f"a convolution over {spec.conv} positions, where kernels take 2, 4, 8 …"
    return ""


@dataclass(frozen=True, slots=True)
class Gated:
    """Every token's queries, keys, values and gates; float32."""

    q: Tensor  # [T, Hk, Dk]
    k: Tensor  # [T, Hk, Dk]
    v: Tensor  # [T, Hv, Dv]
    gates: Tensor  # [3, T, Hv]: log of the decay, decay, beta


@dataclass(frozen=True, slots=True)
class Drafted:
    """Where drafted tokens leave what a commit reads."""

    places: Tensor  # [T] int32, -1 for tokens that are no drafts
    decays: Tensor  # [places, Hv]
    keys: Tensor  # [places, Hk, Dk]
    changes: Tensor  # [places, Hv, Dv]
    fed: Tensor  # [places, C], what the convolution was fed


# ------------------------------------------------------------------ before the state


@triton.jit(do_not_specialize=["tokens"])
def _gate(
    projected,
    windows,
    taps,
    conv,
    decay,
    bias,
    q,
    k,
    v,
    gates,
    places,
    decays,
    keys,
    held,
    tokens,
    stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one token: convolution, silu, and for queries and keys the length of one. The last program: the gates. A
    draft's last tap is the token itself."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.full((), -1, dtype=tl.int64)
    if DRAFTS:
        place = tl.load(places + token).to(tl.int64)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    if head < 2 * KEY_HEADS + VALUE_HEADS:
        is_value = head >= 2 * KEY_HEADS
        size = tl.where(is_value, VALUE_DIM, KEY_DIM)
        start = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM)
        at = tl.arange(0, BLOCK)
        inside = at < size
        mixed = tl.zeros((BLOCK,), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            source = tl.load(taps + token * TAPS + tap).to(tl.int64)
            own = projected + source * stride + start + at
            past = windows + (source - tokens) * CHANNELS + start + at
            fed = tl.load(own, mask=inside & (source >= 0) & (source < tokens), other=0.0).to(tl.float32)
            fed += tl.load(past, mask=inside & (source >= tokens), other=0.0)
            mixed += fed * tl.load(conv + tap * CHANNELS + start + at, mask=inside, other=0.0)
            if DRAFTS and tap == TAPS - 1:
                tl.store(held + place * CHANNELS + start + at, fed, mask=inside & (place >= 0))
        mixed = tl.where(inside, silu(mixed), 0.0)
        if is_value:
            tl.store(v + (token * VALUE_HEADS + head - 2 * KEY_HEADS) * VALUE_DIM + at, mixed, mask=inside)
        else:
            unit = mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) + EPS)
            if head < KEY_HEADS:
                tl.store(q + (token * KEY_HEADS + head) * KEY_DIM + at, unit * (KEY_DIM**-0.5), mask=inside)
            else:
                tl.store(k + (token * KEY_HEADS + head - KEY_HEADS) * KEY_DIM + at, unit, mask=inside)
                if DRAFTS:
                    tl.store(keys + (place * KEY_HEADS + head - KEY_HEADS) * KEY_DIM + at, unit, mask=inside & (place >= 0))
    else:
        one = tl.arange(0, BLOCK_HEADS)
        there = one < VALUE_HEADS
        base = projected + token * stride + CHANNELS + VALUE_HEADS * VALUE_DIM + one
        a = tl.load(base, mask=there, other=0.0).to(tl.float32) + tl.load(bias + one, mask=there, other=0.0)
        g = tl.load(decay + one, mask=there, other=0.0) * softplus(a)
        b = tl.load(base + VALUE_HEADS, mask=there, other=0.0).to(tl.float32)
        tl.store(gates + token * VALUE_HEADS + one, g, mask=there)
        fade = exp(g)
        tl.store(gates + (token + tokens) * VALUE_HEADS + one, fade, mask=there)
        if DRAFTS:
            tl.store(decays + place * VALUE_HEADS + one, fade, mask=there & (place >= 0))
        tl.store(gates + (token + 2 * tokens) * VALUE_HEADS + one, sigmoid(b), mask=there)
    let_next_start(PDL)  # at the end: steps that start among these programs are not spread evenly over the device


def gate(
    projected: Tensor,
    windows: Tensor,
    taps: Tensor,
    *,
    conv: Tensor,
    decay: Tensor,
    bias: Tensor,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    drafted: Drafted | None = None,
    pdl: bool = False,
) -> Gated:
    """projected [T, C + Hv * Dv + 2 Hv] (qkv, z, a, b). taps [T, K] int32: rows of the turn, then of windows [lanes * (K - 1),
    C], oldest first; -1 for zeros. Drafts leave decay, key and what they feed behind."""
    count, device = len(projected), projected.device
    q, k = (torch.empty(count, key_heads, key_dim, device=device) for _ in range(2))
    v = torch.empty(count, value_heads, value_dim, device=device)
    gates = torch.empty(3, count, value_heads, device=device)
    if count:
        _gate[(count, 2 * key_heads + value_heads + 1)](
            projected,
            windows,
            taps,
            conv,
            decay,
            bias,
            q,
            k,
            v,
            gates,
            *((None,) * 4 if drafted is None else (drafted.places, drafted.decays, drafted.keys, drafted.fed)),
            count,
            projected.stride(0),
            KEY_HEADS=key_heads,
            VALUE_HEADS=value_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            TAPS=taps.shape[1],
            DRAFTS=drafted is not None,
            BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
            BLOCK_HEADS=triton.next_power_of_2(value_heads),
            EPS=L2_EPS,
            PDL=pdl,
            num_warps=1,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return Gated(q, k, v, gates)


# ------------------------------------------------------------------ step by step


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
    BRANCHES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
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
        behind_known = state
        keys, queries = k + key_head * KEY_DIM, q + key_head * KEY_DIM
        values = v + head * VALUE_DIM + column
        decays, betas = gates + tokens * VALUE_HEADS + head, gates + 2 * tokens * VALUE_HEADS + head
        last = first + count - 1
        entry = tl.load(order + first)
        entry_ahead = tl.load(order + tl.minimum(first + 1, last))
        token = (entry >> 2).to(tl.int64)
        key = _parts(keys + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
        query = _parts(queries + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
        value = tl.load(values + token * VALUE_HEADS * VALUE_DIM, mask=wide, other=0.0)
        decay, beta = tl.load(decays + token * VALUE_HEADS), tl.load(betas + token * VALUE_HEADS)
        place = tl.load(places + token).to(tl.int64) if DRAFTS else -1
        # What a step read is added up and written while the next one works.
        seen = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
        seen_at = tl.full((), -1, dtype=tl.int64)
        for index in range(count):
            if DRAFTS:
                ahead = (entry_ahead >> 2).to(tl.int64)
                entry_behind = tl.load(order + tl.minimum(first + index + 2, last))
                key_ahead = _parts(keys + ahead * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
                query_ahead = _parts(queries + ahead * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
                value_ahead = tl.load(values + ahead * VALUE_HEADS * VALUE_DIM, mask=wide, other=0.0)
                decay_ahead, beta_ahead = tl.load(decays + ahead * VALUE_HEADS), tl.load(betas + ahead * VALUE_HEADS)
                place_ahead = tl.load(places + ahead).to(tl.int64)
            if BRANCHES:  # noqa: SIM102 - known when compiled, and the other is not
                if (entry & 1) != 0:
                    tl.debug_barrier()  # a change that this path left is read again below
                    state = behind_known
            result = tl.sum(seen, 0)
            tl.store(out + (seen_at * VALUE_HEADS + head) * VALUE_DIM + column, result, mask=wide & (seen_at >= 0))
            faded = ()
            for part in tl.static_range(PARTS):
                faded = faded + (state[part] * decay,)
            if BRANCHES:
                again = (entry & 2) != 0
                change = tl.zeros((BLOCK_V,), dtype=tl.float32)
                if again:
                    change = tl.load(changes + (place * VALUE_HEADS + head) * VALUE_DIM + column, mask=wide, other=0.0)
                else:
                    change = (value - tl.sum(_sums(faded, key, PARTS, ROWS), 0)) * beta
                seen_at = tl.where(again, -1, token)
            else:
                change = (value - tl.sum(_sums(faded, key, PARTS, ROWS), 0)) * beta
                seen_at = token
            state = _moved(faded, key, change, PARTS)
            seen = _sums(state, query, PARTS, ROWS)
            if DRAFTS:
                left = changes + (place * VALUE_HEADS + head) * VALUE_DIM + column
                tl.store(left, change, mask=wide & (place >= 0) & (seen_at >= 0))
            if index == known - 1:
                if BRANCHES:
                    behind_known = state
                for part in tl.static_range(PARTS):
                    there = (row + part * ROWS < KEY_DIM)[:, None] & wide[None, :]
                    tl.store(at + part * ROWS * VALUE_DIM, state[part], mask=there)
            if DRAFTS:
                entry, entry_ahead, token, place = entry_ahead, entry_behind, ahead, place_ahead
                key, query, value, decay, beta = key_ahead, query_ahead, value_ahead, decay_ahead, beta_ahead
            elif index < count - 1:
                token = (tl.load(order + first + index + 1) >> 2).to(tl.int64)
                key = _parts(keys + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
                query = _parts(queries + token * KEY_HEADS * KEY_DIM, row, KEY_DIM, PARTS, ROWS)
                value = tl.load(values + token * VALUE_HEADS * VALUE_DIM, mask=wide, other=0.0)
                decay, beta = tl.load(decays + token * VALUE_HEADS), tl.load(betas + token * VALUE_HEADS)
        tl.store(out + (seen_at * VALUE_HEADS + head) * VALUE_DIM + column, tl.sum(seen, 0), mask=wide & (seen_at >= 0))


def steps(
    gated: Gated,
    states: Tensor,
    out: Tensor,
    *,
    paths: Tensor,
    order: Tensor,
    drafted: Drafted | None = None,
    branches: bool = True,
    pdl: bool = False,
) -> None:
    """Step through paths [P, 5] int32, each in a lane of its own. An entry of `order` [n] int32 is a token times four, and
    FROM_KNOWN or AGAIN or both: where a path goes back to a branch, it starts behind its known tokens and takes the drafts
    before the branch once more. The lane's state is taken before, and written after the path's known tokens; a path without
    known tokens leaves the lane alone. Drafts leave their changes behind. out [T, Hv, Dv] float32. Without `branches` no entry
    goes back."""
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
            KEY_HEADS=gated.q.shape[1],
            VALUE_HEADS=value_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            PARTS=max(triton.cdiv(key_dim, rows), 2),
            ROWS=rows,
            BLOCK_V=columns,
            DRAFTS=drafted is not None,
            BRANCHES=drafted is not None and branches,
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
    let_next_start(PDL)
    wait_for_inputs(PDL)
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
            KEY_HEADS=keys.shape[-2],
            VALUE_HEADS=value_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_K=triton.next_power_of_2(key_dim),
            BLOCK_V=COMMIT_COLUMNS,
            PDL=pdl,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )


@triton.jit
def _window(
    fed,
    windows,
    target,
    sources,
    one,
    block,
    rows,
    stride,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All rows of one window are read before any is written, so a window may be made of itself."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    slot = tl.arange(0, BEFORE)
    source = tl.load(sources + one * (BEFORE + 1) + 1 + slot).to(tl.int64)[:, None]
    place = tl.load(sources + one * (BEFORE + 1)).to(tl.int64)
    new = tl.load(fed + source * stride + at[None, :], mask=inside[None, :] & (source >= 0) & (source < rows), other=0.0)
    old = tl.load(windows + (source - rows) * CHANNELS + at[None, :], mask=inside[None, :] & (source >= rows), other=0.0)
    tl.debug_barrier()
    row = place * (BEFORE - 1) + slot[:, None]
    keep = inside[None, :] & (slot < BEFORE - 1)[:, None] & (place >= 0)
    tl.store(target + row * CHANNELS + at[None, :], new.to(tl.float32) + old, mask=keep)


@triton.jit(do_not_specialize=["rows"])
def _shift(
    fed,
    windows,
    target,
    sources,
    rows,
    stride,
    per_windows,
    per_target,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """per_…: numbers of one layer."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    layer = tl.program_id(2).to(tl.int64)
    fed += layer * rows * stride
    windows += layer * per_windows
    target += layer * per_target
    _window(fed, windows, target, sources, tl.program_id(0), tl.program_id(1), rows, stride, CHANNELS, BEFORE, BLOCK)


def shift_windows(fed: Tensor, windows: Tensor, target: Tensor, sources: Tensor, *, pdl: bool = False) -> None:
    """target[place] ← K - 1 rows of `fed` [n, ≥ C] or, from n on, of windows [lanes, K - 1, C].

    sources [m, 1 + K] int32: the place (-1: nowhere), the K - 1 rows oldest first (-1 for zeros), and one column of padding.
    K is a power of two. `target` may be `windows` itself. All are one layer's, or contiguous with the layers in front.
    """
    layers = windows.shape[0] if windows.dim() == 4 else 1
    before, channels = windows.shape[-2] + 1, windows.shape[-1]
    if len(sources):
        _shift[(len(sources), triton.cdiv(channels, 512), layers)](
            fed,
            windows,
            target,
            sources,
            fed.shape[-2],
            fed.stride(-2),
            windows.numel() // layers,
            target.numel() // layers,
            CHANNELS=channels,
            BEFORE=before,
            BLOCK=512,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )


# ------------------------------------------------------------------ in chunks


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
        KEY_HEADS=gated.q.shape[1],
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=CHUNK_COLUMNS,
        LENGTH=CHUNK,
        num_warps=CHUNK_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )


# ------------------------------------------------------------------ after the state


@triton.jit(do_not_specialize=["tokens"])
def _close(
    x,
    projected,
    weight,
    y,
    windows,
    sources,
    tokens,
    stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    WINDOWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one token; programs behind those of all tokens move windows on."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    behind = program - tokens * HEADS
    if behind < 0:
        token = (program // HEADS).to(tl.int64)
        head = program % HEADS
        at = tl.arange(0, BLOCK)
        inside = at < D
        values = tl.load(x + (token * HEADS + head) * D + at, mask=inside, other=0.0)
        scale = tl.rsqrt(tl.sum(values * values, 0) * (1.0 / D) + eps)
        normed = values * scale * tl.load(weight + at, mask=inside, other=0.0)
        z = tl.load(projected + token * stride + CHANNELS + head * D + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + (token * HEADS + head) * D + at, (normed * silu(z)).to(y.dtype.element_ty), mask=inside)
    elif WINDOWS:
        BLOCKS: tl.constexpr = (CHANNELS + BLOCK_WINDOW - 1) // BLOCK_WINDOW
        one, block = behind // BLOCKS, behind % BLOCKS
        _window(projected, windows, windows, sources, one, block, tokens, stride, CHANNELS, BEFORE, BLOCK_WINDOW)


def close(
    out: Tensor,
    projected: Tensor,
    weight: Tensor,
    eps: float,
    *,
    channels: int,
    windows: Tensor | None = None,
    sources: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """rms(out) · weight · silu(z), z behind the first `channels` columns of `projected`: [T, Hv * Dv] in its dtype. Windows
    move on in the same launch, as in `shift_windows`: nothing reads them any more."""
    count, heads, dim = out.shape
    y = torch.empty(count, heads * dim, dtype=projected.dtype, device=out.device)
    closing = 0 if sources is None else len(sources)
    if count or closing:
        _close[(count * heads + closing * triton.cdiv(channels, WINDOW_BLOCK),)](
            out,
            projected,
            weight,
            y,
            windows,
            sources,
            count,
            projected.stride(0),
            eps,
            HEADS=heads,
            D=dim,
            CHANNELS=channels,
            BLOCK=triton.next_power_of_2(dim),
            BEFORE=2 if windows is None else windows.shape[1] + 1,
            BLOCK_WINDOW=WINDOW_BLOCK,
            WINDOWS=closing > 0,
            PDL=pdl,
            num_warps=1,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return y
