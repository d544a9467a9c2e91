"""Products of many rows with dequantized weights on Hopper: launches `many_rows_hopper.cu`.

In: `PackedActivations` and a dequantized slice of outputs (activations.py). Out: [T, N], with bias and residual. X is the
activations, W the weights. A span is 256 inputs; a stage is a buffer in shared memory for a tile of X and one of W, a slot is a
buffer there for the scales, minima, block sums and factors of a span. TMA is the GPU's unit that copies tiles. Axes: T rows, N
outputs, S spans.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from onedraw.backends.packing import SPAN
from onedraw.backends.torch.ops.cuda.nvrtc import Kernel, Module, checked, driver
from onedraw.backends.torch.ops.cuda.packed.activations import DequantizedWeight, PackedActivations

TILE, DEPTH, THREADS = 128, 64, 384  # TILE: rows and outputs of a tile; DEPTH: inputs of a stage; THREADS: per block
# By scales per span (1 or 8): pipeline stages for tiles of X and W, and slots for per-span data, that fit into shared memory.
STAGES, SLOTS = {1: 6, 8: 4}, {1: 3, 8: 2}
GROUP = 4  # row tiles per band: tiles are computed band by band, so that weights are reused from the L2 cache
CLUSTER = 2  # thread blocks per cluster; its blocks share tiles of W, which TMA multicasts to all of them
# Values of the driver's enums: CUtensorMapDataType FLOAT16, swizzle NONE and 128B, L2 promotion 256B.
_FLOAT16, _NO_SWIZZLE, _SWIZZLE_128, _L2_PROMOTION = 6, 0, 3, 3


class _TensorMap(ctypes.Structure):
    """CUtensorMap: how TMA copies tiles of a matrix to shared memory."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _ManyRowsArguments(ctypes.Structure):
    """The ctypes mirror of `ManyRowsArguments` in many_rows_hopper.cu."""

    _fields_ = (
        *((name, _TensorMap) for name in ("x", "weights", "sums", "minima")),
        *((name, ctypes.c_void_p) for name in ("factors", "scales", "min_scales", "bias", "residual", "y")),
        *(
            (name, ctypes.c_int)
            for name in ("rows", "n", "spans", "scale_stride", "factor_stride", "residual_stride", "y_stride", "paired")
        ),
        ("padding", ctypes.c_char * 48),  # the kernel's structure is a multiple of 64 bytes
    )


def _tensor_map(tensor: Tensor, *, inner: int, swizzle: int, height: int = TILE) -> _TensorMap:
    """The descriptor by which TMA copies tiles [height, inner] of a float16 matrix to shared memory."""
    return _encode(tensor.data_ptr(), *tensor.shape, tensor.stride(0), inner, swizzle, height)


@lru_cache(maxsize=4096)
def _encode(address: int, rows: int, columns: int, stride: int, inner: int, swizzle: int, height: int) -> _TensorMap:
    buffer = (ctypes.c_uint64 * 32)()
    at = (ctypes.addressof(buffer) + 63) // 64 * 64  # the driver requires 64-byte alignment
    checked(
        driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            _FLOAT16,
            2,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(2 * stride),
            (ctypes.c_uint32 * 2)(inner, height),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            swizzle,
            _L2_PROMOTION,
            0,
        ),
        "cuTensorMapEncodeTiled",
    )
    return _TensorMap.from_buffer_copy((ctypes.c_uint64 * 16).from_address(at))


def many_rows_defines(per: int, minima: bool, dtype: torch.dtype) -> dict[str, int]:
    """The compile-time constants of many_rows_hopper.cu."""
    return {
        **{"PER": per, "MINIMA": int(minima), "BF16": int(dtype == torch.bfloat16), "STAGES": STAGES[per], "SLOTS": SLOTS[per]},
        **{"GROUP": GROUP, "CLUSTER": CLUSTER},
    }


@lru_cache(maxsize=64)
def _kernel(per: int, minima: bool, dtype: torch.dtype, device: torch.device) -> Kernel:
    module = Module("many_rows_hopper.cu", device, many_rows_defines(per, minima, dtype), arch_specific=True)
    return module.kernel("many_rows_product", shared_bytes(per))


def compile_kernels(*, by_block: bool, minima: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Compile, or load from the cache folder, the kernel of a product, so that no step compiles anything."""
    _kernel(8 if by_block else 1, minima, dtype, device)


def shared_bytes(per: int) -> int:
    """Bytes of shared memory per block: stages of X and W tiles, slots of per-span data, barriers, the running totals that do not
    fit into registers (8 scales per span), and room for alignment."""
    slot = (4 if per == 1 else 2) * TILE * 16 + (2 * per + 1) * TILE * 4
    totals = 0 if per == 1 else TILE * TILE * 4
    return 1024 + STAGES[per] * 2 * TILE * DEPTH * 2 + SLOTS[per] * slot + 256 + totals


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _by_span(factors: Tensor) -> Tensor:
    """Transpose factors [T, S] to [S, T'], where T' is T rounded up to the rows of a cluster's tiles; the padding is
    uninitialized."""
    rows, spans = factors.shape
    by_span = torch.empty(spans, -(-rows // (TILE * CLUSTER)) * TILE * CLUSTER, dtype=torch.float32, device=factors.device)
    by_span[:, :rows] = factors.t()
    return by_span


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def many_rows_product(
    activations: PackedActivations,
    dequantized: DequantizedWeight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A product of many rows: activations · dequantized weightᵀ + bias + residual → `out` [T, N]. `out` and `residual` may be
    columns of wider tensors."""
    rows, (n, width) = len(activations), dequantized.weights.shape
    if rows == 0:
        return out
    per, device = 8 if dequantized.by_block else 1, out.device
    strides = (0 if residual is None else residual.stride(0), out.stride(0))
    paired = all(stride % 2 == 0 for stride in strides) and out.data_ptr() % 4 == 0 and (_address(residual) or 0) % 4 == 0
    factors = _by_span(activations.factors)
    sums = _tensor_map(activations.sums.view(rows, -1), inner=8, swizzle=_NO_SWIZZLE)
    arguments = _ManyRowsArguments(
        _tensor_map(activations.x, inner=DEPTH, swizzle=_SWIZZLE_128),
        _tensor_map(dequantized.weights, inner=DEPTH, swizzle=_SWIZZLE_128, height=TILE // CLUSTER),
        sums,
        sums if dequantized.minima is None else _tensor_map(dequantized.minima.view(n, -1), inner=8, swizzle=_NO_SWIZZLE),
        *map(_address, (factors, dequantized.scales, dequantized.min_scales, bias, residual, out)),
        *(rows, n, width // SPAN, dequantized.scales.stride(0), factors.stride(0), *strides, int(paired)),
    )
    clusters = min(-(-rows // (TILE * CLUSTER)) * -(-n // TILE), _processors(device) // CLUSTER)
    kernel = _kernel(per, dequantized.min_scales is not None, out.dtype, device)
    kernel.launch(arguments, grid=(CLUSTER * clusters, 1), threads=THREADS, shared=shared_bytes(per))
    return out
