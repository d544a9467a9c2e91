"""Keys and values as codes of 8 bits with one scale per token and key head.

In: heads [..., D]. Out: codes of the same shape and float32 scales [...]; a number is its code times its head's scale. int8: the
largest number of a head is 127; fp8 (e4m3): 448. They are made once, when a token's keys and values are written, and every
form of attention reads codes and scales alike: a score is (q · code) times the key's scale, and the weight that meets a value's
code is the weight times the value's scale, rounded as a weight is. The sum of a row takes the plain weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
KV_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def coded(dtype: torch.dtype) -> bool:
    """Whether such pages have scales beside them."""
    return dtype in LARGEST


def encode(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Finite numbers [..., D] → codes [..., D] and scales [...]. Ties go to the even code."""
    wide, largest = heads.float(), LARGEST[dtype]
    scales = wide.abs().amax(-1) / largest
    ratios = torch.where(scales.unsqueeze(-1) > 0, wide / scales.unsqueeze(-1), 0.0).clamp_(-largest, largest)
    return (ratios.round_() if dtype == torch.int8 else ratios).to(dtype), scales


def bits(store: Tensor) -> Tensor:
    """The same memory in a dtype that every operation moves: few know fp8."""
    return store.view(torch.uint8) if store.dtype == torch.float8_e4m3fn else store
