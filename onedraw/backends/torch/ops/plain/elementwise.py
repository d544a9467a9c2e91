"""Elementwise functions whose bits do not depend on where in a tensor a number is.

In: tensors whose size is a multiple of 64. Out: the same shape. `sampling/exact.py` says why the library's own functions are
not enough.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from onedraw.backends.torch.sampling.exact import apply_elementwise
from onedraw.models.spec import Activation, Gate


def exp_(x: Tensor) -> Tensor:
    """In place."""
    return apply_elementwise(torch.exp, x, out=x)


def softcapped(x: Tensor, cap: float) -> Tensor:
    return apply_elementwise(torch.tanh, x / cap) * cap


def activated(x: Tensor, activation: Activation) -> Tensor:
    """In place where x is contiguous."""
    x = x.contiguous()
    match activation:
        case "silu":
            return apply_elementwise(_silu, x, out=x)
        case "gelu_tanh":
            return apply_elementwise(_gelu_tanh, x, out=x)
        case _:
            assert_never(activation)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up for [T, 2F] with the gate in the first half: [T, F]."""
    width = gate_up.shape[1] // 2
    return activated(gate_up[:, :width].contiguous(), activation).mul_(gate_up[:, width:])


def opened(x: Tensor, gate: Gate) -> Tensor:
    """The factor of a gate: computed in float32, in x's dtype."""
    match gate:
        case "sigmoid":
            return apply_elementwise(torch.sigmoid, x.float()).to(x.dtype)
        case "softplus":
            return apply_elementwise(_softplus, x.float()).to(x.dtype)
        case _:
            assert_never(gate)


def times_gate(x: Tensor, gate: Tensor, kind: Gate) -> Tensor:
    """x [T, W] times a gate [T, W], or [T, W / n] with one number for n neighbours."""
    factor = opened(gate.contiguous(), kind)
    return x.view(len(x), gate.shape[1], -1).mul(factor.unsqueeze(2)).view(len(x), -1)


def _softplus(x: Tensor, out: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.aten.softplus(x) if out is None else torch.ops.aten.softplus(x, out=out)
    return y


def _silu(x: Tensor, out: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.aten.silu(x) if out is None else torch.ops.aten.silu(x, out=out)
    return y


def _gelu_tanh(x: Tensor, out: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.aten.gelu(x, approximate="tanh") if out is None else torch.ops.aten.gelu(x, approximate="tanh", out=out)
    return y
