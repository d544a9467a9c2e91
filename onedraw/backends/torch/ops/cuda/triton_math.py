"""Functions that the Triton kernels share: accurate math, activations, programmatic dependent launch (PDL).

In and out: float32 tiles. Kernels are compiled without contraction of products and sums into fused multiply-adds
(`enable_fp_fusion=False`), so each operation rounds as written. Triton's interpreter has no libdevice, so functions of `tl`
replace it there.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """PDL: wait for the preceding kernels to finish writing. Before this call a kernel must not store anything, nor load anything
    that a kernel of the same step writes."""
    if PDL:
        gdc_wait()


@triton.jit
def load_int32(pointers):
    """Load int32 indices by inline assembly: the compiler would pipeline an ordinary load together with the large loads that
    depend on it, and delay both."""
    if INTERPRETED:
        return tl.load(pointers)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """PDL: allow the next kernel's programs to start on free multiprocessors. Small kernels call this right after their wait.
    Kernels that fill the device call it near their end, because waiting programs would occupy the device. Calling it before the
    wait (see `begin_kernel`) is rarely good: while the previous kernel still holds some multiprocessors, all programs of the next
    one would start on the others."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def exp(x):
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def log(x):
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def log1p(x):
    if INTERPRETED:
        return tl.log(1.0 + x)
    else:
        return libdevice.log1p(x)


@triton.jit
def tanh(x):
    if INTERPRETED:
        return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    else:
        return libdevice.tanh(x)


@triton.jit
def silu(x):
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit
def sigmoid(x):
    return tl.div_rn(x * 0.0 + 1.0, 1.0 + exp(-x))


@triton.jit
def softplus(x):
    """The activation softplus, log(1 + e^x); x itself where x > 20, which is the same after rounding."""
    return tl.where(x > 20.0, x, log1p(exp(tl.minimum(x, 20.0))))


@triton.jit
def apply_activation(x, ACTIVATION: tl.constexpr):
    """Apply silu (ACTIVATION 1) or gelu in its tanh form (2) to float32 values."""
    if ACTIVATION == 1:
        return silu(x)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + tanh(inner))


@triton.jit
def begin_kernel(PDL: tl.constexpr, LAUNCH_FIRST: tl.constexpr = False):
    """The PDL calls at the start of a small kernel. LAUNCH_FIRST: let the next kernel start before this one waits. That is for a
    packed product as next kernel: it has at most one program per multiprocessor, and loads its first weights before its own
    wait."""
    if LAUNCH_FIRST:
        launch_dependents(PDL)
        wait_for_inputs(PDL)
    else:
        wait_for_inputs(PDL)
        launch_dependents(PDL)
