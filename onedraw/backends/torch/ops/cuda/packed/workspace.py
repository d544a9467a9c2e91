"""Scratch memory of packed products on a GPU: dequantized weights, partial sums, and carry buffers between thread blocks.

In: the weights that products will use. Out: a buffer for dequantized slices of outputs, and one for the partial sums of products
of few rows. Both are counted by the memory plan (`DEQUANT_BYTES`, `packing.partial_sum_bytes`) and allocated at the first
product. The carry buffers take about 100 KiB, which the memory plan does not count.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.memory_plan import DEQUANT_BYTES
from onedraw.backends.packing import SPAN, partial_sum_bytes
from onedraw.backends.torch.model.weight_loader import padded
from onedraw.backends.torch.ops.cuda.packed.activations import DequantizedWeight, padded_outputs
from onedraw.backends.torch.ops.cuda.packed.few_rows import SPAN_SCALE_KINDS, empty_carry, has_minima
from onedraw.backends.torch.ops.cuda.packed.many_rows_hopper import TILE
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import PackedWeight

_ALIGNED = 256  # views of the buffer start at multiples of so many bytes


class Workspace:
    """Owner: the operations of one engine on one device, which launch products in order on one stream. Two engines may run
    products concurrently, each on its own thread and stream, so each has its own workspace."""

    def __init__(self, device: torch.device, most: int = DEQUANT_BYTES) -> None:
        self._device, self._most, self._needed, self._partial_sum_bytes = device, most, 0, 0
        self._dequantized = torch.empty(0, dtype=torch.uint8, device=device)
        self._partial_sums = [
            torch.empty(0, dtype=torch.float32, device=device)
        ]  # the last is current; captured CUDA graphs still use the earlier ones
        self._carries: list[Tensor] = []
        self._views: dict[tuple[str, int, int], DequantizedWeight] = {}  # views of `_dequantized` by type, spans and outputs

    def reserve(self, weight: PackedWeight) -> None:
        """Raise the planned sizes of the buffers so that they are large enough for this weight; nothing is allocated yet."""
        rows = padded_outputs(weight.rows)
        self._needed = max(self._needed, min(self._most, rows * _output_bytes(weight) + 4 * _ALIGNED))
        self._partial_sum_bytes = max(self._partial_sum_bytes, partial_sum_bytes(weight.rows, weight.width))

    def partial_sums(self, weight: PackedWeight) -> Tensor:
        """The float32 buffer for partial sums of products of few rows; it holds all outputs, or as many as the memory plan
        allows."""
        self.reserve(weight)
        if self._partial_sums[-1].nbytes < self._partial_sum_bytes:
            self._partial_sums.append(torch.empty(self._partial_sum_bytes // 4, dtype=torch.float32, device=self._device))
        return self._partial_sums[-1]

    def carry(self, number: int) -> Tensor:
        """The buffer through which the thread blocks of a product pass partial sums to their successors. `number`: index among
        the products that may run concurrently, which need separate buffers."""
        while len(self._carries) <= number:
            self._carries.append(empty_carry(self._device))
        return self._carries[number]

    def slices(self, weight: PackedWeight) -> Iterator[tuple[slice, DequantizedWeight]]:
        """Slices of the outputs, each small enough for the buffer, with a view of the buffer to dequantize it into."""
        self.reserve(weight)
        if self._dequantized.numel() < self._needed:
            self._views, self._dequantized = {}, self._dequantized[:0].clone()  # free the old buffer before allocating
            self._dequantized = torch.empty(self._needed, dtype=torch.uint8, device=self._device)
        most = (self._dequantized.numel() - 4 * _ALIGNED) // _output_bytes(weight) // TILE * TILE
        count = weight.rows
        if count > most:  # slices of about equal size, in whole tiles
            count = padded(-(-count // -(-count // most)), TILE)
        for start in range(0, weight.rows, count):
            columns = slice(start, min(start + count, weight.rows))
            key = (weight.kind, weight.spans, columns.stop - start)
            if key not in self._views:
                self._views[key] = self._view(weight, columns.stop - start)
            yield columns, self._views[key]

    def _view(self, weight: PackedWeight, count: int) -> DequantizedWeight:
        spans, per, start = weight.spans, 1 if weight.kind in SPAN_SCALE_KINDS else 8, 0

        def take(dtype: torch.dtype, *shape: int) -> Tensor:
            nonlocal start
            size = int(np.prod(shape)) * dtype.itemsize
            view = self._dequantized[start : start + size].view(dtype).view(shape)
            start += padded(size, _ALIGNED)
            return view

        weights, scales = take(torch.float16, count, spans * SPAN), take(torch.float32, spans * per, padded_outputs(count))
        if not has_minima(weight.kind):
            return DequantizedWeight(weights, scales)
        minima = take(torch.float16, count, spans, 8) if per == 1 else None
        return DequantizedWeight(weights, scales, minima, take(torch.float32, spans * per, padded_outputs(count)))


def _output_bytes(weight: PackedWeight) -> int:
    """Bytes of one dequantized output: its float16 weights, scales and minima."""
    per = 1 if weight.kind in SPAN_SCALE_KINDS else 8
    min_scales = (4 * per + (16 if per == 1 else 0)) if has_minima(weight.kind) else 0
    return weight.spans * (2 * SPAN + 4 * per + min_scales)
