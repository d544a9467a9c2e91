"""Deficits in sixteen bins, and their weights added up exactly: what the search for top-k and top-p counts with.

In: tiles of deficits, 0 for the best token of a row. Out: bins, weights (one for top-k, the mass for top-p), and sums of weights.
Weights are whole numbers, so sums of them have no order that shows.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - kernels know tuples of tiles by their sums, not by unpacking
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from onedraw.backends.torch.kernels.triton_math import INTERPRETED, exp


@triton.jit
def _index(deficit):
    """Which of all bins; they grow with the deficit, a quarter wide at first. Larger deficits are in no smaller bin."""
    bits = (deficit + 1.0).to(tl.int32, bitcast=True)
    return tl.maximum((bits >> 21) - 508, 0), (bits >> 17) & 15


@triton.jit
def bin_of(deficit, LEVEL: tl.constexpr):
    """Of sixteen; the last one of the first level has no end."""
    coarse, fine = _index(deficit)
    if LEVEL == 0:
        return tl.minimum(coarse, 15)
    else:
        return tl.where(coarse >= 15, tl.minimum(coarse - 15, 15), fine)


@triton.jit
def weight_of(deficit, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr):
    """Of what may still be kept: its mass, or one."""
    if BY_MASS:
        return tl.where(deficit <= limit, exp(0.0 - deficit) * SCALE, 0.0).to(tl.int64)
    else:
        return tl.full(deficit.shape, 1, dtype=tl.int64)


@triton.jit
def _floor(x):
    """Of 0 to 2^22."""
    if INTERPRETED:
        return tl.floor(x)
    else:
        return libdevice.add_rd(x, 8388608.0) - 8388608.0


@triton.jit
def _from(bin, EDGE: tl.constexpr):
    """1 where a whole number is EDGE or more, else 0: one sum that stops at 0 and at 1."""
    if INTERPRETED:
        return tl.where(bin >= EDGE, 1.0, 0.0)
    else:
        below: tl.constexpr = 1.0 - EDGE
        asm: tl.constexpr = "add.sat.f32 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=f,f,f", [bin, tl.full(bin.shape, below, tl.float32)], tl.float32, True, 1)


@triton.jit
def no_sums(SUMS: tl.constexpr):
    found = ()
    for _ in tl.static_range(SUMS):
        found = found + (tl.zeros((32,), dtype=tl.float32),)
    return found


@triton.jit
def added_up(sums, deficit, there, limit, SCALE: tl.constexpr, BY_MASS: tl.constexpr, LEVEL: tl.constexpr):
    """Sixteen sums of the weights of one deficit per thread: of all, of those not in the first bin, and so on. Masses have 41
    bits; they are added in three pieces of at most 14, whole numbers that float32 adds exactly."""
    bin = bin_of(deficit, LEVEL).to(tl.float32)
    found = ()
    if BY_MASS:
        mass = tl.where(there & (deficit <= limit), exp(0.0 - deficit) * SCALE, 0.0)
        high = _floor(mass * 7.450580596923828e-09)  # 2^-27
        rest = mass - high * 134217728.0
        middle = _floor(rest * 6.103515625e-05)  # 2^-14
        low = _floor(rest - middle * 16384.0)
        for edge in tl.static_range(16):
            part = _from(bin, edge)
            found = found + (tl.fma(part, high, sums[3 * edge]),)
            found = found + (tl.fma(part, middle, sums[3 * edge + 1]),)
            found = found + (tl.fma(part, low, sums[3 * edge + 2]),)
    else:
        one = tl.where(there, 1.0, 0.0)
        for edge in tl.static_range(16):
            found = found + (tl.fma(_from(bin, edge), one, sums[edge]),)
    return found


@triton.jit
def keep_sums(bins, sums, BY_MASS: tl.constexpr):
    """Add a program's sums to the row's bins."""
    at = tl.arange(0, 16)
    parts = tl.zeros((16,), dtype=tl.int64)
    for edge in tl.static_range(16):
        if BY_MASS:
            total = tl.sum(sums[3 * edge].to(tl.int32), 0).to(tl.int64) << 27
            total += tl.sum(sums[3 * edge + 1].to(tl.int32), 0).to(tl.int64) << 14
            total += tl.sum(sums[3 * edge + 2].to(tl.int32), 0).to(tl.int64)
        else:
            total = tl.sum(sums[edge].to(tl.int32), 0).to(tl.int64)
        parts = tl.where(at == edge, parts + total, tl.where(at == edge - 1, parts - total, parts))
    tl.atomic_add(bins + at, parts, mask=parts > 0, sem="relaxed")
