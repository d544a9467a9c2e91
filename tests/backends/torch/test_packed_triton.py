"""Triton and CUDA kernels of packed products without a GPU: under the Triton interpreter, and compiled for GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from onedraw.backends.devices import Device, device_precision, packed_kernels
from onedraw.backends.packing import SPAN_BYTES
from onedraw.backends.torch.ops.cuda import nvrtc
from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED
from onedraw.backends.torch.ops.cuda.packed import many_rows_hopper
from onedraw.backends.torch.ops.cuda.packed.activations import _pack_activations
from onedraw.backends.torch.ops.cuda.packed.many_rows import ManyRowsTile, _many_rows_product
from onedraw.backends.torch.ops.cuda.packed.portable import KINDS, SIXTEEN, TILE_OUTPUTS, TILE_ROWS, portable_product
from tests.backends.torch import emulated
from tests.backends.torch.compiling import compiled

LARGE_SHARED = 227 * 1024


WITH_CPP = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler here")


@pytest.mark.parametrize(
    ("name", "passed"),
    [
        ("test_packed_activations.py", 14),
        ("test_portable.py", 2 * len(SPAN_BYTES) + 5),
        pytest.param("test_packed.py", len(SPAN_BYTES) + 9, marks=WITH_CPP),
    ],
)
def test_triton_kernels_are_correct_under_the_interpreter(name: str, passed: int) -> None:
    """In a child process, because Triton selects the interpreter at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", f"tests/device/{name}"]
    changes = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:]
    counted = re.search(r"\b(\d+) passed", result.stdout)
    assert counted is not None
    assert int(counted[1]) == passed


def check_compiled(kernel: Any) -> None:
    """It fits into the shared memory of a small GPU, spills no registers, and keeps the order of inputs: with kWidth = 4, tensor
    cores would add them in another order."""
    assert kernel.metadata.shared <= SMALL_SHARED
    assert "kWidth = 4" not in kernel.asm["ttgir"]
    assert "local.b" not in kernel.asm["ptx"]


@pytest.mark.parametrize("capability", [86, 90])
@pytest.mark.parametrize(("per", "minima"), [(1, True), (1, False), (8, True)])
def test_products_of_many_rows_compile_without_a_gpu(per: int, minima: bool, capability: int) -> None:
    tile = ManyRowsTile()
    pointers = {
        **dict.fromkeys(("x", "sums", "weights", "minima"), "*fp16"),
        **dict.fromkeys(("factors", "scales", "min_scales"), "*fp32"),
        **dict.fromkeys(("bias", "residual", "y"), "*bf16"),
    }
    numbers = {
        **{"PER": per, "MINIMA": minima, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "GROUP": tile.group},
        **{"BLOCK_K": 32 if per == 8 else tile.depth, "HAS_BIAS": True, "HAS_RESIDUAL": True},
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    check_compiled(compiled(_many_rows_product, pointers, numbers, capability=capability, **options))


@pytest.mark.parametrize(("spans", "warps"), [(4, 4), (8, 4)])
def test_activation_packing_compiles_without_a_gpu(spans: int, warps: int) -> None:
    pointers = {"x": "*bf16", "order": "*i32", "x_out": "*fp16", "factors": "*fp32", "sums": "*fp16"}
    numbers = {"SPANS": spans, "ORDERED": True, "PDL": False}
    check_compiled(compiled(_pack_activations, pointers, numbers, capability=86, num_warps=warps, enable_fp_fusion=False))


@pytest.mark.skipif(nvrtc.compiler() is None, reason="no NVRTC here")
@pytest.mark.parametrize(("per", "minima"), [(1, True), (8, True)])
def test_the_hopper_product_compiles_and_fits_into_shared_memory(per: int, minima: bool) -> None:
    assert nvrtc.compile_source("many_rows_hopper.cu", "sm_90a", many_rows_hopper.many_rows_defines(per, minima, torch.bfloat16))
    assert many_rows_hopper.shared_bytes(per) <= LARGE_SHARED


TARGETS: tuple[tuple[str, int | str], ...] = (
    *(("cuda", capability) for capability in (60, 61, 70, 75)),
    *(("hip", arch) for arch in ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1200")),
)


def portable(kind: str, dtype: str, backend: str, arch: int | str) -> Any:
    numbers = {"KIND": KINDS.index(kind), "BLOCK": 16 if kind in SIXTEEN else 32, "MINIMA": kind == "Q4_K"}
    numbers |= {"TILE_M": TILE_ROWS, "TILE_N": TILE_OUTPUTS}
    pointers = {"x": f"*{dtype}", "stored": "*u8", "factors": "*fp32", "y": f"*{dtype}"}
    options = {"backend": backend, "num_warps": 4, "enable_fp_fusion": False}
    return compiled(portable_product, pointers, numbers, capability=arch, **options)


@pytest.mark.parametrize(("backend", "arch"), TARGETS)
def test_portable_products_compile_for_gpus_without_the_tensor_core_kernels(backend: str, arch: int | str) -> None:
    device = Device("gpu:0", "hip" if backend == "hip" else "cuda", arch if isinstance(arch, str) else f"sm{arch}")
    assert packed_kernels(device) == "triton"
    dtype = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}[device_precision(device)]
    for kind in ("Q4_K", "Q6_K"):
        assert portable(kind, dtype, backend, arch).metadata.shared <= 48 << 10


def test_triton_refuses_the_amd_architectures_that_are_left_out() -> None:
    """A child process, because the compiler prints a page about it."""
    assert packed_kernels(Device("hip:0", "hip", "gfx906")) is None
    code = "from tests.backends.torch.test_packed_triton import portable; portable('Q4_K', 'fp16', 'hip', 'gfx906')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "unsupported target: 'gfx906'" in result.stderr
