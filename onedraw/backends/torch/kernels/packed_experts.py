"""Experts whose matrices stay in their blocks on a GPU.

In: stacks of stored matrices. Out: a `PackedBank`. Experts have kernels of their own (triton_packed.py), which do not follow the
rule of the other packed products (spans.py): few rows meet one expert, whatever the turn, so there is one form for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from onedraw.backends.packing import SEGMENT, SPAN, SPANS
from onedraw.backends.torch.kernels.blocks import Blocks, empty_blocks, fill_blocks, row_slices
from onedraw.backends.torch.kernels.courier import Courier
from onedraw.backends.torch.kernels.triton_moe import Routes, combine, route, route_borders
from onedraw.backends.torch.kernels.triton_norm import gated
from onedraw.backends.torch.kernels.triton_packed import _packed_experts
from onedraw.backends.torch.layers.linear import Linear
from onedraw.backends.torch.loader import padded
from onedraw.models.source import Tensor as Stored
from onedraw.models.spec import Activation


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


class PackedBank:
    """All experts' matrices in blocks: gate and up below each other where they are of one kind, else side by side."""

    def __init__(self, gate_up: Sequence[Blocks], down: Blocks, activation: Activation) -> None:
        self._gate_up, self._down, self._activation = tuple(gate_up), down, activation

    @property
    def linears(self) -> list[Linear]:
        """None that must be offered rows by a rule."""
        return []

    def borders(self, used: int) -> tuple[int, ...]:
        return route_borders(self._down.count, used) if self._down.codes.device.type == "cuda" else ()

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
        grouped(x, part, routes, out=y[:, start : start + part.rows], divide=divide)
        start += part.rows
    return y


def grouped(x: Tensor, part: Blocks, routes: Routes, *, out: Tensor, divide: int) -> None:
    """out[pair] = x[pair // divide] · weight[expert]ᵀ; `out` may be columns of a wider tensor."""
    if not len(out):
        return
    columns, warps = (32, 2) if routes.height == 16 else (64, 4)
    _packed_experts[(len(routes.tiles), triton.cdiv(part.rows, columns))](
        x,
        part.codes,
        part.high,
        part.scales,
        out,
        routes.order,
        routes.tiles,
        part.rows,
        part.codes.stride(0),
        part.high.stride(0),
        part.scales.stride(0),
        out.stride(0),
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
