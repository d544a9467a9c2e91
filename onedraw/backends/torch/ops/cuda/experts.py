"""Mixture of experts with Triton: grouped matrix products, and the weighted sum in expert order.

In: rows x [T, E], the experts of each row with their weights, and the experts' matrices. Out: [T, E].

(row, expert) pairs are grouped by expert and cut into tiles; a tile processes K from front to back like any other product, so the
bits of a row do not depend on the other rows of its expert. The outputs of a row are added in expert order.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.expert_routing import MAX_PAIRS, group_by_expert
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.norm import ACTIVATIONS
from onedraw.backends.torch.ops.cuda.triton_math import apply_activation, begin_kernel
from onedraw.models.spec import Activation


@dataclass(frozen=True, slots=True)
class Routes:
    """(row, expert) pairs grouped by expert, on the device; computed without a host synchronization."""

    order: Tensor  # [T * used] int32: pairs by expert, those of one expert in order of rows
    tiles: Tensor  # [N, 3] int32: expert, first pair, pairs; 0 pairs for an unused tile
    weights: Tensor  # [T, used] float32, lowest expert first
    height: int  # pairs of a tile, at most

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
    """y[pair] = x[pair // DIVIDE] · weight[expert]ᵀ for the pairs of one tile. With GATE: activation(first half of the weight's
    rows) times the second half, each rounded as a separate product would be."""
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
    """Outputs of one row, each times its weight, added in order."""
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
    """Group experts [T, used] int64 and their weights [T, used] float32, in any order; `count` experts in total. `height`: pairs
    of a tile, at most."""
    rows, used = experts.shape
    pairs = rows * used
    height = height or (16 if pairs <= 32 * count else 64)
    max_tiles = min(pairs, count + pairs // height)  # for any routing
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
    """Row counts from which on pairs are grouped by sorting, and from which on tiles are taller."""
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
    """x [T, E]; gate_up [experts, 2F, E], down [experts, E, F] → Σ weight · down(act(gate x) · up x), lowest expert first."""
    hidden = grouped_gemm(x, gate_up, routes, divide=routes.used, gate=ACTIVATIONS[activation], pdl=pdl)  # [T * used, F]
    outputs = grouped_gemm(hidden, down, routes, divide=1, pdl=pdl)  # [T * used, E]
    return combine(outputs, routes, width=x.shape[1], scale=scale, pdl=pdl)


def combine(outputs: Tensor, routes: Routes, *, width: int, scale: float, pdl: bool = False) -> Tensor:
    """Outputs of pairs [T * used, width] → [T, width], lowest expert first."""
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
    """Each pair's row of x (pair // divide) times the weight of its expert: [T * used, N], or N / 2 with a gate."""
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
