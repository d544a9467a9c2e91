"""Quantized KV cache: quantization when keys and values are written, dequantization when they are read.

In: heads, or loaded codes. Out: codes and scales as in `state/kv_pages.py`, or exact values in the dtype of the product. Codes
are loaded in words of 16 bits, which have two codes of 8 bits (int8, fp8) or four of 4 bits (int4) of neighbouring dimensions,
and are widened in two words at a time by bit operations, which are faster than conversion instructions. A code is multiplied by
its head's scale. Axis: D the size of a head.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.ops.cuda.triton_math import INTERPRETED

# The dtypes of codes, as the constant KV_QUANT of kernels; 0 stands for keys and values that are not quantized.
INT8, FP8, INT4 = (tl.constexpr(number) for number in (1, 2, 3))

# Inline assembly that widens two codes to 16-bit floats; each half of the word `a` has one code. An int8 code is in the lower
# byte of its half: for bf16, its lower seven bits become the mantissa of a number from 128 on, from which 128 is subtracted, or
# 256 if the sign bit is set; for f16, all eight bits become the mantissa of a number from 1024 on. An fp8 code is in the upper
# byte: exponent and mantissa are shifted to their place in the wider format below the sign, and multiplication by 2^120 or 2^8
# corrects the exponent bias. An int4 code c is in bits 1 to 4 and stands for 2 c - 15: the bits become a part of the mantissa of
# a number from 128 (bf16) or 1024 (f16) on, from which 15 more than that is subtracted.
_WIDEN_ASM = {
    ("int8", "bf16"): """lop3.b32 b, a, 0x00800080, 0xC300C300, 0xEA; lop3.b32 a, a, 0x007f007f, 0x43004300, 0xEA;
        mov.b32 by, 0x3f803f80; fma.rn.bf16x2 {out}, a, by, b;""",
    ("int8", "f16"): """lop3.b32 a, a, 0x00ff00ff, 0x64806480, 0x6A; mov.b32 by, 0x64806480; sub.rn.f16x2 {out}, a, by;""",
    ("fp8", "bf16"): """shr.u32 b, a, 4; and.b32 b, b, 0x07f007f0; lop3.b32 a, a, 0x80008000, b, 0xEA;
        mov.b32 by, 0x7B807B80; mov.b32 b, 0x80008000; fma.rn.bf16x2 {out}, a, by, b;""",
    ("fp8", "f16"): """shr.u32 b, a, 1; and.b32 b, b, 0x3f803f80; lop3.b32 a, a, 0x80008000, b, 0xEA;
        mov.b32 by, 0x5C005C00; mul.rn.f16x2 {out}, a, by;""",
    ("int4", "bf16"): """lop3.b32 a, a, 0x001e001e, 0x43004300, 0xEA; mov.b32 by, 0x3f803f80; mov.b32 b, 0xC30FC30F;
        fma.rn.bf16x2 {out}, a, by, b;""",
    ("int4", "f16"): """lop3.b32 a, a, 0x001e001e, 0x64006400, 0xEA; mov.b32 by, 0x640f640f; sub.rn.f16x2 {out}, a, by;""",
}
# Inline assembly that moves the codes of one dimension in two words, by its place in a word, to the bits that _WIDEN_ASM expects.
_SELECT_ASM = {
    "int8": ("mov.b32 a, $1;", "shr.u32 a, $1, 8;"),
    "fp8": ("shl.b32 a, $1, 8;", "mov.b32 a, $1;"),
    "int4": ("shl.b32 a, $1, 1;", "shr.u32 a, $1, 3;", "shr.u32 a, $1, 7;", "shr.u32 a, $1, 11;"),
}


def _asm(body: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 a, b, by; " + body + " }")


def _unpack_asm(code: str, dtype: str) -> tuple[tl.constexpr, ...]:
    return tuple(_asm(f"{select} {_WIDEN_ASM[code, dtype].format(out='$0')}") for select in _SELECT_ASM[code])


# One constant per dimension of a word, because kernels can read constants but no tuples of constants.
INT8_BF16_0, INT8_BF16_1 = _unpack_asm("int8", "bf16")
INT8_F16_0, INT8_F16_1 = _unpack_asm("int8", "f16")
FP8_BF16_0, FP8_BF16_1 = _unpack_asm("fp8", "bf16")
FP8_F16_0, FP8_F16_1 = _unpack_asm("fp8", "f16")
INT4_BF16_0, INT4_BF16_1, INT4_BF16_2, INT4_BF16_3 = _unpack_asm("int4", "bf16")
INT4_F16_0, INT4_F16_1, INT4_F16_2, INT4_F16_3 = _unpack_asm("int4", "f16")


@triton.jit
def _dequantize(codes, dtype: tl.constexpr, KV_QUANT: tl.constexpr):
    """Convert codes, each held in an integer of any width, to values of `dtype` without inline assembly, for Triton's interpreter
    and for float32."""
    if KV_QUANT == INT4:
        values = ((codes & 15) * 2 - 15).to(tl.float32)
    elif KV_QUANT == FP8:
        bits = codes.to(tl.int16)
        values = (((bits & 127) << 7) | ((bits & 128) << 8)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        values = codes.to(tl.int8).to(tl.float32)
    return values.to(dtype)


@triton.jit
def _widen(words, ASM: tl.constexpr, BF16: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.bfloat16 if BF16 else tl.float16, is_pure=True, pack=2)


@triton.jit
def unpack_words(words, dtype: tl.constexpr, KV_QUANT: tl.constexpr):
    """Split words of codes (int16) into the values of each dimension of a word, two or four. Codes are loaded as words of 16 bits
    because the transposing loads for MMA operands move 16 bits at a time, and because for 16-bit operands the compiler keeps the
    order of the sum for every tile shape."""
    BF16: tl.constexpr = dtype == tl.bfloat16
    if INTERPRETED or dtype == tl.float32:
        if KV_QUANT == INT4:
            return (
                _dequantize(words, dtype, KV_QUANT),
                _dequantize(words >> 4, dtype, KV_QUANT),
                _dequantize(words >> 8, dtype, KV_QUANT),
                _dequantize(words >> 12, dtype, KV_QUANT),
            )
        else:
            return _dequantize((words << 8) >> 8, dtype, KV_QUANT), _dequantize(words >> 8, dtype, KV_QUANT)
    elif KV_QUANT == INT4:
        return (
            _widen(words, INT4_BF16_0 if BF16 else INT4_F16_0, BF16),
            _widen(words, INT4_BF16_1 if BF16 else INT4_F16_1, BF16),
            _widen(words, INT4_BF16_2 if BF16 else INT4_F16_2, BF16),
            _widen(words, INT4_BF16_3 if BF16 else INT4_F16_3, BF16),
        )
    elif KV_QUANT == FP8:
        first = _widen(words, FP8_BF16_0 if BF16 else FP8_F16_0, BF16)
        return first, _widen(words, FP8_BF16_1 if BF16 else FP8_F16_1, BF16)
    else:
        first = _widen(words, INT8_BF16_0 if BF16 else INT8_F16_0, BF16)
        return first, _widen(words, INT8_BF16_1 if BF16 else INT8_F16_1, BF16)


@triton.jit
def split_columns(x, PARTS: tl.constexpr):
    """The columns of x [ROWS, C] by their place in a word: PARTS arrays [ROWS, C / PARTS]."""
    ROWS: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, (ROWS, C // 2, 2)))
    if PARTS == 2:
        return even, odd
    else:
        first, third = tl.split(tl.reshape(even, (ROWS, C // 4, 2)))
        second, fourth = tl.split(tl.reshape(odd, (ROWS, C // 4, 2)))
        return first, second, third, fourth


@triton.jit
def _joined(first, second):
    return tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1] * 2))


@triton.jit
def join_columns(parts, PARTS: tl.constexpr):
    """The inverse of `split_columns`."""
    if PARTS == 2:
        return _joined(parts[0], parts[1])
    else:
        return _joined(_joined(parts[0], parts[2]), _joined(parts[1], parts[3]))


@triton.jit
def quantize_heads(x, dtype: tl.constexpr, LARGEST: tl.constexpr, SCALES: tl.constexpr):
    """Quantize heads x [heads, D] float32, which are finite: codes [heads, D], of 4 bits (`dtype` is uint8) [heads, D / 2], and
    scales [heads]. The scale is the largest |x| / SCALES, and x / scale is limited to LARGEST (values: `state/kv_pages.py`).
    Adding and subtracting 1.5 * 2^23 rounds to an integer, with ties to even."""
    largest = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(largest, tl.full(largest.shape, SCALES, tl.float32))
    divisor = tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], x.shape)
    ratio = tl.where((scale > 0)[:, None], tl.div_rn(x, divisor), 0.0)
    ratio = tl.minimum(tl.maximum(ratio, -LARGEST), LARGEST)
    if dtype == tl.uint8:
        rounded = ((ratio + LARGEST) * 0.5 + 12582912.0) - 12582912.0
        even, odd = tl.split(tl.reshape(rounded.to(tl.int32), (x.shape[0], x.shape[1] // 2, 2)))
        return (even | (odd << 4)).to(dtype), scale
    elif dtype == tl.int8:
        return ((ratio + 12582912.0) - 12582912.0).to(dtype), scale
    else:
        return ratio.to(dtype), scale
