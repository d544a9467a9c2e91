"""Where packed products on a GPU write what only they read: weights that are opened, and sums that wait to be added.

In: the weights that will be multiplied with. Out: room for slices of their outputs, opened, and for the sums of a product with
few rows; both within the memory plan (`packing.partial_sum_bytes`, `DEQUANT_BYTES`), allocated when the first product
comes. What blocks hand on to each other has some 100 KiB, which nobody counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.memory_plan import DEQUANT_BYTES
from onedraw.backends.packing import SPAN, partial_sum_bytes
from onedraw.backends.torch.model.weight_loader import padded
from onedraw.backends.torch.ops.cuda.packed import many_rows_hopper as wide
from onedraw.backends.torch.ops.cuda.packed.activations import Opened, beside
from onedraw.backends.torch.ops.cuda.packed.few_rows import WHOLE_KINDS, empty_handed, has_minima
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import Fragments

_ALIGNED = 256  # bytes


class Workspace:
    """Owner: the operations of one engine on one device, which launch one product behind the other. Two engines may be in the
    middle of a product at once, each on a thread and a stream of its own, so no two of them have one workspace."""

    def __init__(self, device: torch.device, most: int = DEQUANT_BYTES) -> None:
        self._device, self._most, self._needed, self._summed = device, most, 0, 0
        self._room = torch.empty(0, dtype=torch.uint8, device=device)
        self._parts = [torch.empty(0, dtype=torch.float32, device=device)]  # the last is used; recorded turns hold the others
        self._handed: list[Tensor] = []
        self._found: dict[tuple[str, int, int], Opened] = {}  # places that were laid out before

    def reserve(self, weight: Fragments) -> None:
        """Say that this weight will be multiplied with here."""
        rows = beside(weight.rows)
        self._needed = max(self._needed, min(self._most, rows * _opened_bytes(weight) + 4 * _ALIGNED))
        self._summed = max(self._summed, partial_sum_bytes(weight.rows, weight.width))

    def parts(self, weight: Fragments) -> Tensor:
        """Room for the sums of a product with few rows, in float32: of all its outputs, or of as many as the plan has it for."""
        self.reserve(weight)
        if self._parts[-1].nbytes < self._summed:
            self._parts.append(torch.empty(self._summed // 4, dtype=torch.float32, device=self._device))
        return self._parts[-1]

    def handed(self, number: int) -> Tensor:
        """Where blocks of one product, or of the so-manieth of those that run at once, hand sums on to each other."""
        while len(self._handed) <= number:
            self._handed.append(empty_handed(self._device))
        return self._handed[number]

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


def _opened_bytes(weight: Fragments) -> int:
    """Of one output."""
    per = 1 if weight.kind in WHOLE_KINDS else 8
    least = (4 * per + (16 if per == 1 else 0)) if has_minima(weight.kind) else 0
    return weight.spans * (2 * SPAN + 4 * per + least)
