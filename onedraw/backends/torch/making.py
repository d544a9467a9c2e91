"""Random weights made where they are used: a model of many billions of numbers in seconds, and nothing crosses from the host.

In: a random tensor's name, seed and spread. Out: the tensor on a device. The numbers are the device's own, other than those the
host would draw for the same name; they too depend on seed and name alone.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from onedraw.checkpoints.random import RandomTensor
from onedraw.models.source import Tensor as Stored


def can_make(tensor: Stored, device: torch.device) -> bool:
    return device.type == "cuda" and isinstance(tensor, RandomTensor) and tensor.anywhere and tensor.order is None


def make(tensor: Stored, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    assert isinstance(tensor, RandomTensor)
    digest = hashlib.sha256(f"{tensor.seed} {tensor.name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.randn(tensor.shape, generator=generator, device=device, dtype=dtype)
    if tensor.below:
        values.abs_().neg_()
    return values.mul_(tensor.spread).add_(tensor.mean)
