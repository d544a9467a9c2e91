"""Choosing tokens on a GPU by the law of `sampling/law.py`: the same tokens and checksums as `backends/torch/sampler.py`.

In: logits [C, V'] and a table of what each row wishes. Out: tokens [C], and the deficits and limits they came from.

    scores    block by block: bias, penalties by counts, DRY, bans; the largest of each block
    deficits  (best - score) / temperature
    search    top-k and top-p as one limit: eight rounds of four bits, each adding whole numbers into sixteen bins
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
# Rows up to which the search takes small blocks, whose sixteen bins are added in one go: few rows leave the device idle
# otherwise. Many rows are faster bin by bin in large blocks. Whole numbers add up to the same either way.
FEW_ROWS, FEW_BLOCK = 8, 512
LEVELS = 8  # rounds of four bits

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
def _deficits(table, deficits, tops, width, blocks, BLOCKS: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr):
    """In place: scores become deficits."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    best = _row_top(tops + row * 2 * blocks, blocks, BLOCKS) + 0.0
    scores = tl.load(deficits + row * width + ids, mask=ids < width, other=float("-inf"))
    divisor = tl.zeros_like(scores) + _number(table, row, 0).to(tl.float32)
    tl.store(deficits + row * width + ids, tl.div_rn(best - scores, divisor), mask=ids < width)


@triton.jit
def _settled(bins, state, target):
    """One round: which of sixteen bins reaches the target, and what is then left to reach. state: bits found so far."""
    at = tl.arange(0, 16)
    counts = tl.load(bins + at)
    running = tl.cumsum(counts, 0)
    bin = tl.sum((running < target).to(tl.int64), 0)
    below = tl.sum(tl.where(at < bin, counts, 0), 0)
    return state * 16 + bin, target - below


@triton.jit
def _found(bins, states, row, level, target, LEVEL_COUNT: tl.constexpr):
    """Bits found before `level`, and what is left to reach. states [C, 2 * LEVELS] int64 has those of the level before."""
    state = tl.full((), 0, dtype=tl.int64)
    left = target
    if level > 0:
        if level > 1:
            state = tl.load(states + row * 2 * LEVEL_COUNT + 2 * (level - 1))
            left = tl.load(states + row * 2 * LEVEL_COUNT + 2 * (level - 1) + 1)
        state, left = _settled(bins + (row * LEVEL_COUNT + level - 1) * 16, state, left)
    return state, left


@triton.jit
def _share_target(table, bins, row, LEVEL_COUNT: tl.constexpr):
    """How much mass top-p asks for: its share of all that was counted in the first round."""
    total = tl.sum(tl.load(bins + row * LEVEL_COUNT * 16 + tl.arange(0, 16)), 0)
    wish = tl.ceil(_number(table, row, 5) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(wish, 1), total)


@triton.jit
def _as_float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _limit_so_far(table, bins_k, states_k, row, COUNTED: tl.constexpr, LEVEL_COUNT: tl.constexpr):
    """min-p, then top-k where the row has it."""
    limit = _number(table, row, 1).to(tl.float32)
    if COUNTED:
        wish = tl.load(table + row * 16 + 6)
        if wish > 0:
            bits, _ = _found(bins_k, states_k, row, LEVEL_COUNT, wish, LEVEL_COUNT)
            limit = tl.minimum(limit, _as_float(bits))
    return limit


@triton.jit(do_not_specialize=["level"])
def _search(
    table,
    deficits,
    bins_k,
    states_k,
    bins_p,
    states_p,
    width,
    level,
    VOCAB: tl.constexpr,
    COUNTED: tl.constexpr,
    BY_MASS: tl.constexpr,
    LEVEL_COUNT: tl.constexpr,
    SCALE: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One round of top-k, or of top-p: weights of the next four bits, for what agrees with the bits found so far."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    if BY_MASS:
        wanted = _number(table, row, 5) < 1.0
        bins = bins_p
        states = states_p
    else:
        wanted = tl.load(table + row * 16 + 6) > 0
        bins = bins_k
        states = states_k
    if wanted:
        ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        deficit = tl.load(deficits + row * width + ids, mask=ids < VOCAB, other=float("inf"))
        target = tl.load(table + row * 16 + 6)
        if BY_MASS:
            limit = _limit_so_far(table, bins_k, states_k, row, COUNTED, LEVEL_COUNT)
            share = exp(0.0 - deficit) * SCALE
            weights = tl.where((deficit <= limit) & (ids < VOCAB), share, 0.0).to(tl.int64)
            if level > 0:
                target = _share_target(table, bins_p, row, LEVEL_COUNT)
        else:
            weights = (ids < VOCAB).to(tl.int64)
        state, left = _found(bins, states, row, level, target, LEVEL_COUNT)
        if (tl.program_id(1) == 0) & (level > 0):
            tl.store(states + row * 2 * LEVEL_COUNT + 2 * level, state)
            tl.store(states + row * 2 * LEVEL_COUNT + 2 * level + 1, left)
        bits = deficit.to(tl.int32, bitcast=True)
        shift = 28 - 4 * level
        agrees = (bits.to(tl.int64) >> (shift + 4)) == state
        weights = tl.where(agrees, weights, 0)
        place = bins + (row * LEVEL_COUNT + level) * 16
        bin = (bits >> shift) & 15
        if tl.max(weights, 0) > 0:
            if FEW:
                sixteen = tl.arange(0, 16)
                parts = tl.sum(tl.where(bin[:, None] == sixteen[None, :], weights[:, None], 0), 0)
                tl.atomic_add(place + sixteen, parts, mask=parts > 0, sem="relaxed")
            else:
                for one in tl.static_range(16):
                    part = tl.sum(tl.where(bin == one, weights, 0), 0)
                    if part > 0:
                        tl.atomic_add(place + one, part, sem="relaxed")


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
    tops,
    bins_k,
    states_k,
    bins_p,
    states_p,
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
    LEVEL_COUNT: tl.constexpr,
    CHECKSUMS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each block's best value under noise, and the lowest id that has it."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    limit = _limit_so_far(table, bins_k, states_k, row, COUNTED, LEVEL_COUNT)
    if SHARED:  # noqa: SIM102 - known when compiled, and the other is not
        if _number(table, row, 5) < 1.0:
            target = _share_target(table, bins_p, row, LEVEL_COUNT)
            bits, _ = _found(bins_p, states_p, row, LEVEL_COUNT, target, LEVEL_COUNT)
            limit = tl.minimum(limit, _as_float(bits))
    if block == 0:
        tl.store(limits + row, limit)
    ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = ids < VOCAB
    deficit = tl.load(deficits + row * width + ids, mask=inside, other=float("inf"))
    value = 0.0 - deficit
    if tl.load(table + row * 16 + 9) == 0:
        first = tl.load(table + row * 16 + 7).to(tl.uint32)
        second = tl.load(table + row * 16 + 8).to(tl.uint32)
        value = _gumbel(ids, first, second) - deficit
    value = tl.where(inside & (deficit <= limit), value, float("-inf"))
    best = tl.max(value, 0)
    place = row * tl.num_programs(1) + block
    tl.store(best_values + place, best)
    tl.store(best_ids + place, tl.min(tl.where(value == best, ids, 2147483647), 0))
    if CHECKSUMS:
        raw = tl.load(logits + row * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
        kept = 0.0 - tl.where(deficit > limit, float("inf"), deficit)
        one = raw.to(tl.int32, bitcast=True).to(tl.int64) * tl.load(weights + ids, mask=inside, other=0)
        two = kept.to(tl.int32, bitcast=True).to(tl.int64) * tl.load(weights + VOCAB + ids, mask=inside, other=0)
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
    bins = torch.zeros(2, rows, LEVELS, 16, dtype=torch.int64, device=device)
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
    _deficits[grid](
        wishes.table,
        deficits,
        tops,
        width,
        blocks,
        BLOCKS=all_blocks,
        BLOCK_V=BLOCK,
        enable_fp_fusion=False,
        PDL=pdl,
        **launch_options(pdl),
    )
    states = torch.empty(2, rows, LEVELS, 2, dtype=torch.int64, device=device)
    search_block = FEW_BLOCK if rows <= FEW_ROWS else BLOCK
    searches = (bins[0], states[0], bins[1], states[1])
    for by_mass, wanted in ((False, wishes.counted), (True, wishes.shared)):
        for level in range(LEVELS if wanted else 0):
            _search[(rows, triton.cdiv(vocab, search_block))](
                wishes.table,
                deficits,
                *searches,
                width,
                level,
                VOCAB=vocab,
                COUNTED=wishes.counted,
                BY_MASS=by_mass,
                LEVEL_COUNT=LEVELS,
                SCALE=2.0**MASS_BITS,
                FEW=rows <= FEW_ROWS,
                BLOCK_V=search_block,
                enable_fp_fusion=False,
                PDL=pdl,
                **launch_options(pdl),
            )
    limits = torch.empty(rows, dtype=torch.float32, device=device)
    best_values = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    best_ids = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    _pick[grid](
        logits,
        wishes.table,
        deficits,
        tops,
        *searches,
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
        LEVEL_COUNT=LEVELS,
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
