"""Kernels compiled for a card that is not here: what the compiler says of their shared memory, and that they compile at all."""

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
    capability: int,
    sixteens: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """`pointers`: argument → element kind; `numbers`: constants; what is in neither is a 32-bit integer, floats by name. Pointers
    and `sixteens` are multiples of 16."""
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
        if signature[name].startswith("*") or name in sixteens
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
