"""Small pieces that the Triton kernels share: accurate functions, activations, waiting for the kernel before.

In: float32 tiles. Out: float32 tiles. Kernels are compiled without contraction of products and sums, so what is written
is what is computed, whatever stands around it. Under Triton's interpreter, which knows no device library, the functions
are numpy's.
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
    """Wait until everything before this kernel is written. Nothing is written before, and nothing read that the turn writes."""
    if PDL:
        gdc_wait()


@triton.jit
def load_int32(pointers):
    """32-bit integers, loaded as they are asked for. A load that the compiler knows would wait in a queue with the large ones
    that hang on it, and they with it."""
    if INTERPRETED:
        return tl.load(pointers)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """The next kernel's programs may take the places that become free. Small kernels say so once they have waited, those that
    fill the device when their work is all but done: programs that only wait would stand in its way. Hardly anybody says
    so before waiting (see `begin_kernel`): the kernel before may hold some multiprocessors, and the next crowds on the others."""
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
    """log(1 + e^x), x itself past 20."""
    return tl.where(x > 20.0, x, log1p(exp(tl.minimum(x, 20.0))))


@triton.jit
def apply_activation(x, ACTIVATION: tl.constexpr):
    """silu (1) or gelu in its tanh form (2), of float32."""
    if ACTIVATION == 1:
        return silu(x)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + tanh(inner))


@triton.jit
def begin_kernel(PDL: tl.constexpr, LAUNCH_FIRST: tl.constexpr = False):
    """A small kernel's beginning. Before PACKED products the next may start before this one waits: a product has a program or
    less for each multiprocessor, which does not crowd, and its first weights are on their way while it waits."""
    if LAUNCH_FIRST:
        launch_dependents(PDL)
        wait_for_inputs(PDL)
    else:
        wait_for_inputs(PDL)
        launch_dependents(PDL)
