"""The compiled norm sums a row in the same order, whether one program or several compute it."""

from __future__ import annotations

import re

import pytest
import torch

from onedraw.backends.torch.ops.cuda import norm
from tests.backends.torch.compiling import compiled


def reduction_layout(width: int, piece: int, *, kind: str, weight: str, capability: int, aligned: bool = True) -> str:
    """Return the layout in which the compiler distributes the operand of the reduction over threads."""
    block = 1 << (width - 1).bit_length()
    pointers = {"x": f"*{kind}", "weight": f"*{weight}", "y": f"*{kind}", "x_out": "*fp16", "factors": "*fp32", "sums": "*fp16"}
    numbers = {"W": width, "BLOCK": block, "PIECE": min(piece, block), "HAS_WEIGHT": True, "FP32_WEIGHT": weight == "fp32"}
    numbers |= {"PACKED": True, "PDL": capability >= 90}
    kernel = compiled(
        norm._rms_norm,
        pointers | {"eps": "fp32"},
        numbers,
        capability=capability,
        divisible_by_16=("x_stride",) if aligned else (),
        num_warps=norm._warps(block),
        enable_fp_fusion=False,
    )
    text = kernel.asm["ttgir"]
    (name,) = set(re.findall(r"\(tensor<" + str(block) + r"xf32, (#\w+)>\) -> f32", text))
    (definition,) = re.findall(rf"^{name} = (.*)$", text, re.MULTILINE)
    return definition


@pytest.mark.parametrize(
    ("width", "kind", "weight"), [(2048, "bf16", "bf16"), (4096, "bf16", "fp32"), (5120, "bf16", "bf16"), (2880, "fp16", "fp16")]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_programs_that_share_a_row_sum_it_in_the_same_order(width: int, kind: str, weight: str, capability: int) -> None:
    few, many = (reduction_layout(width, piece, kind=kind, weight=weight, capability=capability) for piece in (1024, 1 << 20))
    assert few == many


def test_unaligned_rows_are_computed_by_one_program_since_their_sums_would_have_another_order() -> None:
    few, many = (
        reduction_layout(2048, piece, kind="bf16", weight="bf16", capability=90, aligned=False) for piece in (1024, 1 << 20)
    )
    assert few != many, "unaligned rows could be shared"
    rows = torch.empty(3, 2060, dtype=torch.bfloat16)
    assert norm._splits_rows(rows[:, :2048].contiguous())
    assert not norm._splits_rows(rows[:, :2048])
    assert not norm._splits_rows(torch.empty(3, 2056, dtype=torch.bfloat16)[:, 1:2049])
    assert not norm._splits_rows(torch.empty(65, 2048))
