"""Products of packed weights on a GPU: y = x Wᵀ with W in its blocks, made numbers in registers on the way to the matrix unit.

In: rows x [T, K] and a `Blocks` (blocks.py). Out: [T, N]. A weight is what its kind says in float32, rounded to x's dtype:
the same number that a dequantized checkpoint would hold. A program walks K from front to back, 32 inputs at a time, for one
row as for thousands, so the number of rows does not show, and the sum is the one of `triton_linear.py`.

A word holds eight codes of four bits, one for each of the eight planes of a span: plane p has the inputs 32 p … 32 p + 31. So
a plane's codes come out of all words alike and meet one scale per output. Codes become float32 without a conversion: put
into the mantissa of 2²³, which is then taken away.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-redef, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.kernels.triton_math import INTERPRETED, let_next_start, wait_for_inputs

MANTISSA = tl.constexpr(0x4B000000)  # 2²³ as bits: what is or-ed into it is added to it


@triton.jit
def _and_or(a, b, c):
    """(a & b) | c in one instruction, which the compiler does not find by itself where b and c are numbers."""
    if INTERPRETED:
        return (a & b) | c
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _moved(bits, BY: tl.constexpr):
    return bits << BY if BY >= 0 else bits >> -BY


@triton.jit
def _codes(words, high, PLANE: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Codes of one plane as float32, less the offset. Every step is exact."""
    if BITS == 8:
        SLOT: tl.constexpr = 8 * (PLANE % 2)
        part = words if PLANE % 4 < 2 else words >> 16
        bits = _and_or(part, 255 << SLOT, MANTISSA)
    else:
        SLOT: tl.constexpr = 4 * (PLANE % 5)
        part = words if PLANE < 5 else words >> 20
        bits = _and_or(part, 15 << SLOT, MANTISSA)
    if BITS == 5:
        bits = _and_or(_moved(high, SLOT + 4 - PLANE), 16 << SLOT, bits)
    if BITS == 6:
        bits = _and_or(_moved(high, SLOT + 4 - 2 * PLANE), 48 << SLOT, bits)
    UNIT: tl.constexpr = 1.0 / (1 << SLOT)
    LESS: tl.constexpr = 8388608.0 / (1 << SLOT) + OFFSET
    return bits.to(tl.float32, bitcast=True) * UNIT - LESS


@triton.jit
def _fours(words, PLANE: tl.constexpr):
    """Codes of sign, two bits of exponent and one of mantissa, as float32, twice as large."""
    bits = words >> (4 * PLANE)
    number = ((bits & 7) << 22) | ((bits & 8) << 28)
    return number.to(tl.float32, bitcast=True) * 1.7014118346046923e38 + 0.0  # 2¹²⁷; zero has no sign


@triton.jit
def _half(word, WHICH: tl.constexpr):
    """The lower or upper float16 of words."""
    bits = word >> 16 if WHICH else word
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(word, WHICH: tl.constexpr):
    """A byte of words as a float32."""
    if INTERPRETED:
        bits = ((word >> (8 * WHICH)) & 255) | MANTISSA
    else:
        SELECT: tl.constexpr = 0x7440 | WHICH
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [word, MANTISSA, SELECT], dtype=tl.int32, is_pure=True, pack=1
        )
    return bits.to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _power(word, WHICH: tl.constexpr):
    """2^(byte - 128)"""
    exponent = (word >> (8 * WHICH)) & 255
    bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _along(value, ALONG: tl.constexpr):
    """One number per output, for all inputs of a plane: [N] → [N, 1], or [1, N] where inputs run down."""
    return tl.expand_dims(value, ALONG)


@triton.jit
def _weights(words, high, a, b, c, d, e, f, g, h, first, PLANE: tl.constexpr, KIND: tl.constexpr, ALONG: tl.constexpr):
    """One plane as float32 numbers. a … h: the words of scales; first: which inputs are the plane's first sixteen."""
    if KIND == "Q4_0" or KIND == "Q5_0" or KIND == "Q8_0":
        BITS: tl.constexpr = 4 if KIND == "Q4_0" else (5 if KIND == "Q5_0" else 8)
        word = a if PLANE < 2 else (b if PLANE < 4 else (c if PLANE < 6 else d))
        return _codes(words, high, PLANE, BITS, 1 << (BITS - 1)) * _along(_half(word, PLANE % 2), ALONG)
    elif KIND == "Q4_1" or KIND == "Q5_1":
        BITS: tl.constexpr = 4 if KIND == "Q4_1" else 5
        low = a if PLANE == 0 else (b if PLANE == 1 else (c if PLANE == 2 else d))
        top = e if PLANE == 4 else (f if PLANE == 5 else (g if PLANE == 6 else h))
        word = low if PLANE < 4 else top
        codes = _codes(words, high, PLANE, BITS, 0)
        return codes * _along(_half(word, 0), ALONG) + _along(_half(word, 1), ALONG)
    elif KIND == "Q4_K" or KIND == "Q5_K":
        BITS: tl.constexpr = 4 if KIND == "Q4_K" else 5
        if PLANE < 4:
            scales = b & 0x3F3F3F3F
            minima = c & 0x3F3F3F3F
        else:
            scales = (d & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)
            minima = ((d >> 4) & 0x0F0F0F0F) | ((c >> 2) & 0x30303030)
        scale = _half(a, 0) * _byte(scales, PLANE % 4)
        least = _half(a, 1) * _byte(minima, PLANE % 4)
        return _codes(words, high, PLANE, BITS, 0) * _along(scale, ALONG) - _along(least, ALONG)
    elif KIND == "Q6_K":
        word = a if PLANE < 2 else (b if PLANE < 4 else (c if PLANE < 6 else d))
        whole = _half(e, 0)
        one = whole * (_byte(word ^ -0x7F7F7F80, 2 * (PLANE % 2)) - 128.0)
        two = whole * (_byte(word ^ -0x7F7F7F80, 2 * (PLANE % 2) + 1) - 128.0)
        return _codes(words, high, PLANE, 6, 32) * tl.where(first, _along(one, ALONG), _along(two, ALONG))
    else:
        tl.static_assert(KIND == "MXFP4")
        word = a if PLANE < 4 else b
        return _fours(words, PLANE) * _along(_power(word, PLANE % 4), ALONG)


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
def _product(
    x_at,
    live,
    codes,
    high,
    scales,
    column,
    n,
    width,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Outputs `column` of rows at x_at [1, M]: [N, M] float32. Weights are the left side: they stay in registers."""
    k = tl.arange(0, 32)
    first = (k < 16)[None, :]
    place = column[:, None] * WORDS + k[None, :]
    high_at = high + (column[:, None] * 32 + k[None, :])
    scales_at = scales + column
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for span in range(0, tl.cdiv(width, 256)):
        at = codes + span * n * WORDS
        words = tl.load(at + place)
        more = words
        if KIND == "Q8_0":
            more = tl.load(at + place + 32)
        upper = words
        if KIND == "Q6_K":
            upper = tl.load(high_at + span * n * 32).to(tl.int32)
        if KIND == "Q5_0" or KIND == "Q5_1" or KIND == "Q5_K":
            upper = tl.load(high_at + (span // 2) * n * 32).to(tl.int32) >> (span % 2 * 8)
        a, b, c, d, e, f, g, h = _scale_words(scales_at + span * n * SCALES, n, KIND)
        for plane in tl.static_range(8):
            mine = more if KIND == "Q8_0" and plane >= 4 else words
            numbers = _weights(mine, upper, a, b, c, d, e, f, g, h, first, plane, KIND, 1)
            start = span * 256 + plane * 32
            if EVEN_K:
                row = tl.load(x_at + (start + k)[:, None], mask=live, other=0.0)
            else:
                row = tl.load(x_at + (start + k)[:, None], mask=live & (start + k < width)[:, None], other=0.0)
            rounded = numbers.to(row.dtype)
            if INTERPRETED:  # it knows no bf16 products
                accumulator = tl.dot(rounded.to(tl.float32), row.to(tl.float32), accumulator)
            else:
                accumulator = tl.dot(rounded, row, accumulator)
    return accumulator


@triton.jit(do_not_specialize=["rows"])  # one compilation for all numbers of rows of a tile
def _packed(
    x,
    codes,
    high,
    scales,
    bias,
    residual,
    y,
    rows,
    n,
    x_stride,
    residual_stride,
    y_stride,
    width,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    blocks_m = tl.cdiv(rows, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    if GROUP == 1:
        block_m = program // blocks_n
        block_n = program % blocks_n
    else:
        band = program // (GROUP * blocks_n)
        height = tl.minimum(blocks_m - band * GROUP, GROUP)
        within = program % (GROUP * blocks_n)
        block_m = band * GROUP + within % height
        block_n = within // height
    m = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    live = m < rows
    inside = column < n
    safe = column if EVEN_N else tl.where(inside, column, 0)
    x_at = x + m[None, :] * x_stride
    out = _product(x_at, live[None, :], codes, high, scales, safe, n, width, KIND, WORDS, SCALES, BLOCK_M, BLOCK_N, EVEN_K)
    let_next_start(PDL)
    kind = y.dtype.element_ty
    out = out.to(kind)
    if HAS_BIAS:
        out = (out.to(tl.float32) + tl.load(bias + safe)[:, None].to(tl.float32)).to(kind)
    keep = live[None, :] if EVEN_N else live[None, :] & inside[:, None]
    if HAS_RESIDUAL:
        add = tl.load(residual + m[None, :] * residual_stride + safe[:, None], mask=keep, other=0.0)
        out = (out.to(tl.float32) + add.to(tl.float32)).to(kind)
    tl.store(y + m[None, :] * y_stride + column[:, None], out, mask=keep)


@triton.jit(do_not_specialize=["count"])
def _unpacked(
    codes,
    high,
    scales,
    wanted,
    y,
    count,
    n,
    width,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Rows of the weight as numbers: one span of `BLOCK` of them."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    span = tl.program_id(1)
    live = place < count
    if LISTED:
        row = tl.load(wanted + place, mask=live, other=0).to(tl.int32)
    else:
        row = tl.where(live, place, 0)
    k = tl.arange(0, 32)
    first = (k < 16)[None, :]
    at = codes + span.to(tl.int64) * n * WORDS + row[:, None] * WORDS + k[None, :]
    words = tl.load(at)
    more = words
    if KIND == "Q8_0":
        more = tl.load(at + 32)
    upper = words
    if KIND == "Q6_K":
        upper = tl.load(high + span.to(tl.int64) * n * 32 + row[:, None] * 32 + k[None, :]).to(tl.int32)
    if KIND == "Q5_0" or KIND == "Q5_1" or KIND == "Q5_K":
        both = tl.load(high + (span // 2).to(tl.int64) * n * 32 + row[:, None] * 32 + k[None, :])
        upper = both.to(tl.int32) >> (span % 2 * 8)
    a, b, c, d, e, f, g, h = _scale_words(scales + span.to(tl.int64) * n * SCALES + row, n, KIND)
    y_at = y + place.to(tl.int64)[:, None] * width + span * 256 + k[None, :]
    for plane in tl.static_range(8):
        mine = more if KIND == "Q8_0" and plane >= 4 else words
        numbers = _weights(mine, upper, a, b, c, d, e, f, g, h, first, plane, KIND, 1)
        inside = (span * 256 + plane * 32 + k < width)[None, :]
        tl.store(y_at + plane * 32, numbers.to(y.dtype.element_ty), mask=live[:, None] & inside)


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
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
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
            x_at, live[None, :], own, own_high, own_scales, safe, n, width, KIND, WORDS, SCALES, BLOCK_M, BLOCK_N, EVEN_K
        )
        at = y + pair[None, :] * y_stride + column[:, None]
        tl.store(at, out.to(y.dtype.element_ty), mask=live[None, :] & inside[:, None])
