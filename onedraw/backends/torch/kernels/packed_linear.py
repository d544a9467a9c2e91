"""Weights in their blocks, made ready for products on a GPU, and looked up row by row.

In: tensors of a checkpoint, their bytes read where the file is mapped. Out: a `PackedLinear`: several weights side by side in
one product, each in its own kind; neighbours of one kind are one weight. What no kernel reads is a matrix of the model's dtype
beside them.

A product of few rows reads the blocks themselves (`packed_rows.py`); for many rows the weight is opened, slice by slice of its
outputs, in one workspace of the device, and multiplied there (`wide.py`, `triton_wide.py`). Both follow the rule that stands in
spans.py, so which of them served does not show in the bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.packing import SPAN, why_not_in_blocks
from onedraw.backends.plan import OPENED_BYTES
from onedraw.backends.torch.kernels import triton_wide, wide
from onedraw.backends.torch.kernels.courier import Courier
from onedraw.backends.torch.kernels.fragments import Fragments, empty_fragments, fill_fragments, slices_of
from onedraw.backends.torch.kernels.packed_rows import (
    MOST_ROWS,
    WHOLE_KINDS,
    has_minima,
    make_ready,
    opened,
    skinny_product,
    unpacked_rows,
)
from onedraw.backends.torch.kernels.spans import Opened, Prepared, Ready, beside, prepare_rows
from onedraw.backends.torch.kernels.triton_linear import linear
from onedraw.backends.torch.layers.linear import Linear, RowRule
from onedraw.backends.torch.loader import padded
from onedraw.models.source import Tensor as Stored
from onedraw.models.views import Columns

# Fewer rows are served faster 64 by 64 than by opening the weight. Recorded turns have fewer, so none has a workspace in it.
WIDE_FROM = 257
HOPPER = (9, 0)


# ------------------------------------------------------------------ one weight


def packed_product(
    prepared: Prepared,
    weight: Fragments,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Prepared rows times a weight: out [T, N], which may be columns of a wider tensor."""
    rows = len(prepared)
    if rows < WIDE_FROM:
        for start in range(0, rows, MOST_ROWS):
            part = slice(start, start + MOST_ROWS)
            beside = None if residual is None else residual[part]
            skinny_product(prepared.rows(part), weight, out=out[part], bias=bias, residual=beside, pdl=pdl)
        return out
    product = wide.wide_product if _is_hopper(out.device) else triton_wide.wide_product
    for columns, room in workspace(out.device).slices(weight):
        some = opened(weight, columns.start, columns.stop - columns.start, room)
        product(
            prepared,
            some,
            out=out[:, columns],
            bias=None if bias is None else bias[columns],
            residual=None if residual is None else residual[:, columns],
        )
    return out


@lru_cache(maxsize=8)
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == HOPPER


class Workspace:
    """Where weights are opened, on one device. It is as large as the largest of them asks for, within what the memory plan has
    for it, and is allocated when the first product comes. Work on one device runs in order, so everybody may use it."""

    def __init__(self, device: torch.device, most: int = OPENED_BYTES) -> None:
        self._device, self._most, self._needed = device, most, 0
        self._room = torch.empty(0, dtype=torch.uint8, device=device)
        self._found: dict[tuple[str, int, int], Opened] = {}  # places that were laid out before

    def reserve(self, weight: Fragments) -> None:
        """Say that this weight will be opened here."""
        rows = beside(weight.rows)
        self._needed = max(self._needed, min(self._most, rows * _opened_bytes(weight) + 4 * _ALIGNED))

    def slices(self, weight: Fragments) -> Iterator[tuple[slice, Opened]]:
        """Outputs that fit at once, and the room they are opened in."""
        self.reserve(weight)
        if self._room.numel() < self._needed:
            self._found, self._room = {}, self._room[:0].clone()  # the old one goes before the new one comes
            self._room = torch.empty(self._needed, dtype=torch.uint8, device=self._device)
        most = (self._room.numel() - 4 * _ALIGNED) // _opened_bytes(weight) // wide.TILE * wide.TILE
        count = weight.rows
        if count > most:  # slices of about equal size, in whole tiles
            count = padded(-(-count // -(-count // most)), wide.TILE)
        for start in range(0, weight.rows, count):
            columns = slice(start, min(start + count, weight.rows))
            asked = (weight.kind, weight.spans, columns.stop - start)
            if asked not in self._found:
                self._found[asked] = self._laid_out(weight, columns.stop - start)
            yield columns, self._found[asked]

    def _laid_out(self, weight: Fragments, count: int) -> Opened:
        spans, per, start = weight.spans, 1 if weight.kind in WHOLE_KINDS else 8, 0

        def take(dtype: torch.dtype, *shape: int) -> Tensor:
            nonlocal start
            size = int(np.prod(shape)) * dtype.itemsize
            found = self._room[start : start + size].view(dtype).view(shape)
            start += padded(size, _ALIGNED)
            return found

        weights, scales = take(torch.float16, count, spans * SPAN), take(torch.float32, spans * per, beside(count))
        if not has_minima(weight.kind):
            return Opened(weights, scales)
        minima = take(torch.float16, count, spans, 8) if per == 1 else None
        return Opened(weights, scales, minima, take(torch.float32, spans * per, beside(count)))


_ALIGNED = 256  # bytes


def _opened_bytes(weight: Fragments) -> int:
    """Of one output."""
    per = 1 if weight.kind in WHOLE_KINDS else 8
    least = (4 * per + (16 if per == 1 else 0)) if has_minima(weight.kind) else 0
    return weight.spans * (2 * SPAN + 4 * per + least)


@lru_cache(maxsize=8)
def workspace(device: torch.device) -> Workspace:
    """One for all weights of a device."""
    return Workspace(device)


def load_fragments(tensors: Sequence[Stored], *, pad: int, courier: Courier, device: torch.device) -> Fragments:
    """Weights of one kind as one, made ready for products and look-ups."""
    made = bring_fragments(tensors, pad=pad, courier=courier, device=device)
    if device.type == "cuda":  # nothing is compiled in the middle of a turn
        make_ready(made.kind, device)
    workspace(device).reserve(made)
    return made


def bring_fragments(tensors: Sequence[Stored], *, pad: int, courier: Courier, device: torch.device) -> Fragments:
    """Weights of one kind as one: rows below each other, each padded to a multiple of `pad` rows. Stacks of matrices are joined
    matrix by matrix."""
    heights, width = [padded(tensor.shape[-2], pad) for tensor in tensors], tensors[0].shape[-1]
    stack = tensors[0].shape[:-2]
    count = stack[0] if stack else 1
    made = empty_fragments(tensors[0].kind, rows=sum(heights), width=width, device=device, count=count)
    first = 0
    for tensor, height in zip(tensors, heights, strict=True):
        raw, rows = tensor.packed(), tensor.shape[-2]
        assert raw is not None
        stacked, own = raw.reshape(count, rows, -1), tensor.factors()
        factors = None if own is None else torch.from_numpy(own).view(count, rows).to(device)
        for matrices, part in slices_of(count, rows, width):
            some = stacked[matrices, part]
            there = courier.bring(some.reshape(-1, some.shape[-1])).view(some.shape)
            known = None if factors is None else factors[matrices, part]
            fill_fragments(made, there, first=first + part.start, number=matrices.start, factors=known)
        first += height
    return made


# ------------------------------------------------------------------ products


class PackedLinear(Linear):
    """Weights side by side, in blocks or as matrices of x's dtype. `order` (int32): where each input of the stored columns stands
    in a row that is offered, where that is another order; such a weight stands alone. `ready`: where rows may lie that were
    made ready before."""

    def __init__(
        self,
        parts: Sequence[Fragments | Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        bias: Tensor | None = None,
        in_features: int | None = None,
        order: Tensor | None = None,
        ready: Ready | None = None,
        pdl: bool = False,
    ) -> None:
        self.parts, self._order, self._ready = tuple(parts), order, ready or Ready()
        self._heights = [part.rows if isinstance(part, Fragments) else len(part) for part in parts]
        first = parts[0]
        self._width = first.width if isinstance(first, Fragments) else first.shape[1]
        self.out_features, self.in_features = sum(self._heights), in_features or self._width
        self.dtype, self.device, self.rule, self.bias, self._pdl = dtype, device, RowRule(floor=1), bias, pdl

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, K] → x Wᵀ + b + residual, each sum rounded."""
        prepared = self._ready.take(x) if self._order is None and x.shape[1] == self._width else None
        x = x if x.stride(1) == 1 else x.contiguous()
        if prepared is None:
            prepared = prepare_rows(x, width=self._width, order=self._order, pdl=self._pdl)  # once for all parts
        y = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        start = 0
        for part, height in zip(self.parts, self._heights, strict=True):
            here = slice(start, start + height)
            bias = None if self.bias is None else self.bias[here]
            beside = None if residual is None else residual[:, here]
            if isinstance(part, Fragments):
                packed_product(prepared, part, out=y[:, here], bias=bias, residual=beside, pdl=self._pdl)
            else:
                linear(x[:, : part.shape[1]], part, out=y[:, here], bias=bias, residual=beside, pdl=self._pdl)
            start += height
        return y

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x, residual) if residual.dtype == self.dtype else super().added(x, residual)

    def rows(self, wanted: Tensor, by: object = None) -> Tensor:
        """Rows of a product of one weight, as numbers: [T] → [T, K]."""
        (part,) = self.parts
        if not isinstance(part, Fragments):
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
    ready: Ready | None = None,
    pdl: bool = False,
) -> PackedLinear | None:
    """None where none of these weights can stay in blocks: one matrix serves better then."""
    if all(map(why_not_in_blocks, tensors)):
        return None
    tensors, order = _in_stored_order(tensors, device)
    parts: list[Fragments | Tensor] = []
    for kind, same in groupby(tensors, key=lambda tensor: "" if why_not_in_blocks(tensor) else tensor.kind):
        together = list(same)
        if kind:
            parts.append(load_fragments(together, pad=pad, courier=courier, device=device))
        else:
            matrices = [torch.from_numpy(tensor.float32()) for tensor in together]
            joined = torch.cat([torch.nn.functional.pad(m, (0, 0, 0, -len(m) % pad)) for m in matrices])
            parts.append(joined.to(device=device, dtype=dtype))
    width = padded(tensors[0].shape[1], pad_columns)
    if device.type == "cuda" and _is_hopper(device):
        for kind in {part.kind for part in parts if isinstance(part, Fragments)}:
            wide.make_ready(by_block=kind not in WHOLE_KINDS, minima=has_minima(kind), dtype=dtype, device=device)
    return PackedLinear(parts, dtype=dtype, device=device, bias=bias, in_features=width, order=order, ready=ready, pdl=pdl)


def _in_stored_order(tensors: Sequence[Stored], device: torch.device) -> tuple[Sequence[Stored], Tensor | None]:
    """Weights with their columns as they are stored, and the order that a row must come in."""
    (first, *others) = tensors
    if not isinstance(first, Columns):
        return tensors, None
    assert not others, "columns in an order of their own come alone"
    return [first.stored], torch.from_numpy(np.argsort(first.order)).to(device, torch.int32)
