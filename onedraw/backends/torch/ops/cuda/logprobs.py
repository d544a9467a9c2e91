"""Logprobs of sampled tokens with Triton: the integers from which `sampling/logprobs.py` computes a row's logprobs.

In: the result of `sampling_kernels.py`, and which rows request logprobs. Out: for each of these rows the mass of all tokens, the
deficit of the sampled token, and the most likely tokens with their deficits. A deficit is the best score minus a token's score,
divided by the temperature, or for logprobs before the filters the best logit minus a token's logit; a mass is exp(-deficit) as an
integer. Blocks of a row are combined only by integer sums and by comparisons, so their number and order do not change the result.
The result is written to the columns TOTAL (sum of the masses), SAMPLED (bits of the sampled token's deficit) and, from TOP on,
the most likely tokens. Axis: a row is one position to sample at.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.sampling_kernels import BLOCK, SamplingResult
from onedraw.backends.torch.ops.cuda.top_k_top_p import row_max
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel, exp
from onedraw.backends.torch.sampling.sampler import asked_keys
from onedraw.sampling.logprobs import MASS_BITS, SAMPLED, TOP, TOTAL

TOP_CAPACITIES = (32, 128)  # how many most likely tokens the samples have columns for; a step uses one of these for all its rows
NO_LOGPROBS = -1  # in place of a row's request for logprobs if it wants none


@triton.jit
def _described_deficit(logits, deficits, limits, row, ids, mask, best, processed, logits_stride, width):
    """Deficits from which logprobs are computed: those of the logits, or if `processed` is not 0 those of the adjusted scores,
    infinite for tokens that the filters remove."""
    if processed != 0:
        deficit = tl.load(deficits + row * width + ids, mask=mask, other=float("inf"))
        deficit = tl.where(deficit > tl.load(limits + row), float("inf"), deficit)
    else:
        deficit = best - tl.load(logits + row * logits_stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    return deficit


@triton.jit
def _block_logprobs(
    logits,
    deficits,
    limits,
    block_maxima,
    requests,
    totals,
    candidates,
    logits_stride,
    width,
    blocks,
    VOCAB: tl.constexpr,
    SCALE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a block's mass to its row's total, and store its most likely tokens, best first, as (bits of the deficit, id)."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = tl.load(requests + row)
    if request >= 0:
        best = row_max(block_maxima + (row * 2 + 1) * blocks, blocks, BLOCKS) + 0.0  # adding 0 turns -0.0 into 0.0
        ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = ids < VOCAB
        deficit = _described_deficit(logits, deficits, limits, row, ids, mask, best, request % 2, logits_stride, width)
        mass = tl.where(mask, exp(0.0 - deficit) * SCALE, 0.0).to(tl.int64)
        tl.atomic_add(totals + row, tl.sum(mass, 0), sem="relaxed")
        keys = (deficit.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids.to(tl.int64)
        keys = tl.where(mask, keys, 9223372036854775807)
        target = candidates + (row * blocks + block) * CAPACITY
        for rank in range(request // 2):
            smallest = tl.min(keys, 0)
            tl.store(target + rank, smallest)
            keys = tl.where(keys == smallest, 9223372036854775807, keys)


@triton.jit
def _row_logprobs(
    logits,
    deficits,
    limits,
    block_maxima,
    requests,
    totals,
    candidates,
    tokens,
    samples,
    logits_stride,
    width,
    samples_stride,
    blocks,
    TOTAL: tl.constexpr,
    SAMPLED: tl.constexpr,
    TOP: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fill the logprob columns of a row from the candidates of its blocks."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + row)
    if request >= 0:
        target = samples + row * samples_stride
        best = row_max(block_maxima + (row * 2 + 1) * blocks, blocks, BLOCKS) + 0.0
        token = tl.maximum(tl.load(tokens + row), 0)
        deficit = _described_deficit(logits, deficits, limits, row, token, token >= 0, best, request % 2, logits_stride, width)
        tl.store(target + TOTAL, tl.load(totals + row))
        tl.store(target + SAMPLED, deficit.to(tl.int32, bitcast=True).to(tl.int64))
        top = request // 2
        place = tl.arange(0, ROOM)
        found = (place < blocks * CAPACITY) & (place % CAPACITY < top)
        keys = tl.load(candidates + row * blocks * CAPACITY + place, mask=found, other=9223372036854775807)
        for rank in range(top):
            smallest = tl.min(keys, 0)
            tl.store(target + TOP + rank, smallest)
            keys = tl.where(keys == smallest, 9223372036854775807, keys)


def write_logprobs(
    samples: Tensor, logits: Tensor, result: SamplingResult, requests: Tensor, *, vocab: int, width: int, pdl: bool = False
) -> None:
    """Fill the logprob columns of `samples` in the rows that request logprobs (`SamplingTable.logprobs`). The tensor has TOP
    columns and room for as many tokens as one of TOP_CAPACITIES says."""
    rows, blocks, capacity = len(samples), result.block_maxima.shape[2], samples.shape[1] - TOP
    totals = torch.zeros(rows, dtype=torch.int64, device=samples.device)
    candidates = torch.empty(rows, blocks, capacity, dtype=torch.int64, device=samples.device)
    tensors = (logits, result.deficits, result.limits, result.block_maxima, requests, totals, candidates)
    constants = {"CAPACITY": capacity, "BLOCKS": triton.next_power_of_2(blocks), "PDL": pdl, "enable_fp_fusion": False}
    _block_logprobs[(rows, blocks)](
        *tensors,
        logits.stride(0),
        width,
        blocks,
        VOCAB=vocab,
        SCALE=2.0**MASS_BITS,
        BLOCK_V=BLOCK,
        **constants,
        **launch_options(pdl),
    )
    room = triton.next_power_of_2(blocks * capacity)
    _row_logprobs[(rows,)](
        *tensors,
        result.tokens,
        samples,
        logits.stride(0),
        width,
        samples.stride(0),
        blocks,
        TOTAL=TOTAL,
        SAMPLED=SAMPLED,
        TOP=TOP,
        ROOM=room,
        num_warps=min(max(room // 512, 1), 16),
        **constants,
        **launch_options(pdl),
    )


def write_asked(samples: Tensor, logits: Tensor, result: SamplingResult, requests: Tensor, asked: Tensor) -> None:
    """Fill the last columns of `samples` with the tokens that rows ask for by id (`SamplingTable.asked`)."""
    ids = asked.to(torch.int64)
    known = ids.clamp(min=0)
    best = result.block_maxima[:, 1].amax(1, keepdim=True) + 0.0  # adding 0 turns -0.0 into 0.0
    kept = result.deficits.gather(1, known)
    kept = kept.masked_fill(kept > result.limits[:, None], torch.inf)
    raw = best - logits.gather(1, known).to(torch.float32)
    samples[:, -asked.shape[1] :] = asked_keys(torch.where(requests[:, None] % 2 == 1, kept, raw), ids)
