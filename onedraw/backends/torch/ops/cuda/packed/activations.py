"""Packed activations: rows scaled to float16 for matrix products with quantized weights, and the arithmetic of these products.

In: rows x [T, K] in bf16 or f16. Out: `PackedActivations`, which every packed product of these rows reads. All kernels follow
the same arithmetic (`few_rows.cu` and `experts.cu` for few rows, `many_rows_hopper.cu` and `many_rows.py` for many), so their
results are bitwise equal. Axes: T rows, K inputs, N outputs, S spans. d and m are the scale and the minimum of a block or span,
dmin the scale of minima; a code is the stored integer of a weight, and t a power of two that its float16 form contains:

1. Activations. A block is 32 inputs, a span is 256 inputs, a segment is 4 spans; inputs past K are zero. Each segment is divided
   by the power of two 2^e that brings its largest |x| into [512, 1024), with e in [-96, 118] and e = 0 for a segment of zeros:
   X = x · 2^-e, rounded to float16. A = the sum of X over a block, exact, then rounded to float32 and stored as two float16,
   hi = f16(A) and lo = f16(A - hi). Infinities and NaNs are kept. A row's result depends on that row alone.
2. K types (Q4_K, Q5_K, Q6_K) and NVFP4. W = t · scale · code in float16, rounded to nearest: exact except for Q6_K above 2,048.
   P = the sum of W · X over a span by tensor cores, 16 inputs at a time in order, accumulated from zero in float32. For types
   with minima, M is one tensor-core step over 16 values: t times the eight minima with hi, then the eight minima again with lo.
   sum = fma(P, d / t, sum); sum = fma(M, -dmin / t, sum), in float32; a kernel may multiply by 1 / t at the end instead.
   For NVFP4, d is the factor of the matrix and t = 1. For K types, t = 2^-24 for the first eight of sixteen outputs and 2^-20
   for the other eight. These W are subnormal in float16. Tensor cores align products to a common exponent before adding, and
   treat a subnormal's exponent as the smallest normal one, so t affects the last bits of P and is part of the arithmetic. The
   position of an output among its sixteen is its row number in the concatenated weights modulo 16, whichever kernel computes it.
3. Types with a float scale per block (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4). W = code minus its offset, exact. P = the sum of
   W · X over a block, two steps of 16 from zero. sum = fma(P, d, sum); with minima, sum = fma(hi + lo, m, sum).
4. Each segment's sum starts at zero and is multiplied by its 2^e, at the end or along the way: both give the same result, because
   a power of two commutes with rounding while all values stay in the range of float32. With float16 scales nothing underflows;
   nothing overflows while d · 2^e / t does not, that is, for scales below 1 and rows below 2^112. Segments are added in order,
   whichever thread computes them. Then the total is rounded, and bias and residual are added, each sum rounded.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.packing import SEGMENT, SPAN
from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel

BLOCK = 32  # a block sum is the sum of this many inputs
# Range of e: a float16 times 2^-96 does not underflow float32, and dividing by 2^118 brings any finite row into float16.
MIN_EXPONENT, MAX_EXPONENT = -96, 118
ONE_SEGMENT_SPANS = 4096  # rows × spans up to which a program packs one segment; for larger inputs a program packs two


@dataclass(frozen=True, slots=True)
class PackedActivations:
    """Scaled rows as packed products read them: S spans of 256 inputs, the last one padded with zeros."""

    x: Tensor  # [T, S * 256] float16: the inputs, each segment divided by its 2^e
    factors: Tensor  # [T, S] float32, 2^e: equal for all spans of a segment
    sums: Tensor  # [T, S, 16] float16: the hi parts of the eight block sums, then the lo parts

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, wanted: slice) -> PackedActivations:
        return PackedActivations(self.x[wanted], self.factors[wanted], self.sums[wanted])


class PendingActivations:
    """The packed form of the latest output of a norm or gated activation, kept for the product that reads it. Owner: the
    operations."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._packed: PackedActivations | None = None

    def put(self, rows: Tensor, packed: PackedActivations) -> None:
        self._rows, self._packed = rows, packed

    def take(self, rows: Tensor) -> PackedActivations | None:
        """The packed form of exactly this tensor, removed from here; None if another tensor is stored or it was taken before."""
        found = self.peek(rows)
        if found is not None:
            self._rows, self._packed = None, None
        return found

    def peek(self, rows: Tensor) -> PackedActivations | None:
        """Like `take`, but keeps the entry for a later reader of the same rows."""
        return self._packed if self._rows is rows else None


def empty_packed_activations(rows: int, width: int, device: torch.device) -> PackedActivations:
    spans = -(-width // SPAN)
    return PackedActivations(
        x=torch.empty(rows, spans * SPAN, dtype=torch.float16, device=device),
        factors=torch.empty(rows, spans, dtype=torch.float32, device=device),
        sums=torch.empty(rows, spans, 16, dtype=torch.float16, device=device),
    )


@triton.jit
def scaled_span(values, SPANS: tl.constexpr):
    """Scale one program's part of a row: float32 values [SPANS * 256], whole segments or the entire row → X [SPANS, 256] float16,
    2^e [SPANS] float32, and the hi and lo parts of the block sums [SPANS, 8] float16."""
    values = tl.reshape(values, (SPANS, 256))
    # Bit patterns of magnitudes, compared as integers, sort like the floats, with NaN last.
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    TOGETHER: tl.constexpr = 4 if SPANS >= 4 else SPANS
    largest = tl.max(tl.reshape(tl.max(bits, 1), (SPANS // TOGETHER, TOGETHER)), 1)
    largest = tl.reshape(tl.broadcast_to(largest[:, None], (SPANS // TOGETHER, TOGETHER)), (SPANS,))
    exponent = tl.minimum(tl.maximum((largest >> 23) - 136, -96), 118)
    exponent = tl.where(largest == 0, 0, exponent)
    factor = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = (values * inverse[:, None]).to(tl.float16)
    # The 32 values are multiples of 2^-24 up to 1,024, split into multiples of 2^-9 and the remainder. The sum of either part
    # needs at most 24 bits, so it is exact in any order; only adding the two sums rounds.
    exact = tl.reshape(scaled, (SPANS, 8, 32)).to(tl.float32)
    coarse = (exact + 24576.0) - 24576.0
    large, small = tl.sum(coarse, 2), tl.sum(exact - coarse, 2)
    whole = tl.where(tl.abs(large) < float("inf"), large + small, large)
    hi = whole.to(tl.float16)
    lo = (whole - hi.to(tl.float32)).to(tl.float16)
    return scaled, factor, hi, lo


@triton.jit
def store_span(scaled, factor, hi, lo, x_out, factors, sums, row, first, spans, SPANS: tl.constexpr):
    """Store SPANS spans of a row, starting with span `first`, in the layout of `PackedActivations`."""
    span = first + tl.arange(0, SPANS)
    inside = span < spans
    at = row * spans + span
    k = tl.arange(0, 256)
    eight = tl.arange(0, 8)
    tl.store(x_out + at[:, None] * 256 + k[None, :], scaled, mask=inside[:, None])
    tl.store(factors + at, factor, mask=inside)
    tl.store(sums + at[:, None] * 16 + eight[None, :], hi, mask=inside[:, None])
    tl.store(sums + at[:, None] * 16 + 8 + eight[None, :], lo, mask=inside[:, None])


@triton.jit
def _pack_activations(
    x,
    order,
    x_out,
    factors,
    sums,
    x_stride,
    width,
    spans,
    SPANS: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_kernel(PDL, True)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SPANS
    at = first * 256 + tl.arange(0, SPANS * 256)
    inside = at < width
    place = tl.load(order + at, mask=inside, other=0) if ORDERED else at
    values = tl.load(x + row * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    scaled, factor, hi, lo = scaled_span(values, SPANS)
    store_span(scaled, factor, hi, lo, x_out, factors, sums, row, first, spans, SPANS)


def pack_border(width: int) -> int:
    """The number of rows from which a program packs two segments instead of one."""
    return ONE_SEGMENT_SPANS // -(-width // SPAN) + 1


def pack_activations(
    x: Tensor, *, width: int | None = None, order: Tensor | None = None, out: PackedActivations | None = None, pdl: bool = False
) -> PackedActivations:
    """Pack the first `width` columns (all if None) of x [T, K], which has inner stride 1. `order` (int32): packed input k is
    input order[k] of x. `out`: where to store the result."""
    rows, width = len(x), x.shape[1] if width is None else width
    made = empty_packed_activations(rows, width, x.device) if out is None else out
    spans = made.factors.shape[1]
    if rows:
        together = SEGMENT if rows * spans <= ONE_SEGMENT_SPANS else 2 * SEGMENT
        _pack_activations[(rows, triton.cdiv(spans, together))](
            x,
            order,
            made.x,
            made.factors,
            made.sums,
            x.stride(0),
            width,
            spans,
            SPANS=together,
            ORDERED=order is not None,
            PDL=pdl,
            num_warps=4,
            enable_fp_fusion=False,
            **launch_options(pdl),
        )
    return made


# ------------------------------------------------------------------ dequantized weights


@dataclass(frozen=True, slots=True)
class DequantizedWeight:
    """Some outputs of a weight as the float16 numbers W of the module's docstring: codes, for K types and NVFP4 times t and the
    scales inside a span. The weight has S spans; `scales` and `min_scales` have one value per span, or one per block of 32
    inputs, with the output index innermost. N' is N rounded up to whole tiles; the padding is uninitialized."""

    weights: Tensor  # [N, S * 256] float16
    scales: Tensor  # [S, N'] float32, one per span, or [S * 8, N'], one per block
    minima: Tensor | None = None  # [N, S, 8] float16: the stored minima times t, only for K types with minima
    min_scales: Tensor | None = None  # float32: scales of the minima [S, N'], or the minima themselves [S * 8, N']

    @property
    def by_block(self) -> bool:
        return len(self.scales) * SPAN > self.weights.shape[1]


SUBNORMAL_FACTORS = (2.0**-24, 2.0**-20)  # t of K types: for the first eight of sixteen outputs, and for the other eight


def padded_outputs(outputs: int) -> int:
    """Outputs rounded up to whole tiles of the widest kernel: the row length of `scales`."""
    return -(-outputs // 128) * 128
