"""Products of packed weights on a GPU where nothing can be compiled for the faster ones: by the kernel that experts have.

In: tensors of a checkpoint, their bytes read where the file is mapped. Out: a `BlocksLinear`, several weights side by side, each
in its own kind. One tile of 16 rows serves any number of them, so there is one form and no border. Its bits are its own: sums
follow the rule of `triton_packed.py`, not that of `spans.py`, so the operations that use it have another name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from onedraw.backends.packing import why_not_in_blocks
from onedraw.backends.torch.kernels.blocks import Blocks, numbers
from onedraw.backends.torch.kernels.courier import Courier
from onedraw.backends.torch.kernels.packed_experts import grouped, load_blocks
from onedraw.backends.torch.kernels.packed_linear import in_stored_order, side_by_side
from onedraw.backends.torch.kernels.triton_linear import linear
from onedraw.backends.torch.kernels.triton_moe import Routes
from onedraw.backends.torch.layers.linear import Linear, RowRule
from onedraw.backends.torch.loader import padded
from onedraw.models.source import Tensor as Stored

HEIGHT = 16  # rows of a tile


class BlocksLinear(Linear):
    """Weights side by side, in blocks or as matrices of x's dtype. `order` (int32): where each input of the stored columns stands
    in a row that is offered, where that is another order."""

    def __init__(
        self,
        parts: Sequence[Blocks | Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        bias: Tensor | None = None,
        in_features: int | None = None,
        order: Tensor | None = None,
    ) -> None:
        self.parts, self._order, self.bias = tuple(parts), order, bias
        self._heights = [part.rows if isinstance(part, Blocks) else len(part) for part in parts]
        first = parts[0]
        self._width = first.width if isinstance(first, Blocks) else first.shape[1]
        self.out_features, self.in_features = sum(self._heights), in_features or self._width
        self.dtype, self.device, self.rule = dtype, device, RowRule(floor=1)

    @property
    def kind(self) -> str:
        return "+".join(part.kind if isinstance(part, Blocks) else str(part.dtype) for part in self.parts)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, K] → x Wᵀ + b + residual, each sum rounded."""
        own = x[:, : self._width] if self._order is None else x.index_select(1, self._order)
        own = own if own.stride(1) == 1 else own.contiguous()
        y = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        routes = _all_to_one(len(x), x.device)
        start = 0
        for part, height in zip(self.parts, self._heights, strict=True):
            here = y[:, start : start + height]
            if isinstance(part, Blocks):
                grouped(own, part, routes, out=here, divide=1)
            else:
                linear(own, part, out=here)
            start += height
        y = y if self.bias is None else y + self.bias
        return y if residual is None else y + residual

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x, residual) if residual.dtype == self.dtype else super().added(x, residual)

    def rows(self, wanted: Tensor, by: object = None) -> Tensor:
        """Rows of a product of one weight, as numbers: [T] → [T, K]."""
        (part,) = self.parts
        if not isinstance(part, Blocks):
            return part.index_select(0, wanted)
        codes, high = (one.index_select(2, wanted) for one in (part.codes, part.high))
        some = Blocks(part.kind, len(wanted), part.width, codes, high, part.scales.index_select(3, wanted))
        return numbers(some).to(self.dtype)


def _all_to_one(rows: int, device: torch.device) -> Routes:
    """Every row to the only matrix, in tiles; made on the device, so that a turn that is recorded may hold it."""
    first = torch.arange(0, rows, HEIGHT, dtype=torch.int32, device=device)
    tiles = torch.stack([torch.zeros_like(first), first, (rows - first).clamp(max=HEIGHT)], 1)
    order = torch.arange(rows, dtype=torch.int32, device=device)
    return Routes(order, tiles, torch.empty(rows, 1, dtype=torch.float32, device=device), HEIGHT)


def blocks_linear(
    tensors: Sequence[Stored],
    *,
    dtype: torch.dtype,
    device: torch.device,
    courier: Courier,
    bias: Tensor | None = None,
    pad: int = 1,
    pad_columns: int = 1,
) -> BlocksLinear | None:
    """None where none of these weights can stay in blocks: one matrix serves better then."""
    if all(map(why_not_in_blocks, tensors)):
        return None
    tensors, order = in_stored_order(tensors, device)
    parts = side_by_side(
        tensors, partial(load_blocks, pad=pad, courier=courier, device=device), pad=pad, dtype=dtype, device=device
    )
    width = padded(tensors[0].shape[1], pad_columns)
    return BlocksLinear(parts, dtype=dtype, device=device, bias=bias, in_features=width, order=order)
