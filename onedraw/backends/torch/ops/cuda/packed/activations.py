"""Rows made ready for products with packed weights on a GPU: numbers that are exact in float16, segment by segment.

In: rows x [T, K] in bf16 or f16. Out: `Prepared`, which every packed product of those rows reads. The rule, which all kernels
of such a product follow (`packed_rows.py` for few rows and for experts, `wide.py` and `triton_wide.py` for many), so that their
bits are equal:

1. Rows. A block is 32 inputs, a span 256, a segment four spans; inputs past K are zero. Of each segment, 2^e is the power of two
   that brings its largest |x| into [512, 1024), with e within [-96, 118] and 0 for a segment of zeros. X = x · 2^-e, rounded to
   float16. A is a block's sum of X: exact, then rounded to float32, and kept as two float16, hi = f16(A) and lo = f16(A - hi).
   What is not finite stays so. A row's result depends on that row alone.
2. K kinds (Q4_K, Q5_K, Q6_K) and NVFP4. W = t · scale · code in float16, rounded to nearest: exact but for Q6_K above 2,048.
   P is the sum of a span's W · X by the matrix unit, 16 inputs at a time in their order, chained from zero, in float32. Where
   there are minima, M is one step of the matrix unit over 16: t times the eight minima with hi, then the eight again with lo.
   sum = fma(P, d / t, sum); sum = fma(M, -dmin / t, sum), in float32, or the same with 1 / t in the end. d of NVFP4 is the factor
   of its matrix, and t is 1; for K kinds t is 2^-24 for the first eight of sixteen outputs and 2^-20 for the others. Such numbers
   lie below float16's normal ones. The matrix unit brings products to one exponent before it adds them, and takes that of a
   number below the normal ones for the least normal one: so t shows in the last bits of P, and is part of the rule. Outputs are
   counted within weights that stand together: each has its place of sixteen wherever and however it is multiplied.
3. Kinds with a float scale per block (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4). W = code less its offset, exact. P is the sum of a
   block's W · X, two steps of 16 from zero. sum = fma(P, d, sum); where there are minima, sum = fma(hi + lo, m, sum).
4. Sums run over segments from zero, each times its 2^e in the end, or times 2^e on the way, which is the same: a power of two
   commutes with rounding, as long as all numbers stay within float32. With scales of float16 none falls below it, whatever the
   rows are; none exceeds it where d · 2^e / t does not, so for scales below 1 and rows below 2^112. Segments are added from
   front to back, whoever computes them. Then the result is rounded, and bias and residual are added, each sum rounded.
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

BLOCK = 32  # inputs that have a sum
LEAST, MOST = -96, 118  # of e: a float16 times 2^-96 is no less than float32 has, and rows of any size become finite numbers
FEW = 4096  # spans; more of them are prepared two segments by a program


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows as a packed product reads them. S spans of 256 inputs, the last filled up with zeros."""

    x: Tensor  # [T, S * 256] float16, x · 2^-e
    factors: Tensor  # [T, S] float32, 2^e: equal for the spans of a segment
    sums: Tensor  # [T, S, 16] float16: hi of the eight blocks' sums, then lo

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, wanted: slice) -> Prepared:
        return Prepared(self.x[wanted], self.factors[wanted], self.sums[wanted])


class Ready:
    """Rows that a norm or a gate made ready on the way, until the product that reads them takes them. Owner: the operations."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._prepared: Prepared | None = None

    def put(self, rows: Tensor, prepared: Prepared) -> None:
        self._rows, self._prepared = rows, prepared

    def take(self, rows: Tensor) -> Prepared | None:
        """None where these very rows were not made ready, or were taken before."""
        found = self.look(rows)
        if found is not None:
            self._rows, self._prepared = None, None
        return found

    def look(self, rows: Tensor) -> Prepared | None:
        """The same for whoever is not the last to read these rows."""
        return self._prepared if self._rows is rows else None


def empty_prepared(rows: int, width: int, device: torch.device) -> Prepared:
    spans = -(-width // SPAN)
    return Prepared(
        x=torch.empty(rows, spans * SPAN, dtype=torch.float16, device=device),
        factors=torch.empty(rows, spans, dtype=torch.float32, device=device),
        sums=torch.empty(rows, spans, 16, dtype=torch.float16, device=device),
    )


@triton.jit
def scaled_span(values, SPANS: tl.constexpr):
    """Numbers of float32 [SPANS * 256], whole segments or all there is → X of float16 [SPANS, 256], 2^e [SPANS], hi and lo
    [SPANS, 8]."""
    values = tl.reshape(values, (SPANS, 256))
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as whole numbers they stand in the order of their sizes, NaN last
    TOGETHER: tl.constexpr = 4 if SPANS >= 4 else SPANS
    largest = tl.max(tl.reshape(tl.max(bits, 1), (SPANS // TOGETHER, TOGETHER)), 1)
    largest = tl.reshape(tl.broadcast_to(largest[:, None], (SPANS // TOGETHER, TOGETHER)), (SPANS,))
    exponent = tl.minimum(tl.maximum((largest >> 23) - 136, -96), 118)
    exponent = tl.where(largest == 0, 0, exponent)
    factor = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = (values * inverse[:, None]).to(tl.float16)
    # 32 multiples of 2^-24 up to 1,024, in two parts: multiples of 2^-9, and what is left. The sums of each need 24 bits, so they
    # are exact in any order, and only where they are put together is anything rounded.
    exact = tl.reshape(scaled, (SPANS, 8, 32)).to(tl.float32)
    coarse = (exact + 24576.0) - 24576.0
    large, small = tl.sum(coarse, 2), tl.sum(exact - coarse, 2)
    whole = tl.where(tl.abs(large) < float("inf"), large + small, large)
    hi = whole.to(tl.float16)
    lo = (whole - hi.to(tl.float32)).to(tl.float16)
    return scaled, factor, hi, lo


@triton.jit
def store_span(scaled, factor, hi, lo, x_out, factors, sums, row, first, spans, SPANS: tl.constexpr):
    """Spans `first` … of a row, as `Prepared` has them."""
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
def _prepare(
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


def prepare_border(width: int) -> int:
    """Rows from which on two segments are one program's."""
    return FEW // -(-width // SPAN) + 1


def prepare_rows(
    x: Tensor, *, width: int | None = None, order: Tensor | None = None, out: Prepared | None = None, pdl: bool = False
) -> Prepared:
    """x [T, at least `width`], rows of stride 1. `order`: input k of what comes out is input order[k] of x (int32)."""
    rows, width = len(x), x.shape[1] if width is None else width
    made = empty_prepared(rows, width, x.device) if out is None else out
    spans = made.factors.shape[1]
    if rows:
        together = SEGMENT if rows * spans <= FEW else 2 * SEGMENT
        _prepare[(rows, triton.cdiv(spans, together))](
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


# ------------------------------------------------------------------ weights as the rule has them


@dataclass(frozen=True, slots=True)
class Opened:
    """Outputs of a weight as whole numbers, or as tiny multiples of them (`TINY`). S spans; `scales` and `least` have one number
    per span, or one per block of 32, and those of neighbouring outputs stand side by side: N' is N filled up to whole tiles, with
    anything."""

    weights: Tensor  # [N, S * 256] float16
    scales: Tensor  # [S, N'] or [S * 8, N'] float32
    minima: Tensor | None = None  # [N, S, 8] float16, of the K kinds that have minima
    least: Tensor | None = None  # what a minimum is multiplied with [S, N'], or the minima themselves [S * 8, N']: float32

    @property
    def by_block(self) -> bool:
        return len(self.scales) * SPAN > self.weights.shape[1]


TINY = (2.0**-24, 2.0**-20)  # t of K kinds: for eight outputs, and for the next eight


def beside(outputs: int) -> int:
    """Places for so many outputs' scales: whole tiles of the widest product."""
    return -(-outputs // 128) * 128
