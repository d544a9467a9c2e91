"""Packed products where there is no accelerator: under the interpreter, and compiled for cards that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onedraw.backends.packing import SEGMENT, SPANS
from onedraw.backends.torch.kernels.packed_linear import choose_packed_tile
from onedraw.backends.torch.kernels.triton_linear import SMALL_SHARED
from onedraw.backends.torch.kernels.triton_packed import _packed

LARGE_SHARED = 227 * 1024


def test_rows_are_prepared_right_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "tests/device/test_spans.py"]
    changes = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert "7 passed" in ran.stdout


def test_packed_products_are_right_under_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    quick = ("-k", "not packed_model")  # a whole model takes the interpreter a minute
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"),
        *("tests/device/test_packed.py", *quick),
    ]
    changes = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert f"{2 * len(SPANS) + 7} passed" in ran.stdout


@pytest.mark.parametrize("shared", [SMALL_SHARED, LARGE_SHARED])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 100, 2048])
def test_every_packed_tile_fits_into_the_shared_memory_of_its_card(rows: int, shared: int) -> None:
    for kind in SPANS:
        for n in (1024, 5120, 34816):
            assert choose_packed_tile(kind, rows, n, shared).shared(kind) <= shared


@pytest.mark.parametrize(
    ("kind", "rows", "arch"),
    [("Q4_K", 1, 86), ("Q5_1", 16, 86), ("Q6_K", 2048, 86), ("Q8_0", 2048, 86), ("Q5_K", 1, 90), ("Q4_K", 2048, 90)],
)
def test_products_compile_for_cards_that_are_not_here(kind: str, rows: int, arch: int) -> None:
    """Within the shared memory of the card, without memory for registers that do not fit, and with inputs in their order: a
    matrix unit that is offered four at a time would add them up in another one."""
    shared = SMALL_SHARED if arch == 86 else LARGE_SHARED
    tile = choose_packed_tile(kind, rows, 5120, shared)
    numbers = {
        **{"KIND": kind, "CODES": SPANS[kind].codes, "SCALES": SPANS[kind].scales},
        **{"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "GROUP": tile.group},
        **{
            "HAS_BIAS": False,
            "HAS_RESIDUAL": False,
            "EVEN_N": True,
            "EVEN_K": True,
            "SEGMENT": SEGMENT,
            "SPLIT": tile.split,
            "PDL": False,
        },
    }
    pointers = dict.fromkeys(("x", "bias", "residual", "y"), "*bf16") | {"codes": "*i16", "high": "*i16", "scales": "*i32"}
    pointers["y"] = "*fp32" if tile.split else "*bf16"
    types = {name: pointers.get(name, "constexpr" if name in numbers else "i32") for name in _packed.arg_names}
    wide = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(types) if name != "rows" and name not in numbers}
    source = ASTSource(_packed, signature=types, constexprs=numbers, attrs=wide)
    made = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": tile.warps, "num_stages": tile.stages}
    )
    assert made.metadata.shared <= shared
    assert "kWidth = 4" not in made.asm["ttgir"]
    assert "local.b" not in made.asm["ptx"]
