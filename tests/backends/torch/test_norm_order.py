"""The order in which a norm's sum is taken, as the compiler lays it out: one for all programs that a row may have."""

from __future__ import annotations

import re

import pytest
import torch

from onedraw.backends.torch.ops.cuda import norm
from tests.backends.torch.compiling import compiled


def order_of_the_sum(width: int, piece: int, *, kind: str, weight: str, capability: int, aligned: bool = True) -> str:
    """The layout of what is added up, with its meaning in place of its name."""
    block = 1 << (width - 1).bit_length()
    pointers = {"x": f"*{kind}", "weight": f"*{weight}", "y": f"*{kind}", "x_out": "*fp16", "factors": "*fp32", "sums": "*fp16"}
    numbers = {"W": width, "BLOCK": block, "PIECE": min(piece, block), "HAS_WEIGHT": True, "FP32_WEIGHT": weight == "fp32"}
    numbers |= {"PACKED": True, "PDL": capability >= 90}
    made = compiled(
        norm._rms_norm,
        pointers | {"eps": "fp32"},
        numbers,
        capability=capability,
        sixteens=("x_stride",) if aligned else (),
        num_warps=norm._warps(block),
        enable_fp_fusion=False,
    )
    text = made.asm["ttgir"]
    (name,) = set(re.findall(r"\(tensor<" + str(block) + r"xf32, (#\w+)>\) -> f32", text))
    (meaning,) = re.findall(rf"^{name} = (.*)$", text, re.MULTILINE)
    return meaning


@pytest.mark.parametrize(
    ("width", "kind", "weight"), [(2048, "bf16", "bf16"), (4096, "bf16", "fp32"), (5120, "bf16", "bf16"), (2880, "fp16", "fp16")]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_programs_that_share_a_row_take_its_sum_as_one_does(width: int, kind: str, weight: str, capability: int) -> None:
    few, many = (order_of_the_sum(width, piece, kind=kind, weight=weight, capability=capability) for piece in (1024, 1 << 20))
    assert few == many


def test_rows_at_odd_places_are_not_shared_since_their_sum_would_be_another() -> None:
    few, many = (
        order_of_the_sum(2048, piece, kind="bf16", weight="bf16", capability=90, aligned=False) for piece in (1024, 1 << 20)
    )
    assert few != many, "then they may be shared"
    rows = torch.empty(3, 2060, dtype=torch.bfloat16)
    assert norm._splits_rows(rows[:, :2048].contiguous())
    assert not norm._splits_rows(rows[:, :2048])
    assert not norm._splits_rows(torch.empty(3, 2056, dtype=torch.bfloat16)[:, 1:2049])
    assert not norm._splits_rows(torch.empty(65, 2048))
