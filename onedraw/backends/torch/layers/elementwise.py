"""Functions of single numbers whose bits do not depend on where in a tensor the number stands.

In: tensors whose size is a multiple of 64. Out: the same shape. See `exact.py` for why the library alone is not enough.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from onedraw.backends.torch.exact import apply_elementwise
from onedraw.models.spec import Activation


def exp_(x: Tensor) -> Tensor:
    """In place."""
    return apply_elementwise(torch.exp, x, out=x)


def softcapped(x: Tensor, cap: float) -> Tensor:
    return apply_elementwise(torch.tanh, x / cap) * cap


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up for [T, 2F] with the gate in the first half: [T, F]."""
    width = gate_up.shape[1] // 2
    gate = gate_up[:, :width].contiguous()
    match activation:
        case "silu":
            opened = apply_elementwise(_silu, gate, out=gate)
        case "gelu_tanh":
            opened = apply_elementwise(_gelu_tanh, gate, out=gate)
        case _:
            assert_never(activation)
    return opened.mul_(gate_up[:, width:])


def _silu(x: Tensor, out: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.aten.silu(x) if out is None else torch.ops.aten.silu(x, out=out)
    return y


def _gelu_tanh(x: Tensor, out: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.aten.gelu(x, approximate="tanh") if out is None else torch.ops.aten.gelu(x, approximate="tanh", out=out)
    return y
