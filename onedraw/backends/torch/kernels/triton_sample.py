"""Choosing tokens on a GPU by the law of `sampling/law.py`: the same tokens and checksums as `backends/torch/sampler.py`.

In: logits [C, V'] and a table of what each row wishes. Out: tokens [C], and the deficits and limits they came from.

    scores    block by block: bias, penalties by counts, DRY, bans; the largest of each block
    deficits  (best - score) / temperature
    search    top-k and top-p as one limit: weights, whole numbers, are added into sixteen bins by deficit; what is in the bin
              that holds the limit is written down, and once more for sixteen bins of that; what is left is halved until
              the limit is found. A list that is too short is not used: its source is read again.
    pick      noise by integer hash less deficit; the largest, the lowest id among equals
    checksum  whole numbers, where a row asks for it

Blocks of one row meet only in maxima and in sums of whole numbers, so their number and order do not show. Nothing here
reads the host or waits for it: a turn that was captured may hold all of it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.kernels.triton_linear import launch_options
from onedraw.backends.torch.kernels.triton_math import exp, let_next_start, log, log1p, wait_for_inputs
from onedraw.sampling.law import MASS_BITS

BLOCK = 2048
# Of the search, one warp each: few rows leave the device idle in large blocks. 1024 halves of masses fit into 32 bits.
FEW_ROWS, FEW_BLOCK, SEARCH_BLOCK = 4, 256, 1024
TALLY = 32  # words of one row and level: sixteen bins, how many are written down, padding
SHORT = 4096  # of the second list; the first one is a quarter of the vocabulary

# Columns of the table [C, COLUMNS] int64; the first six are float64 by their bits.
DIVISOR, LIMIT, REPETITION, FREQUENCY, PRESENCE, TOP_P, TOP_K, KEY_0, KEY_1, GREEDY, LANE = range(11)
BIAS, DRY, BANS, DRAFTS, ENTRIES_END = range(11, 16)  # where a row's entries of each kind begin
COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the rows ask for, on the device. Entries: token ids with a number each, row by row, kind by kind."""

    table: Tensor  # [C, COLUMNS] int64
    tokens: Tensor  # [entries] int32
    values: Tensor  # [entries] float32
    output: Tensor | None  # [lanes, V'] int32, how often each token stands in a lane's output
    prompt: Tensor | None  # [lanes, V'] bool
    grown: Tensor | None  # [n] int64: places in `output` that become one more before anything is chosen
    counted: bool  # some row wants top-k
    shared: bool  # some row wants top-p
    adjusted: bool  # some row wants bias, penalties, DRY or bans


@dataclass(frozen=True, slots=True)
class Chosen:
    tokens: Tensor  # [C] int64, -1 where the law leaves none
    deficits: Tensor  # [C, W] float32, infinite past the vocabulary
    limits: Tensor  # [C] float32


@triton.jit
def _number(table, row, COLUMN: tl.constexpr):
    return tl.load(table + row * 16 + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def _entries(scores, ids, tokens, values, begin, stop, KIND: tl.constexpr):
    """Bias (0) adds, DRY (1) takes away, bans (2) leave nothing."""
    for entry in range(begin, stop):
        here = ids == tl.load(tokens + entry)
        if KIND == 0:
            scores = tl.where(here, scores + tl.load(values + entry), scores)
        elif KIND == 1:
            scores = tl.where(here, scores - tl.load(values + entry), scores)
        else:
            scores = tl.where(here, float("-inf"), scores)
    return scores


@triton.jit
def _penalized(scores, ids, inside, table, row, tokens, output, prompt, stride):
    """Repetition, frequency, presence, in this order, where the row counts its history; drafts before it count too."""
    at = table + row * 16
    lane = tl.load(at + 10)
    if lane >= 0:
        count = tl.load(output + lane * stride + ids, mask=inside, other=0)
        for entry in range(tl.load(at + 14), tl.load(at + 15)):
            count += (ids == tl.load(tokens + entry)).to(tl.int32)
        seen = (count > 0) | (tl.load(prompt + lane * stride + ids, mask=inside, other=0) != 0)
        penalty = _number(table, row, 2).to(tl.float32)
        less = tl.where(scores > 0, tl.div_rn(scores, tl.zeros_like(scores) + penalty), scores * penalty)
        scores = tl.where(seen, less, scores)
        scores = scores - count.to(tl.float32) * _number(table, row, 3).to(tl.float32)
        scores = scores - (count > 0).to(tl.float32) * _number(table, row, 4).to(tl.float32)
    return scores


@triton.jit
def _scores(
    logits,
    table,
    tokens,
    values,
    output,
    prompt,
    deficits,
    tops,
    logits_stride,
    counts_stride,
    width,
    VOCAB: tl.constexpr,
    ADJUSTED: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Steps 1 to 3, and the largest score and logit of each block; NaN where there is one."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = ids < VOCAB
    raw = tl.load(logits + row * logits_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    scores = raw
    if ADJUSTED:
        at = table + row * 16
        scores = _entries(scores, ids, tokens, values, tl.load(at + 11), tl.load(at + 12), 0)
        if COUNTED:
            scores = _penalized(scores, ids, inside, table, row, tokens, output, prompt, counts_stride)
        scores = _entries(scores, ids, tokens, values, tl.load(at + 12), tl.load(at + 13), 1)
        scores = _entries(scores, ids, tokens, values, tl.load(at + 13), tl.load(at + 14), 2)
        tl.store(deficits + row * width + ids, scores, mask=ids < width)
    blocks = tl.num_programs(1)
    _keep_top(tops + (row * 2) * blocks + block, scores)
    _keep_top(tops + (row * 2 + 1) * blocks + block, raw)


@triton.jit
def _keep_top(place, x):
    broken = tl.max((x != x).to(tl.int32), 0)
    tl.store(place, tl.where(broken != 0, float("nan"), tl.max(x, 0)))


@triton.jit
def _row_top(tops, blocks, BLOCKS: tl.constexpr):
    """The largest of a row; NaN where there is one."""
    at = tl.arange(0, BLOCKS)
    x = tl.load(tops + at, mask=at < blocks, other=float("-inf"))
    broken = tl.max((x != x).to(tl.int32), 0)
    return tl.where(broken != 0, float("nan"), tl.max(x, 0))


@triton.jit
def _index(deficit):
    """Which of all bins; they grow with the deficit, a quarter wide at first. Larger deficits are in no smaller bin."""
    bits = (deficit + 1.0).to(tl.int32, bitcast=True)
    return tl.maximum((bits >> 21) - 508, 0), (bits >> 17) & 15


@triton.jit
def _bin(deficit, LEVEL: tl.constexpr):
    """Of sixteen; the last one of the first level has no end."""
    coarse, fine = _index(deficit)
    if LEVEL == 0:
        return tl.minimum(coarse, 15)
    else:
        return tl.where(coarse >= 15, tl.minimum(coarse - 15, 15), fine)


@triton.jit
def _weight(deficit, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr):
    """Of what may still be kept: its mass, or one."""
    if BY_MASS:
        return tl.where(deficit <= limit, exp(0.0 - deficit) * SCALE, 0.0).to(tl.int64)
    else:
        return tl.full(deficit.shape, 1, dtype=tl.int64)


@triton.jit
def _add_up(bins, deficit, there, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr, LEVEL: tl.constexpr):
    """Add the weights of a block to sixteen bins. Masses have 41 bits: they are added in two halves."""
    bin = tl.where(there, _bin(deficit, LEVEL), 16)
    weight = _weight(deficit, limit, SCALE, BY_MASS)
    high, low = (weight >> 20).to(tl.int32), (weight & 1048575).to(tl.int32)
    at = tl.arange(0, 16)
    parts = tl.zeros((16,), dtype=tl.int64)
    for one in tl.static_range(16):
        part = tl.sum(tl.where(bin == one, low, 0), 0).to(tl.int64)
        if BY_MASS:
            part += tl.sum(tl.where(bin == one, high, 0), 0).to(tl.int64) << 20
        parts = tl.where(at == one, part, parts)
    tl.atomic_add(bins + at, parts, mask=parts > 0, sem="relaxed")


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
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    best = _row_top(tops + row * 2 * blocks, blocks, BLOCKS) + 0.0
    if ADJUSTED:
        scores = tl.load(deficits + row * width + ids, mask=ids < width, other=float("-inf"))
    else:
        scores = tl.load(logits + row * logits_stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    divisor = tl.zeros_like(scores) + _number(table, row, 0).to(tl.float32)
    deficit = tl.div_rn(best - scores, divisor)
    tl.store(deficits + row * width + ids, deficit, mask=ids < width)
    if WANTED:  # noqa: SIM102 - known when compiled, and the other is not
        if _wanted(table, row, BY_MASS):
            limit = _number(table, row, 1).to(tl.float32)
            bins = tallies + (row + tl.num_programs(0) * BY_MASS) * 64
            _add_up(bins, deficit, ids < VOCAB, limit, SCALE, BY_MASS, 0)


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
def _tally(
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
    SHORT_LIST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weights into the sixteen bins of a level."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    bins = tallies + row * 64
    if _wanted(table, row, BY_MASS):
        limit = _limit_so_far(table, found, row, COUNTED and BY_MASS)
        ids = start + tl.arange(0, BLOCK_V)
        if LEVEL == 0:
            deficit = tl.load(deficits + row * width + ids, mask=ids < VOCAB, other=float("inf"))
            _add_up(bins, deficit, ids < VOCAB, limit, SCALE, BY_MASS, 0)
        else:
            written = tl.load(bins + 16)
            if (start < written) | (written > LONG):
                deficit, there = _listed(deficits, lists, row, ids, bins, width, VOCAB, LONG, SHORT_LIST)
                bin, _ = _reached(bins, _target(table, bins, row, BY_MASS))
                _add_up(bins + 32, deficit, there & (_bin(deficit, 0) == bin), limit, SCALE, BY_MASS, 1)


@triton.jit
def _collect(
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
    SHORT_LIST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """What is in the bin that holds the limit, written down in any order; how much that is, even where it is too much."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    bins = tallies + row * 64
    if _wanted(table, row, BY_MASS):
        written = tl.load(bins + 16)
        if (LEVEL == 0) | (start < written) | (written > LONG):
            ids = start + tl.arange(0, BLOCK_V)
            limit = _limit_so_far(table, found, row, COUNTED and BY_MASS)
            bin, left = _reached(bins, _target(table, bins, row, BY_MASS))
            place = lists + row * (LONG + SHORT_LIST)
            if LEVEL == 0:
                deficit = tl.load(deficits + row * width + ids, mask=ids < VOCAB, other=float("inf"))
                agrees = (ids < VOCAB) & (_bin(deficit, 0) == bin)
            else:
                fine, _ = _reached(bins + 32, left)
                deficit, there = _listed(deficits, lists, row, ids, bins, width, VOCAB, LONG, SHORT_LIST)
                agrees = there & (_bin(deficit, 0) == bin) & (_bin(deficit, 1) == fine)
                place += LONG
            if BY_MASS:
                agrees = agrees & (deficit <= limit)
            rank = tl.cumsum(agrees.to(tl.int32), 0)
            count = tl.max(rank, 0)
            if count > 0:
                at = tl.atomic_add(bins + LEVEL * 32 + 16, count.to(tl.int64), sem="relaxed") + rank - 1
                room: tl.constexpr = SHORT_LIST if LEVEL else LONG
                tl.store(place + at, deficit, mask=agrees & (at < room))


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
    PDL: tl.constexpr,
):
    """The smallest deficit whose bin, up to it, has what is left to reach: between the ends of what is written down, halved."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    bins = tallies + row * 64
    if _wanted(table, row, BY_MASS):
        limit = _limit_so_far(table, found, row, COUNTED and BY_MASS)
        bin, left = _reached(bins, _target(table, bins, row, BY_MASS))
        fine, left = _reached(bins + 32, left)
        written = tl.load(bins + 32 + 16)
        ids = tl.arange(0, SHORT_LIST)
        low = tl.full((), 0, dtype=tl.int32)
        high = tl.full((), 2139095040, dtype=tl.int32)  # infinity, by its bits
        if written <= SHORT_LIST:
            there = ids < written
            deficit = tl.load(lists + row * (LONG + SHORT_LIST) + LONG + ids, mask=there, other=0.0)
            weight = tl.where(there, _weight(deficit, limit, SCALE, BY_MASS), 0)
            bits = deficit.to(tl.int32, bitcast=True)
            high = tl.minimum(tl.max(bits, 0), high)
            low = tl.minimum(tl.min(tl.where(there, bits, 2139095040), 0), high)
            while low < high:
                middle = low + (high - low) // 2
                enough = tl.sum(tl.where(bits <= middle, weight, 0), 0) >= left
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle + 1)
        else:
            first = tl.load(bins + 16)
            stop = tl.where(first <= LONG, first, VOCAB).to(tl.int32)
            while low < high:
                middle = low + (high - low) // 2
                total = tl.full((), 0, dtype=tl.int64)
                for start in range(0, stop, SHORT_LIST):
                    deficit, there = _listed(deficits, lists, row, start + ids, bins, width, VOCAB, LONG, SHORT_LIST)
                    there = there & (_bin(deficit, 0) == bin) & (_bin(deficit, 1) == fine)
                    below = there & (deficit.to(tl.int32, bitcast=True) <= middle)
                    total += tl.sum(tl.where(below, _weight(deficit, limit, SCALE, BY_MASS), 0), 0)
                enough = total >= left
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle + 1)
        tl.store(found + BY_MASS * tl.num_programs(0) + row, high.to(tl.float32, bitcast=True))


@triton.jit
def _mix32(word):
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _gumbel(ids, first, second):
    """-log(-log u) of the hash of (key, id): the logarithm of u itself in the lower half, of 1 - (1 - u) in the upper."""
    word = _mix32(_mix32(ids.to(tl.uint32) ^ first) + second) >> 8
    odd = (word.to(tl.int32) * 2 + 1).to(tl.int32)  # u * 2^25
    rest = tl.where(odd > 16777216, odd - 33554432, 0)
    above = rest.to(tl.float32) * 2.9802322387695312e-08
    below = (odd - rest).to(tl.float32) * 2.9802322387695312e-08
    return 0.0 - log(0.0 - (log1p(above) + log(below)))


@triton.jit
def _pick(
    logits,
    table,
    deficits,
    found,
    limits,
    best_values,
    best_ids,
    weights,
    checksums,
    logits_stride,
    width,
    VOCAB: tl.constexpr,
    COUNTED: tl.constexpr,
    SHARED: tl.constexpr,
    CHECKSUMS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each block's best value under noise, and the lowest id that has it."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    limit = _limit_so_far(table, found, row, COUNTED)
    if SHARED:  # noqa: SIM102 - known when compiled, and the other is not
        if _number(table, row, 5) < 1.0:
            limit = tl.minimum(limit, tl.load(found + tl.num_programs(0) + row))
    if block == 0:
        tl.store(limits + row, limit)
    ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = ids < VOCAB
    deficit = tl.load(deficits + row * width + ids, mask=inside, other=float("inf"))
    kept = inside & (deficit <= limit)
    best = tl.full((), float("-inf"), dtype=tl.float32)
    best_id = tl.full((), 2147483647, dtype=tl.int32)
    if tl.max(kept.to(tl.int32), 0) > 0:  # most blocks have nothing that may be chosen
        value = 0.0 - deficit
        if tl.load(table + row * 16 + 9) == 0:
            first = tl.load(table + row * 16 + 7).to(tl.uint32)
            second = tl.load(table + row * 16 + 8).to(tl.uint32)
            value = _gumbel(ids, first, second) - deficit
        value = tl.where(kept, value, float("-inf"))
        best = tl.max(value, 0)
        best_id = tl.min(tl.where(value == best, ids, 2147483647), 0)
    place = row * tl.num_programs(1) + block
    tl.store(best_values + place, best)
    tl.store(best_ids + place, best_id)
    if CHECKSUMS:
        raw = tl.load(logits + row * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
        left = 0.0 - tl.where(deficit > limit, float("inf"), deficit)
        one = raw.to(tl.int32, bitcast=True).to(tl.int64) * tl.load(weights + ids, mask=inside, other=0)
        two = left.to(tl.int32, bitcast=True).to(tl.int64) * tl.load(weights + VOCAB + ids, mask=inside, other=0)
        tl.atomic_add(checksums + row, tl.sum(tl.where(inside, one + two, 0), 0), sem="relaxed")


@triton.jit
def _conclude(tokens, tops, best_values, best_ids, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """The best of the blocks' best; -1 where the logits are no distribution or nothing is left."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    value = tl.load(best_values + row * blocks + at, mask=at < blocks, other=float("-inf"))
    ids = tl.load(best_ids + row * blocks + at, mask=at < blocks, other=2147483647)
    token = tl.min(tl.where(value == tl.max(value, 0), ids, 2147483647), 0).to(tl.int64)
    best = _row_top(tops + row * 2 * blocks, blocks, BLOCKS)
    raw = _row_top(tops + (row * 2 + 1) * blocks, blocks, BLOCKS)
    sound = (best > float("-inf")) & (best < float("inf")) & (raw < float("inf"))
    tl.store(tokens + row, tl.where(sound, token, -1))


def choose(
    logits: Tensor, wishes: Wishes, *, vocab: int, width: int, weights: Tensor | None = None, pdl: bool = False
) -> tuple[Chosen, Tensor | None]:
    """logits [C, ≥ V] in any dtype, rows of stride 1. With `weights` [2, V] int64 also the checksums [C]."""
    rows, device = len(logits), logits.device
    blocks = triton.cdiv(width, BLOCK)
    grid, all_blocks = (rows, blocks), triton.next_power_of_2(blocks)
    deficits = torch.empty(rows, width, dtype=torch.float32, device=device)
    tops = torch.empty(rows, 2, blocks, dtype=torch.float32, device=device)
    # What is cleared is cleared first: the kernels then follow each other without a gap.
    tallies = torch.zeros(2, rows, 2, TALLY, dtype=torch.int64, device=device)
    checksums = None if weights is None else torch.zeros(rows, dtype=torch.int64, device=device)
    _scores[grid](
        logits,
        wishes.table,
        wishes.tokens,
        wishes.values,
        wishes.output,
        wishes.prompt,
        deficits,
        tops,
        logits.stride(0),
        0 if wishes.output is None else wishes.output.stride(0),
        width,
        VOCAB=vocab,
        ADJUSTED=wishes.adjusted,
        COUNTED=wishes.output is not None,
        BLOCK_V=BLOCK,
        enable_fp_fusion=False,
        PDL=pdl,
        **launch_options(pdl),
    )
    found = _searched(logits, wishes, deficits, tops, tallies, vocab=vocab, pdl=pdl)
    limits = torch.empty(rows, dtype=torch.float32, device=device)
    best_values = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    best_ids = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    _pick[grid](
        logits,
        wishes.table,
        deficits,
        found,
        limits,
        best_values,
        best_ids,
        weights,
        checksums,
        logits.stride(0),
        width,
        VOCAB=vocab,
        COUNTED=wishes.counted,
        SHARED=wishes.shared,
        CHECKSUMS=weights is not None,
        BLOCK_V=BLOCK,
        enable_fp_fusion=False,
        PDL=pdl,
        **launch_options(pdl),
    )
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    _conclude[(rows,)](
        tokens, tops, best_values, best_ids, blocks, BLOCKS=all_blocks, PDL=pdl, num_warps=1, **launch_options(pdl)
    )
    return Chosen(tokens, deficits, limits), None if checksums is None else checksums & (2**63 - 1)


def _searched(
    logits: Tensor, wishes: Wishes, deficits: Tensor, tops: Tensor, tallies: Tensor, *, vocab: int, pdl: bool
) -> Tensor:
    """Scores become deficits; the limits of top-k and of top-p, [2, C], where rows want them."""
    (rows, width), blocks, device = deficits.shape, tops.shape[2], deficits.device
    found = torch.empty(2, rows, dtype=torch.float32, device=device)
    block = FEW_BLOCK if rows <= FEW_ROWS else SEARCH_BLOCK
    options = {"PDL": pdl, "enable_fp_fusion": False, **launch_options(pdl)}
    kinds = [by_mass for by_mass, wanted in ((False, wishes.counted), (True, wishes.shared)) if wanted]
    _deficits[(rows, triton.cdiv(width, block))](
        logits, wishes.table, deficits, tops, tallies, logits.stride(0), width, blocks,
        VOCAB=vocab, ADJUSTED=wishes.adjusted, WANTED=bool(kinds), BY_MASS=kinds[:1] == [True], SCALE=2.0**MASS_BITS,
        BLOCKS=triton.next_power_of_2(blocks), BLOCK_V=block, num_warps=1, **options,
    )  # fmt: skip
    if not kinds:
        return found
    long = max(width // 4, 1)
    lists = torch.empty(rows, long + SHORT, dtype=torch.float32, device=device)
    for by_mass in kinds:
        given = (wishes.table, deficits, lists, found, tallies[int(by_mass)], width)
        sizes = {"VOCAB": vocab, "COUNTED": wishes.counted, "BY_MASS": by_mass, "SCALE": 2.0**MASS_BITS, "LONG": long}
        steps = [(_tally, 0), (_collect, 0), (_tally, 1), (_collect, 1)]
        for kernel, level in steps[1:] if by_mass == kinds[0] else steps:  # the first is in the deficits already
            kernel[(rows, triton.cdiv(vocab, block))](
                *given, **sizes, LEVEL=level, SHORT_LIST=SHORT, BLOCK_V=block, num_warps=1, **options
            )
        _find[(rows,)](*given, **sizes, SHORT_LIST=SHORT, num_warps=8, **options)
    return found
