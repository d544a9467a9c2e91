"""Launches the CUDA kernels that read packed weights: products of few rows, products of experts, dequantization.

In: `PackedWeight` (tensor_core_layout.py) and `PackedActivations` (activations.py, which defines the arithmetic). Out:
`few_rows_product`, [T, N]; `experts_product`, the same for rows routed to experts; `dequantize`, some outputs of a weight in the
form that products of many rows read; `dequantize_rows`, rows of a weight as floats. The kernels (`few_rows.cu`, `experts.cu`,
`dequantize.cu`) are compiled when the first weight of a quantization type is loaded. A unit is 16 outputs by 256 inputs of a
weight; a segment is 1,024 inputs; a pair is a row and one of its experts. PDL is programmatic dependent launch. Axes: T rows, N
outputs, K inputs.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from onedraw.backends.packing import FEW_ROWS, SEGMENT, SPAN, UNIT_ROWS, gpu_unit_bytes
from onedraw.backends.torch.ops.cuda.experts import Routes
from onedraw.backends.torch.ops.cuda.linear import shared_memory
from onedraw.backends.torch.ops.cuda.nvrtc import Kernel, Module, compile_for
from onedraw.backends.torch.ops.cuda.packed.activations import DequantizedWeight, PackedActivations, padded_outputs
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import PackedWeight
from onedraw.backends.torch.ops.cuda.packed.work_split import (
    EXPERT_BLOCKS,
    EXPERT_WARPS,
    RESERVED_SHARED,
    SPLIT_K_WARPS,
    TILE_ROWS,
    WHOLE_K_WARPS,
    expert_tiles,
    expert_tiles_fit,
    output_slabs,
    rows_at_once,
    split_borders,
    split_defines,
    split_expert_work,
    split_work,
)
from onedraw.checkpoints.dequantize import QUANT_TYPES

FEW_ROWS_SOURCE, EXPERTS_SOURCE, DEQUANTIZE_SOURCE = "few_rows.cu", "experts.cu", "dequantize.cu"
SPAN_SCALE_KINDS = ("Q4_K", "Q5_K", "Q6_K", "NVFP4")  # types with a float scale per span of 256 and integer scales within it
DEQUANTIZE_WARPS = ROW_WARPS = 4  # warps per thread block; must equal the constants of dequantize.cu
PDL, OVERLAPS_PREVIOUS, OVERLAPS_NEXT = 1, 2, 4  # flags of `ProductArguments.pdl`; must equal those of work_items.cuh
DTYPE_NUMBERS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # numbers of dtypes in the arguments of the kernels


def has_minima(kind: str) -> bool:
    return kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def empty_dequantized(weight: PackedWeight, count: int) -> DequantizedWeight:
    """Uninitialized tensors for `count` outputs of a weight in dequantized form: float16 weights, scales and minima."""
    device, spans, whole = weight.units.device, weight.spans, weight.kind in SPAN_SCALE_KINDS
    minima, per_span = has_minima(weight.kind), 1 if whole else 8
    return DequantizedWeight(
        weights=torch.empty(count, spans * SPAN, dtype=torch.float16, device=device),
        scales=torch.empty(spans * per_span, padded_outputs(count), dtype=torch.float32, device=device),
        minima=torch.empty(count, spans, 8, dtype=torch.float16, device=device) if whole and minima else None,
        min_scales=torch.empty(spans * per_span, padded_outputs(count), dtype=torch.float32, device=device) if minima else None,
    )


class _DequantizeArguments(ctypes.Structure):
    """The ctypes mirror of `DequantizeArguments` in dequantize.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("units", "weights", "scales", "minima", "min_scales")),
        *((name, ctypes.c_int) for name in ("first", "count", "spans", "stride")),
    )


class _DequantizeRowsArguments(ctypes.Structure):
    """The ctypes mirror of `DequantizeRowsArguments` in dequantize.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("units", "wanted", "out")),
        *((name, ctypes.c_int) for name in ("count", "spans", "width", "dtype")),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_COMMON: tuple[tuple[str, Any], ...] = (
    *(
        (name, ctypes.c_void_p)
        for name in ("units", "x", "factors", "sums", "bias", "residual", "out", "partial_sums", "counters")
    ),
    *((name, ctypes.c_longlong) for name in ("residual_stride", "out_stride")),
    *((name, ctypes.c_int) for name in ("outputs", "unit_count", "spans", "rows", "barriers", "buffers", "bf16", "pdl")),
)


class _FewRowsArguments(ctypes.Structure):
    """The ctypes mirror of `ProductArguments` in work_items.cuh, without ROUTED."""

    _fields_ = (
        *_COMMON,
        ("carry", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("granule", "even", "odd")),
        ("per_segment", ctypes.c_float),
    )


class _ExpertsArguments(ctypes.Structure):
    """The ctypes mirror of `ExpertsArguments` in experts.cu."""

    _fields_ = (
        *_COMMON,
        ("pairs", ctypes.c_void_p),
        ("divide", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("order", "tiles")),
        ("expert_bytes", ctypes.c_longlong),
        ("split_k", ctypes.c_int),
    )


# ------------------------------------------------------------------ compiling


def kind_number(kind: str) -> int:
    """The value of the macro KIND in the CUDA sources, which is the ggml number of the quantization type."""
    return QUANT_TYPES[kind].ggml_type or 0


def few_rows_defines(kind: str, tiles: int, whole_k: bool) -> dict[str, int]:
    return {"KIND": kind_number(kind), **split_defines(tiles, whole_k)}


def experts_defines(kind: str, tiles: int) -> dict[str, int]:
    return {"KIND": kind_number(kind), "TILES": tiles, "WARPS": EXPERT_WARPS, "BLOCKS": EXPERT_BLOCKS[tiles]}


@lru_cache(maxsize=64)
def _dequantize_module(kind: str, device: torch.device) -> Module:
    return Module(DEQUANTIZE_SOURCE, device, {"KIND": kind_number(kind)})


@lru_cache(maxsize=64)
def _dequantize_kernel(kind: str, device: torch.device, name: str) -> Kernel:
    return _dequantize_module(kind, device).kernel(name)


@cache  # unbounded: captured CUDA graphs hold raw kernel handles, so no kernel may be unloaded
def _few_rows_kernel(kind: str, device: torch.device, tiles: int, whole_k: bool) -> Kernel:
    return Module(FEW_ROWS_SOURCE, device, few_rows_defines(kind, tiles, whole_k)).kernel(
        "few_rows_product", shared_memory(device)
    )


@cache
def _experts_kernel(kind: str, device: torch.device, tiles: int) -> Kernel:
    shared = shared_memory(device) - RESERVED_SHARED  # what is subtracted is for the kernel's static shared memory
    return Module(EXPERTS_SOURCE, device, experts_defines(kind, tiles)).kernel("experts_product", shared)


@lru_cache(maxsize=64)
def compile_kernels(kind: str, device: torch.device) -> None:
    """Compile, or load from the cache folder, the kernels of a quantization type for products of few rows and for
    dequantization, so that no step compiles anything."""
    variants = [(tiles, False) for tiles in SPLIT_K_WARPS] + [(tiles, True) for tiles in WHOLE_K_WARPS]
    sources = [
        (DEQUANTIZE_SOURCE, {"KIND": kind_number(kind)}),
        *((FEW_ROWS_SOURCE, few_rows_defines(kind, *variant)) for variant in variants),
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda source: compile_for(source[0], device, source[1]), sources))
    _dequantize_kernel(kind, device, "dequantize")
    for variant in variants:
        _few_rows_kernel(kind, device, *variant)


@lru_cache(maxsize=64)
def compile_expert_kernels(kind: str, device: torch.device) -> None:
    """Like `compile_kernels`, for the products of experts."""
    fitting = [tiles for tiles in EXPERT_BLOCKS if expert_tiles_fit(tiles, shared_memory(device))]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda tiles: compile_for(EXPERTS_SOURCE, device, experts_defines(kind, tiles)), fitting))
    for tiles in fitting:
        _experts_kernel(kind, device, tiles)


# ------------------------------------------------------------------ products of few rows


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def few_rows_borders(weight: PackedWeight) -> tuple[int, ...]:
    """Row counts from which a product of few rows uses another kernel variant, another work split, or two launches."""
    device, segments = weight.units.device, -(-weight.spans // SEGMENT)
    multiprocessors, shared = _multiprocessors(device), shared_memory(device)
    return split_borders(len(weight.units), segments, multiprocessors=multiprocessors, shared=shared, most=FEW_ROWS)


def few_rows_product(
    activations: PackedActivations,
    weight: PackedWeight,
    *,
    out: Tensor,
    partial_sums: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    pdl: bool = False,
    overlaps_previous: bool = False,
    overlaps_next: bool = False,
    carry: Tensor | None = None,
    whole_k: bool | None = None,
) -> Tensor:
    """A product of few rows: activations · weightᵀ + bias + residual for up to 64 rows → out [T, N] in bf16 or f16, which may be
    columns of a wider tensor; bias and residual have its dtype. `partial_sums`: a float32 buffer for sums of segments; if it is
    too small for all outputs, they are computed slab by slab; if None, it is allocated here. `overlaps_previous`: with PDL this
    product may run concurrently with the one launched before it, which reads the same rows and was launched with `overlaps_next`;
    the two must have different `partial_sums` and `carry` buffers (`empty_carry`). `whole_k` overrides the choice of
    work_split.py; it does not change the result."""
    rows, device = len(activations), weight.units.device
    assert rows <= FEW_ROWS, f"{rows} rows: at most {FEW_ROWS} are supported"
    if rows == 0:
        return out
    shared = shared_memory(device)
    again = partial(few_rows_product, partial_sums=partial_sums, pdl=pdl, carry=carry, whole_k=whole_k)
    most = rows_at_once(rows, shared)
    if rows > most:
        for part in (slice(0, most), slice(most, rows)):
            added = None if residual is None else residual[part]
            first, last = overlaps_previous and part.start == 0, overlaps_next and part.start > 0
            again(
                activations.rows(part),
                weight,
                out=out[part],
                bias=bias,
                residual=added,
                overlaps_previous=first,
                overlaps_next=last,
            )
        return out
    unit_count, segments = len(weight.units), -(-weight.spans // SEGMENT)
    split = split_work(rows, unit_count, segments, multiprocessors=_multiprocessors(device), shared=shared, whole_k=whole_k)
    if carry is None and split.whole_k:
        carry = empty_carry(device)
    if partial_sums is None:
        partial_sums = torch.empty(unit_count * split.sums, dtype=torch.float32, device=device)
    if unit_count * split.sums > partial_sums.numel():
        for units in output_slabs(unit_count, partial_sums.numel() // split.sums):
            here = slice(units.start * UNIT_ROWS, units.stop * UNIT_ROWS)
            first, last = overlaps_previous and units.start == 0, overlaps_next and units.stop == unit_count
            again(
                activations,
                weight.units_slice(units),
                out=out[:, here],
                bias=None if bias is None else bias[here],
                residual=None if residual is None else residual[:, here],
                overlaps_previous=first,
                overlaps_next=last,
            )
        return out
    arguments = _FewRowsArguments(
        *(weight.units.data_ptr(), activations.x.data_ptr(), activations.factors.data_ptr(), activations.sums.data_ptr()),
        *(_address(bias), _address(residual), out.data_ptr(), _address(partial_sums), weight.counters.data_ptr()),
        *(0 if residual is None else residual.stride(0), out.stride(0)),
        *(
            weight.rows,
            unit_count,
            weight.spans,
            rows,
            split.barriers,
            split.buffers,
            DTYPE_NUMBERS[out.dtype],
            (PDL | OVERLAPS_PREVIOUS * overlaps_previous | OVERLAPS_NEXT * overlaps_next) * pdl,
            _address(carry),
            split.granule,
            *divmod(unit_count * segments // split.granule, split.blocks),
            1 / segments,
        ),
    )
    kernel = _few_rows_kernel(weight.kind, device, split.tiles, split.whole_k)
    kernel.launch(arguments, grid=(split.blocks, 1), threads=split.threads, shared=split.shared, pdl=pdl)
    return out


def empty_carry(device: torch.device) -> Tensor:
    """A buffer through which thread blocks pass partial sums to their successors, filled with CARRY_EMPTY of few_rows.cu."""
    return torch.full(
        (_multiprocessors(device) * max(WHOLE_K_WARPS) * TILE_ROWS * UNIT_ROWS,), -1, dtype=torch.int32, device=device
    )


def partial_sum_count(rows: int, weight: PackedWeight) -> int:
    """Floats of `partial_sums` that a product of `rows` rows uses; if it takes several launches, they share the buffer."""
    device, segments = weight.units.device, -(-weight.spans // SEGMENT)
    unit_count, shared = len(weight.units), shared_memory(device)
    needed = 0
    while rows:
        count = rows_at_once(rows, shared)
        split = split_work(count, unit_count, segments, multiprocessors=_multiprocessors(device), shared=shared)
        needed = max(needed, unit_count * split.sums)
        rows -= count
    return needed


# ------------------------------------------------------------------ products of experts


def tile_height(pairs: int, count: int, device: torch.device) -> int:
    """Rows per tile for `pairs` (row, expert) pairs routed to `count` experts. The height does not change the result."""
    return TILE_ROWS * expert_tiles(pairs, count, shared=shared_memory(device))


def experts_product(
    activations: PackedActivations, experts: PackedWeight, routes: Routes, *, divide: int, out: Tensor, pdl: bool = False
) -> Tensor:
    """A product of experts: out[pair] = activations[pair // divide] · expertᵀ for all pairs, each with its own expert; out
    [pairs, N] in bf16 or f16, which may be columns of a wider tensor. The grid depends only on the number of pairs, so the host
    need not read the routes."""
    device, rows = experts.units.device, len(activations)
    if not len(routes.order):
        return out
    assert routes.height % TILE_ROWS == 0, f"row tiles must be multiples of {TILE_ROWS} rows"
    assert activations.factors.shape[1] == experts.spans, "activations and experts differ in width"
    tiles, segments = routes.height // TILE_ROWS, -(-experts.spans // SEGMENT)
    most = min(routes.height, len(routes.weights))  # a row is routed to an expert at most once
    split = split_expert_work(most, tiles, experts.unit_count, segments, shared=shared_memory(device))
    arguments = _ExpertsArguments(
        *(experts.units.data_ptr(), activations.x.data_ptr(), activations.factors.data_ptr(), activations.sums.data_ptr()),
        *(None, None, out.data_ptr(), None, None, 0, out.stride(0), experts.rows, experts.unit_count, experts.spans, rows),
        *(0, 0, DTYPE_NUMBERS[out.dtype], int(pdl), None, divide),
        *(
            routes.order.data_ptr(),
            routes.tiles.data_ptr(),
            experts.unit_count * experts.spans * gpu_unit_bytes(experts.kind),
            split.split_k,
        ),
    )
    kernel = _experts_kernel(experts.kind, device, tiles)
    kernel.launch(arguments, grid=(len(routes.tiles), split.blocks_per_tile), threads=split.threads, shared=split.shared, pdl=pdl)
    return out


# ------------------------------------------------------------------ dequantization


def dequantize(weight: PackedWeight, first: int, count: int, out: DequantizedWeight | None = None) -> DequantizedWeight:
    """Dequantize outputs first … first + count to float16 weights and scales; `first` is a multiple of 16."""
    assert first % UNIT_ROWS == 0, f"the first output must be a multiple of {UNIT_ROWS}"
    assert first + count <= len(weight.units) * UNIT_ROWS, "outputs past the weight's end"
    out = empty_dequantized(weight, count) if out is None else out
    arguments = _DequantizeArguments(
        weight.units.data_ptr(),
        out.weights.data_ptr(),
        out.scales.data_ptr(),
        _address(out.minima),
        _address(out.min_scales),
        first // UNIT_ROWS,
        count,
        weight.spans,
        out.scales.stride(0),
    )
    units = -(-count // UNIT_ROWS) * weight.spans
    kernel = _dequantize_kernel(weight.kind, weight.units.device, "dequantize")
    kernel.launch(arguments, grid=(-(-units // DEQUANTIZE_WARPS), 1), threads=32 * DEQUANTIZE_WARPS)
    return out


def dequantize_rows(weight: PackedWeight, wanted: Tensor | None, *, out: Tensor) -> Tensor:
    """Write rows of a weight as floats to out [T, K], which is contiguous: the rows numbered in `wanted` (int64), or all rows if
    None."""
    if len(out):
        assert out.is_contiguous(), "the output must be contiguous"
        wanted = None if wanted is None else wanted.long().contiguous()
        arguments = _DequantizeRowsArguments(
            *(weight.units.data_ptr(), _address(wanted), out.data_ptr()),
            *(len(out), weight.spans, weight.width, DTYPE_NUMBERS[out.dtype]),
        )
        kernel = _dequantize_kernel(weight.kind, weight.units.device, "dequantize_rows")
        kernel.launch(arguments, grid=(-(-len(out) * weight.spans // ROW_WARPS), 1), threads=32 * ROW_WARPS)
    return out
