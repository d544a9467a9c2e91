"""Products of packed weights with many rows on Hopper: `many_rows_hopper.cu`, and how it is called.

In: prepared rows and a slice of a weight, opened (spans.py). Out: [T, N], with bias and residual.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from onedraw.backends.packing import SPAN
from onedraw.backends.torch.ops.cuda.nvrtc import Kernel, Module, checked, driver
from onedraw.backends.torch.ops.cuda.packed.activations import Opened, Prepared

TILE, DEPTH, THREADS = 128, 64, 384
STAGES, SLOTS = {1: 6, 8: 4}, {1: 3, 8: 2}  # of tiles, and of what belongs to a span, by how many scales a span has
GROUP = 4  # neighbouring tiles share so many blocks of rows
CLUSTER = 2  # blocks of threads that share the weights they bring
_HALF, _PLAIN, _SWIZZLED, _PROMOTED = 6, 0, 3, 3  # the driver's names: float16; no swizzle, 128 bytes; 256 bytes into L2


class _TensorMap(ctypes.Structure):
    """How tiles of a matrix are brought to shared memory; the driver fills it in."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _Given(ctypes.Structure):
    _fields_ = (
        *((name, _TensorMap) for name in ("x", "weights", "sums", "minima")),
        *((name, ctypes.c_void_p) for name in ("factors", "scales", "least", "bias", "residual", "y")),
        *(
            (name, ctypes.c_int)
            for name in ("rows", "n", "spans", "scale_stride", "factor_stride", "residual_stride", "y_stride", "paired")
        ),
        ("end", ctypes.c_char * 48),  # the kernel's structure is a multiple of 64 bytes
    )


def _tensor_map(tensor: Tensor, *, inner: int, swizzle: int, tall: int = TILE) -> _TensorMap:
    """Tiles [tall, inner] of a matrix of float16."""
    return _encoded(tensor.data_ptr(), *tensor.shape, tensor.stride(0), inner, swizzle, tall)


@lru_cache(maxsize=4096)
def _encoded(place: int, rows: int, columns: int, stride: int, inner: int, swizzle: int, tall: int) -> _TensorMap:
    room = (ctypes.c_uint64 * 32)()
    at = (ctypes.addressof(room) + 63) // 64 * 64  # where the driver wants it
    checked(
        driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            _HALF,
            2,
            ctypes.c_void_p(place),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(2 * stride),
            (ctypes.c_uint32 * 2)(inner, tall),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            swizzle,
            _PROMOTED,
            0,
        ),
        "describing a matrix",
    )
    return _TensorMap.from_buffer_copy((ctypes.c_uint64 * 16).from_address(at))


def defines(per: int, minima: bool, dtype: torch.dtype) -> dict[str, int]:
    """What the source is compiled with."""
    return {
        **{"PER": per, "MINIMA": int(minima), "BRAIN": int(dtype == torch.bfloat16), "STAGES": STAGES[per], "SLOTS": SLOTS[per]},
        **{"GROUP": GROUP, "CLUSTER": CLUSTER},
    }


@lru_cache(maxsize=64)
def _kernel(per: int, minima: bool, dtype: torch.dtype, device: torch.device) -> Kernel:
    return Module("many_rows_hopper.cu", device, defines(per, minima, dtype), own=True).kernel("wide", shared_bytes(per))


def make_ready(*, by_block: bool, minima: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Compile, or find in the cache folder, what a product needs: nothing is compiled in the middle of a turn."""
    _kernel(8 if by_block else 1, minima, dtype, device)


def shared_bytes(per: int) -> int:
    """Stages of X and W, slots of what belongs to a span, barriers, totals where they do not stay in registers, and room to align
    them."""
    slot = (4 if per == 1 else 2) * TILE * 16 + (2 * per + 1) * TILE * 4
    totals = 0 if per == 1 else TILE * TILE * 4
    return 1024 + STAGES[per] * 2 * TILE * DEPTH * 2 + SLOTS[per] * slot + 256 + totals


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _by_span(factors: Tensor) -> Tensor:
    """[T, S] → [S, T'], with room for whole tiles."""
    rows, spans = factors.shape
    found = torch.empty(spans, -(-rows // (TILE * CLUSTER)) * TILE * CLUSTER, dtype=torch.float32, device=factors.device)
    found[:, :rows] = factors.t()
    return found


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
    factors = _by_span(prepared.factors)
    sums = _tensor_map(prepared.sums.view(rows, -1), inner=8, swizzle=_PLAIN)
    given = _Given(
        _tensor_map(prepared.x, inner=DEPTH, swizzle=_SWIZZLED),
        _tensor_map(opened.weights, inner=DEPTH, swizzle=_SWIZZLED, tall=TILE // CLUSTER),
        sums,
        sums if opened.minima is None else _tensor_map(opened.minima.view(n, -1), inner=8, swizzle=_PLAIN),
        *map(_place, (factors, opened.scales, opened.least, bias, residual, out)),
        *(rows, n, width // SPAN, opened.scales.stride(0), factors.stride(0), *strides, int(whole)),
    )
    clusters = min(-(-rows // (TILE * CLUSTER)) * -(-n // TILE), _processors(device) // CLUSTER)
    kernel = _kernel(per, opened.least is not None, out.dtype, device)
    kernel.launch(given, grid=(CLUSTER * clusters, 1), threads=THREADS, shared=shared_bytes(per))
    return out
