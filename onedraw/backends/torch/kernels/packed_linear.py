"""Weights in their blocks, made ready for products on a GPU, and looked up row by row.

In: tensors of a checkpoint, their bytes read where the file is mapped. Out: a `PackedLinear`: several weights side by side in
one product, each in its own kind; neighbours of one kind are one weight. What no kernel reads is a matrix of the model's dtype
beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
import triton
from torch import Tensor

from onedraw.backends.packing import SEGMENT, SPAN, SPANS, why_not_in_blocks
from onedraw.backends.torch.kernels.blocks import Blocks, empty_blocks, fill_blocks, row_slices
from onedraw.backends.torch.kernels.triton_linear import launch_options, linear, shared_memory
from onedraw.backends.torch.kernels.triton_moe import Routes, combine, route
from onedraw.backends.torch.kernels.triton_norm import gated
from onedraw.backends.torch.kernels.triton_packed import _merged, _packed, _packed_experts, _unpacked
from onedraw.backends.torch.layers.linear import Linear, RowRule
from onedraw.backends.torch.loader import padded
from onedraw.checkpoints.quants import copy_rows
from onedraw.models.source import Tensor as Stored
from onedraw.models.spec import Activation
from onedraw.models.views import Columns

MERGED_AT_ONCE = 512  # outputs of one program of `_merged`
UNPACKED_AT_ONCE = 16  # rows of one program of `_unpacked`


@dataclass(frozen=True, slots=True)
class PackedTile:
    """How one program cuts its work. No number here can change a bit of the result."""

    rows: int
    columns: int
    warps: int
    stages: int
    group: int = 1
    split: bool = False  # a program of its own for each segment of inputs

    def shared(self, kind: str) -> int:
        """Bytes of shared memory, as an upper bound: a span of weights and of rows per stage."""
        return self.stages * (self.columns * SPANS[kind].nbytes + self.rows * SPAN * 2)


SPLIT_OUTPUTS = 16384  # up to so many outputs a program per segment fills the device better


@lru_cache(maxsize=4096)
def choose_packed_tile(kind: str, rows: int, n: int, shared: int) -> PackedTile:
    """The tile for so many rows of a product, small enough for the device's shared memory. Measured on an H200 with cold
    weights (bench/gpu_packed.py tune)."""
    split, wide = n <= SPLIT_OUTPUTS, kind in ("Q6_K", "Q8_0")
    if rows <= 8:
        tile = PackedTile(8, 32, 2 if kind == "Q8_0" else 1, 2 if split else 3, split=split)
    elif rows <= 16:
        tile = PackedTile(16, 64, 4, 3, split=split) if wide else PackedTile(16, 32, 2, 2 if split else 3, split=split)
    elif rows <= 64:
        tile = PackedTile(32 if rows <= 32 else 64, 64, 4, 2 if kind in ("Q6_K", "Q8_0", "Q5_K") else 3, split=split)
    else:
        tile = PackedTile(64, 128, 8, 3, group=8) if kind == "Q5_K" else PackedTile(64, 64, 4, 2 if wide else 3, group=8)
    while tile.shared(kind) > shared:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.columns > 64:
            tile = replace(tile, columns=64, warps=4)
        else:
            tile = replace(tile, rows=tile.rows // 2)
    return tile


def packed_product(
    x: Tensor,
    blocks: Blocks,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: PackedTile | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [T, at least K], rows of stride 1 → out [T, N], which may be columns of a wider tensor."""
    rows, n = len(x), blocks.rows
    if rows == 0:
        return out
    tile = tile or choose_packed_tile(blocks.kind, rows, n, shared_memory(x.device))
    segments = triton.cdiv(triton.cdiv(blocks.width, SPAN), SEGMENT) if tile.split else 1
    split = segments > 1
    y = torch.empty(segments, rows, n, dtype=torch.float32, device=x.device) if split else out
    follows = {"bias": bias, "residual": residual}
    now = dict.fromkeys(follows) if split else follows
    _packed[(triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns), segments)](
        x,
        blocks.codes,
        blocks.high,
        blocks.scales,
        now["bias"],
        now["residual"],
        y,
        rows,
        n,
        x.stride(0),
        0 if now["residual"] is None else now["residual"].stride(0),
        n if split else out.stride(0),
        blocks.width,
        KIND=blocks.kind,
        CODES=SPANS[blocks.kind].codes,
        SCALES=SPANS[blocks.kind].scales,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        GROUP=tile.group,
        HAS_BIAS=now["bias"] is not None,
        HAS_RESIDUAL=now["residual"] is not None,
        EVEN_N=n % tile.columns == 0,
        EVEN_K=blocks.width % SPAN == 0,
        SEGMENT=SEGMENT,
        SPLIT=split,
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(pdl),
    )
    if split:
        _merge(y, out, bias=bias, residual=residual, pdl=pdl)
    return out


def _merge(parts: Tensor, out: Tensor, *, bias: Tensor | None, residual: Tensor | None, pdl: bool) -> None:
    segments, rows, n = parts.shape
    _merged[(rows, triton.cdiv(n, MERGED_AT_ONCE))](
        parts,
        bias,
        residual,
        out,
        rows,
        n,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        segments,
        BLOCK=MERGED_AT_ONCE,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        PDL=pdl,
        num_warps=4,
        enable_fp_fusion=False,
        **launch_options(pdl),
    )


def unpacked_rows(blocks: Blocks, wanted: Tensor | None, *, out: Tensor) -> Tensor:
    """Rows of a weight as numbers, those wanted or all: out [T, K]."""
    count = len(out)
    if count:
        _unpacked[(triton.cdiv(count, UNPACKED_AT_ONCE), triton.cdiv(blocks.width, SPAN))](
            blocks.codes,
            blocks.high,
            blocks.scales,
            wanted,
            out,
            count,
            blocks.rows,
            blocks.width,
            KIND=blocks.kind,
            CODES=SPANS[blocks.kind].codes,
            SCALES=SPANS[blocks.kind].scales,
            BLOCK=UNPACKED_AT_ONCE,
            LISTED=wanted is not None,
            num_warps=4,
        )
    return out


# ------------------------------------------------------------------ from the file to the device


class Courier:
    """Brings stored bytes to a device through two small buffers, so the host holds no copy of a weight."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def bring(self, raw: np.ndarray) -> Tensor:
        """Rows [n, bytes] on the device."""
        turn = self._turn = 1 - self._turn
        event = self._sent[turn]
        if event is not None:
            event.synchronize()
        if self._buffers[turn].numel() < raw.size:
            self._buffers[turn] = torch.empty(raw.size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        room = self._buffers[turn][: raw.size].view(raw.shape)
        copy_rows(raw, room.numpy())
        there = room.to(self._device, non_blocking=True, copy=True)
        if self._device.type == "cuda":
            event = self._sent[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return there


def load_blocks(tensors: Sequence[Stored], *, pad: int, courier: Courier, device: torch.device) -> Blocks:
    """Weights of one kind as one: rows below each other, each padded to a multiple of `pad` rows. Stacks of matrices are
    joined matrix by matrix."""
    heights = [padded(tensor.shape[-2], pad) for tensor in tensors]
    stack, width = tensors[0].shape[:-2], tensors[0].shape[-1]
    count = stack[0] if stack else 1
    blocks = empty_blocks(tensors[0].kind, rows=sum(heights), width=width, device=device, count=count)
    first = 0
    for tensor, height in zip(tensors, heights, strict=True):
        raw = tensor.packed()
        assert raw is not None
        rows = tensor.shape[-2]
        for number in range(count):
            own = raw[number * rows : (number + 1) * rows]
            for part in row_slices(rows, width):
                fill_blocks(blocks, courier.bring(own[part]), first=first + part.start, number=number)
        first += height
    return blocks


# ------------------------------------------------------------------ products


class PackedLinear(Linear):
    """Weights side by side, in blocks or as matrices of x's dtype. `order`: where each input of the stored columns stands in a
    row that is offered, where that is another order."""

    def __init__(
        self,
        parts: Sequence[Blocks | Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        bias: Tensor | None = None,
        in_features: int | None = None,
        order: Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        self.parts, self._order = tuple(parts), order
        self._heights = [part.rows if isinstance(part, Blocks) else len(part) for part in parts]
        first = parts[0]
        width = first.width if isinstance(first, Blocks) else first.shape[1]
        self.out_features, self.in_features = sum(self._heights), in_features or width
        self.dtype, self.device, self.rule, self.bias, self._pdl = dtype, device, RowRule(floor=1), bias, pdl

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, K] → x Wᵀ + b + residual, each sum rounded."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        start = 0
        for part, height in zip(self.parts, self._heights, strict=True):
            here = slice(start, start + height)
            bias = None if self.bias is None else self.bias[here]
            beside = None if residual is None else residual[:, here]
            if isinstance(part, Blocks):
                packed_product(x, part, out=y[:, here], bias=bias, residual=beside, pdl=self._pdl)
            else:
                linear(x[:, : part.shape[1]], part, out=y[:, here], bias=bias, residual=beside, pdl=self._pdl)
            start += height
        return y

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x, residual) if residual.dtype == self.dtype else super().added(x, residual)

    def rows(self, wanted: Tensor, by: object = None) -> Tensor:
        """Rows of a product of one weight, as numbers: [T] → [T, K]."""
        (part,) = self.parts
        if not isinstance(part, Blocks):
            return part.index_select(0, wanted)
        return unpacked_rows(part, wanted, out=torch.empty(len(wanted), part.width, dtype=self.dtype, device=self.device))


def packed_linear(
    tensors: Sequence[Stored],
    *,
    dtype: torch.dtype,
    device: torch.device,
    courier: Courier,
    bias: Tensor | None = None,
    pad: int = 1,
    pad_columns: int = 1,
    pdl: bool = False,
) -> PackedLinear | None:
    """None where none of these weights can stay in blocks: one matrix serves better then."""
    if all(map(why_not_in_blocks, tensors)):
        return None
    tensors, order = _in_stored_order(tensors, device)
    parts: list[Blocks | Tensor] = []
    for kind, same in groupby(tensors, key=lambda tensor: "" if why_not_in_blocks(tensor) else tensor.kind):
        together = list(same)
        if kind:
            parts.append(load_blocks(together, pad=pad, courier=courier, device=device))
        else:
            matrices = [torch.from_numpy(tensor.float32()) for tensor in together]
            joined = torch.cat([torch.nn.functional.pad(m, (0, 0, 0, -len(m) % pad)) for m in matrices])
            parts.append(joined.to(device=device, dtype=dtype))
    width = padded(tensors[0].shape[1], pad_columns)
    return PackedLinear(parts, dtype=dtype, device=device, bias=bias, in_features=width, order=order, pdl=pdl)


def _in_stored_order(tensors: Sequence[Stored], device: torch.device) -> tuple[Sequence[Stored], Tensor | None]:
    """Weights with their columns as they are stored, and the order that a row must come in."""
    (first, *others) = tensors
    if not isinstance(first, Columns):
        return tensors, None
    assert not others, "columns in an order of their own come alone"
    return [first.stored], torch.from_numpy(np.argsort(first.order)).to(device)


# ------------------------------------------------------------------ experts


class PackedBank:
    """All experts' matrices in blocks: gate and up below each other where they are of one kind, else side by side."""

    def __init__(self, gate_up: Sequence[Blocks], down: Blocks, activation: Activation) -> None:
        self._gate_up, self._down, self._activation = tuple(gate_up), down, activation

    @property
    def linears(self) -> list[Linear]:
        """None that must be offered rows by a rule."""
        return []

    def __call__(self, h: Tensor, ids: Tensor, weights: Tensor, scale: float) -> Tensor:
        routes = route(ids, weights, count=self._down.count)
        opened = _grouped(h, self._gate_up, routes, divide=routes.used)
        answers = _grouped(gated(opened, self._activation), [self._down], routes, divide=1)
        return combine(answers, routes, width=h.shape[1], scale=scale)


def load_bank(
    gate_up: Sequence[Stored], down: Stored, activation: Activation, *, pad: int, courier: Courier, device: torch.device
) -> PackedBank:
    """Stacks of matrices → experts; inner widths are padded with zero rows."""
    together = len({tensor.kind for tensor in gate_up}) == 1
    groups = [gate_up] if together else [[tensor] for tensor in gate_up]
    first = [load_blocks(group, pad=pad, courier=courier, device=device) for group in groups]
    return PackedBank(first, load_blocks([down], pad=1, courier=courier, device=device), activation)


def _grouped(x: Tensor, parts: Sequence[Blocks], routes: Routes, *, divide: int) -> Tensor:
    y = torch.empty(len(routes.order), sum(part.rows for part in parts), dtype=x.dtype, device=x.device)
    start = 0
    for part in parts:
        if len(y):
            columns, warps = (32, 2) if routes.height == 16 else (64, 4)
            _packed_experts[(len(routes.tiles), triton.cdiv(part.rows, columns))](
                x,
                part.codes,
                part.high,
                part.scales,
                y[:, start:],
                routes.order,
                routes.tiles,
                part.rows,
                part.codes.stride(0),
                part.high.stride(0),
                part.scales.stride(0),
                y.stride(0),
                x.stride(0),
                part.width,
                DIVIDE=divide,
                KIND=part.kind,
                CODES=SPANS[part.kind].codes,
                SCALES=SPANS[part.kind].scales,
                BLOCK_M=routes.height,
                BLOCK_N=columns,
                EVEN_K=part.width % SPAN == 0,
                SEGMENT=SEGMENT,
                num_warps=warps,
                num_stages=3,
            )
        start += part.rows
    return y
