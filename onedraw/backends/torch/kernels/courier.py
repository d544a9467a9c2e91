"""Stored bytes on their way from a mapped file to a device.

In: rows of a stored tensor, read where the file is mapped. Out: the same bytes on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onedraw.checkpoints.quants import copy_rows


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
