"""RMSNorm: x / sqrt(mean(x²) + eps), computed in float32, times a weight, or none.

In: x [..., W]. Out: the same shape and dtype. Each row's sum has one fixed order. A weight in float32 meets the normed
numbers before they are rounded to x's dtype ("wide"), a weight in x's dtype after ("narrow").
"""

from __future__ import annotations

import torch
from torch import Tensor

from onedraw.backends.torch.exact import ordered_sum


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    scale = ordered_sum(wide.square()).unsqueeze(-1).mul(1 / x.shape[-1]).add_(eps).rsqrt_()
    normed = wide.mul(scale)
    if weight is None:
        return normed.to(x.dtype)
    return normed.mul_(weight).to(x.dtype) if weight.dtype == torch.float32 else normed.to(x.dtype).mul_(weight)
