"""Products of packed weights with few rows on a GPU, weights as plain float16, and rows of weights as numbers.

In: `Fragments` (fragments.py), and rows made ready (spans.py, which says the rule of the arithmetic). Out: `skinny_product` gives
[T, N]; `opened` a slice of outputs as the product of many rows reads it; `unpacked_rows` numbers, as the file has them. The
kernels are `packed_rows.cu`, compiled when the first weight of a kind is made ready.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onedraw.backends.packing import SEGMENT, SPAN, UNIT_ROWS
from onedraw.backends.torch.kernels.fragments import Fragments
from onedraw.backends.torch.kernels.nvrtc import Kernel, Module, compile_for
from onedraw.backends.torch.kernels.spans import Opened, Prepared
from onedraw.backends.torch.kernels.triton_linear import shared_memory
from onedraw.checkpoints.quants import KINDS

SOURCE = "packed_rows.cu"
MOST_ROWS = 64  # of one call; more rows are another kernel's
TILE_ROWS = 8  # rows that one step of the matrix unit takes
TILES = (1, 2, 3, 4, 6, 8)  # tiles of rows that a kernel is compiled for
FEW_WARPS = 8  # of a block of threads that has more than so many tiles:
TILES_OF_MANY_WARPS = 4
WHOLE_KINDS = ("Q4_K", "Q5_K", "Q6_K")  # one scale for a span of 256, on top of small ones
OPENED_WARPS = LOOKED_WARPS = 4
DTYPE_NUMBERS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


def has_minima(kind: str) -> bool:
    return kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def empty_opened(fragments: Fragments, count: int) -> Opened:
    """Room for so many outputs of a weight."""
    device, spans, whole = fragments.units.device, fragments.spans, fragments.kind in WHOLE_KINDS
    minima, per_span = has_minima(fragments.kind), 1 if whole else 8
    return Opened(
        weights=torch.empty(count, spans * SPAN, dtype=torch.float16, device=device),
        scales=torch.empty(count, spans * per_span, dtype=torch.float32, device=device),
        minima=torch.empty(count, spans, 8, dtype=torch.float16, device=device) if whole and minima else None,
        least=torch.empty(count, spans * per_span, dtype=torch.float32, device=device) if minima else None,
    )


class _Opened(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("units", "weights", "scales", "minima", "least")),
        *((name, ctypes.c_int) for name in ("first", "count", "spans")),
    )


class _Looked(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("units", "wanted", "out")),
        *((name, ctypes.c_int) for name in ("count", "spans", "width", "dtype")),
    )


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("units", "x", "factors", "sums", "bias", "residual", "out", "parts", "counters")),
        *((name, ctypes.c_longlong) for name in ("residual_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("outputs", "tall", "spans", "rows", "bf16", "pdl")),
    )


@dataclass(frozen=True, slots=True)
class Form:
    """How blocks of threads work. No number here can change a bit of the result."""

    warps: int = 16  # of a block, for up to 32 rows
    ahead: int = 1  # items of a warp that are brought into the second cache before their turn

    def warps_for(self, tiles: int) -> int:
        return self.warps if tiles <= TILES_OF_MANY_WARPS else FEW_WARPS

    def defines(self, tiles: int, buffers: int) -> dict[str, int]:
        return {"TILES": tiles, "WARPS": self.warps_for(tiles), "BUFFERS": buffers, "AHEAD": self.ahead}


CHOSEN = Form()


def shared_bytes(tiles: int) -> int:
    """A segment of rows: numbers, sums, powers of two, and what brings eight rows into different banks."""
    return TILE_ROWS * tiles * (SEGMENT * (2 * SPAN + 32 + 4) + 16)


def buffers_of(tiles: int, shared: int) -> int:
    """Segments of rows that there is room for at once; more than two are never needed at once."""
    return min(2, shared // shared_bytes(tiles))


def blocks_of(tall: int, segments: int, multiprocessors: int) -> int:
    """Blocks of threads: one per multiprocessor, but a few less where each has then rows of one segment only."""
    aligned = multiprocessors // segments * segments
    return min(aligned if aligned >= 0.97 * multiprocessors else multiprocessors, tall * segments)


def tiles_of(rows: int, shared: int) -> int:
    """Tiles for so many rows at once, or the most that there is shared memory for."""
    fitting = [tiles for tiles in TILES if shared_bytes(tiles) <= shared]
    return next((tiles for tiles in fitting if tiles * TILE_ROWS >= rows), fitting[-1])


def _defines(kind: str, device: torch.device, tiles: int = 0, form: Form = CHOSEN) -> dict[str, int]:
    """For a product of so many tiles, or for what else is done with a weight."""
    own = form.defines(tiles, buffers_of(tiles, shared_memory(device))) if tiles else {}
    return {"KIND": KINDS[kind].code or 0, **own}


@lru_cache(maxsize=64)
def _rest(kind: str, device: torch.device) -> Module:
    return Module(SOURCE, device, _defines(kind, device))


@lru_cache(maxsize=64)
def _kernel(kind: str, device: torch.device, name: str) -> Kernel:
    return _rest(kind, device).kernel(name)


def _shared(tiles: int, device: torch.device) -> int:
    shared = shared_memory(device)
    return buffers_of(tiles, shared) * shared_bytes(tiles)


@lru_cache(maxsize=256)
def _product(kind: str, device: torch.device, tiles: int, form: Form) -> Kernel:
    return Module(SOURCE, device, _defines(kind, device, tiles, form)).kernel("rows_product", _shared(tiles, device))


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def skinny_product(
    prepared: Prepared,
    fragments: Fragments,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    pdl: bool = False,
    form: Form = CHOSEN,
) -> Tensor:
    """Up to 64 rows → out [T, N] in bf16 or f16, which may be columns of a wider tensor; bias and residual are of its dtype.
    `form` changes no bit."""
    rows, device = len(prepared), fragments.units.device
    assert rows <= MOST_ROWS, "more rows than this product is for"
    if rows == 0:
        return out
    tiles = tiles_of(rows, shared_memory(device))
    most = tiles * TILE_ROWS
    if rows > most:
        for part in (slice(0, most), slice(most, rows)):
            beside = None if residual is None else residual[part]
            skinny_product(prepared.rows(part), fragments, out=out[part], bias=bias, residual=beside, pdl=pdl, form=form)
        return out
    tall, segments = len(fragments.units), -(-fragments.spans // SEGMENT)
    parts = None
    if segments > 1:
        parts = torch.empty(segments * tall * UNIT_ROWS * most, dtype=torch.float32, device=device)
    given = _Product(
        *(fragments.units.data_ptr(), prepared.x.data_ptr(), prepared.factors.data_ptr(), prepared.sums.data_ptr()),
        *(_place(bias), _place(residual), out.data_ptr(), _place(parts), fragments.counters.data_ptr()),
        *(0 if residual is None else residual.stride(0), out.stride(0)),
        *(fragments.rows, tall, fragments.spans, rows, DTYPE_NUMBERS[out.dtype], int(pdl)),
    )
    kernel = _product(fragments.kind, device, tiles, form)
    blocks = blocks_of(tall, segments, _multiprocessors(device))
    kernel.launch(given, grid=(blocks, 1), threads=32 * form.warps_for(tiles), shared=_shared(tiles, device), pdl=pdl)
    return out


@lru_cache(maxsize=64)
def make_ready(kind: str, device: torch.device) -> None:
    """Compile, or find in the cache folder, what the products of a kind need: nothing is compiled in the middle of a turn."""
    fitting = [tiles for tiles in TILES if shared_bytes(tiles) <= shared_memory(device)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda tiles: compile_for(SOURCE, device, _defines(kind, device, tiles)), (0, *fitting)))
    _kernel(kind, device, "opened")
    for tiles in fitting:
        _product(kind, device, tiles, CHOSEN)


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
