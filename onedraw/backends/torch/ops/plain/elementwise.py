"""Elementwise functions, RMSNorm and rotary embedding whose bits do not depend on the position of a number in its tensor.

In: tensors whose size is a multiple of 64. Out: tensors of the same shape. `../../sampling/exact.py` explains why torch's own
functions do not have this property. Axes: T tokens, N heads of size D, F feed-forward width, W columns; d: rotary dimensions of a
head.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.torch.sampling.exact import apply_elementwise, ordered_sum
from onedraw.models.spec import Activation, Gate, RopeSpec


def exp_(x: Tensor) -> Tensor:
    """Replace x by exp(x) in place, and return it."""
    return apply_elementwise(torch.exp, x, out=x)


def softcapped(x: Tensor, cap: float) -> Tensor:
    return apply_elementwise(torch.tanh, x / cap) * cap


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation of x, computed in place if x is contiguous."""
    x = x.contiguous()
    match activation:
        case "silu":
            return apply_elementwise(_silu, x, out=x)
        case "gelu_tanh":
            return apply_elementwise(_gelu_tanh, x, out=x)
        case _:
            assert_never(activation)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Gated activation, activation(gate) * up, where gate_up [T, 2F] has the gate in its first F columns: [T, F]."""
    width = gate_up.shape[1] // 2
    return activated(gate_up[:, :width].contiguous(), activation).mul_(gate_up[:, width:])


def opened(x: Tensor, gate: Gate) -> Tensor:
    """Sigmoid or softplus of a gate's projection x, computed in float32 and rounded to x's dtype."""
    match gate:
        case "sigmoid":
            return apply_elementwise(torch.sigmoid, x.float()).to(x.dtype)
        case "softplus":
            return apply_elementwise(_softplus, x.float()).to(x.dtype)
        case _:
            assert_never(gate)


def times_gate(x: Tensor, gate: Tensor, kind: Gate) -> Tensor:
    """Multiply x [T, W] by sigmoid or softplus of a gate [T, W], or [T, W / n] with one value for n neighbouring columns."""
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


# ------------------------------------------------------------------ norm


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm, x / sqrt(mean(x²) + eps), computed in float32, times a weight if given: a float32 weight before rounding to x's
    dtype, any other after it."""
    wide = x.float()
    scale = ordered_sum(wide.square()).unsqueeze(-1).mul(1 / x.shape[-1]).add_(eps).rsqrt_()
    normed = wide.mul(scale)
    if weight is None:
        return normed.to(x.dtype)
    return normed.mul_(weight).to(x.dtype) if weight.dtype == torch.float32 else normed.to(x.dtype).mul_(weight)


# ------------------------------------------------------------------ rope


def rope_table(rope: RopeSpec, length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The table of cos and sin of every position, [length, 2, d/2]."""
    frequencies = np.asarray(rope.inverse_frequencies(), dtype=np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies  # [length, d/2]
    wide = angles.astype(np.float64)
    table = np.stack([np.cos(wide), np.sin(wide)], axis=1) * rope.scale
    return torch.from_numpy(table.astype(np.float32)).to(device=device, dtype=dtype)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding: x [T, N, D] with its first d dimensions rotated by cos and sin [T, 2, d/2]: dimension i pairs with i +
    d/2 (half-split). The other dimensions are copied."""
    half = angles.shape[-1]
    cos, sin = angles[:, :1], angles[:, 1:]  # [T, 1, d/2]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
