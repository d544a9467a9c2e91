"""Mixture of experts with Triton: grouped matrix products, and the weighted sum in expert order.

In: rows x [T, E], the experts of each row with their weights, and the experts' matrices. Out: [T, E].

A pair is a row and one of its experts. Pairs are grouped by expert and cut into tiles; a tile processes the inputs of the product
from front to back like any other product, so the bits of a row do not depend on the other rows of its expert. The outputs of a
row are added in expert order. Axes: T rows, `used` experts of a row, E hidden width, F feed-forward width of an expert, N outputs
of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.norm import ACTIVATIONS
from onedraw.backends.torch.ops.cuda.triton_math import apply_activation, begin_kernel, exp, sigmoid, tanh
from onedraw.models.spec import Activation, MoeSpec

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"


MAX_PAIRS = 512  # the most pairs that `group_by_expert` accepts; more are sorted by torch
PAIR_BLOCK = 16  # the pairs that the loop of `_group_by_expert` compares at a time


@triton.jit
def _choose_experts(
    logits,
    bias,
    factors,
    ids,
    weights,
    stride,
    softcap,
    EXPERTS: tl.constexpr,
    USED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    FACTORS: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select the best experts of one row, best first, the lowest index among equals. Their scores are added in this order."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    mask = expert < EXPERTS
    raw = tl.load(logits + row * stride + expert, mask=mask, other=0.0).to(tl.float32)
    if SOFTCAP:
        raw = tanh(tl.div_rn(raw, tl.zeros_like(raw) + softcap)) * softcap
    if SOFTMAX:
        exps = tl.where(mask, exp(raw - tl.max(tl.where(mask, raw, float("-inf")), 0)), 0.0)
        scores = tl.div_rn(exps, tl.zeros_like(exps) + tl.sum(exps, 0))
    else:
        scores = sigmoid(raw)
    rank = scores
    if BIAS:
        rank = scores + tl.load(bias + expert, mask=mask, other=0.0)
    # NaN ranks first, as in a sort, and makes all weights of the row NaN; the sampler then reports the row as invalid. No expert
    # is selected twice.
    rank = tl.where(rank == rank, rank, float("inf"))
    remaining = mask
    slot = tl.arange(0, SLOTS)
    expert_ids = tl.full((SLOTS,), EXPERTS - 1, dtype=tl.int32)
    weight = tl.zeros((SLOTS,), dtype=tl.float32)
    total = tl.full((), 0.0, dtype=tl.float32)
    for index in tl.static_range(USED):
        best = tl.max(tl.where(remaining, rank, float("-inf")), 0)
        chosen = tl.min(tl.where(remaining & (rank == best), expert, EXPERTS - 1), 0)
        remaining = remaining & (expert != chosen)
        score = tl.sum(tl.where(expert == chosen, scores, 0.0), 0)
        total += score
        expert_ids = tl.where(slot == index, chosen, expert_ids)
        weight = tl.where(slot == index, score, weight)
    if NORMALISED:
        weight = tl.div_rn(weight, tl.zeros_like(weight) + total)
    if FACTORS:
        weight = weight * tl.load(factors + expert_ids)
    tl.store(ids + row * USED + slot, expert_ids.to(tl.int64), mask=slot < USED)
    tl.store(weights + row * USED + slot, weight, mask=slot < USED)


def choose_experts(
    logits: Tensor, spec: MoeSpec, *, bias: Tensor | None, factors: Tensor | None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Experts of each token, best first, and their weights: [T, used] int64 and float32."""
    rows = len(logits)
    ids = torch.empty(rows, spec.used, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, spec.used, dtype=torch.float32, device=logits.device)
    if rows:
        _choose_experts[(rows,)](
            logits, bias, factors, ids, weights, logits.stride(0), float(spec.softcap or 0.0),
            EXPERTS=spec.experts, USED=spec.used, SOFTMAX=spec.scores == "softmax", SOFTCAP=spec.softcap is not None,
            BIAS=bias is not None, FACTORS=factors is not None, NORMALISED=spec.normalised,
            BLOCK=triton.next_power_of_2(spec.experts), SLOTS=triton.next_power_of_2(spec.used), PDL=pdl,
            num_warps=1, enable_fp_fusion=False, **launch_options(pdl),
        )  # fmt: skip
    return ids, weights


@triton.jit(do_not_specialize=["pairs", "max_tiles"])
def _group_by_expert(
    ids,
    weights,
    order,
    tiles,
    sorted_weights,
    starts,
    pairs,
    max_tiles,
    EXPERTS: tl.constexpr,
    USED: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program sorts all pairs: the position of a pair is the number of pairs that come before it, which the program
    counts."""
    begin_kernel(PDL)
    expert = tl.arange(0, BLOCK_E)
    pair = tl.arange(0, BLOCK)
    pair_expert = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    rank_in_expert = tl.zeros((BLOCK,), dtype=tl.int32)
    rank_in_row = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, pairs, PAIR_BLOCK):
        other = start + tl.arange(0, PAIR_BLOCK)
        other_expert = tl.load(ids + other, mask=other < pairs, other=-2).to(tl.int32)
        counts += tl.sum((expert[:, None] == other_expert[None, :]).to(tl.int32), 1)
        earlier = (pair_expert[:, None] == other_expert[None, :]) & (other[None, :] < pair[:, None])
        rank_in_expert += tl.sum(earlier.to(tl.int32), 1)
        same_row = (other // USED)[None, :] == (pair // USED)[:, None]
        rank_in_row += tl.sum(
            (same_row & (other_expert[None, :] < pair_expert[:, None]) & (other_expert >= 0)[None, :]).to(tl.int32), 1
        )
    start_pair = tl.cumsum(counts, 0) - counts
    tl.store(starts + expert, start_pair, mask=expert < EXPERTS)
    tile_counts = (counts + HEIGHT - 1) // HEIGHT
    ends = tl.cumsum(tile_counts, 0)
    for tile in range(0, tl.max(tile_counts, 0)):
        tile_ptrs = tiles + (ends - tile_counts + tile) * 3
        tile_mask = tile < tile_counts
        tl.store(tile_ptrs, expert, mask=tile_mask)
        tl.store(tile_ptrs + 1, start_pair + tile * HEIGHT, mask=tile_mask)
        tl.store(tile_ptrs + 2, tl.minimum(counts - tile * HEIGHT, HEIGHT), mask=tile_mask)
    unused = (pair >= tl.max(ends, 0)) & (pair < max_tiles)
    for word in tl.static_range(3):
        tl.store(tiles + pair * 3 + word, 0, mask=unused)
    tl.debug_barrier()
    position = tl.load(starts + pair_expert, mask=pair < pairs, other=0) + rank_in_expert
    sorted_pair = pair // USED * USED + rank_in_row
    tl.store(order + position, sorted_pair, mask=pair < pairs)
    tl.store(sorted_weights + sorted_pair, tl.load(weights + pair, mask=pair < pairs, other=0.0), mask=pair < pairs)


def group_by_expert(
    ids: Tensor, weights: Tensor, *, count: int, height: int, max_tiles: int, pdl: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Order, tiles and weights of `Routes`, for at most MAX_PAIRS pairs."""
    (rows, used), device = ids.shape, ids.device
    order = torch.empty(rows * used, dtype=torch.int32, device=device)
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=device)
    sorted_weights = torch.empty(rows, used, dtype=torch.float32, device=device)
    starts = torch.empty(count, dtype=torch.int32, device=device)
    _group_by_expert[(1,)](
        ids, weights, order, tiles, sorted_weights, starts, rows * used, max_tiles,
        EXPERTS=count, USED=used, HEIGHT=height, BLOCK=triton.next_power_of_2(rows * used),
        BLOCK_E=triton.next_power_of_2(count), PAIR_BLOCK=PAIR_BLOCK, PDL=pdl, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    return order, tiles, sorted_weights


@triton.jit
def _add_shared_expert(
    out,
    shared,
    gate,
    residual,
    y,
    gate_stride,
    width,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.load(shared + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        total = total * sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
    total = (total + tl.load(out + row * width + columns, mask=mask, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
    if ADDED:
        before = tl.load(residual + row * width + columns, mask=mask, other=0.0)
        total = before.to(tl.float32) + total.to(tl.float32)
    tl.store(y + row * width + columns, total.to(y.dtype.element_ty), mask=mask)


def add_shared_expert(out: Tensor, shared: Tensor, gate: Tensor | None, residual: Tensor | None, *, pdl: bool = False) -> Tensor:
    """Add the shared expert's output: residual + (shared · sigmoid(gate) + out), rounded where separate operations would round.
    The gate is column 0 of `gate` [T, …]; for None, sigmoid(gate) is left out."""
    rows, width = out.shape
    y = torch.empty_like(out if residual is None else residual)
    if rows:
        _add_shared_expert[(rows, triton.cdiv(width, 1024))](
            out, shared, gate, residual, y, 0 if gate is None else gate.stride(0), width,
            GATED=gate is not None, ADDED=residual is not None, BLOCK=1024, PDL=pdl, enable_fp_fusion=False,
            **launch_options(pdl),
        )  # fmt: skip
    return y


# ------------------------------------------------------------------ grouped products


@dataclass(frozen=True, slots=True)
class Routes:
    """Pairs grouped by expert, on the device. The tables are computed without synchronizing with the host."""

    order: Tensor  # [T * used] int32: numbers of pairs, sorted by expert and then by row
    tiles: Tensor  # [n, 3] int32: expert, index in `order` of the tile's first pair, number of pairs (0 for an unused tile)
    weights: Tensor  # [T, used] float32: the experts' weights, lowest expert first
    height: int  # the largest number of pairs of a tile

    @property
    def used(self) -> int:
        return self.weights.shape[1]


@triton.jit
def _grouped_gemm(
    x,
    weight,
    y,
    order,
    tiles,
    n,
    DIVIDE: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute y[pair] = x[pair // DIVIDE] · weight[expert]ᵀ for the pairs of one tile. With GATE: activation(x · gateᵀ) times x ·
    upᵀ, where gate is the first half of the weight's rows and up the second; each is rounded as a separate product would be."""
    begin_kernel(PDL)
    tile = tl.program_id(0) * 3
    expert = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + tile + 1)
    count = tl.load(tiles + tile + 2)
    if count > 0:
        m = tl.arange(0, BLOCK_M)
        row_mask = m < count
        pair = tl.load(order + first + m, mask=row_mask, other=0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = column < n
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x + (pair // DIVIDE)[:, None] * K + k[None, :]
        matrices: tl.constexpr = 2 if GATE else 1
        w_ptrs = weight + expert * matrices * n * K + column[None, :].to(tl.int64) * K + k[:, None]
        dtype = y.dtype.element_ty
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            left = tl.load(x_ptrs + start, mask=row_mask[:, None] & (k[None, :] < K - start), other=0.0)
            right = tl.load(w_ptrs + start, mask=column_mask[None, :] & (k[:, None] < K - start), other=0.0)
            accumulator = tl.dot(left, right, accumulator)
            if GATE:
                up_weight = tl.load(w_ptrs + n * K + start, mask=column_mask[None, :] & (k[:, None] < K - start), other=0.0)
                up = tl.dot(left, up_weight, up)
        if GATE:
            activated = apply_activation(accumulator.to(dtype).to(tl.float32), GATE).to(dtype)
            accumulator = activated.to(tl.float32) * up.to(dtype).to(tl.float32)
        y_ptrs = y + pair[:, None] * n + column[None, :]
        tl.store(y_ptrs, accumulator.to(dtype), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _combine(outputs, weights, y, width, scale, USED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The sum of a row's outputs, each times its weight, in the order of `Routes.weights`."""
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in tl.static_range(USED):
        output = tl.load(outputs + (row * USED + index) * width + columns, mask=mask, other=0.0).to(tl.float32)
        total = total + output * tl.load(weights + row * USED + index)
    tl.store(y + row * width + columns, (total * scale).to(y.dtype.element_ty), mask=mask)


def route(experts: Tensor, weights: Tensor, *, count: int, height: int | None = None, pdl: bool = False) -> Routes:
    """Group the pairs of experts [T, used] int64, which may be in any order, with their weights [T, used] float32. `count`: the
    number of experts. `height`: the largest number of pairs of a tile, chosen here if None."""
    rows, used = experts.shape
    pairs = rows * used
    height = height or (16 if pairs <= 32 * count else 64)
    max_tiles = min(pairs, count + pairs // height)  # an upper bound for any routing, so that shapes do not depend on the data
    if 0 < pairs <= MAX_PAIRS:
        tables = group_by_expert(
            experts.contiguous(), weights.contiguous(), count=count, height=height, max_tiles=max_tiles, pdl=pdl
        )
        return Routes(*tables, height)
    experts, by_expert = experts.sort(dim=1)
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    tile_counts = (counts + height - 1) // height
    ends = tile_counts.cumsum(0)
    tile = torch.arange(max_tiles, device=flat.device)
    expert = torch.searchsorted(ends, tile, right=True).clamp_(max=count - 1)
    offset = (tile - (ends - tile_counts)[expert]) * height
    tile_rows = (counts[expert] - offset).clamp(0, height)
    tile_rows = torch.where(tile < ends[-1], tile_rows, 0)
    tiles = torch.stack([expert, starts[expert] + offset, tile_rows], 1).to(torch.int32)
    return Routes(order.to(torch.int32), tiles, weights.gather(1, by_expert).contiguous(), height)


def route_borders(count: int, used: int) -> tuple[int, ...]:
    """Row counts from which pairs are sorted by torch instead of `group_by_expert`, and from which tiles are taller."""
    return MAX_PAIRS // used + 1, 32 * count // used + 1


def run_experts(
    x: Tensor,
    routes: Routes,
    *,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    scale: float = 1.0,
    pdl: bool = False,
) -> Tensor:
    """Compute all experts. x [T, E], gate_up [experts, 2F, E], down [experts, E, F] → the sum of weight · down(activation(gate x)
    · up x) over a row's experts, lowest first: [T, E]."""
    hidden = grouped_gemm(x, gate_up, routes, divide=routes.used, gate=ACTIVATIONS[activation], pdl=pdl)  # [T * used, F]
    outputs = grouped_gemm(hidden, down, routes, divide=1, pdl=pdl)  # [T * used, E]
    return combine(outputs, routes, width=x.shape[1], scale=scale, pdl=pdl)


def combine(outputs: Tensor, routes: Routes, *, width: int, scale: float, pdl: bool = False) -> Tensor:
    """Add the outputs of pairs [T * used, width], each times its weight, lowest expert first: [T, width], times `scale`."""
    rows = len(routes.weights)
    y = torch.empty(rows, width, dtype=outputs.dtype, device=outputs.device)
    if rows:
        block = 1024
        _combine[(rows, triton.cdiv(width, block))](
            outputs, routes.weights, y, width, scale, USED=routes.used, BLOCK=block, PDL=pdl, enable_fp_fusion=False,
            **launch_options(pdl),
        )  # fmt: skip
    return y


def grouped_gemm(x: Tensor, weight: Tensor, routes: Routes, *, divide: int, gate: int = 0, pdl: bool) -> Tensor:
    """Multiply, for all pairs, row pair // divide of x with the weight of the pair's expert: [T * used, N], or N / 2 with a
    gate."""
    _, n, k = weight.shape
    n = n // 2 if gate else n
    y = torch.empty(len(routes.order), n, dtype=x.dtype, device=x.device)
    if len(y):
        columns, depth = (64, 128) if routes.height == 16 else (128, 64)
        columns = columns // 2 if gate else columns
        _grouped_gemm[(len(routes.tiles), triton.cdiv(n, columns))](
            x,
            weight,
            y,
            routes.order,
            routes.tiles,
            n,
            DIVIDE=divide,
            K=k,
            GATE=gate,
            BLOCK_M=routes.height,
            BLOCK_N=columns,
            BLOCK_K=depth,
            PDL=pdl,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return y
