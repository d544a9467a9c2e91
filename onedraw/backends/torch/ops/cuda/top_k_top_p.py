"""Top-k and top-p with Triton: the limit of each row, which is the largest deficit that is kept.

In: scores of rows and their sampling parameters (the table of `sampling_kernels.py`). Out: deficits, (best - score) /
temperature, and limits [2, C] of top-k and top-p. A row is one position to sample at. Axes: C rows, W padded width of a row.

Token weights, which are integers (1 for top-k, the probability mass for top-p), are added into a histogram of sixteen bins by
deficit (level 0). The tokens of the bin that contains the limit are collected in a list, and binned once more into sixteen finer
bins (level 1); the tokens of the fine bin that contains the limit are collected in a shorter list, in which the limit is found by
bisection. If a list overflows, the row or list that it was collected from is read again instead. Integer sums are exact in any
order, so the limit does not depend on scheduling.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - Triton concatenates tuples with +, unpacking is not supported
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import INTERPRETED, begin_kernel, exp
from onedraw.sampling.logprobs import MASS_BITS

# Programs are one warp each, except for those of `_find_limit`. Steps of at most FEW_ROWS rows use blocks of FEW_BLOCK tokens
# instead of SEARCH_BLOCK, since large blocks would leave the device idle.
FEW_ROWS, FEW_BLOCK, SEARCH_BLOCK = 4, 256, 1024
HISTOGRAM_WORDS = 32  # words of one row and level: sixteen bins, the number of collected tokens, padding
# The first list has space for half of the vocabulary, the second for SHORT_LIST tokens. One program holds the second list in
# registers; if it has at most REGISTER_LIST tokens, which is the usual case, a smaller variant does.
SHORT_LIST = 16384
REGISTER_LIST = 2048


# ------------------------------------------------------------------ histogram


@triton.jit
def _bin_indices(deficit):
    """The coarse and the fine bin of a deficit, from the bits of deficit + 1. Both grow with the deficit; the coarse bins are a
    quarter wide below 1 and double in width with every power of two."""
    bits = (deficit + 1.0).to(tl.int32, bitcast=True)
    return tl.maximum((bits >> 21) - 508, 0), (bits >> 17) & 15


@triton.jit
def bin_index(deficit, LEVEL: tl.constexpr):
    """The bin among the sixteen of a level. Level 0 has coarse bins, the last of which is unbounded. Level 1 divides a coarse bin
    into fine bins, and the unbounded one into coarse bins."""
    coarse, fine = _bin_indices(deficit)
    if LEVEL == 0:
        return tl.minimum(coarse, 15)
    else:
        return tl.where(coarse >= 15, tl.minimum(coarse - 15, 15), fine)


@triton.jit
def token_weight(deficit, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr):
    """The weight of a token: BY_MASS its probability mass, 0 past the limit; otherwise 1."""
    if BY_MASS:
        return tl.where(deficit <= limit, exp(0.0 - deficit) * SCALE, 0.0).to(tl.int64)
    else:
        return tl.full(deficit.shape, 1, dtype=tl.int64)


@triton.jit
def _floor(x):
    """Round x down to an integer, for 0 ≤ x ≤ 2^22: adding 2^23 with rounding down drops the fraction."""
    if INTERPRETED:
        return tl.floor(x)
    else:
        return libdevice.add_rd(x, 8388608.0) - 8388608.0


@triton.jit
def _at_least(bin, EDGE: tl.constexpr):
    """Whether the integer `bin` is at least EDGE, as 1.0 or 0.0, by one saturating addition."""
    if INTERPRETED:
        return tl.where(bin >= EDGE, 1.0, 0.0)
    else:
        below: tl.constexpr = 1.0 - EDGE
        asm: tl.constexpr = "add.sat.f32 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=f,f,f", [bin, tl.full(bin.shape, below, tl.float32)], tl.float32, True, 1)


@triton.jit
def zero_sums(SUMS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = sums + (tl.zeros((32,), dtype=tl.float32),)
    return sums


@triton.jit
def accumulate_weights(sums, deficit, mask, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr, LEVEL: tl.constexpr):
    """Add the weights of one deficit per thread to sixteen sums, of which sum e takes the bins from e on. Masses have 41 bits;
    they are added in three parts of at most 14 bits, integers that float32 adds exactly."""
    bin = bin_index(deficit, LEVEL).to(tl.float32)
    new_sums = ()
    if BY_MASS:
        mass = tl.where(mask & (deficit <= limit), exp(0.0 - deficit) * SCALE, 0.0)
        high = _floor(mass * 7.450580596923828e-09)  # the factor is 2^-27
        rest = mass - high * 134217728.0
        middle = _floor(rest * 6.103515625e-05)  # the factor is 2^-14
        low = _floor(rest - middle * 16384.0)
        for edge in tl.static_range(16):
            in_bin = _at_least(bin, edge)
            new_sums = new_sums + (tl.fma(in_bin, high, sums[3 * edge]),)
            new_sums = new_sums + (tl.fma(in_bin, middle, sums[3 * edge + 1]),)
            new_sums = new_sums + (tl.fma(in_bin, low, sums[3 * edge + 2]),)
    else:
        one = tl.where(mask, 1.0, 0.0)
        for edge in tl.static_range(16):
            new_sums = new_sums + (tl.fma(_at_least(bin, edge), one, sums[edge]),)
    return new_sums


@triton.jit
def add_to_histogram(histogram, sums, BY_MASS: tl.constexpr):
    """Add a program's sums to the histogram of its row."""
    bin = tl.arange(0, 16)
    counts = tl.zeros((16,), dtype=tl.int64)
    for edge in tl.static_range(16):
        if BY_MASS:
            total = tl.sum(sums[3 * edge].to(tl.int32), 0).to(tl.int64) << 27
            total += tl.sum(sums[3 * edge + 1].to(tl.int32), 0).to(tl.int64) << 14
            total += tl.sum(sums[3 * edge + 2].to(tl.int32), 0).to(tl.int64)
        else:
            total = tl.sum(sums[edge].to(tl.int32), 0).to(tl.int64)
        counts = tl.where(bin == edge, counts + total, tl.where(bin == edge - 1, counts - total, counts))
    tl.atomic_add(histogram + bin, counts, mask=counts > 0, sem="relaxed")


# ------------------------------------------------------------------ parameters of a row


@triton.jit
def table_float(table, row, COLUMN: tl.constexpr):
    """A float64 column of the table, which stores its bits as int64."""
    return tl.load(table + row * 16 + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def row_max(block_maxima, blocks, BLOCKS: tl.constexpr):
    """The maximum of a row, from the maxima of its blocks; NaN if one of them is NaN."""
    block = tl.arange(0, BLOCKS)
    x = tl.load(block_maxima + block, mask=block < blocks, other=float("-inf"))
    has_nan = tl.max((x != x).to(tl.int32), 0)
    return tl.where(has_nan != 0, float("nan"), tl.max(x, 0))


@triton.jit
def _row_uses_filter(table, row, BY_MASS: tl.constexpr):
    if BY_MASS:
        return table_float(table, row, 5) < 1.0
    else:
        return tl.load(table + row * 16 + 6) > 0


@triton.jit
def _target_weight(table, histogram, row, BY_MASS: tl.constexpr):
    """The weight that the kept tokens must reach: for top-k the number of tokens, for top-p its share of the histogram's total
    mass."""
    if BY_MASS:
        total = tl.sum(tl.load(histogram + tl.arange(0, 16)), 0)
        mass = tl.ceil(table_float(table, row, 5) * total.to(tl.float64)).to(tl.int64)
        return tl.minimum(tl.maximum(mass, 1), total)
    else:
        return tl.load(table + row * 16 + 6)


@triton.jit
def _target_bin(histogram, target):
    """The bin in which the cumulated weight reaches the target, and the weight that is left to reach inside it."""
    bins = tl.arange(0, 16)
    counts = tl.load(histogram + bins)
    bin = tl.minimum(tl.sum((tl.cumsum(counts, 0) < target).to(tl.int32), 0), 15)
    return bin, target - tl.sum(tl.where(bins < bin, counts, 0), 0)


@triton.jit
def limit_so_far(table, limits, row, HAS_TOP_K: tl.constexpr):
    """The limit of min-p, or that of top-k if the row uses top-k and it is smaller."""
    limit = table_float(table, row, 1).to(tl.float32)
    if HAS_TOP_K:  # noqa: SIM102 - constexpr condition, and a runtime one
        if _row_uses_filter(table, row, False):
            limit = tl.minimum(limit, tl.load(limits + row))
    return limit


# ------------------------------------------------------------------ deficits and search


@triton.jit
def _load_deficit(logits, deficits, row, ids, best, divisor, logits_stride, width, VOCAB: tl.constexpr, ADJUSTED: tl.constexpr):
    if ADJUSTED:
        scores = tl.load(deficits + row * width + ids, mask=ids < width, other=float("-inf"))
    else:
        scores = tl.load(logits + row * logits_stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.div_rn(best - scores, tl.zeros_like(scores) + divisor)


@triton.jit
def _deficits(
    logits,
    table,
    deficits,
    block_maxima,
    histograms,
    logits_stride,
    width,
    blocks,
    VOCAB: tl.constexpr,
    ADJUSTED: tl.constexpr,
    HAS_FILTER: tl.constexpr,
    BY_MASS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Turn scores (the logits, unless they were adjusted) into deficits, and count them into level 0 of the histogram
    of the first filter: top-k if some row uses it, else top-p (BY_MASS)."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    best = row_max(block_maxima + row * 2 * blocks, blocks, BLOCKS) + 0.0
    divisor = table_float(table, row, 0).to(tl.float32)
    counted = False
    if HAS_FILTER:
        counted = _row_uses_filter(table, row, BY_MASS)
    if counted:
        limit = table_float(table, row, 1).to(tl.float32)
        sums = zero_sums(48 if BY_MASS else 16)
        for step in tl.range(0, BLOCK_V, 32, loop_unroll_factor=4):
            ids = start + step + tl.arange(0, 32)
            deficit = _load_deficit(logits, deficits, row, ids, best, divisor, logits_stride, width, VOCAB, ADJUSTED)
            tl.store(deficits + row * width + ids, deficit, mask=ids < width)
            sums = accumulate_weights(sums, deficit, ids < VOCAB, limit, SCALE, BY_MASS, 0)
        add_to_histogram(histograms + (row + tl.num_programs(0) * BY_MASS) * 64, sums, BY_MASS)
    else:
        ids = start + tl.arange(0, BLOCK_V)
        deficit = _load_deficit(logits, deficits, row, ids, best, divisor, logits_stride, width, VOCAB, ADJUSTED)
        tl.store(deficits + row * width + ids, deficit, mask=ids < width)


@triton.jit
def _candidates(
    deficits, lists, row, ids, histogram, width, VOCAB: tl.constexpr, LONG_LIST: tl.constexpr, SHORT_LIST: tl.constexpr
):
    """Deficits of the first list, or of the whole row if the list overflowed, and a mask of the valid ones."""
    written = tl.load(histogram + 16)
    fits = written <= LONG_LIST
    listed = tl.load(lists + row * (LONG_LIST + SHORT_LIST) + ids, mask=fits & (ids < written), other=float("inf"))
    full_row = tl.load(deficits + row * width + ids, mask=(written > LONG_LIST) & (ids < VOCAB), other=float("inf"))
    return tl.where(fits, listed, full_row), ids < tl.where(fits, written, VOCAB)


@triton.jit
def _fine_bin_candidates(
    deficits, lists, row, ids, histogram, width, bin, fine, VOCAB: tl.constexpr, LONG_LIST: tl.constexpr, SHORT_LIST: tl.constexpr
):
    """The deficits of `_candidates`, with a mask of those in the coarse and fine bin that contain the limit."""
    deficit, mask = _candidates(deficits, lists, row, ids, histogram, width, VOCAB, LONG_LIST, SHORT_LIST)
    return deficit, mask & (bin_index(deficit, 0) == bin) & (bin_index(deficit, 1) == fine)


@triton.jit
def _count_level(table, deficits, lists, histogram, row, start, width, limit, VOCAB: tl.constexpr, BY_MASS: tl.constexpr,
                 SCALE: tl.constexpr, LONG_LIST: tl.constexpr, LEVEL: tl.constexpr, SHORT_LIST: tl.constexpr,
                 BLOCK_V: tl.constexpr):  # fmt: skip
    """Add the weights of one block of a row to the histogram of a level."""
    bin = 0
    if LEVEL == 1:
        bin, _ = _target_bin(histogram, _target_weight(table, histogram, row, BY_MASS))
    sums = zero_sums(48 if BY_MASS else 16)
    for step in tl.range(0, BLOCK_V, 32, loop_unroll_factor=4):
        ids = start + step + tl.arange(0, 32)
        if LEVEL == 0:
            mask = ids < VOCAB
            deficit = tl.load(deficits + row * width + ids, mask=mask, other=float("inf"))
        else:
            deficit, mask = _candidates(deficits, lists, row, ids, histogram, width, VOCAB, LONG_LIST, SHORT_LIST)
            mask = mask & (bin_index(deficit, 0) == bin)
        sums = accumulate_weights(sums, deficit, mask, limit, SCALE, BY_MASS, LEVEL)
    add_to_histogram(histogram + LEVEL * 32, sums, BY_MASS)


@triton.jit
def _collect(table, deficits, lists, histogram, row, ids, width, limit, VOCAB: tl.constexpr, BY_MASS: tl.constexpr,
             LONG_LIST: tl.constexpr, LEVEL: tl.constexpr, SHORT_LIST: tl.constexpr):  # fmt: skip
    """Append the tokens of the bin that contains the limit to the level's list, in any order. The counter includes tokens
    for which an overflowing list has no room."""
    bin, left = _target_bin(histogram, _target_weight(table, histogram, row, BY_MASS))
    target = lists + row * (LONG_LIST + SHORT_LIST)
    if LEVEL == 0:
        deficit = tl.load(deficits + row * width + ids, mask=ids < VOCAB, other=float("inf"))
        mask = (ids < VOCAB) & (bin_index(deficit, 0) == bin)
    else:
        fine, _ = _target_bin(histogram + 32, left)
        deficit, mask = _fine_bin_candidates(deficits, lists, row, ids, histogram, width, bin, fine, VOCAB, LONG_LIST, SHORT_LIST)
        target += LONG_LIST
    if BY_MASS:
        mask = mask & (deficit <= limit)
    count = tl.sum(mask.to(tl.int32), 0)
    if count > 0:
        rank = tl.cumsum(mask.to(tl.int32), 0)
        position = tl.atomic_add(histogram + LEVEL * 32 + 16, count.to(tl.int64), sem="relaxed") + rank - 1
        capacity: tl.constexpr = SHORT_LIST if LEVEL else LONG_LIST
        tl.store(target + position, deficit, mask=mask & (position < capacity))


@triton.jit
def _search_level(
    table,
    deficits,
    lists,
    limits,
    histograms,
    width,
    VOCAB: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    BY_MASS: tl.constexpr,
    SCALE: tl.constexpr,
    LONG_LIST: tl.constexpr,
    LEVEL: tl.constexpr,
    COLLECT: tl.constexpr,
    SHORT_LIST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One level of the search over one block of a row: add the weights to the histogram, or (COLLECT) append the tokens
    of the bin that contains the limit to a list."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    histogram = histograms + row * 64
    if _row_uses_filter(table, row, BY_MASS):
        written = tl.load(histogram + 16)
        if (LEVEL == 0) | (start < written) | (written > LONG_LIST):
            ids = start + tl.arange(0, BLOCK_V)
            limit = limit_so_far(table, limits, row, HAS_TOP_K and BY_MASS)
            if COLLECT:
                _collect(table, deficits, lists, histogram, row, ids, width, limit, VOCAB, BY_MASS, LONG_LIST, LEVEL, SHORT_LIST)
            else:
                _count_level(table, deficits, lists, histogram, row, start, width, limit, VOCAB, BY_MASS, SCALE, LONG_LIST, LEVEL,
                             SHORT_LIST, BLOCK_V)  # fmt: skip


@triton.jit
def _bisect_list(lists, row, written, left, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr, LONG_LIST: tl.constexpr,
                 SHORT_LIST: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
    """Find the limit in the second list by bisection over the bits of floats, which sort like the floats if these are not
    negative. Returns the bits."""
    ids = tl.arange(0, ROOM)
    mask = ids < written
    deficit = tl.load(lists + row * (LONG_LIST + SHORT_LIST) + LONG_LIST + ids, mask=mask, other=0.0)
    weight = tl.where(mask, token_weight(deficit, limit, SCALE, BY_MASS), 0)
    bits = deficit.to(tl.int32, bitcast=True)
    high = tl.max(bits, 0)
    low = tl.minimum(tl.min(tl.where(mask, bits, 2139095040), 0), high)
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(bits <= middle, weight, 0), 0) >= left
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return high


@triton.jit
def _find_limit(
    table,
    deficits,
    lists,
    limits,
    histograms,
    width,
    VOCAB: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    BY_MASS: tl.constexpr,
    SCALE: tl.constexpr,
    LONG_LIST: tl.constexpr,
    SHORT_LIST: tl.constexpr,
    REGISTER_LIST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The limit of a row: the smallest deficit up to which the fine bin's weights reach the target, by bisection."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    histogram = histograms + row * 64
    if _row_uses_filter(table, row, BY_MASS):
        limit = limit_so_far(table, limits, row, HAS_TOP_K and BY_MASS)
        bin, left = _target_bin(histogram, _target_weight(table, histogram, row, BY_MASS))
        fine, left = _target_bin(histogram + 32, left)
        written = tl.load(histogram + 32 + 16)
        high = tl.full((), 0, dtype=tl.int32)
        if written <= REGISTER_LIST:
            high = _bisect_list(lists, row, written, left, limit, SCALE, BY_MASS, LONG_LIST, SHORT_LIST, REGISTER_LIST)
        elif written <= SHORT_LIST:
            high = _bisect_list(lists, row, written, left, limit, SCALE, BY_MASS, LONG_LIST, SHORT_LIST, SHORT_LIST)
        else:
            first = tl.load(histogram + 16)
            stop = tl.where(first <= LONG_LIST, first, VOCAB).to(tl.int32)
            low = tl.full((), 2139095040, dtype=tl.int32)  # the bits of infinity
            ids = tl.arange(0, REGISTER_LIST)
            for start in range(0, stop, REGISTER_LIST):
                deficit, mask = _fine_bin_candidates(
                    deficits, lists, row, start + ids, histogram, width, bin, fine, VOCAB, LONG_LIST, SHORT_LIST
                )
                bits = deficit.to(tl.int32, bitcast=True)
                high = tl.maximum(high, tl.max(tl.where(mask, bits, 0), 0))
                low = tl.minimum(low, tl.min(tl.where(mask, bits, 2139095040), 0))
            while low < high:  # the second list overflowed, which is slow and rare
                middle = low + (high - low) // 2
                total = tl.full((), 0, dtype=tl.int64)
                for start in range(0, stop, REGISTER_LIST):
                    deficit, mask = _fine_bin_candidates(
                        deficits, lists, row, start + ids, histogram, width, bin, fine, VOCAB, LONG_LIST, SHORT_LIST
                    )
                    below = mask & (deficit.to(tl.int32, bitcast=True) <= middle)
                    total += tl.sum(tl.where(below, token_weight(deficit, limit, SCALE, BY_MASS), 0), 0)
                enough = total >= left
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle + 1)
        tl.store(limits + BY_MASS * tl.num_programs(0) + row, high.to(tl.float32, bitcast=True))


def find_limits(
    logits: Tensor,
    table: Tensor,
    deficits: Tensor,
    block_maxima: Tensor,
    histograms: Tensor,
    *,
    vocab: int,
    adjusted: bool,
    has_top_k: bool,
    has_top_p: bool,
    pdl: bool,
) -> Tensor:
    """Turn scores into deficits, and find the limits [2, C] of top-k and top-p. `has_top_k`, `has_top_p`: whether some row uses
    it.

    `deficits` [C, W] holds the scores on entry if they are adjusted. histograms [2, C, 2, HISTOGRAM_WORDS] int64 must be zero.
    """
    (rows, width), blocks, device = deficits.shape, block_maxima.shape[2], deficits.device
    limits = torch.empty(2, rows, dtype=torch.float32, device=device)
    block = FEW_BLOCK if rows <= FEW_ROWS else SEARCH_BLOCK
    options = {"PDL": pdl, "enable_fp_fusion": False, **launch_options(pdl)}
    filters = [by_mass for by_mass, used in ((False, has_top_k), (True, has_top_p)) if used]
    _deficits[(rows, triton.cdiv(width, block))](
        logits, table, deficits, block_maxima, histograms, logits.stride(0), width, blocks,
        VOCAB=vocab, ADJUSTED=adjusted, HAS_FILTER=bool(filters), BY_MASS=filters[:1] == [True], SCALE=2.0**MASS_BITS,
        BLOCKS=triton.next_power_of_2(blocks), BLOCK_V=block, num_warps=1, **options,
    )  # fmt: skip
    if not filters:
        return limits
    long_list = max(width // 2, 1)
    lists = torch.empty(rows, long_list + SHORT_LIST, dtype=torch.float32, device=device)
    for by_mass in filters:
        tensors = (table, deficits, lists, limits, histograms[int(by_mass)], width)
        constants = {"VOCAB": vocab, "HAS_TOP_K": has_top_k, "BY_MASS": by_mass, "SCALE": 2.0**MASS_BITS, "LONG_LIST": long_list}
        steps = [(level, collect) for level in (0, 1) for collect in (False, True)]
        # `_deficits` has counted level 0 of the first filter already.
        for level, collect in steps[1:] if by_mass == filters[0] else steps:
            _search_level[(rows, triton.cdiv(vocab, block))](
                *tensors, **constants, LEVEL=level, COLLECT=collect, SHORT_LIST=SHORT_LIST, BLOCK_V=block, num_warps=1, **options
            )
        _find_limit[(rows,)](
            *tensors, **constants, SHORT_LIST=SHORT_LIST, REGISTER_LIST=min(REGISTER_LIST, SHORT_LIST), num_warps=16, **options
        )
    return limits
