"""RMSNorm: x / sqrt(mean(x²) + eps), computed in float32, times a weight in the model's dtype.

In: x [..., W]. Out: the same shape and dtype. Each row is reduced by itself along a contiguous axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight
