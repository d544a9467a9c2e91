"""RMSNorm: x / sqrt(mean(x²) + eps), computed in float32, times a weight in the model's dtype.

In: x [..., W]. Out: the same shape and dtype. Each row is reduced by itself along a contiguous axis.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = wide.square().sum(-1, keepdim=True).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    normed = wide.mul(scale)
    return normed.mul_(weight) if x.dtype == torch.float32 else normed.to(x.dtype).mul_(weight)
