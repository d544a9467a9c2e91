"""The Walsh-Hadamard transform of heads, for keys and values of 4 bits: `transformed` in `state/kv_pages.py` says why and how.

In: heads in float32. Out: bitwise the transform of plain torch, since every sum and difference is of the same two numbers. PDL is
programmatic dependent launch: a kernel may start while the one before it ends, and waits before it reads what that one writes.
Axes: T tokens, H heads, D the size of a head.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.torch.ops.cuda.linear import launch_options
from onedraw.backends.torch.ops.cuda.triton_math import begin_kernel

HEADS_PER_PROGRAM = 4


def exponent_of(dim: int) -> int:
    """The transform's block is the largest power of two that divides the size of a head: 2 to this exponent."""
    return (dim & -dim).bit_length() - 1


@triton.jit
def transform_heads(x, EXPONENT: tl.constexpr, KEPT: tl.constexpr):
    """Transform heads x [heads, BLOCK_D] float32 in blocks of 2^EXPONENT. KEPT: 1 for keys and values, 0 for queries and
    outputs; the product of the factors for both is 2^-EXPONENT, which makes the transform undo itself. Each round adds and
    subtracts neighbours and moves their sums before all differences, so the numbers are in their own places again after the last
    round."""
    BLOCK: tl.constexpr = 2**EXPONENT
    BLOCKS: tl.constexpr = x.shape[0] * x.shape[1] // BLOCK
    blocks = tl.reshape(x, (BLOCKS, BLOCK))
    for _ in tl.static_range(EXPONENT):
        first, second = tl.split(tl.reshape(blocks, (BLOCKS, BLOCK // 2, 2)))
        blocks = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (BLOCKS, BLOCK))
    return tl.reshape(blocks, (x.shape[0], x.shape[1])) * (1.0 / 2 ** ((EXPONENT + KEPT) // 2))


@triton.jit
def _transform_outputs(x, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HEADS: tl.constexpr,
                       EXPONENT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (d < D)[None, :]
    begin_kernel(PDL)
    places = x + (tl.program_id(0).to(tl.int64) * HEADS + head[:, None]) * D + d[None, :]
    found = transform_heads(tl.load(places, mask=mask, other=0.0).to(tl.float32), EXPONENT, 0)
    tl.store(places, found.to(x.dtype.element_ty), mask=mask)


def transform_outputs(x: Tensor, *, heads: int, dim: int, pdl: bool) -> None:
    """Transform the outputs of attention, x [T, H * D], in place."""
    _transform_outputs[(len(x), triton.cdiv(heads, HEADS_PER_PROGRAM))](
        x,
        HEADS=heads,
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        EXPONENT=exponent_of(dim),
        PDL=pdl,
        num_warps=4,
        enable_fp_fusion=False,
        **launch_options(pdl),
    )
