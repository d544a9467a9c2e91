"""Top-k and top-p on a GPU: each row's limit, the largest deficit that is kept.

In: scores of rows and what the rows wish (the table of `triton_sample.py`). Out: deficits, (best - score) / temperature, and
limits [2, C].

Weights, which are whole numbers (one for top-k, the mass for top-p), are added into sixteen bins by deficit. What is in the
bin that holds the limit is written down, and once more for sixteen bins of that; what is left is halved until the limit is
found. A list that is too short is not used: what it was made of is read again. Sums of whole numbers have no order that shows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import INTERPRETED, begin_kernel, exp
from onedraw.sampling.law import MASS_BITS

# -------------------- Deficits in sixteen bins, and their weights added up exactly: what the search for top-k an


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - kernels know tuples of tiles by their sums, not by unpacking


@triton.jit
def _index(deficit):
    """Which of all bins; they grow with the deficit, a quarter wide at first. Larger deficits are in no smaller bin."""
    bits = (deficit + 1.0).to(tl.int32, bitcast=True)
    return tl.maximum((bits >> 21) - 508, 0), (bits >> 17) & 15


@triton.jit
def bin_of(deficit, LEVEL: tl.constexpr):
    """Of sixteen; the last one of the first level has no end."""
    coarse, fine = _index(deficit)
    if LEVEL == 0:
        return tl.minimum(coarse, 15)
    else:
        return tl.where(coarse >= 15, tl.minimum(coarse - 15, 15), fine)


@triton.jit
def weight_of(deficit, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr):
    """Of what may still be kept: its mass, or one."""
    if BY_MASS:
        return tl.where(deficit <= limit, exp(0.0 - deficit) * SCALE, 0.0).to(tl.int64)
    else:
        return tl.full(deficit.shape, 1, dtype=tl.int64)


@triton.jit
def _floor(x):
    """Of 0 to 2^22."""
    if INTERPRETED:
        return tl.floor(x)
    else:
        return libdevice.add_rd(x, 8388608.0) - 8388608.0


@triton.jit
def _from(bin, EDGE: tl.constexpr):
    """1 where a whole number is EDGE or more, else 0: one sum that stops at 0 and at 1."""
    if INTERPRETED:
        return tl.where(bin >= EDGE, 1.0, 0.0)
    else:
        below: tl.constexpr = 1.0 - EDGE
        asm: tl.constexpr = "add.sat.f32 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=f,f,f", [bin, tl.full(bin.shape, below, tl.float32)], tl.float32, True, 1)


@triton.jit
def no_sums(SUMS: tl.constexpr):
    found = ()
    for _ in tl.static_range(SUMS):
        found = found + (tl.zeros((32,), dtype=tl.float32),)
    return found


@triton.jit
def added_up(sums, deficit, there, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr, LEVEL: tl.constexpr):
    """Sixteen sums of the weights of one deficit per thread: of all, of those not in the first bin, and so on. Masses have 41
    bits; they are added in three pieces of at most 14, whole numbers that float32 adds exactly."""
    bin = bin_of(deficit, LEVEL).to(tl.float32)
    found = ()
    if BY_MASS:
        mass = tl.where(there & (deficit <= limit), exp(0.0 - deficit) * SCALE, 0.0)
        high = _floor(mass * 7.450580596923828e-09)  # 2^-27
        rest = mass - high * 134217728.0
        middle = _floor(rest * 6.103515625e-05)  # 2^-14
        low = _floor(rest - middle * 16384.0)
        for edge in tl.static_range(16):
            part = _from(bin, edge)
            found = found + (tl.fma(part, high, sums[3 * edge]),)
            found = found + (tl.fma(part, middle, sums[3 * edge + 1]),)
            found = found + (tl.fma(part, low, sums[3 * edge + 2]),)
    else:
        one = tl.where(there, 1.0, 0.0)
        for edge in tl.static_range(16):
            found = found + (tl.fma(_from(bin, edge), one, sums[edge]),)
    return found


@triton.jit
def keep_sums(bins, sums, BY_MASS: tl.constexpr):
    """Add a program's sums to the row's bins."""
    at = tl.arange(0, 16)
    parts = tl.zeros((16,), dtype=tl.int64)
    for edge in tl.static_range(16):
        if BY_MASS:
            total = tl.sum(sums[3 * edge].to(tl.int32), 0).to(tl.int64) << 27
            total += tl.sum(sums[3 * edge + 1].to(tl.int32), 0).to(tl.int64) << 14
            total += tl.sum(sums[3 * edge + 2].to(tl.int32), 0).to(tl.int64)
        else:
            total = tl.sum(sums[edge].to(tl.int32), 0).to(tl.int64)
        parts = tl.where(at == edge, parts + total, tl.where(at == edge - 1, parts - total, parts))
    tl.atomic_add(bins + at, parts, mask=parts > 0, sem="relaxed")


# -------------------- Top-k and top-p on a GPU: each row's limit, the largest deficit that is kept.


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"


# Of the search, one warp each: few rows leave the device idle in large blocks.
FEW_ROWS, FEW_BLOCK, SEARCH_BLOCK = 4, 256, 1024
TALLY = 32  # words of one row and level: sixteen bins, how many are written down, padding
# The first list has room for half of the vocabulary, the second for this many, which one program has in registers.
SHORT = 16384
FEWEST = 2048  # of them, mostly


@triton.jit
def _number(table, row, COLUMN: tl.constexpr):
    return tl.load(table + row * 16 + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def _row_top(tops, blocks, BLOCKS: tl.constexpr):
    """The largest of a row; NaN where there is one."""
    at = tl.arange(0, BLOCKS)
    x = tl.load(tops + at, mask=at < blocks, other=float("-inf"))
    broken = tl.max((x != x).to(tl.int32), 0)
    return tl.where(broken != 0, float("nan"), tl.max(x, 0))


@triton.jit
def _deficits(
    logits,
    table,
    deficits,
    tops,
    tallies,
    logits_stride,
    width,
    blocks,
    VOCAB: tl.constexpr,
    ADJUSTED: tl.constexpr,
    WANTED: tl.constexpr,
    BY_MASS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores, which are the logits themselves where nothing adjusts them, become deficits; they are the first level of the
    first search, too."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    best = _row_top(tops + row * 2 * blocks, blocks, BLOCKS) + 0.0
    divisor = _number(table, row, 0).to(tl.float32)
    tallied = False
    if WANTED:
        tallied = _wanted(table, row, BY_MASS)
    if tallied:
        limit = _number(table, row, 1).to(tl.float32)
        sums = no_sums(48 if BY_MASS else 16)
        for step in tl.range(0, BLOCK_V, 32, loop_unroll_factor=4):
            ids = start + step + tl.arange(0, 32)
            deficit = _deficit(logits, deficits, row, ids, best, divisor, logits_stride, width, VOCAB, ADJUSTED)
            tl.store(deficits + row * width + ids, deficit, mask=ids < width)
            sums = added_up(sums, deficit, ids < VOCAB, limit, SCALE, BY_MASS, 0)
        keep_sums(tallies + (row + tl.num_programs(0) * BY_MASS) * 64, sums, BY_MASS)
    else:
        ids = start + tl.arange(0, BLOCK_V)
        deficit = _deficit(logits, deficits, row, ids, best, divisor, logits_stride, width, VOCAB, ADJUSTED)
        tl.store(deficits + row * width + ids, deficit, mask=ids < width)


@triton.jit
def _deficit(logits, deficits, row, ids, best, divisor, logits_stride, width, VOCAB: tl.constexpr, ADJUSTED: tl.constexpr):
    if ADJUSTED:
        scores = tl.load(deficits + row * width + ids, mask=ids < width, other=float("-inf"))
    else:
        scores = tl.load(logits + row * logits_stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.div_rn(best - scores, tl.zeros_like(scores) + divisor)


@triton.jit
def _wanted(table, row, BY_MASS: tl.constexpr):
    if BY_MASS:
        return _number(table, row, 5) < 1.0
    else:
        return tl.load(table + row * 16 + 6) > 0


@triton.jit
def _target(table, bins, row, BY_MASS: tl.constexpr):
    """How many tokens top-k asks for, or how much mass top-p: its share of all that was counted."""
    if BY_MASS:
        total = tl.sum(tl.load(bins + tl.arange(0, 16)), 0)
        wish = tl.ceil(_number(table, row, 5) * total.to(tl.float64)).to(tl.int64)
        return tl.minimum(tl.maximum(wish, 1), total)
    else:
        return tl.load(table + row * 16 + 6)


@triton.jit
def _reached(bins, target):
    """Which of sixteen bins reaches the target, and what is left to reach in it."""
    at = tl.arange(0, 16)
    counts = tl.load(bins + at)
    bin = tl.minimum(tl.sum((tl.cumsum(counts, 0) < target).to(tl.int32), 0), 15)
    return bin, target - tl.sum(tl.where(at < bin, counts, 0), 0)


@triton.jit
def _limit_so_far(table, found, row, COUNTED: tl.constexpr):
    """min-p, then top-k where the row has it."""
    limit = _number(table, row, 1).to(tl.float32)
    if COUNTED:  # noqa: SIM102 - known when compiled, and the other is not
        if _wanted(table, row, False):
            limit = tl.minimum(limit, tl.load(found + row))
    return limit


@triton.jit
def _listed(deficits, lists, row, ids, bins, width, VOCAB: tl.constexpr, LONG: tl.constexpr, SHORT_LIST: tl.constexpr):
    """The first list, or all of the row where the list is too short."""
    written = tl.load(bins + 16)
    short = written <= LONG
    some = tl.load(lists + row * (LONG + SHORT_LIST) + ids, mask=short & (ids < written), other=float("inf"))
    every = tl.load(deficits + row * width + ids, mask=(written > LONG) & (ids < VOCAB), other=float("inf"))
    return tl.where(short, some, every), ids < tl.where(short, written, VOCAB)


@triton.jit
def _near(deficits, lists, row, ids, bins, width, bin, fine, VOCAB: tl.constexpr, LONG: tl.constexpr, SHORT_LIST: tl.constexpr):
    """Of these, what is in the bin that holds the limit, and in the finer one."""
    deficit, there = _listed(deficits, lists, row, ids, bins, width, VOCAB, LONG, SHORT_LIST)
    return deficit, there & (bin_of(deficit, 0) == bin) & (bin_of(deficit, 1) == fine)


@triton.jit
def _tally(table, deficits, lists, bins, row, start, width, limit, VOCAB: tl.constexpr, BY_MASS: tl.constexpr,
           SCALE: tl.constexpr, LONG: tl.constexpr, LEVEL: tl.constexpr, SHORT_LIST: tl.constexpr,
           BLOCK_V: tl.constexpr):  # fmt: skip
    """Weights into the sixteen bins of a level."""
    bin = 0
    if LEVEL == 1:
        bin, _ = _reached(bins, _target(table, bins, row, BY_MASS))
    sums = no_sums(48 if BY_MASS else 16)
    for step in tl.range(0, BLOCK_V, 32, loop_unroll_factor=4):
        ids = start + step + tl.arange(0, 32)
        if LEVEL == 0:
            there = ids < VOCAB
            deficit = tl.load(deficits + row * width + ids, mask=there, other=float("inf"))
        else:
            deficit, there = _listed(deficits, lists, row, ids, bins, width, VOCAB, LONG, SHORT_LIST)
            there = there & (bin_of(deficit, 0) == bin)
        sums = added_up(sums, deficit, there, limit, SCALE, BY_MASS, LEVEL)
    keep_sums(bins + LEVEL * 32, sums, BY_MASS)


@triton.jit
def _collect(table, deficits, lists, bins, row, ids, width, limit, VOCAB: tl.constexpr, BY_MASS: tl.constexpr,
             LONG: tl.constexpr, LEVEL: tl.constexpr, SHORT_LIST: tl.constexpr):  # fmt: skip
    """What is in the bin that holds the limit, written down in any order; how much that is, even where it is too much."""
    bin, left = _reached(bins, _target(table, bins, row, BY_MASS))
    place = lists + row * (LONG + SHORT_LIST)
    if LEVEL == 0:
        deficit = tl.load(deficits + row * width + ids, mask=ids < VOCAB, other=float("inf"))
        agrees = (ids < VOCAB) & (bin_of(deficit, 0) == bin)
    else:
        fine, _ = _reached(bins + 32, left)
        deficit, agrees = _near(deficits, lists, row, ids, bins, width, bin, fine, VOCAB, LONG, SHORT_LIST)
        place += LONG
    if BY_MASS:
        agrees = agrees & (deficit <= limit)
    count = tl.sum(agrees.to(tl.int32), 0)
    if count > 0:
        rank = tl.cumsum(agrees.to(tl.int32), 0)
        at = tl.atomic_add(bins + LEVEL * 32 + 16, count.to(tl.int64), sem="relaxed") + rank - 1
        room: tl.constexpr = SHORT_LIST if LEVEL else LONG
        tl.store(place + at, deficit, mask=agrees & (at < room))


@triton.jit
def _narrow(
    table,
    deficits,
    lists,
    found,
    tallies,
    width,
    VOCAB: tl.constexpr,
    COUNTED: tl.constexpr,
    BY_MASS: tl.constexpr,
    SCALE: tl.constexpr,
    LONG: tl.constexpr,
    LEVEL: tl.constexpr,
    COLLECTS: tl.constexpr,
    SHORT_LIST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One level over one block of a row: what is in it is tallied, or then collected."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    bins = tallies + row * 64
    if _wanted(table, row, BY_MASS):
        written = tl.load(bins + 16)
        if (LEVEL == 0) | (start < written) | (written > LONG):
            ids = start + tl.arange(0, BLOCK_V)
            limit = _limit_so_far(table, found, row, COUNTED and BY_MASS)
            if COLLECTS:
                _collect(table, deficits, lists, bins, row, ids, width, limit, VOCAB, BY_MASS, LONG, LEVEL, SHORT_LIST)
            else:
                _tally(table, deficits, lists, bins, row, start, width, limit, VOCAB, BY_MASS, SCALE, LONG, LEVEL, SHORT_LIST,
                       BLOCK_V)  # fmt: skip


@triton.jit
def _halved(lists, row, written, left, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr, LONG: tl.constexpr,
            SHORT_LIST: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
    """The limit in the second list, by its bits."""
    ids = tl.arange(0, ROOM)
    there = ids < written
    deficit = tl.load(lists + row * (LONG + SHORT_LIST) + LONG + ids, mask=there, other=0.0)
    weight = tl.where(there, weight_of(deficit, limit, SCALE, BY_MASS), 0)
    bits = deficit.to(tl.int32, bitcast=True)
    high = tl.max(bits, 0)
    low = tl.minimum(tl.min(tl.where(there, bits, 2139095040), 0), high)
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(bits <= middle, weight, 0), 0) >= left
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return high


@triton.jit
def _find(
    table,
    deficits,
    lists,
    found,
    tallies,
    width,
    VOCAB: tl.constexpr,
    COUNTED: tl.constexpr,
    BY_MASS: tl.constexpr,
    SCALE: tl.constexpr,
    LONG: tl.constexpr,
    SHORT_LIST: tl.constexpr,
    SHORTER: tl.constexpr,
    PDL: tl.constexpr,
):
    """The smallest deficit whose bin, up to it, has what is left to reach: between the ends of what is written down, halved."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    bins = tallies + row * 64
    if _wanted(table, row, BY_MASS):
        limit = _limit_so_far(table, found, row, COUNTED and BY_MASS)
        bin, left = _reached(bins, _target(table, bins, row, BY_MASS))
        fine, left = _reached(bins + 32, left)
        written = tl.load(bins + 32 + 16)
        high = tl.full((), 0, dtype=tl.int32)
        if written <= SHORTER:
            high = _halved(lists, row, written, left, limit, SCALE, BY_MASS, LONG, SHORT_LIST, SHORTER)
        elif written <= SHORT_LIST:
            high = _halved(lists, row, written, left, limit, SCALE, BY_MASS, LONG, SHORT_LIST, SHORT_LIST)
        else:
            first = tl.load(bins + 16)
            stop = tl.where(first <= LONG, first, VOCAB).to(tl.int32)
            low = tl.full((), 2139095040, dtype=tl.int32)  # infinity, by its bits
            ids = tl.arange(0, SHORTER)
            for start in range(0, stop, SHORTER):
                deficit, there = _near(deficits, lists, row, start + ids, bins, width, bin, fine, VOCAB, LONG, SHORT_LIST)
                bits = deficit.to(tl.int32, bitcast=True)
                high = tl.maximum(high, tl.max(tl.where(there, bits, 0), 0))
                low = tl.minimum(low, tl.min(tl.where(there, bits, 2139095040), 0))
            while low < high:  # so many that are near, and not all equal: slow, and seldom
                middle = low + (high - low) // 2
                total = tl.full((), 0, dtype=tl.int64)
                for start in range(0, stop, SHORTER):
                    deficit, there = _near(deficits, lists, row, start + ids, bins, width, bin, fine, VOCAB, LONG, SHORT_LIST)
                    below = there & (deficit.to(tl.int32, bitcast=True) <= middle)
                    total += tl.sum(tl.where(below, weight_of(deficit, limit, SCALE, BY_MASS), 0), 0)
                enough = total >= left
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle + 1)
        tl.store(found + BY_MASS * tl.num_programs(0) + row, high.to(tl.float32, bitcast=True))


def searched(
    logits: Tensor,
    table: Tensor,
    deficits: Tensor,
    tops: Tensor,
    tallies: Tensor,
    *,
    vocab: int,
    adjusted: bool,
    counted: bool,
    shared: bool,
    pdl: bool,
) -> Tensor:
    """Scores, which stand in `deficits` [C, W] where they are adjusted, become deficits; the limits of top-k and of top-p,
    [2, C], where rows want them (`counted`, `shared`: some row does). tallies [2, C, 2, TALLY] int64 are zero."""
    (rows, width), blocks, device = deficits.shape, tops.shape[2], deficits.device
    found = torch.empty(2, rows, dtype=torch.float32, device=device)
    block = FEW_BLOCK if rows <= FEW_ROWS else SEARCH_BLOCK
    options = {"PDL": pdl, "enable_fp_fusion": False, **launch_options(pdl)}
    kinds = [by_mass for by_mass, wanted in ((False, counted), (True, shared)) if wanted]
    _deficits[(rows, triton.cdiv(width, block))](
        logits, table, deficits, tops, tallies, logits.stride(0), width, blocks,
        VOCAB=vocab, ADJUSTED=adjusted, WANTED=bool(kinds), BY_MASS=kinds[:1] == [True], SCALE=2.0**MASS_BITS,
        BLOCKS=triton.next_power_of_2(blocks), BLOCK_V=block, num_warps=1, **options,
    )  # fmt: skip
    if not kinds:
        return found
    long = max(width // 2, 1)
    lists = torch.empty(rows, long + SHORT, dtype=torch.float32, device=device)
    for by_mass in kinds:
        given = (table, deficits, lists, found, tallies[int(by_mass)], width)
        sizes = {"VOCAB": vocab, "COUNTED": counted, "BY_MASS": by_mass, "SCALE": 2.0**MASS_BITS, "LONG": long}
        steps = [(level, collects) for level in (0, 1) for collects in (False, True)]
        for level, collects in steps[1:] if by_mass == kinds[0] else steps:  # the first is in the deficits already
            _narrow[(rows, triton.cdiv(vocab, block))](
                *given, **sizes, LEVEL=level, COLLECTS=collects, SHORT_LIST=SHORT, BLOCK_V=block, num_warps=1, **options
            )
        _find[(rows,)](*given, **sizes, SHORT_LIST=SHORT, SHORTER=min(FEWEST, SHORT), num_warps=16, **options)
    return found
