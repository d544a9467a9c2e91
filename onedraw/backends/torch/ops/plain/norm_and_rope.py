"""RMSNorm, and rotary positions, half-split: (x[i], x[i + d/2]) rotates by position * inv_freq[i].

In: x, heads [T, N, D] for rope. Out: the same shape. Angles are products of float32 numbers, as the models were trained with; a
step only adds and multiplies, so rows cannot affect each other.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.torch.sampling.exact import ordered_sum
from onedraw.models.spec import RopeSpec


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps), computed in float32, times a weight, or none."""
    wide = x.float()
    scale = ordered_sum(wide.square()).unsqueeze(-1).mul(1 / x.shape[-1]).add_(eps).rsqrt_()
    normed = wide.mul(scale)
    if weight is None:
        return normed.to(x.dtype)
    return normed.mul_(weight).to(x.dtype) if weight.dtype == torch.float32 else normed.to(x.dtype).mul_(weight)


# ------------------------------------------------------------------ rope


def rope_table(rope: RopeSpec, length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """cos and sin of every position: [length, 2, d/2]."""
    frequencies = np.asarray(rope.inverse_frequencies(), dtype=np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies  # [length, d/2]
    wide = angles.astype(np.float64)
    table = np.stack([np.cos(wide), np.sin(wide)], axis=1) * rope.scale
    return torch.from_numpy(table.astype(np.float32)).to(device=device, dtype=dtype)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [T, N, D] rotated by cos and sin [T, 2, d/2]; dimensions past d pass through."""
    half = angles.shape[-1]
    cos, sin = angles[:, :1], angles[:, 1:]  # [T, 1, d/2]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
