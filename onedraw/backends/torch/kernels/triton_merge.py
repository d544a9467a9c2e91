"""Splits of attention merged from front to back: what every split of a row left, its maximum, its sums and its mixture.

In: parts of splits in memory. Out: one state for all of them, in registers, or the rows' attention itself. A group of splits is
asked for at once, so that a wait is one for all of them; the order of the merging, and so its bits, is that of the splits for
any size of a group.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - kernels know tuples of tiles by their sums, not by unpacking
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.kernels.triton_math import let_next_start, wait_for_inputs


@triton.jit
def split_at(position, LEAST: tl.constexpr):
    """Which split a position lies in: see `split_of`."""
    low = tl.minimum(position // LEAST, position // (2 * LEAST) + 4)
    return tl.minimum(low, tl.minimum(position // (4 * LEAST) + 8, position // (8 * LEAST) + 16))


@triton.jit
def start_of(split, LEAST: tl.constexpr):
    low = tl.maximum(split * LEAST, (split - 4) * (2 * LEAST))
    return tl.maximum(low, tl.maximum((split - 8) * (4 * LEAST), (split - 16) * (8 * LEAST)))


@triton.jit
def fold(peak, total, mixed, peak_s, total_s, mixed_s):
    """One more split behind those so far; a split in which a row sees nothing leaves it as it is."""
    top = tl.maximum(peak, peak_s)
    safe = tl.where(top == float("-inf"), 0.0, top)
    before, now = tl.exp2(peak - safe), tl.exp2(peak_s - safe)
    seen = total_s != 0.0
    total = tl.where(seen, tl.fma(total, before, total_s * now), total)
    mixed = tl.where(seen[:, None], tl.fma(mixed, before[:, None], mixed_s * now[:, None]), mixed)
    return tl.where(seen, top, peak), total, mixed


@triton.jit
def _group(
    split,
    stop,
    part_mixed,
    part_peak,
    part_total,
    line,
    merged,
    heads,
    live,
    column,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The next splits' parts; behind the last there is none, which nobody sees."""
    peaks, totals, mixtures = (), (), ()
    for ahead in tl.static_range(GROUP):
        there = live & (split + ahead < stop)
        part = ((split + ahead) * merged + line).to(tl.int64) * HEADS + heads
        peaks = peaks + (tl.load(part_peak + part, mask=there, other=float("-inf")),)
        totals = totals + (tl.load(part_total + part, mask=there, other=0.0),)
        inside = there[:, None] & (column < D)[None, :]
        mixtures = mixtures + (tl.load(part_mixed + part[:, None] * D + column[None, :], mask=inside, other=0.0),)
    return peaks, totals, mixtures


@triton.jit
def folded(
    begin,
    stop,
    part_mixed,
    part_peak,
    part_total,
    line,
    merged,
    heads,
    live,
    column,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Splits [begin, stop) of one token's `heads` [ROWS] and values' columns [C]: maximum and sum [ROWS], mixture [ROWS, C]."""
    peak = tl.full((heads.shape[0],), float("-inf"), dtype=tl.float32)
    total = tl.zeros((heads.shape[0],), dtype=tl.float32)
    mixed = tl.zeros((heads.shape[0], column.shape[0]), dtype=tl.float32)
    for split in tl.range(begin, stop, GROUP, num_stages=1):
        peaks, totals, mixtures = _group(
            split, stop, part_mixed, part_peak, part_total, line, merged, heads, live, column, HEADS, D, GROUP
        )
        for one in tl.static_range(GROUP):
            peak, total, mixed = fold(peak, total, mixed, peaks[one], totals[one], mixtures[one])
    return peak, total, mixed


@triton.jit(do_not_specialize=["merged"])
def merge_splits(
    out,
    part_mixed,
    part_peak,
    part_total,
    tokens,
    firsts,
    ends,
    lines,
    merged,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and head."""
    token = tl.load(tokens + tl.program_id(0))
    line = tl.load(lines + token)
    head = tl.program_id(1)
    begin = split_at(tl.load(firsts + token), LEAST)
    stop = split_at(tl.load(ends + token), LEAST) + 1
    wait_for_inputs(PDL)
    d = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    _, total, mixed = folded(
        begin, stop, part_mixed, part_peak, part_total, line, merged, head + one, one == 0, d, HEADS, D, GROUP
    )
    let_next_start(PDL)
    result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], (1, BLOCK_D))).to(out.dtype.element_ty)
    at = out + ((token.to(tl.int64) * HEADS + head) * D + one)[:, None] + d[None, :]
    tl.store(at, result, mask=(d < D)[None, :])
