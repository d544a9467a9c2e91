"""Products of packed weights with few rows on a GPU, weights as plain float16, and rows of weights as numbers.

In: `Fragments` (fragments.py), and rows made ready (spans.py, which says the rule of the arithmetic). Out: `skinny_product` gives
[T, N]; `grouped_product` the same for rows that go to experts; `opened` a slice of outputs as the product of many rows reads it;
`unpacked_rows` numbers, as the file has them. The kernels are `few_rows.cu`, `experts.cu` and `dequantize.cu`,
compiled when the first weight of a kind is made ready.
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
from onedraw.backends.torch.ops.cuda.packed.activations import Opened, Prepared, beside
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import Fragments
from onedraw.backends.torch.ops.cuda.packed.work_split import (
    APART_WARPS,
    GROUP_BLOCKS,
    GROUP_WARPS,
    INSIDE_WARPS,
    RESERVED,
    TILE_ROWS,
    defines_of,
    group_fits,
    group_tiles,
    rows_at_once,
    share_borders,
    share_group,
    share_out,
    slabs_of,
)
from onedraw.checkpoints.dequantize import QUANT_TYPES

PRODUCT, EXPERTS, OPENED = "few_rows.cu", "experts.cu", "dequantize.cu"
WHOLE_KINDS = ("Q4_K", "Q5_K", "Q6_K", "NVFP4")  # one scale for a span of 256, on top of small ones
OPENED_WARPS = LOOKED_WARPS = 4
PDL, JOINS, JOINED = 1, 2, 4  # as work_items.cuh has them
DTYPE_NUMBERS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


def has_minima(kind: str) -> bool:
    return kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def empty_opened(fragments: Fragments, count: int) -> Opened:
    """Room for so many outputs of a weight."""
    device, spans, whole = fragments.units.device, fragments.spans, fragments.kind in WHOLE_KINDS
    minima, per_span = has_minima(fragments.kind), 1 if whole else 8
    return Opened(
        weights=torch.empty(count, spans * SPAN, dtype=torch.float16, device=device),
        scales=torch.empty(spans * per_span, beside(count), dtype=torch.float32, device=device),
        minima=torch.empty(count, spans, 8, dtype=torch.float16, device=device) if whole and minima else None,
        least=torch.empty(spans * per_span, beside(count), dtype=torch.float32, device=device) if minima else None,
    )


class _Opened(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("units", "weights", "scales", "minima", "least")),
        *((name, ctypes.c_int) for name in ("first", "count", "spans", "stride")),
    )


class _Looked(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("units", "wanted", "out")),
        *((name, ctypes.c_int) for name in ("count", "spans", "width", "dtype")),
    )


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_COMMON: tuple[tuple[str, Any], ...] = (
    *((name, ctypes.c_void_p) for name in ("units", "x", "factors", "sums", "bias", "residual", "out", "parts", "counters")),
    *((name, ctypes.c_longlong) for name in ("residual_stride", "out_stride")),
    *((name, ctypes.c_int) for name in ("outputs", "tall", "spans", "rows", "barriers", "buffers", "bf16", "pdl")),
)


class _Product(ctypes.Structure):
    _fields_ = (
        *_COMMON,
        ("handed", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("granule", "even", "odd")),
        ("per_segment", ctypes.c_float),
    )


class _Grouped(ctypes.Structure):
    _fields_ = (
        *_COMMON,
        ("pairs", ctypes.c_void_p),
        ("divide", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("order", "tiles")),
        ("expert_bytes", ctypes.c_longlong),
        ("sides", ctypes.c_int),
    )


@lru_cache(maxsize=64)
def _rest(kind: str, device: torch.device) -> Module:
    return Module(OPENED, device, {"KIND": _number(kind)})


@lru_cache(maxsize=64)
def _kernel(kind: str, device: torch.device, name: str) -> Kernel:
    return _rest(kind, device).kernel(name)


@cache  # recorded turns hold them
def _product(kind: str, device: torch.device, tiles: int, inside: bool) -> Kernel:
    return Module(PRODUCT, device, _defines(kind, tiles, inside)).kernel("rows_product", shared_memory(device))


def _defines(kind: str, tiles: int, inside: bool) -> dict[str, int]:
    return {"KIND": _number(kind), **defines_of(tiles, inside)}


@cache
def _group(kind: str, device: torch.device, tiles: int) -> Kernel:
    shared = shared_memory(device) - RESERVED  # the kernel has a little of its own
    return Module(EXPERTS, device, _group_defines(kind, tiles)).kernel("grouped_product", shared)


def _group_defines(kind: str, tiles: int) -> dict[str, int]:
    return {"KIND": _number(kind), "TILES": tiles, "WARPS": GROUP_WARPS, "BLOCKS": GROUP_BLOCKS[tiles]}


def _number(kind: str) -> int:
    return QUANT_TYPES[kind].ggml_type or 0


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def skinny_borders(fragments: Fragments) -> tuple[int, ...]:
    """Row counts from which on a product of few rows is another."""
    device, segments = fragments.units.device, -(-fragments.spans // SEGMENT)
    multiprocessors, shared = _multiprocessors(device), shared_memory(device)
    return share_borders(len(fragments.units), segments, multiprocessors=multiprocessors, shared=shared, most=FEW_ROWS)


def skinny_product(
    prepared: Prepared,
    fragments: Fragments,
    *,
    out: Tensor,
    parts: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    pdl: bool = False,
    joins: bool = False,
    joined: bool = False,
    handed: Tensor | None = None,
    inside: bool | None = None,
) -> Tensor:
    """Up to 64 rows → out [T, N] in bf16 or f16, which may be columns of a wider tensor; bias and residual are of its dtype.
    `parts`: float32, where sums of segments wait; where it is too short for all outputs they come slab by slab. Without it they
    have memory of their own. `joins`: the product launched before this one reads the same rows and is `joined`, so both may run
    at once; they have different `parts` and `handed` (`empty_handed`). `inside` (shares.py) changes no bit."""
    rows, device = len(prepared), fragments.units.device
    assert rows <= FEW_ROWS, "more rows than this product is for"
    if rows == 0:
        return out
    shared, again = shared_memory(device), partial(skinny_product, parts=parts, pdl=pdl, handed=handed, inside=inside)
    most = rows_at_once(rows, shared)
    if rows > most:
        for part in (slice(0, most), slice(most, rows)):
            added = None if residual is None else residual[part]
            first, last = joins and part.start == 0, joined and part.start > 0
            again(prepared.rows(part), fragments, out=out[part], bias=bias, residual=added, joins=first, joined=last)
        return out
    tall, segments = len(fragments.units), -(-fragments.spans // SEGMENT)
    share = share_out(rows, tall, segments, multiprocessors=_multiprocessors(device), shared=shared, inside=inside)
    if handed is None and share.inside:
        handed = empty_handed(device)
    if parts is None:
        parts = torch.empty(tall * share.sums, dtype=torch.float32, device=device)
    if tall * share.sums > parts.numel():
        for units in slabs_of(tall, parts.numel() // share.sums):
            here = slice(units.start * UNIT_ROWS, units.stop * UNIT_ROWS)
            own = None if bias is None else bias[here]
            added = None if residual is None else residual[:, here]
            first, last = joins and units.start == 0, joined and units.stop == tall
            again(prepared, fragments.some(units), out=out[:, here], bias=own, residual=added, joins=first, joined=last)
        return out
    given = _Product(
        *(fragments.units.data_ptr(), prepared.x.data_ptr(), prepared.factors.data_ptr(), prepared.sums.data_ptr()),
        *(_place(bias), _place(residual), out.data_ptr(), _place(parts), fragments.counters.data_ptr()),
        *(0 if residual is None else residual.stride(0), out.stride(0)),
        *(
            fragments.rows,
            tall,
            fragments.spans,
            rows,
            share.barriers,
            share.buffers,
            DTYPE_NUMBERS[out.dtype],
            (PDL | JOINS * joins | JOINED * joined) * pdl,
            _place(handed),
            share.granule,
            *divmod(tall * segments // share.granule, share.blocks),
            1 / segments,
        ),
    )
    kernel = _product(fragments.kind, device, share.tiles, share.inside)
    kernel.launch(given, grid=(share.blocks, 1), threads=share.threads, shared=share.shared, pdl=pdl)
    return out


def empty_handed(device: torch.device) -> Tensor:
    """Where blocks of a product hand sums on to each other, when none has: NOBODYS in few_rows.cu."""
    return torch.full(
        (_multiprocessors(device) * max(INSIDE_WARPS) * TILE_ROWS * UNIT_ROWS,), -1, dtype=torch.int32, device=device
    )


def waiting_sums(rows: int, fragments: Fragments) -> int:
    """Numbers that `parts` has for a product of so many rows, those that come at once and those behind them."""
    device, segments = fragments.units.device, -(-fragments.spans // SEGMENT)
    tall, shared = len(fragments.units), shared_memory(device)
    needed = 0
    while rows:
        count = rows_at_once(rows, shared)
        share = share_out(count, tall, segments, multiprocessors=_multiprocessors(device), shared=shared)
        needed = max(needed, tall * share.sums)
        rows -= count
    return needed


def tile_height(pairs: int, count: int, device: torch.device) -> int:
    """Rows of an expert that a block takes at once, where so many pairs go to so many experts. It changes no bit."""
    return TILE_ROWS * group_tiles(pairs, count, shared=shared_memory(device))


def grouped_product(
    prepared: Prepared, experts: Fragments, routes: Routes, *, divide: int, out: Tensor, pdl: bool = False
) -> Tensor:
    """out[pair] = prepared[pair // divide] · expertᵀ for all pairs, each with its own expert; out [pairs, N] in bf16 or f16,
    which may be columns of a wider tensor. Nothing here looks at the host, whatever the routes are."""
    device, rows = experts.units.device, len(prepared)
    if not len(routes.order):
        return out
    assert routes.height % TILE_ROWS == 0, "tiles of rows are whole tiles of the matrix unit"
    assert prepared.factors.shape[1] == experts.spans, "rows of another width"
    tiles, segments = routes.height // TILE_ROWS, -(-experts.spans // SEGMENT)
    most = min(routes.height, len(routes.weights))  # a row goes to an expert once
    share = share_group(most, tiles, experts.tall, segments, shared=shared_memory(device))
    given = _Grouped(
        *(experts.units.data_ptr(), prepared.x.data_ptr(), prepared.factors.data_ptr(), prepared.sums.data_ptr()),
        *(None, None, out.data_ptr(), None, None, 0, out.stride(0), experts.rows, experts.tall, experts.spans, rows),
        *(0, 0, DTYPE_NUMBERS[out.dtype], int(pdl), None, divide),
        *(
            routes.order.data_ptr(),
            routes.tiles.data_ptr(),
            experts.tall * experts.spans * gpu_unit_bytes(experts.kind),
            share.sides,
        ),
    )
    kernel = _group(experts.kind, device, tiles)
    kernel.launch(given, grid=(len(routes.tiles), share.across), threads=share.threads, shared=share.shared, pdl=pdl)
    return out


@lru_cache(maxsize=64)
def make_groups_ready(kind: str, device: torch.device) -> None:
    """The same as `make_ready`, for experts."""
    fitting = [tiles for tiles in GROUP_BLOCKS if group_fits(tiles, shared_memory(device))]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda tiles: compile_for(EXPERTS, device, _group_defines(kind, tiles)), fitting))
    for tiles in fitting:
        _group(kind, device, tiles)


@lru_cache(maxsize=64)
def make_ready(kind: str, device: torch.device) -> None:
    """Compile, or find in the cache folder, what the products of a kind need: nothing is compiled in the middle of a turn."""
    ways = [(tiles, False) for tiles in APART_WARPS] + [(tiles, True) for tiles in INSIDE_WARPS]
    needed = [(OPENED, {"KIND": _number(kind)}), *((PRODUCT, _defines(kind, *way)) for way in ways)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda one: compile_for(one[0], device, one[1]), needed))
    _kernel(kind, device, "opened")
    for way in ways:
        _product(kind, device, *way)


def opened(fragments: Fragments, first: int, count: int, out: Opened | None = None) -> Opened:
    """Outputs first … first + count; `first` is a multiple of 16."""
    assert first % UNIT_ROWS == 0, "units hold 16 outputs"
    assert first + count <= len(fragments.units) * UNIT_ROWS, "outputs past the weight's end"
    out = empty_opened(fragments, count) if out is None else out
    given = _Opened(
        fragments.units.data_ptr(),
        out.weights.data_ptr(),
        out.scales.data_ptr(),
        _place(out.minima),
        _place(out.least),
        first // UNIT_ROWS,
        count,
        fragments.spans,
        out.scales.stride(0),
    )
    units = -(-count // UNIT_ROWS) * fragments.spans
    kernel = _kernel(fragments.kind, fragments.units.device, "opened")
    kernel.launch(given, grid=(-(-units // OPENED_WARPS), 1), threads=32 * OPENED_WARPS)
    return out


def unpacked_rows(fragments: Fragments, wanted: Tensor | None, *, out: Tensor) -> Tensor:
    """Rows of a weight as numbers, those wanted (int64) or all: out [T, K]."""
    if len(out):
        assert out.is_contiguous(), "numbers are written row behind row"
        wanted = None if wanted is None else wanted.long().contiguous()
        given = _Looked(
            *(fragments.units.data_ptr(), _place(wanted), out.data_ptr()),
            *(len(out), fragments.spans, fragments.width, DTYPE_NUMBERS[out.dtype]),
        )
        kernel = _kernel(fragments.kind, fragments.units.device, "looked_up")
        kernel.launch(given, grid=(-(-len(out) * fragments.spans // LOOKED_WARPS), 1), threads=32 * LOOKED_WARPS)
    return out
