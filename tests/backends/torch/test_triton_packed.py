"""Packed products where there is no accelerator: under the interpreter, and compiled for cards that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from onedraw.backends.packing import SPAN_BYTES
from onedraw.backends.torch.ops.cuda import nvrtc
from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED
from onedraw.backends.torch.ops.cuda.packed import many_rows_hopper as wide
from onedraw.backends.torch.ops.cuda.packed.activations import _prepare
from onedraw.backends.torch.ops.cuda.packed.many_rows import WideTile, _wide
from tests.backends.torch import emulated
from tests.backends.torch.compiling import compiled

LARGE_SHARED = 227 * 1024


WITH_CPP = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler here")


@pytest.mark.parametrize(
    ("name", "passed"), [("test_packed_activations.py", 14), pytest.param("test_packed.py", len(SPAN_BYTES) + 9, marks=WITH_CPP)]
)
def test_what_is_written_in_triton_is_right_under_the_interpreter(name: str, passed: int) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", f"tests/device/{name}"]
    changes = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert f"{passed} passed" in ran.stdout


def lean(made: Any) -> None:
    """Within the shared memory of a small card, without memory for registers that do not fit, and with inputs in their order: a
    matrix unit that is offered four at a time would add them up in another one."""
    assert made.metadata.shared <= SMALL_SHARED
    assert "kWidth = 4" not in made.asm["ttgir"]
    assert "local.b" not in made.asm["ptx"]


@pytest.mark.parametrize("capability", [86, 90])
@pytest.mark.parametrize(("per", "minima"), [(1, True), (1, False), (8, True)])
def test_wide_products_compile_for_cards_that_are_not_here(per: int, minima: bool, capability: int) -> None:
    tile = WideTile()
    pointers = {
        **dict.fromkeys(("x", "sums", "weights", "minima"), "*fp16"),
        **dict.fromkeys(("factors", "scales", "least"), "*fp32"),
        **dict.fromkeys(("bias", "residual", "y"), "*bf16"),
    }
    numbers = {
        **{"PER": per, "MINIMA": minima, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "GROUP": tile.group},
        **{"BLOCK_K": 32 if per == 8 else tile.depth, "HAS_BIAS": True, "HAS_RESIDUAL": True},
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    lean(compiled(_wide, pointers, numbers, capability=capability, **options))


@pytest.mark.parametrize(("spans", "warps"), [(4, 4), (8, 4)])
def test_rows_are_prepared_by_kernels_that_compile_for_cards_that_are_not_here(spans: int, warps: int) -> None:
    pointers = {"x": "*bf16", "order": "*i32", "x_out": "*fp16", "factors": "*fp32", "sums": "*fp16"}
    numbers = {"SPAN_BYTES": spans, "ORDERED": True, "PDL": False}
    lean(compiled(_prepare, pointers, numbers, capability=86, num_warps=warps, enable_fp_fusion=False))


@pytest.mark.skipif(nvrtc.compiler() is None, reason="no NVRTC here")
@pytest.mark.parametrize(("per", "minima"), [(1, True), (8, True)])
def test_the_wide_product_of_hopper_compiles_and_its_stages_fit(per: int, minima: bool) -> None:
    assert nvrtc.compile_source("many_rows_hopper.cu", "sm_90a", wide.defines(per, minima, torch.bfloat16))
    assert wide.shared_bytes(per) <= LARGE_SHARED
