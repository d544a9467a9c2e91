"""Codes of 8 bits in kernels: numbers to codes when a token's keys and values are written, codes to numbers when they are read.

In: heads, or loaded codes. Out: codes and scales as `codes.py` makes them, or numbers of the product's dtype, exactly.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.kernels.triton_math import INTERPRETED


def _widening(shift: int, mask: int, offset: int, product: str) -> str:
    """Four fp8 numbers to four of 16 bits: each into the upper byte of a half, exponent and fraction moved under the sign to
    where the wider number has them, and one product that puts the exponent's offset right."""
    one = f"""
    prmt.b32 a, $2, 0, {{select}};
    shr.u32 b, a, {shift};
    and.b32 b, b, {mask:#x};
    lop3.b32 a, a, 0x80008000, b, 0xEA;
    {product};
    """
    both = one.format(select="0x1404", out="$0") + one.format(select="0x3424", out="$1")
    return f"{{ .reg .b32 a, b, by, zero; mov.b32 by, {offset:#x}; mov.b32 zero, 0x80008000; {both} }}"


TO_BF16 = tl.constexpr(_widening(4, 0x07F007F0, 0x7B807B80, "fma.rn.bf16x2 {out}, a, by, zero"))  # by 2^120
TO_F16 = tl.constexpr(_widening(1, 0x3F803F80, 0x5C005C00, "mul.rn.f16x2 {out}, a, by"))  # by 2^8


@triton.jit
def numbers(codes, kind: tl.constexpr):
    """int8, or fp8 as its bits (uint8), as numbers. The instructions that convert fp8 are slower than those that move bits."""
    if codes.dtype == tl.int8:
        found = codes.to(kind)
    elif INTERPRETED:
        wide = codes.to(tl.int16)
        found = (((wide & 127) << 7) | ((wide & 128) << 8)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif kind == tl.bfloat16:
        found = tl.inline_asm_elementwise(TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        found = tl.inline_asm_elementwise(TO_F16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    return found.to(kind)


@triton.jit
def codes_of(x, kind: tl.constexpr, LARGEST: tl.constexpr):
    """x [heads, D] float32, finite → codes and scales [heads]. Adding 1.5 * 2^23 leaves no room for a fraction, so the sum
    is rounded to a whole number, ties to the even one."""
    largest = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    by = tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], x.shape)
    ratio = tl.where((scale > 0)[:, None], tl.div_rn(x, by), 0.0)
    ratio = tl.minimum(tl.maximum(ratio, -LARGEST), LARGEST)
    if kind == tl.int8:
        ratio = (ratio + 12582912.0) - 12582912.0
    return ratio.to(kind), scale
