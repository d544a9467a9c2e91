"""Products of packed experts on a GPU: y = x Wᵀ with W in its blocks, whose codes go to the matrix unit as small whole numbers.
All other packed products follow another rule, with kernels of their own (spans.py).

In: rows x [T, K] and a `Blocks` (blocks.py). Out: [T, N]. A block's codes are exact in x's dtype; what the matrix unit makes of
one block is multiplied with the block's scale in float32 and added up, block after block from front to back. A minimum that
a block adds to all of its weights meets the sum of the block's inputs, which is taken by the matrix unit too. So a weight
is never rounded. Blocks are added up over segments of 1,024 inputs, and segments from front to back; a row's bits are its own.

A halfword holds a code for each of several planes; plane p has the inputs 32 p … 32 p + 31 of a span. So a plane's codes come
out of all halfwords alike, two with one instruction, and meet one scale per output.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-redef, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.kernels.triton_math import INTERPRETED

MANTISSA = tl.constexpr(0x4B000000)  # 2²³ as bits: what is or-ed into it is added to it
# Numbers as pairs of bf16, and of f16: 128 and 1024, to which a small whole number is added by or-ing it in; less them.
_ADD = {"bf16": "0x43004300", "fp16": "0x64006400"}
_LESS = {"bf16": "0xC300C300", "fp16": "0xE400E400"}
_ONE = {"bf16": "0x3F803F80", "fp16": "0x3C003C00"}
_WITH_MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
_PTX = {"bf16": "bf16x2", "fp16": "f16x2"}


@triton.constexpr_function
def _instructions(kind, plane, dtype):
    """Two halfwords of codes ($1) and of high bits ($2) → two numbers."""
    if kind == "Q8_0":
        shift = f"shr.b32 t, $1, {8 * (plane % 2)};"
        if dtype == "bf16":  # seven bits are added to 128; the eighth makes of the 128 that are taken away 256
            body = "lop3.b32 u, t, 0x00800080, 0x43004300, 0xEA; lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA; "
            return f"{{ .reg .b32 t, u, v, w; {shift} {body} mov.b32 v, 0xBF80BF80; fma.rn.bf16x2 $0, u, v, t; }}"
        body = "xor.b32 t, t, 0x00800080; and.b32 t, t, 0x00FF00FF; or.b32 t, t, 0x64006400; "
        return f"{{ .reg .b32 t, v, w; {shift} {body} mov.b32 v, 0x3C003C00; mov.b32 w, 0xE480E480; fma.rn.f16x2 $0, t, v, w; }}"
    five = kind in ("Q5_0", "Q5_1", "Q5_K")
    shift = f"shr.b32 t, $1, {5 * (plane % 3) if five else 4 * (plane % 4)};"
    if kind == "MXFP4":  # exponent and mantissa as those of a number 2¹²⁶ times too small; f16: 2¹⁴ times
        at, up = (6, "0x7E807E80") if dtype == "bf16" else (9, "0x74007400")
        body = f"and.b32 u, t, 0x00080008; and.b32 t, t, 0x00070007; shl.b32 u, u, 12; shl.b32 t, t, {at}; or.b32 t, t, u; "
        return f"{{ .reg .b32 t, u, v, w; {shift} {body} mov.b32 v, {up}; mov.b32 w, 0; fma.rn.{_PTX[dtype]} $0, t, v, w; }}"
    body = f"lop3.b32 t, t, {'0x001F001F' if five else '0x000F000F'}, {_ADD[dtype]}, 0xEA; "
    if kind == "Q6_K":
        move = f"shl.b32 u, $2, {4 - 2 * plane};" if plane <= 2 else f"shr.b32 u, $2, {2 * plane - 4};"
        body += f"{move} lop3.b32 t, u, 0x00300030, t, 0xEA; "
    if kind in _WITH_MINIMA:  # what was added is taken away with the minimum
        return f"{{ .reg .b32 t, u; {shift} {body} mov.b32 $0, t; }}"
    offset = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}[kind]
    less = f"0x{int(_LESS[dtype], 16) + offset * 0x00010001:08X}"  # whole numbers above 128 and 1024 are a step apart
    body += f"mov.b32 v, {_ONE[dtype]}; mov.b32 w, {less}; fma.rn.{_PTX[dtype]} $0, t, v, w;"
    return f"{{ .reg .b32 t, u, v, w; {shift} {body} }}"


@triton.jit
def _whole(halves, high, PLANE: tl.constexpr, KIND: tl.constexpr):
    """Codes of one plane as int32, less the offset."""
    if KIND == "Q8_0":
        return ((((halves >> (8 * (PLANE % 2))) & 255) ^ 128) - 128).to(tl.int32)
    else:
        if KIND == "Q5_0" or KIND == "Q5_1" or KIND == "Q5_K":
            codes = ((halves >> (5 * (PLANE % 3))) & 31).to(tl.int32)
        else:
            codes = ((halves >> (4 * (PLANE % 4))) & 15).to(tl.int32)
        if KIND == "Q6_K":
            codes = codes | (((high.to(tl.int32) >> (2 * PLANE)) & 3) << 4)
        OFFSET: tl.constexpr = 8 if KIND == "Q4_0" else (16 if KIND == "Q5_0" else (32 if KIND == "Q6_K" else 0))
        return codes - OFFSET


@triton.jit
def _fours(codes):
    """Codes of sign, two bits of exponent and one of mantissa, as float32."""
    number = ((codes & 7) << 22) | ((codes & 8) << 28)
    return number.to(tl.float32, bitcast=True) * 8.507059173023462e37 + 0.0  # 2¹²⁶; zero has no sign


@triton.jit
def _codes(halves, high, PLANE: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of one plane in x's dtype. Every step is exact."""
    if INTERPRETED:
        if KIND == "MXFP4":
            return _fours(_whole(halves, high, PLANE, KIND))
        else:
            return _whole(halves, high, PLANE, KIND).to(tl.float32)
    elif tl.bfloat16 == DTYPE:
        two: tl.constexpr = _instructions(KIND, PLANE, "bf16")
        return tl.inline_asm_elementwise(two, "=r,r,r", [halves, high], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        two: tl.constexpr = _instructions(KIND, PLANE, "fp16")
        return tl.inline_asm_elementwise(two, "=r,r,r", [halves, high], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _half(word, WHICH: tl.constexpr):
    """The lower or upper float16 of words."""
    bits = word >> 16 if WHICH else word
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _times_byte(factor, word, WHICH: tl.constexpr):
    """A byte of words times a float16's value, exactly: the byte is or-ed into the mantissa of 2²³, which is taken away in the
    one rounding of a fused product and sum."""
    if INTERPRETED:
        return factor * ((word >> (8 * WHICH)) & 255).to(tl.float32)
    else:
        SELECT: tl.constexpr = 0x7440 | WHICH
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [word, MANTISSA, SELECT], dtype=tl.int32, is_pure=True, pack=1
        )
        return tl.fma(bits.to(tl.float32, bitcast=True), factor, factor * -8388608.0)


@triton.jit
def _power(word, WHICH: tl.constexpr):
    """2^(byte - 127)"""
    exponent = (word >> (8 * WHICH)) & 255
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scale(a, b, c, d, e, f, g, h, PLANE: tl.constexpr, SIDE: tl.constexpr, KIND: tl.constexpr):
    """What a block's codes are multiplied with, and what is added to them then: float32 [N] each. a … h: words of scales.
    SIDE: which sixteen inputs of the plane, where they have scales of their own."""
    if KIND == "Q4_0" or KIND == "Q5_0" or KIND == "Q8_0":
        word = a if PLANE < 2 else (b if PLANE < 4 else (c if PLANE < 6 else d))
        scale = _half(word, PLANE % 2)
        return scale, scale
    elif KIND == "Q4_1" or KIND == "Q5_1":
        low = a if PLANE == 0 else (b if PLANE == 1 else (c if PLANE == 2 else d))
        top = e if PLANE == 4 else (f if PLANE == 5 else (g if PLANE == 6 else h))
        word = low if PLANE < 4 else top
        return _half(word, 0), _half(word, 1)
    elif KIND == "Q4_K" or KIND == "Q5_K":
        if PLANE < 4:
            scales = b & 0x3F3F3F3F
            minima = c & 0x3F3F3F3F
        else:
            scales = (d & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)
            minima = ((d >> 4) & 0x0F0F0F0F) | ((c >> 2) & 0x30303030)
        return _times_byte(_half(a, 0), scales, PLANE % 4), _times_byte(-_half(a, 1), minima, PLANE % 4)
    elif KIND == "Q6_K":
        word = a if PLANE < 2 else (b if PLANE < 4 else (c if PLANE < 6 else d))
        whole = _half(e, 0)
        scale = _times_byte(whole, word ^ -0x7F7F7F80, 2 * (PLANE % 2) + SIDE) - whole * 128.0
        return scale, scale
    else:
        tl.static_assert(KIND == "MXFP4")
        scale = _power(a if PLANE < 4 else b, PLANE % 4)
        return scale, scale


@triton.jit
def _scale_words(scales, n, KIND: tl.constexpr):
    """The words of scales of one span, as many as the kind has, and the first again for those it has not."""
    a = tl.load(scales)
    b = tl.load(scales + n)
    c = a
    d = a
    e = a
    f = a
    g = a
    h = a
    if KIND != "MXFP4":
        c = tl.load(scales + 2 * n)
        d = tl.load(scales + 3 * n)
    if KIND == "Q6_K" or KIND == "Q4_1" or KIND == "Q5_1":
        e = tl.load(scales + 4 * n)
    if KIND == "Q4_1" or KIND == "Q5_1":
        f = tl.load(scales + 5 * n)
        g = tl.load(scales + 6 * n)
        h = tl.load(scales + 7 * n)
    return a, b, c, d, e, f, g, h


@triton.jit
def _mine(low, top, more, most, low_side, top_side, PLANE: tl.constexpr, SIDE: tl.constexpr, KIND: tl.constexpr):
    """The halfwords that hold a plane."""
    if KIND == "Q8_0":
        return low if PLANE < 2 else (top if PLANE < 4 else (more if PLANE < 6 else most))
    elif KIND == "Q5_0" or KIND == "Q5_1" or KIND == "Q5_K":
        return low if PLANE < 3 else (top if PLANE < 6 else more)
    elif SIDE == 1:
        return low_side if PLANE < 4 else top_side
    else:
        return low if PLANE < 4 else top


@triton.jit
def _piece(
    low,
    top,
    more,
    most,
    low_side,
    top_side,
    high,
    high_side,
    a,
    b,
    c,
    d,
    e,
    f,
    g,
    h,
    PLANE: tl.constexpr,
    SIDE: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The codes of one block of inputs, and their scale and minimum."""
    mine = _mine(low, top, more, most, low_side, top_side, PLANE, SIDE, KIND)
    number = _codes(mine, high_side if SIDE == 1 else high, PLANE, KIND, DTYPE)
    scale, least = _scale(a, b, c, d, e, f, g, h, PLANE, SIDE, KIND)
    if (KIND == "Q4_1" or KIND == "Q5_1" or KIND == "Q4_K" or KIND == "Q5_K") and not INTERPRETED:
        OFFSET: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0
        least = tl.fma(scale, -OFFSET, least)
    return number, scale, least


@triton.jit
def _product(
    x_at,
    live,
    codes,
    high,
    scales,
    column,
    n,
    width,
    end,
    KIND: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Outputs `column` of rows at x_at [1, M], over spans [0, end): [N, M] float32. Weights are the left side: they stay in
    registers."""
    DEPTH: tl.constexpr = 16 if KIND == "Q6_K" else 32
    HAS_MINIMUM: tl.constexpr = KIND == "Q4_1" or KIND == "Q5_1" or KIND == "Q4_K" or KIND == "Q5_K"
    k = tl.arange(0, DEPTH)
    place = column[:, None] * CODES + k[None, :]
    high_place = column[:, None] * 32 + k[None, :]
    scales_at = scales + column
    kind = x_at.dtype.element_ty
    ones = tl.full((BLOCK_N, DEPTH), 1.0, dtype=kind)
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # Scales are not what the matrix unit reads, so the compiler would not bring them early: they come a span ahead.
    next_a, next_b, next_c, next_d, next_e, next_f, next_g, next_h = _scale_words(scales_at, n, KIND)
    for span in range(0, end):
        at = codes + span * n * CODES + place
        low = tl.load(at)
        top = tl.load(at + 32)
        more = low
        most = low
        if CODES > 64:
            more = tl.load(at + 64)
        if CODES > 96:
            most = tl.load(at + 96)
        upper = low
        low_side = low
        top_side = top
        upper_side = upper
        if KIND == "Q6_K":  # sixteen inputs at a time
            high_at = high + span * n * 32 + high_place
            upper = tl.load(high_at)
            low_side = tl.load(at + 16)
            top_side = tl.load(at + 48)
            upper_side = tl.load(high_at + 16)
        a, b, c, d, e, f, g, h = next_a, next_b, next_c, next_d, next_e, next_f, next_g, next_h
        ahead = tl.minimum(span + 1, end - 1)
        next_a, next_b, next_c, next_d, next_e, next_f, next_g, next_h = _scale_words(scales_at + ahead * n * SCALES, n, KIND)
        for piece in tl.static_range(256 // DEPTH):
            number, scale, least = _piece(
                low,
                top,
                more,
                most,
                low_side,
                top_side,
                upper,
                upper_side,
                a,
                b,
                c,
                d,
                e,
                f,
                g,
                h,
                piece * DEPTH // 32,
                piece % (32 // DEPTH),
                KIND,
                kind,
            )
            start = span * 256 + piece * DEPTH
            if EVEN_K:
                row = tl.load(x_at + (start + k)[:, None], mask=live, other=0.0)
            else:
                row = tl.load(x_at + (start + k)[:, None], mask=live & (start + k < width)[:, None], other=0.0)
            if INTERPRETED:  # it knows no bf16 products
                row = row.to(tl.float32)
            accumulator = tl.fma(tl.dot(number, row), scale[:, None], accumulator)
            if HAS_MINIMUM:
                accumulator = tl.fma(tl.dot(ones.to(row.dtype), row), least[:, None], accumulator)
        closes = span % SEGMENT == SEGMENT - 1
        total = tl.where(closes, total + accumulator, total)
        accumulator = tl.where(closes, 0.0, accumulator)
    return total + accumulator


@triton.jit
def _packed_experts(
    x,
    codes,
    high,
    scales,
    y,
    order,
    tiles,
    n,
    code_stride,
    high_stride,
    scale_stride,
    y_stride,
    x_stride,
    width,
    DIVIDE: tl.constexpr,
    KIND: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """y[pair] = x[pair // DIVIDE] · weight[expert]ᵀ for the pairs of one tile (triton_moe.py)."""
    tile = tl.program_id(0) * 3
    expert = tl.load(tiles + tile).to(tl.int64)
    begin = tl.load(tiles + tile + 1)
    count = tl.load(tiles + tile + 2)
    if count > 0:
        m = tl.arange(0, BLOCK_M)
        live = m < count
        pair = tl.load(order + begin + m, mask=live, other=0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < n
        safe = tl.where(inside, column, 0)
        x_at = x + (pair // DIVIDE)[None, :] * x_stride
        own = codes + expert * code_stride
        own_high = high + expert * high_stride
        own_scales = scales + expert * scale_stride
        out = _product(
            x_at,
            live[None, :],
            own,
            own_high,
            own_scales,
            safe,
            n,
            width,
            tl.cdiv(width, 256),
            KIND,
            CODES,
            SCALES,
            BLOCK_M,
            BLOCK_N,
            EVEN_K,
            SEGMENT,
        )
        at = y + pair[None, :] * y_stride + column[:, None]
        tl.store(at, out.to(y.dtype.element_ty), mask=live[None, :] & inside[:, None])
