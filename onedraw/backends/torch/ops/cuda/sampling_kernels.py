"""Sampling with Triton by the rule of `sampling/law.py`: the same tokens and checksums as `backends/torch/sampling/sampler.py`.

In: logits [C, V'] and a table of sampling parameters. Out: tokens [C], and the deficits and limits from which they were sampled.
Axes: C rows (positions to sample), V tokens of the vocabulary, V' V with padding, W the padded width of deficits, M token masks.
A lane is the slot in which a sequence's tokens are counted. `sampler.py` builds the table and launches these kernels.

    scores    block by block: bias, penalties by counts, DRY, bans, token masks; the maximum of each block
    deficits  (best - score) / temperature
    limits    top-k and top-p as the largest deficit that is kept (`top_k_top_p.py`)
    argmax    of Gumbel noise (an integer hash) minus deficit; the lowest id among equals
    checksum  integer sums, where a row requests it
    logprobs  in `logprobs.py`, where a row requests them

Blocks of a row are combined only by maxima and integer sums, so their number and order do not change the result. The host neither
reads nor waits for anything here, so that all of it can be captured in a CUDA graph.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.top_k_top_p import HISTOGRAM_WORDS, find_limits, limit_so_far, row_max, table_float
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel, log, log1p

BLOCK = 2048

# Columns of the table [C, COLUMNS] int64; the first six hold the bits of a float64. Kernels use the numbers, not these names.
DIVISOR, LIMIT, REPETITION, FREQUENCY, PRESENCE, TOP_P, TOP_K, KEY_0, KEY_1, GREEDY, LANE = range(11)
BIAS, DRY, BANS, DRAFTS, ENTRIES_END = range(11, 16)  # index of a row's first entry of each kind, and of the end of the last kind
COLUMNS = 16


@dataclass(slots=True)
class SamplingTable:
    """The sampling parameters of all rows, on the device. Entries are (token id, value) pairs, row by row and kind by kind."""

    rows: Tensor  # [C, COLUMNS] int64: the parameters of each position
    tokens: Tensor  # [entries] int32: token ids of all entries
    values: Tensor  # [entries] float32: bias or penalty; unused for bans and drafts
    output: Tensor | None  # [lanes, V'] int32, how often each token occurs in a lane's output
    prompt: Tensor | None  # [lanes, V'] bool, whether a token occurs in a lane's prompt
    count_increments: Tensor | None  # [n] int64: flat indices of `output` to increment before sampling
    masks: Tensor | None  # [M, words] int32, one bit per token that is allowed; None: no row has a mask
    mask_rows: Tensor | None  # [C] int32, the row of `masks` that applies, -1 for none
    logprobs: Tensor | None  # [C] int32, twice the number of most likely tokens, plus 1 for mode "processed"; or NO_LOGPROBS
    asked: Tensor | None  # [C, ids] int32: token ids whose logprobs the rows ask for, -1 before them; None: no row asks for any
    both: Tensor | None  # [C] int32: for rows with mode "both", a request for processed logprobs alone; else NO_LOGPROBS
    forced: Tensor | None  # [C] int64: the token that the request forces, -1 where one is sampled; None: no row forces one
    has_top_k: bool  # whether some row of the step uses top-k
    has_top_p: bool  # whether some row uses top-p
    adjusted: bool  # whether some row has logit bias, penalties, DRY, bans or a mask

    def part(self, rows: slice) -> SamplingTable:
        """The table of some of the rows. Entries, counts and masks are shared, because rows find them by index."""
        mask_rows = None if self.mask_rows is None else self.mask_rows[rows]
        logprobs = None if self.logprobs is None else self.logprobs[rows]
        asked = None if self.asked is None else self.asked[rows]
        both = None if self.both is None else self.both[rows]
        forced = None if self.forced is None else self.forced[rows]
        return replace(self, rows=self.rows[rows], mask_rows=mask_rows, logprobs=logprobs, asked=asked, both=both, forced=forced)


@dataclass(frozen=True, slots=True)
class SamplingResult:
    tokens: Tensor  # [C] int64; -1 if the sampling rule leaves no token
    deficits: Tensor  # [C, W] float32: (best - score) / temperature; infinite past the vocabulary
    limits: Tensor  # [C] float32: the largest deficit that a token may have
    block_maxima: Tensor  # [C, 2, blocks] float32: the largest score and the largest logit of each block


@triton.jit
def _apply_entries(scores, ids, tokens, values, begin, stop, KIND: tl.constexpr):
    """KIND 0 adds logit bias, 1 subtracts DRY penalties, 2 bans tokens."""
    for entry in range(begin, stop):
        is_token = ids == tl.load(tokens + entry)
        if KIND == 0:
            scores = tl.where(is_token, scores + tl.load(values + entry), scores)
        elif KIND == 1:
            scores = tl.where(is_token, scores - tl.load(values + entry), scores)
        else:
            scores = tl.where(is_token, float("-inf"), scores)
    return scores


@triton.jit
def _apply_penalties(scores, ids, mask, table, row, tokens, output, prompt, stride):
    """Repetition, frequency and presence penalties, in this order, for rows that have a lane of token counts. Drafts that precede
    the sampled position are counted as well."""
    row_ptr = table + row * 16
    lane = tl.load(row_ptr + 10)
    if lane >= 0:
        count = tl.load(output + lane * stride + ids, mask=mask, other=0)
        for entry in range(tl.load(row_ptr + 14), tl.load(row_ptr + 15)):
            count += (ids == tl.load(tokens + entry)).to(tl.int32)
        seen = (count > 0) | (tl.load(prompt + lane * stride + ids, mask=mask, other=0) != 0)
        penalty = table_float(table, row, 2).to(tl.float32)
        penalized = tl.where(scores > 0, tl.div_rn(scores, tl.zeros_like(scores) + penalty), scores * penalty)
        scores = tl.where(seen, penalized, scores)
        scores = scores - count.to(tl.float32) * table_float(table, row, 3).to(tl.float32)
        scores = scores - (count > 0).to(tl.float32) * table_float(table, row, 4).to(tl.float32)
    return scores


@triton.jit
def _scores(
    logits,
    table,
    tokens,
    values,
    output,
    prompt,
    masks,
    mask_rows,
    deficits,
    block_maxima,
    logits_stride,
    counts_stride,
    masks_stride,
    width,
    VOCAB: tl.constexpr,
    ADJUSTED: tl.constexpr,
    HISTORY: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add bias, penalties and bans to the logits of one block (if ADJUSTED), store these scores in `deficits`, and in any case
    store the block's largest score and logit, which are NaN if the block has a NaN."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = ids < VOCAB
    raw = tl.load(logits + row * logits_stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    scores = raw
    if ADJUSTED:
        row_ptr = table + row * 16
        scores = _apply_entries(scores, ids, tokens, values, tl.load(row_ptr + 11), tl.load(row_ptr + 12), 0)
        if HISTORY:
            scores = _apply_penalties(scores, ids, mask, table, row, tokens, output, prompt, counts_stride)
        scores = _apply_entries(scores, ids, tokens, values, tl.load(row_ptr + 12), tl.load(row_ptr + 13), 1)
        scores = _apply_entries(scores, ids, tokens, values, tl.load(row_ptr + 13), tl.load(row_ptr + 14), 2)
        if MASKED:
            mask_row = tl.load(mask_rows + row).to(tl.int64)
            if mask_row >= 0:
                words = tl.load(masks + mask_row * masks_stride + ids // 32, mask=mask, other=0)
                scores = tl.where(((words >> (ids % 32)) & 1) != 0, scores, float("-inf"))
        tl.store(deficits + row * width + ids, scores, mask=ids < width)
    blocks = tl.num_programs(1)
    _store_block_max(block_maxima + (row * 2) * blocks + block, scores)
    _store_block_max(block_maxima + (row * 2 + 1) * blocks + block, raw)


@triton.jit
def _store_block_max(target, x):
    has_nan = tl.max((x != x).to(tl.int32), 0)
    tl.store(target, tl.where(has_nan != 0, float("nan"), tl.max(x, 0)))


@triton.jit
def _mix32(word):
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _gumbel(ids, key_0, key_1):
    """Gumbel noise -log(-log u), for u from the hash of (key, id). log u is log(u) for u below one half and log1p(u - 1) above
    it."""
    word = _mix32(_mix32(ids.to(tl.uint32) ^ key_0) + key_1) >> 8
    odd = (word.to(tl.int32) * 2 + 1).to(tl.int32)  # u * 2^25, which is an odd integer
    rest = tl.where(odd > 16777216, odd - 33554432, 0)
    upper_u = rest.to(tl.float32) * 2.9802322387695312e-08
    lower_u = (odd - rest).to(tl.float32) * 2.9802322387695312e-08
    return 0.0 - log(0.0 - (log1p(upper_u) + log(lower_u)))


@triton.jit
def _block_argmax(
    logits,
    table,
    deficits,
    search_limits,
    limits,
    best_values,
    best_ids,
    weights,
    checksums,
    logits_stride,
    width,
    VOCAB: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    CHECKSUMS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest value of noise minus deficit in each block, and the lowest id that has it."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    limit = limit_so_far(table, search_limits, row, HAS_TOP_K)
    if HAS_TOP_P:  # noqa: SIM102 - constexpr condition, and a runtime one
        if table_float(table, row, 5) < 1.0:
            limit = tl.minimum(limit, tl.load(search_limits + tl.num_programs(0) + row))
    if block == 0:
        tl.store(limits + row, limit)
    ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = ids < VOCAB
    deficit = tl.load(deficits + row * width + ids, mask=mask, other=float("inf"))
    kept = mask & (deficit <= limit)
    best = tl.full((), float("-inf"), dtype=tl.float32)
    best_id = tl.full((), 2147483647, dtype=tl.int32)
    if tl.max(kept.to(tl.int32), 0) > 0:  # most blocks have no token within the limit, and skip the noise
        value = 0.0 - deficit
        if tl.load(table + row * 16 + 9) == 0:
            key_0 = tl.load(table + row * 16 + 7).to(tl.uint32)
            key_1 = tl.load(table + row * 16 + 8).to(tl.uint32)
            value = _gumbel(ids, key_0, key_1) - deficit
        value = tl.where(kept, value, float("-inf"))
        best = tl.max(value, 0)
        best_id = tl.min(tl.where(value == best, ids, 2147483647), 0)
    target = row * tl.num_programs(1) + block
    tl.store(best_values + target, best)
    tl.store(best_ids + target, best_id)
    if CHECKSUMS:
        raw = tl.load(logits + row * logits_stride + ids, mask=mask, other=0.0).to(tl.float32)
        kept_score = 0.0 - tl.where(deficit > limit, float("inf"), deficit)
        raw_sum = raw.to(tl.int32, bitcast=True).to(tl.int64) * tl.load(weights + ids, mask=mask, other=0)
        kept_sum = kept_score.to(tl.int32, bitcast=True).to(tl.int64) * tl.load(weights + VOCAB + ids, mask=mask, other=0)
        tl.atomic_add(checksums + row, tl.sum(tl.where(mask, raw_sum + kept_sum, 0), 0), sem="relaxed")


@triton.jit
def _row_argmax(tokens, block_maxima, best_values, best_ids, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """The best token of all blocks; -1 if the logits contain NaN or +inf, or if no token is left."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    value = tl.load(best_values + row * blocks + block, mask=block < blocks, other=float("-inf"))
    ids = tl.load(best_ids + row * blocks + block, mask=block < blocks, other=2147483647)
    token = tl.min(tl.where(value == tl.max(value, 0), ids, 2147483647), 0).to(tl.int64)
    best = row_max(block_maxima + row * 2 * blocks, blocks, BLOCKS)
    raw = row_max(block_maxima + (row * 2 + 1) * blocks, blocks, BLOCKS)
    valid = (best > float("-inf")) & (best < float("inf")) & (raw < float("inf"))
    tl.store(tokens + row, tl.where(valid, token, -1))


def sample_tokens(
    logits: Tensor, table: SamplingTable, *, vocab: int, width: int, weights: Tensor | None = None, pdl: bool = False
) -> tuple[SamplingResult, Tensor | None]:
    """Sample one token per row of logits [C, ≥ V] (any dtype, inner stride 1). With `weights` [2, V] int64, the token weights of
    checksums, also return checksums [C]."""
    rows, device = len(logits), logits.device
    blocks = triton.cdiv(width, BLOCK)
    grid, padded_blocks = (rows, blocks), triton.next_power_of_2(blocks)
    deficits = torch.empty(rows, width, dtype=torch.float32, device=device)
    block_maxima = torch.empty(rows, 2, blocks, dtype=torch.float32, device=device)
    # These buffers are zeroed before the first launch, so that the kernels are launched back to back.
    histograms = torch.zeros(2, rows, 2, HISTOGRAM_WORDS, dtype=torch.int64, device=device)
    checksums = None if weights is None else torch.zeros(rows, dtype=torch.int64, device=device)
    _scores[grid](
        logits,
        table.rows,
        table.tokens,
        table.values,
        table.output,
        table.prompt,
        table.masks,
        table.mask_rows,
        deficits,
        block_maxima,
        logits.stride(0),
        0 if table.output is None else table.output.stride(0),
        0 if table.masks is None else table.masks.stride(0),
        width,
        VOCAB=vocab,
        ADJUSTED=table.adjusted,
        HISTORY=table.output is not None,
        MASKED=table.masks is not None,
        BLOCK_V=BLOCK,
        enable_fp_fusion=False,
        PDL=pdl,
        **launch_options(pdl),
    )
    search_limits = find_limits(
        logits,
        table.rows,
        deficits,
        block_maxima,
        histograms,
        vocab=vocab,
        adjusted=table.adjusted,
        has_top_k=table.has_top_k,
        has_top_p=table.has_top_p,
        pdl=pdl,
    )
    limits = torch.empty(rows, dtype=torch.float32, device=device)
    best_values = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    best_ids = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    _block_argmax[grid](
        logits,
        table.rows,
        deficits,
        search_limits,
        limits,
        best_values,
        best_ids,
        weights,
        checksums,
        logits.stride(0),
        width,
        VOCAB=vocab,
        HAS_TOP_K=table.has_top_k,
        HAS_TOP_P=table.has_top_p,
        CHECKSUMS=weights is not None,
        BLOCK_V=BLOCK,
        enable_fp_fusion=False,
        PDL=pdl,
        **launch_options(pdl),
    )
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    _row_argmax[(rows,)](
        tokens, block_maxima, best_values, best_ids, blocks, BLOCKS=padded_blocks, PDL=pdl, num_warps=1, **launch_options(pdl)
    )
    return SamplingResult(tokens, deficits, limits, block_maxima), None if checksums is None else checksums & (2**63 - 1)
