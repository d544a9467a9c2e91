"""Products of packed weights with many rows on Hopper: `wide.cu`, and how it is called.

In: prepared rows and a slice of a weight, opened (spans.py). Out: [T, N], with bias and residual.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from onedraw.backends.packing import SPAN
from onedraw.backends.torch.kernels.nvrtc import Kernel, Module, checked, driver
from onedraw.backends.torch.kernels.spans import Opened, Prepared

TILE, DEPTH, THREADS = 128, 64, 384
STAGES = {1: 6, 8: 5}  # by how many scales a span has
GROUP = 16  # neighbouring tiles share so many blocks of rows
_HALF, _PLAIN, _SWIZZLED, _PROMOTED = 6, 0, 3, 3  # the driver's names: float16; no swizzle, 128 bytes; 256 bytes into L2


class _TensorMap(ctypes.Structure):
    """How tiles of a matrix are brought to shared memory; the driver fills it in."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _Given(ctypes.Structure):
    _fields_ = (
        *((name, _TensorMap) for name in ("x", "weights", "sums", "minima")),
        *((name, ctypes.c_void_p) for name in ("factors", "scales", "least", "bias", "residual", "y")),
        *((name, ctypes.c_int) for name in ("rows", "n", "spans", "residual_stride", "y_stride", "paired")),
        ("end", ctypes.c_char * 56),  # the kernel's structure is a multiple of 64 bytes
    )


def _tensor_map(tensor: Tensor, *, inner: int, swizzle: int) -> _TensorMap:
    """Tiles [128, inner] of a matrix of float16."""
    room = (ctypes.c_uint64 * 32)()
    at = (ctypes.addressof(room) + 63) // 64 * 64  # where the driver wants it
    rows, columns = tensor.shape
    checked(
        driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            _HALF,
            2,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(tensor.stride(0) * tensor.itemsize),
            (ctypes.c_uint32 * 2)(inner, TILE),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            swizzle,
            _PROMOTED,
            0,
        ),
        "describing a matrix",
    )
    return _TensorMap.from_buffer_copy((ctypes.c_uint64 * 16).from_address(at))


@lru_cache(maxsize=64)
def _kernel(per: int, minima: bool, dtype: torch.dtype, device: torch.device) -> Kernel:
    defines = {"PER": per, "MINIMA": int(minima), "BRAIN": int(dtype == torch.bfloat16), "STAGES": STAGES[per], "GROUP": GROUP}
    return Module("wide.cu", device, defines, own=True).kernel("wide", shared_bytes(per))


def make_ready(*, by_block: bool, minima: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Compile, or find in the cache folder, what a product needs: nothing is compiled in the middle of a turn."""
    _kernel(8 if by_block else 1, minima, dtype, device)


def shared_bytes(per: int) -> int:
    """Stages of X and W, two slots of what belongs to a span, barriers, and room to align them."""
    slot = (4 if per == 1 else 2) * TILE * 16 + (2 * per + 1) * TILE * 4
    return 1024 + STAGES[per] * 2 * TILE * DEPTH * 2 + 2 * slot + 16 * STAGES[per] + 32


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def wide_product(
    prepared: Prepared, opened: Opened, *, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Outputs may be columns of a wider tensor, and so may the residual's."""
    rows, (n, width) = len(prepared), opened.weights.shape
    if rows == 0:
        return out
    per, device = 8 if opened.by_block else 1, out.device
    strides = (0 if residual is None else residual.stride(0), out.stride(0))
    whole = all(stride % 2 == 0 for stride in strides) and out.data_ptr() % 4 == 0 and (_place(residual) or 0) % 4 == 0
    sums = _tensor_map(prepared.sums.view(rows, -1), inner=8, swizzle=_PLAIN)
    given = _Given(
        _tensor_map(prepared.x, inner=DEPTH, swizzle=_SWIZZLED),
        _tensor_map(opened.weights, inner=DEPTH, swizzle=_SWIZZLED),
        sums,
        sums if opened.minima is None else _tensor_map(opened.minima.view(n, -1), inner=8, swizzle=_PLAIN),
        *map(_place, (prepared.factors, opened.scales, opened.least, bias, residual, out)),
        *(rows, n, width // SPAN, *strides, int(whole)),
    )
    tiles = -(-rows // TILE) * -(-n // TILE)
    kernel = _kernel(per, opened.least is not None, out.dtype, device)
    kernel.launch(given, grid=(min(tiles, _processors(device)), 1), threads=THREADS, shared=shared_bytes(per))
    return out
