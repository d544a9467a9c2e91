"""RMSNorm: x / sqrt(mean(x²) + eps), computed in float32, times a weight in the model's dtype.

In: x [..., W]. Out: the same shape and dtype. Each row's sum has one fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onedraw.backends.torch.exact import ordered_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = ordered_sum(wide.square()).unsqueeze(-1).mul(1 / x.shape[-1]).add_(eps).rsqrt_()
    normed = wide.mul(scale)
    return normed.mul_(weight) if x.dtype == torch.float32 else normed.to(x.dtype).mul_(weight)
