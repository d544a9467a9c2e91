"""The way from one stage of layers to the next: buffers that are allocated once and hold one turn's rows.

In: the residual stream [T, E] on the device before, and what the layers behind have as inputs of their own. Out: the same
bits on the device behind. One buffer sends (in pinned memory of the host where only one side is a GPU), one receives: the
sender's numbers are free as soon as they are in the first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from onedraw.errors import OutOfMemory


class StageBoundary:
    """Owner: the stage behind it. Rows that crossed are good until the next turn crosses."""

    def __init__(
        self, source: torch.device, target: torch.device, *, rows: int, hidden: int, inputs: int, dtype: torch.dtype
    ) -> None:
        self._source, self._target = source, target
        pinned = source.type != target.type
        try:
            place = torch.device("cpu") if pinned else source
            self._sent = torch.empty(rows, hidden, dtype=dtype, device=place, pin_memory=pinned)
            self._received = torch.zeros(rows, hidden, dtype=dtype, device=target)
            self._inputs = torch.zeros(rows, inputs, dtype=dtype, device=target)
        except (RuntimeError, MemoryError):  # how torch says that there is not enough
            raise OutOfMemory(f"the {rows} rows between {source} and {target} do not fit; lower --turn-tokens") from None
        self._gpu = next((device for device in (source, target) if device.type == "cuda"), None) if pinned else None

    @property
    def nbytes(self) -> int:
        return self._sent.nbytes + self._received.nbytes + self._inputs.nbytes

    def cross(self, x: Tensor, own: Tensor | None, rows: int | None = None) -> tuple[Tensor, Tensor | None]:
        """x [T, E]; own [T, layers behind, width]. `rows`: as many as the stage behind pads the turn to, where it pads it
        otherwise; what it has more is padding, with numbers of an earlier turn."""
        rows = len(x) if rows is None else rows
        count = min(len(x), rows)
        if max(count, rows) > len(self._sent):
            raise AssertionError(f"a turn of {max(count, rows)} rows meets a boundary of {len(self._sent)}")
        if x.dtype != self._sent.dtype:
            raise AssertionError(f"a stream of {x.dtype} meets a boundary of {self._sent.dtype}")
        sent = self._sent[:count]
        self._settle()  # the turn before may still be on its way out of this buffer
        sent.copy_(x[:count], non_blocking=True)
        if self._source.type == "cuda":
            self._settle()  # a host reads it next
        self._received[:count].copy_(sent, non_blocking=True)
        if own is None:
            return self._received[:rows], None
        inputs = self._inputs[:rows].view(rows, *own.shape[1:])
        inputs[:count].copy_(own[:count])
        return self._received[:rows], inputs

    def _settle(self) -> None:
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current_device device, whatever their arguments lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
