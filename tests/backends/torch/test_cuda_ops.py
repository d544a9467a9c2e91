"""What the operations of a GPU refuse when they are asked, before a weight is read; no GPU is needed to ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from onedraw.backends.torch.model.mixers import DeltaMixer
from onedraw.backends.torch.model.weight_loader import WeightLoader
from onedraw.backends.torch.ops.cuda.delta import unsupported_reason
from onedraw.backends.torch.ops.cuda.ops import TritonOps
from onedraw.errors import UnsupportedModel
from onedraw.models.source import LazyTensor
from onedraw.models.spec import DeltaSpec

CPU = torch.device("cpu")
QWEN = DeltaSpec(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv=4)


class Nothing:
    """A checkpoint of which nothing may be read."""

    def tensor(self, layer: int | None, weight: str) -> LazyTensor:
        raise AssertionError(f"{weight} was read")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key_dim": 20}, "key heads 20 wide"),
        ({"key_dim": 97}, "key heads 97 wide"),
        ({"value_dim": 100}, "value heads 100 wide"),
        ({"key_dim": 8}, "multiples of 8 from 16 on"),
        ({"value_heads": 40}, "40 value heads to 16 key heads"),
        ({"conv": 3}, "a convolution over 3 positions"),
    ],
)
def test_delta_layers_that_kernels_would_get_wrong_are_refused_before_anything_is_read(change: dict[str, Any], said: str) -> None:
    loader = WeightLoader(Nothing(), ops=TritonOps(CPU), dtype=torch.bfloat16, device=CPU)
    with pytest.raises(UnsupportedModel, match=f"{said}.*use --device cpu"):
        DeltaMixer.load(0, replace(QWEN, **change), loader, 1e-6)


@pytest.mark.parametrize("change", [{}, {"key_dim": 64}, {"key_dim": 16, "value_dim": 24}, {"key_heads": 48}, {"conv": 2}])
def test_other_delta_layers_are_not(change: dict[str, Any]) -> None:
    assert unsupported_reason(replace(QWEN, **change)) == ""
