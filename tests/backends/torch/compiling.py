"""Compiles a Triton kernel for a GPU that need not be present."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(
    kernel: Any,
    pointers: dict[str, str],
    numbers: dict[str, Any],
    *,
    capability: int | str,
    backend: str = "cuda",
    divisible_by_16: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """`pointers`: type of each pointer or float argument; `numbers`: constexpr values; other arguments are 32-bit integers.
    `capability`: the compute capability of an NVIDIA GPU; the architecture of an AMD GPU, where `backend` is hip. Pointers and
    the arguments in `divisible_by_16` are specialized as multiples of 16."""
    signature, constants = {}, {}
    for name in kernel.arg_names:
        if name in numbers:
            signature[name], constants[(kernel.arg_names.index(name),)] = "constexpr", numbers[name]
        elif name in pointers:
            signature[name] = pointers[name] if pointers[name].startswith(("fp", "i")) else "*" + pointers[name][1:]
        else:
            signature[name] = "i32"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in divisible_by_16
    }
    lanes = 64 if backend == "hip" and str(capability).startswith("gfx9") else 32
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget(backend, capability, lanes), options=options)
