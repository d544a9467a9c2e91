"""Models that the GPU kernels cannot run are refused before a weight is read; the check needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from onedraw.backends.torch.model.layer import DeltaMixer
from onedraw.backends.torch.model.weight_loader import WeightLoader
from onedraw.backends.torch.ops.cuda.delta import unsupported_reason
from onedraw.backends.torch.ops.cuda.ops import TritonOps
from onedraw.errors import UnsupportedModel
from onedraw.models.source import LazyTensor
from onedraw.models.spec import DeltaSpec

CPU = torch.device("cpu")
QWEN = DeltaSpec(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv=4)


class UnreadableCheckpoint:
    """Fails the test when a tensor is read."""

    def tensor(self, layer: int | None, weight: str) -> LazyTensor:
        raise AssertionError(f"{weight} was read")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_dim": 20}, "key heads of size 20"),
        ({"key_dim": 97}, "key heads of size 97"),
        ({"value_dim": 100}, "value heads of size 100"),
        ({"key_dim": 8}, "multiples of 8 from 16 on"),
        ({"value_heads": 40}, "40 value heads for 16 key heads"),
        ({"conv": 3}, "a convolution over 3 positions"),
    ],
)
def test_delta_layers_with_unsupported_sizes_are_refused_before_weights_are_read(change: dict[str, Any], message: str) -> None:
    loader = WeightLoader(UnreadableCheckpoint(), ops=TritonOps(CPU), dtype=torch.bfloat16, device=CPU)
    with pytest.raises(UnsupportedModel, match=f"{message}.*use --device cpu"):
        DeltaMixer.load(0, replace(QWEN, **change), loader, 1e-6)


@pytest.mark.parametrize("change", [{}, {"key_dim": 64}, {"key_dim": 16, "value_dim": 24}, {"key_heads": 48}, {"conv": 2}])
def test_other_delta_layers_are_supported(change: dict[str, Any]) -> None:
    assert unsupported_reason(replace(QWEN, **change)) == ""
