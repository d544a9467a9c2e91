"""Products of packed weights with few rows on a GPU, weights as plain float16, and rows of weights as numbers.

In: `Fragments` (fragments.py), and rows made ready (spans.py, which says the rule of the arithmetic). Out: `skinny_product` gives
[T, N]; `opened` a slice of outputs as the product of many rows reads it; `unpacked_rows` numbers, as the file has them. The
kernels are `packed_rows.cu`, compiled when the first weight of a kind is made ready.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onedraw.backends.packing import SEGMENT, SPAN, UNIT_ROWS
from onedraw.backends.torch.kernels.fragments import Fragments
from onedraw.backends.torch.kernels.nvrtc import Kernel, Module
from onedraw.backends.torch.kernels.spans import Opened, Prepared
from onedraw.checkpoints.quants import KINDS

SOURCE = "packed_rows.cu"
MOST_ROWS = 64  # of one call; more rows are another kernel's
TILE_ROWS = 8  # rows that one step of the matrix unit takes
MOST_TILES = 4  # of one block of threads
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
        *((name, ctypes.c_int) for name in ("outputs", "tall", "spans", "rows", "chunks", "share", "bf16", "pdl")),
    )


@dataclass(frozen=True, slots=True)
class Form:
    """How a product is cut into blocks of threads. No number here can change a bit of the result."""

    warps: int
    tall: int  # units of 16 outputs below each other in a warp
    depth: int  # spans that are on their way
    together: int  # blocks on a multiprocessor, which the compiler leaves registers for

    @property
    def defines(self) -> dict[str, int]:
        return {"WARPS": self.warps, "TALL": self.tall, "DEPTH": self.depth, "TOGETHER": self.together}


# Spans in a stage of rows, and stages, by tiles of rows: the same numbers stand at the end of the product's source.
STAGES = {1: (4, 2), 2: (2, 2), 3: (1, 3), 4: (1, 2)}


def shared_bytes(tiles: int) -> int:
    span, stages = STAGES[tiles]
    return stages * TILE_ROWS * tiles * (span * (2 * SPAN + 32) + 16 + 4 * span)


FORMS = (Form(4, 1, 1, 4),)  # those that are chosen from


def choose_form(kind: str, tiles: int) -> Form:
    """Measured on an H200 with cold weights (bench/gpu_rows.py tune)."""
    return FORMS[0]


def choose_share(blocks: int, segments: int, places: int) -> int:
    """Segments of one block of threads: as many blocks as find a place at once, or enough rounds that the last is small."""
    best, found = 2.0, segments
    for share in range(1, segments + 1):
        made = blocks * -(-segments // share)
        rounds = made / places
        # What is idle: places without a block, places that wait for the last round, and what a block takes to get going.
        idle = max(0.0, 0.75 - rounds) if rounds <= 1 else (-(-made // places) - rounds) / rounds
        idle += 0.03 * (-(-segments // share) - 1) / segments + (0.04 if share < 2 and rounds > 1 else 0.0)
        if idle < best - 1e-9:
            best, found = idle, share
    return found


@lru_cache(maxsize=64)
def _module(kind: str, device: torch.device, form: Form | None = None) -> Module:
    return Module(SOURCE, device, {"KIND": KINDS[kind].code or 0, **(form.defines if form else {})})


@lru_cache(maxsize=256)
def _kernel(kind: str, device: torch.device, name: str, shared: int = 0, form: Form | None = None) -> Kernel:
    return _module(kind, device, form).kernel(name, shared)


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
    form: Form | None = None,
    share: int | None = None,
) -> Tensor:
    """Up to 64 rows → out [T, N] in bf16 or f16, which may be columns of a wider tensor; bias and residual are of its dtype."""
    rows, device = len(prepared), fragments.units.device
    assert rows <= MOST_ROWS, "more rows than this product is for"
    if rows == 0:
        return out
    tiles = -(-rows // TILE_ROWS)
    chunks = -(-tiles // MOST_TILES)
    tiles = -(-tiles // chunks)
    form = form or choose_form(fragments.kind, tiles)
    tall, segments = len(fragments.units), -(-fragments.spans // SEGMENT)
    blocks = -(-tall // (form.warps * form.tall)) * chunks
    share = share or choose_share(blocks, segments, form.together * _multiprocessors(device))
    splits = -(-segments // share)
    parts = None
    if splits > 1:
        height = form.warps * form.tall * UNIT_ROWS
        parts = torch.empty(segments * blocks * height * tiles * TILE_ROWS, dtype=torch.float32, device=device)
    given = _Product(
        *(fragments.units.data_ptr(), prepared.x.data_ptr(), prepared.factors.data_ptr(), prepared.sums.data_ptr()),
        *(_place(bias), _place(residual), out.data_ptr(), _place(parts), fragments.counters.data_ptr()),
        *(0 if residual is None else residual.stride(0), out.stride(0)),
        *(fragments.rows, tall, fragments.spans, rows, chunks, share, DTYPE_NUMBERS[out.dtype], int(pdl)),
    )
    shared = shared_bytes(tiles)
    kernel = _kernel(fragments.kind, device, f"product{tiles}", shared, form)
    kernel.launch(given, grid=(blocks, splits), threads=32 * form.warps, shared=shared, pdl=pdl)
    return out


def make_ready(kind: str, device: torch.device) -> None:
    """Compile, or find in the cache folder, what the products of a kind need: nothing is compiled in the middle of a turn."""
    _kernel(kind, device, "opened")
    for tiles in range(1, MOST_TILES + 1):
        _kernel(kind, device, f"product{tiles}", shared_bytes(tiles), choose_form(kind, tiles))


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
