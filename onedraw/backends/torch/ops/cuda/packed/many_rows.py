"""Products of many rows with dequantized weights, in Triton: for GPUs other than Hopper, which has `many_rows_hopper.cu`. Tests
compare the other kernels with this one.

In: `PackedActivations` and a dequantized slice of outputs (activations.py, which defines the arithmetic). Out: [T, N]. A program
computes one tile of rows and outputs, with inputs in order; tile sizes do not change the result. A span is 256 inputs. Axes: T
rows, N outputs.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-redef, untyped-decorator, misc"
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.packing import SPAN
from onedraw.backends.torch.ops.cuda.packed.activations import DequantizedWeight, PackedActivations


@dataclass(frozen=True, slots=True)
class ManyRowsTile:
    """Tile sizes and launch options. They do not change the result."""

    rows: int = 128
    columns: int = 64
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8  # row tiles per band: programs are numbered band by band, so that weights are reused from the L2 cache


@triton.jit
def _tile_index(rows, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The tile of a program, as (row tile, output tile), ordered so that neighbouring programs share rows or weights."""
    program = tl.program_id(0)
    blocks_m = tl.cdiv(rows, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    band = program // (GROUP * blocks_n)
    height = tl.minimum(blocks_m - band * GROUP, GROUP)
    within = program % (GROUP * blocks_n)
    return band * GROUP + within % height, within // height


@triton.jit(do_not_specialize=["rows", "n"])
def _many_rows_product(
    x,
    factors,
    sums,
    weights,
    scales,
    minima,
    min_scales,
    bias,
    residual,
    y,
    rows,
    n,
    spans,
    scale_stride,
    residual_stride,
    y_stride,
    PER: tl.constexpr,
    MINIMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Compute one tile of x · weightsᵀ + bias + residual. PER: scales per span and output, 1 or 8. BLOCK_K: inputs per iteration,
    32 if PER is 8."""
    block_m, block_n = _tile_index(rows, n, BLOCK_M, BLOCK_N, GROUP)
    m = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    live = m < rows
    inside = column < n
    m_safe = tl.where(live, m, 0)
    safe = tl.where(inside, column, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    sixteen = tl.arange(0, 16)
    width = spans * 256
    x_at = x + m_safe[:, None] * width + k[None, :]
    w_at = weights + safe[None, :] * width + k[:, None]
    STEPS: tl.constexpr = 256 // BLOCK_K
    part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    segment = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, spans * STEPS):
        left = tl.load(x_at + step * BLOCK_K)
        right = tl.load(w_at + step * BLOCK_K)
        part = tl.dot(left, right, part)
        span = step // STEPS
        if PER == 8:
            factor = tl.load(factors + m_safe * spans + span)
            scale = tl.load(scales + step * scale_stride + safe)
            segment = tl.fma(part, factor[:, None] * scale[None, :], segment)
            if MINIMA:
                at = sums + (m_safe * spans + span) * 16 + step % 8
                whole = tl.load(at).to(tl.float32) + tl.load(at + 8).to(tl.float32)
                low = tl.load(min_scales + step * scale_stride + safe)
                spread = whole[:, None] + tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                segment = tl.fma(spread, factor[:, None] * low[None, :], segment)
            part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        elif step % STEPS == STEPS - 1:
            factor = tl.load(factors + m_safe * spans + span)
            scale = tl.load(scales + span * scale_stride + safe)
            segment = tl.fma(part, factor[:, None] * scale[None, :], segment)
            if MINIMA:
                met = tl.dot(
                    tl.load(sums + (m_safe[:, None] * spans + span) * 16 + sixteen[None, :]),
                    tl.load(minima + (safe[None, :] * spans + span) * 8 + (sixteen % 8)[:, None]),
                )
                low = tl.load(min_scales + span * scale_stride + safe)
                segment = tl.fma(met, factor[:, None] * -low[None, :], segment)
            part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if step % (4 * STEPS) == 4 * STEPS - 1:
            total += segment
            segment = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total += segment
    keep = live[:, None] & inside[None, :]
    kind = y.dtype.element_ty
    out = total.to(kind)
    if HAS_BIAS:
        out = (out.to(tl.float32) + tl.load(bias + column, mask=inside, other=0.0)[None, :].to(tl.float32)).to(kind)
    if HAS_RESIDUAL:
        add = tl.load(residual + m[:, None] * residual_stride + column[None, :], mask=keep, other=0.0)
        out = (out.to(tl.float32) + add.to(tl.float32)).to(kind)
    tl.store(y + m[:, None] * y_stride + column[None, :], out, mask=keep)


def many_rows_product(
    activations: PackedActivations,
    dequantized: DequantizedWeight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: ManyRowsTile | None = None,
) -> Tensor:
    """A product of many rows: activations · dequantized weightᵀ + bias + residual → `out` [T, N]. `out` and `residual` may be
    columns of wider tensors."""
    rows, (n, width) = len(activations), dequantized.weights.shape
    if rows == 0:
        return out
    tile = tile or ManyRowsTile()
    _many_rows_product[(triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns),)](
        activations.x,
        activations.factors,
        activations.sums,
        dequantized.weights,
        dequantized.scales,
        dequantized.minima,
        dequantized.min_scales,
        bias,
        residual,
        out,
        rows,
        n,
        width // SPAN,
        dequantized.scales.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        PER=8 if dequantized.by_block else 1,
        MINIMA=dequantized.min_scales is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=32 if dequantized.by_block else tile.depth,
        GROUP=tile.group,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
    return out
