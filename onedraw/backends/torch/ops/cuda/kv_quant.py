"""8-bit KV cache: quantization when keys and values are written, dequantization when they are read.

In: heads, or loaded codes. Out: codes and scales as in `state/kv_pages.py`, or exact values in the dtype of the product. Codes
are widened two at a time by bit operations, which are faster than conversion instructions. A code is a byte, int8 or fp8, that is
multiplied by its head's scale. Axis: D the size of a head.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.ops.cuda.triton_math import INTERPRETED

# Inline assembly that widens two codes to 16-bit floats; each half of the word `a` has one code. An int8 code is in the lower
# byte of its half: for bf16, its lower seven bits become the mantissa of a number from 128 on, from which 128 is subtracted, or
# 256 if the sign bit is set; for f16, all eight bits become the mantissa of a number from 1024 on. An fp8 code is in the upper
# byte: exponent and mantissa are shifted to their place in the wider format below the sign, and multiplication by 2^120 or 2^8
# corrects the exponent bias.
_WIDEN_ASM = {
    ("int8", "bf16"): """lop3.b32 b, a, 0x00800080, 0xC300C300, 0xEA; lop3.b32 a, a, 0x007f007f, 0x43004300, 0xEA;
        mov.b32 by, 0x3f803f80; fma.rn.bf16x2 {out}, a, by, b;""",
    ("int8", "f16"): """lop3.b32 a, a, 0x00ff00ff, 0x64806480, 0x6A; mov.b32 by, 0x64806480; sub.rn.f16x2 {out}, a, by;""",
    ("fp8", "bf16"): """shr.u32 b, a, 4; and.b32 b, b, 0x07f007f0; lop3.b32 a, a, 0x80008000, b, 0xEA;
        mov.b32 by, 0x7B807B80; mov.b32 b, 0x80008000; fma.rn.bf16x2 {out}, a, by, b;""",
    ("fp8", "f16"): """shr.u32 b, a, 1; and.b32 b, b, 0x3f803f80; lop3.b32 a, a, 0x80008000, b, 0xEA;
        mov.b32 by, 0x5C005C00; mul.rn.f16x2 {out}, a, by;""",
}
# Inline assembly that moves the lower or the upper codes of two 16-bit pairs to the byte that _WIDEN_ASM expects.
_SELECT_ASM = {"int8": ("mov.b32 a, $1;", "shr.u32 a, $1, 8;"), "fp8": ("shl.b32 a, $1, 8;", "mov.b32 a, $1;")}


def _asm(body: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 a, b, by; " + body + " }")


def _unpack_asm(code: str, dtype: str, upper: int) -> tl.constexpr:
    return _asm(f"{_SELECT_ASM[code][upper]} {_WIDEN_ASM[code, dtype].format(out='$0')}")


LOWER_INT8_BF16, LOWER_INT8_F16, LOWER_FP8_BF16, LOWER_FP8_F16 = (_unpack_asm(*names, 0) for names in _WIDEN_ASM)
UPPER_INT8_BF16, UPPER_INT8_F16, UPPER_FP8_BF16, UPPER_FP8_F16 = (_unpack_asm(*names, 1) for names in _WIDEN_ASM)


@triton.jit
def _dequantize(codes, dtype: tl.constexpr, FP8: tl.constexpr):
    """Convert codes, each held in an integer of any width, to values of `dtype` without inline assembly, for Triton's interpreter
    and for float32."""
    if FP8:
        bits = codes.to(tl.int16)
        values = (((bits & 127) << 7) | ((bits & 128) << 8)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        values = codes.to(tl.int8).to(tl.float32)
    return values.to(dtype)


@triton.jit
def unpack_pairs(pairs, dtype: tl.constexpr, FP8: tl.constexpr):
    """Split pairs of codes (int16) into the values of the lower codes and of the upper codes. Codes are loaded as 16-bit pairs
    because the transposing loads for MMA operands move 16 bits at a time, and because for 16-bit operands the compiler keeps the
    order of the sum for every tile shape."""
    BF16: tl.constexpr = dtype == tl.bfloat16
    if INTERPRETED or dtype == tl.float32:
        return _dequantize((pairs << 8) >> 8, dtype, FP8), _dequantize(pairs >> 8, dtype, FP8)
    else:
        LOWER: tl.constexpr = (
            (LOWER_FP8_BF16 if BF16 else LOWER_FP8_F16) if FP8 else (LOWER_INT8_BF16 if BF16 else LOWER_INT8_F16)
        )
        UPPER: tl.constexpr = (
            (UPPER_FP8_BF16 if BF16 else UPPER_FP8_F16) if FP8 else (UPPER_INT8_BF16 if BF16 else UPPER_INT8_F16)
        )
        lower = tl.inline_asm_elementwise(LOWER, "=r,r", [pairs], dtype=tl.bfloat16 if BF16 else tl.float16, is_pure=True, pack=2)
        upper = tl.inline_asm_elementwise(UPPER, "=r,r", [pairs], dtype=tl.bfloat16 if BF16 else tl.float16, is_pure=True, pack=2)
        return lower, upper


@triton.jit
def quantize_heads(x, dtype: tl.constexpr, QUANT_MAX: tl.constexpr):
    """Quantize heads x [heads, D] float32, which are finite: codes [heads, D] and scales [heads]. Adding and subtracting 1.5 *
    2^23 rounds to an integer, with ties to even."""
    largest = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(largest, tl.full(largest.shape, QUANT_MAX, tl.float32))
    divisor = tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], x.shape)
    ratio = tl.where((scale > 0)[:, None], tl.div_rn(x, divisor), 0.0)
    ratio = tl.minimum(tl.maximum(ratio, -QUANT_MAX), QUANT_MAX)
    if dtype == tl.int8:
        ratio = (ratio + 12582912.0) - 12582912.0
    return ratio.to(dtype), scale
