"""Weights in their blocks, made ready for products on a GPU, and looked up row by row.

In: tensors of a checkpoint, their bytes read where the file is mapped. Out: a `PackedLinear`: several weights side by side in
one product, each in its own kind; neighbours of one kind are one weight. What no kernel reads is a matrix of the model's dtype
beside them.

A product of few rows reads the blocks themselves (`packed_rows.py`); for many rows the weight is opened, slice by slice of its
outputs, and multiplied there (`wide.py`, `triton_wide.py`). What either writes on the way lies in the operations' own workspace
(`workspace.py`). Both follow the rule that stands in spans.py, so which of them served does not show in the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.packing import FEW_ROWS, why_not_gpu_packed
from onedraw.backends.torch.model.weight_loader import padded
from onedraw.backends.torch.ops.cuda.linear import linear, shared_memory, tile_borders
from onedraw.backends.torch.ops.cuda.packed import many_rows as triton_wide
from onedraw.backends.torch.ops.cuda.packed import many_rows_hopper as wide
from onedraw.backends.torch.ops.cuda.packed.activations import Prepared, Ready, prepare_border, prepare_rows
from onedraw.backends.torch.ops.cuda.packed.few_rows import (
    WHOLE_KINDS,
    has_minima,
    make_ready,
    opened,
    skinny_borders,
    skinny_product,
    unpacked_rows,
    waiting_sums,
)
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import Fragments, empty_fragments, fill_fragments, slices_of
from onedraw.backends.torch.ops.cuda.packed.workspace import Workspace
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.checkpoints.dequantize import copy_rows
from onedraw.models.source import LazyTensor
from onedraw.models.tensor_views import ColumnSelection

# -------------------- Stored bytes on their way from a mapped file to a device.


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


# -------------------- Weights in their blocks, made ready for products on a GPU, and looked up row by row.


# Fewer rows are served faster 64 by 64 than by opening the weight. Recorded turns have fewer, so none has a workspace in it.
WIDE_FROM = 257
HOPPER = (9, 0)


# ------------------------------------------------------------------ one weight


def packed_product(
    prepared: Prepared,
    weight: Fragments,
    *,
    out: Tensor,
    workspace: Workspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    parts: Tensor | None = None,
    pdl: bool = False,
    joins: bool = False,
    joined: bool = False,
    number: int = 0,
) -> Tensor:
    """Prepared rows times a weight: out [T, N], which may be columns of a wider tensor. `parts`, `joins` and `joined` are
    those of `skinny_product`, for rows that come at once; `number`: of those that are joined."""
    rows = len(prepared)
    if rows < WIDE_FROM:
        parts = workspace.parts(weight) if parts is None else parts
        for start in range(0, rows, FEW_ROWS):
            part = slice(start, start + FEW_ROWS)
            beside = None if residual is None else residual[part]
            skinny_product(
                prepared.rows(part),
                weight,
                out=out[part],
                parts=parts,
                bias=bias,
                residual=beside,
                pdl=pdl,
                joins=joins,
                joined=joined,
                handed=workspace.handed(number),
            )
        return out
    product = wide.wide_product if _is_hopper(out.device) else triton_wide.wide_product
    for columns, room in workspace.slices(weight):
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


def load_fragments(
    tensors: Sequence[LazyTensor], *, pad: int, courier: Courier, device: torch.device, workspace: Workspace
) -> Fragments:
    """Weights of one kind as one, made ready for products and look-ups."""
    made = bring_fragments(tensors, pad=pad, courier=courier, device=device)
    if device.type == "cuda":  # nothing is compiled in the middle of a turn
        make_ready(made.kind, device)
    workspace.reserve(made)
    return made


def bring_fragments(tensors: Sequence[LazyTensor], *, pad: int, courier: Courier, device: torch.device) -> Fragments:
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
        workspace: Workspace,
        bias: Tensor | None = None,
        in_features: int | None = None,
        order: Tensor | None = None,
        ready: Ready | None = None,
        pdl: bool = False,
    ) -> None:
        self.parts, self._order, self._ready, self.workspace = tuple(parts), order, ready or Ready(), workspace
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
        rooms, start = self._rooms(len(x)), 0
        self.workspace.handed(len(self.parts) - 1)  # all of them, before the first product is under way
        for i, (part, height) in enumerate(zip(self.parts, self._heights, strict=True)):
            here = slice(start, start + height)
            bias = None if self.bias is None else self.bias[here]
            beside = None if residual is None else residual[:, here]
            if isinstance(part, Fragments):
                packed_product(
                    prepared,
                    part,
                    out=y[:, here],
                    workspace=self.workspace,
                    bias=bias,
                    residual=beside,
                    parts=rooms[i] if rooms else None,
                    pdl=self._pdl,
                    joins=bool(rooms) and i > 0,
                    joined=bool(rooms) and i + 1 < len(self.parts),
                    number=i,
                )
            else:
                linear(x[:, : part.shape[1]], part, out=y[:, here], bias=bias, residual=beside, pdl=self._pdl)
            start += height
        return y

    def _rooms(self, rows: int) -> list[Tensor]:
        """Where the sums of each part wait, where all parts may be multiplied at once: each has its own. Else none."""
        parts = [part for part in self.parts if isinstance(part, Fragments)]
        if not (self._pdl and 1 < len(parts) == len(self.parts) and 0 < rows <= FEW_ROWS):
            return []
        *_, room = map(self.workspace.parts, parts)  # it grows with what it is asked for
        sizes = [waiting_sums(rows, part) for part in parts]
        return list(torch.split(room[: sum(sizes)], sizes)) if sum(sizes) <= len(room) else []

    @property
    def kind(self) -> str:
        return "+".join(part.kind if isinstance(part, Fragments) else str(part.dtype) for part in self.parts)

    @property
    def borders(self) -> tuple[int, ...]:
        return self.all_borders() if self.device.type == "cuda" else ()  # an emulator takes seconds for so many rows

    def all_borders(self) -> tuple[int, ...]:
        """Of the products with few rows, of preparing rows, of the second launch, and where weights are opened from."""
        found = {prepare_border(self._width), FEW_ROWS + 1, WIDE_FROM}
        for part, height in zip(self.parts, self._heights, strict=True):
            if isinstance(part, Fragments):
                found.update(skinny_borders(part))
            else:
                found.update(tile_borders(height, self._width, part.dtype, shared_memory(self.device)))
        return tuple(sorted(found - {1}))

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x, residual) if residual.dtype == self.dtype else super().added(x, residual)

    def rows(self, wanted: Tensor, thread_pool: int | None = None) -> Tensor:
        """Rows of a product of one weight, as numbers: [T] → [T, K]."""
        (part,) = self.parts
        if not isinstance(part, Fragments):
            return part.index_select(0, wanted)
        return unpacked_rows(part, wanted, out=torch.empty(len(wanted), part.width, dtype=self.dtype, device=self.device))


def packed_linear(
    tensors: Sequence[LazyTensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    courier: Courier,
    workspace: Workspace,
    bias: Tensor | None = None,
    pad: int = 1,
    pad_columns: int = 1,
    ready: Ready | None = None,
    pdl: bool = False,
) -> PackedLinear | None:
    """None where none of these weights can stay in blocks: one matrix serves better then."""
    if all(map(why_not_gpu_packed, tensors)):
        return None
    tensors, order = _in_stored_order(tensors, device)
    parts: list[Fragments | Tensor] = []
    for kind, same in groupby(tensors, key=lambda tensor: "" if why_not_gpu_packed(tensor) else tensor.kind):
        together = list(same)
        if kind:
            parts.append(load_fragments(together, pad=pad, courier=courier, device=device, workspace=workspace))
        else:
            matrices = [torch.from_numpy(tensor.float32()) for tensor in together]
            joined = torch.cat([torch.nn.functional.pad(m, (0, 0, 0, -len(m) % pad)) for m in matrices])
            parts.append(joined.to(device=device, dtype=dtype))
    width = padded(tensors[0].shape[1], pad_columns)
    if device.type == "cuda" and _is_hopper(device):
        for kind in {part.kind for part in parts if isinstance(part, Fragments)}:
            wide.make_ready(by_block=kind not in WHOLE_KINDS, minima=has_minima(kind), dtype=dtype, device=device)
    return PackedLinear(
        parts,
        dtype=dtype,
        device=device,
        workspace=workspace,
        bias=bias,
        in_features=width,
        order=order,
        ready=ready,
        pdl=pdl,
    )


def _in_stored_order(tensors: Sequence[LazyTensor], device: torch.device) -> tuple[Sequence[LazyTensor], Tensor | None]:
    """Weights with their columns as they are stored, and the order that a row must come in."""
    (first, *others) = tensors
    if not isinstance(first, ColumnSelection):
        return tensors, None
    assert not others, "columns in an order of their own come alone"
    return [first.stored], torch.from_numpy(np.argsort(first.order)).to(device, torch.int32)
