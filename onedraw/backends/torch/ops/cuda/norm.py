"""RMSNorm, gated activations and gates with Triton.

In: rows [T, W]. Out: rows. A program of a norm normalizes a row, or a piece of a row; in both cases it adds up the squares of the
whole row, in a layout that depends on the width alone, so the order of the sum does not depend on the other rows. Norms and gated
activations can also write their rows as packed activations, the format that products with quantized weights read
(`packed/activations.py`). Axes: T rows, W columns, F feed-forward width. PDL is programmatic dependent launch.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.packing import FEW_ROWS, SEGMENT, SPAN
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.packed.activations import PackedActivations, scaled_span, store_span
from onedraw.backends.torch.ops.cuda.triton_math import apply_activation, begin_kernel, sigmoid, softplus
from onedraw.models.spec import Activation, Gate

# A program with at most this many warps fits on a multiprocessor beside a block of a packed product (packed/work_split.py); a
# larger program would delay the start of the product's blocks.
MAX_WARPS = 8
ACTIVATIONS: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2}  # the numbers of activations in the arguments of kernels


@triton.jit
def _rms_norm(
    x,
    weight,
    y,
    x_out,
    factors,
    sums,
    x_stride,
    eps,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    FP32_WEIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    # Every program of a row computes the sum of the whole row, and normalizes PIECE columns.
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = columns < W
    if HAS_WEIGHT:  # no kernel writes the weight, so it is loaded before the PDL wait
        factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    begin_kernel(PDL, PACKED)
    row = tl.program_id(0).to(tl.int64)
    all_columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + all_columns, mask=all_columns < W, other=0.0).to(tl.float32)
    piece_values = values if PIECE == BLOCK else tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) * (1.0 / W) + eps)
    normed = piece_values * scale
    dtype = y.dtype.element_ty
    if HAS_WEIGHT:
        normed = normed * factor if FP32_WEIGHT else normed.to(dtype).to(tl.float32) * factor
    tl.store(y + row * W + columns, normed.to(dtype), mask=mask)
    if PACKED:
        SPANS: tl.constexpr = PIECE // 256
        scaled, power, hi, lo = scaled_span(normed.to(dtype).to(tl.float32), SPANS)
        store_span(scaled, power, hi, lo, x_out, factors, sums, row, tl.program_id(1) * SPANS, (W + 255) // 256, SPANS)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, packed: PackedActivations | None = None, pdl: bool = False
) -> Tensor:
    """RMSNorm of x [..., W]. A float32 weight is applied before the normalized values are rounded, any other after that.
    `packed`: also store the result there, with the same bits as `pack_activations`."""
    width = x.shape[-1]
    flat = x.reshape(-1, width) if x.dim() != 2 else x
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if len(flat):
        block = max(triton.next_power_of_2(width), 1 if packed is None else 256)
        piece = min(block, SEGMENT * SPAN) if packed is not None and _splits_rows(flat) else block
        _rms_norm[(len(flat), triton.cdiv(width, piece))](
            flat,
            weight,
            y,
            *_packed_pointers(packed),
            flat.stride(0),
            eps,
            W=width,
            BLOCK=block,
            PIECE=piece,
            HAS_WEIGHT=weight is not None,
            FP32_WEIGHT=weight is not None and weight.dtype == torch.float32,
            PACKED=packed is not None,
            PDL=pdl,
            num_warps=_warps(block),
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return y.view(x.shape)


@triton.jit
def _gated_activation(
    gate_up,
    y,
    x_out,
    factors,
    sums,
    n,
    stride,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PAIRED: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_kernel(PDL, PACKED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < n
    if PAIRED:
        pair_columns = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(gate_up + row * stride + pair_columns, mask=pair_columns < 2 * n, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
    else:
        gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * stride + n + columns, mask=mask, other=0.0).to(tl.float32)
    activated = apply_activation(gate, ACTIVATION).to(y.dtype.element_ty)
    product = (activated.to(tl.float32) * up).to(y.dtype.element_ty)
    tl.store(y + row * n + columns, product, mask=mask)
    if PACKED:
        SPANS: tl.constexpr = BLOCK // 256
        scaled, power, hi, lo = scaled_span(tl.where(mask, product.to(tl.float32), 0.0), SPANS)
        store_span(scaled, power, hi, lo, x_out, factors, sums, row, tl.program_id(1) * SPANS, (n + 255) // 256, SPANS)


def gated_activation(
    gate_up: Tensor, activation: Activation, *, paired: bool = False, packed: PackedActivations | None = None, pdl: bool = False
) -> Tensor:
    """Gated activation, activation(gate) * up: [T, 2F] → [T, F]. The gate is the first half of the columns; with `paired`,
    gate and up columns alternate. `packed`: also store the result there, with the same bits as `pack_activations`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        # A segment of packed activations has one factor, so a program computes a whole segment.
        max_block, min_block = (2048, 1) if packed is None else (SEGMENT * SPAN, SPAN)
        block = max(min(max_block, triton.next_power_of_2(width)), min_block)
        _gated_activation[(rows, triton.cdiv(width, block))](
            gate_up,
            y,
            *_packed_pointers(packed),
            width,
            gate_up.stride(0),
            BLOCK=block,
            ACTIVATION=ACTIVATIONS[activation],
            PAIRED=paired,
            PACKED=packed is not None,
            PDL=pdl,
            num_warps=4 if packed is None else MAX_WARPS,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return y


@triton.jit
def _apply_gate(
    x,
    gate,
    y,
    gate_stride,
    WIDTH: tl.constexpr,
    GATE_GROUP: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    value = tl.load(x + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    gate_value = tl.load(gate + row * gate_stride + columns // GATE_GROUP, mask=mask, other=0.0).to(tl.float32)
    dtype = y.dtype.element_ty
    gate_value = (sigmoid(gate_value) if SIGMOID else softplus(gate_value)).to(dtype).to(tl.float32)
    tl.store(y + row * WIDTH + columns, (value * gate_value).to(dtype), mask=mask)


def apply_gate(x: Tensor, gate: Tensor, kind: Gate, *, pdl: bool = False) -> Tensor:
    """Multiply x [T, W] by sigmoid or softplus of a gate [T, W], or [T, W / n] with one value for n neighbouring columns."""
    rows, width = x.shape
    y = torch.empty_like(x)
    if rows:
        block = min(2048, triton.next_power_of_2(width))
        _apply_gate[(rows, triton.cdiv(width, block))](
            x,
            gate,
            y,
            gate.stride(0),
            WIDTH=width,
            GATE_GROUP=width // gate.shape[1],
            SIGMOID=kind == "sigmoid",
            BLOCK=block,
            PDL=pdl,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return y


def _packed_pointers(packed: PackedActivations | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if packed is None else (packed.x, packed.factors, packed.sums)


def _splits_rows(x: Tensor) -> bool:
    """Whether several programs compute pieces of one row. They do only for at most FEW_ROWS rows, and only if rows are aligned:
    then the compiler vectorizes loads by eight, whatever else the program loads; otherwise the layout, and with it the order of
    the sum, would depend on the piece that the program loads beside the row."""
    aligned = x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return aligned and len(x) <= FEW_ROWS


def _warps(block: int) -> int:
    return min(max(block // 512, 1), MAX_WARPS)
