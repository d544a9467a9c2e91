"""Linear layers on a CPU whose weights are stored in panels.

In: tensors of a checkpoint, or one float32 matrix. Out: a `CpuLinear`: its weights in panels (gguf_blocks.h), several weights
concatenated in one product, each of its own type. Quantized weights stay quantized; types without a kernel are converted to
float32. A panel has all inputs of 16 or 32 outputs. Activations quantized to 8 bits are called codes. Axis: T rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.packing import CPU_PACKED_KINDS
from onedraw.backends.torch.ops.cpu.library import LONG, POINTER, Kernels
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.models.source import LazyTensor

GROUP = 32  # activations that share a scale; must equal GROUP of gguf_blocks.h
GROUP_BYTES = 16  # size of the struct `group` of packed_linear.h, which holds a group's scale and sums


class _Part(ctypes.Structure):
    """The ctypes mirror of `part` in packed_linear.h."""

    _fields_ = (*((name, LONG) for name in ("kind", "rows", "column")), ("panels", POINTER))


class _LinearArguments(ctypes.Structure):
    """The ctypes mirror of `packed_linear` in packed_linear.h."""

    _fields_ = (*((name, LONG) for name in ("input", "output", "count", "coded")), ("bias", POINTER), ("parts", POINTER))


@dataclass(frozen=True, slots=True)
class Panels:
    """One weight in the panel layout of gguf_blocks.h."""

    kind: str
    rows: int  # number of rows, including rows of zeros that pad the stored ones
    width: int  # number of inputs of each row
    data: Tensor  # the panels' bytes as uint8, aligned to 64 bytes


def pack_rows(kernels: Kernels, raw: np.ndarray, kind: str, *, rows: int, width: int, height: int) -> Panels:
    """Reorder stored rows into panels with `height` rows in all; rows that are not stored are zero."""
    code = CPU_PACKED_KINDS[kind]
    data = kernels.allocate(kernels.packed_bytes(code, height, width))
    raw = np.ascontiguousarray(raw)
    kernels.pack(raw.ctypes.data, data.data_ptr(), code, rows, width, height, kernels.thread_pool)
    return Panels(kind, height, width, data)


def pack_panels(kernels: Kernels, tensor: LazyTensor, *, height: int) -> Panels:
    """A stored matrix in panels, in its own type if a kernel exists for it, otherwise as float32."""
    rows, width = tensor.shape
    raw = tensor.packed() if tensor.kind in CPU_PACKED_KINDS else None
    if raw is None:
        return pack_rows(kernels, tensor.float32(), "F32", rows=rows, width=width, height=height)
    return pack_rows(kernels, raw, tensor.kind, rows=rows, width=width, height=height)


class CpuLinear(Linear):
    """Weights concatenated along their outputs. `coded`: for quantized weights, activations are quantized to 8-bit codes."""

    def __init__(
        self, kernels: Kernels, parts: Sequence[Panels], *, bias: Tensor | None, coded: bool, in_features: int | None = None
    ) -> None:
        self.out_features = sum(part.rows for part in parts)
        # Columns of an input row, which may have more than the weight; the others are not read.
        self.in_features = in_features or parts[0].width
        self.dtype, self.device, self.rule, self.bias = torch.float32, torch.device("cpu"), RowRule(floor=1), bias
        self.parts, self._coded = tuple(parts), coded
        self._kernels = kernels
        self._array = (_Part * len(parts))()
        column = 0
        for place, part in enumerate(parts):
            self._array[place] = _Part(CPU_PACKED_KINDS[part.kind], part.rows, column, part.data.data_ptr())
            column += part.rows
        self._arguments = _LinearArguments(
            input=parts[0].width,
            output=self.out_features,
            count=len(parts),
            coded=coded,
            bias=None if bias is None else bias.data_ptr(),
            parts=ctypes.addressof(self._array),
        )
        self.address = ctypes.addressof(self._arguments)
        wants_codes = coded and any(part.kind not in ("F32", "F16", "BF16") for part in parts)
        self._row_bytes = parts[0].width // GROUP * (GROUP + GROUP_BYTES) if wants_codes else 0

    def __call__(self, x: Tensor) -> Tensor:
        kernels = self._kernels
        y = torch.empty(len(x), self.out_features, dtype=torch.float32, device="cpu")
        memory = kernels.scratch(len(x) * self._row_bytes) if self._row_bytes else None
        kernels.linear(self.address, x.data_ptr(), self.in_features, y.data_ptr(), len(x), memory, kernels.thread_pool)
        return y

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product added to a residual in float32, then rounded to the residual's dtype, as fused layers do it."""
        return (residual.float() + self(x)).to(residual.dtype)

    def first_outputs(self, count: int) -> Linear:
        """The product of the first `count` outputs. It is this one if there are no more outputs, or several parts, or a bias, or
        if `count` is no multiple of 32, where panels of all types end."""
        if len(self.parts) > 1 or self.bias is not None or not 0 < count < self.out_features or count % 32:
            return self
        (part,) = self.parts
        first = Panels(part.kind, count, part.width, part.data)
        return CpuLinear(self._kernels, [first], bias=None, coded=self._coded, in_features=self.in_features)

    def rows(self, wanted: Tensor, thread_pool: int | None = None) -> Tensor:
        """Rows of the weight as floats, by number; only for a product of a single weight: [T] → [T, in]."""
        (part,) = self.parts
        out = torch.empty(len(wanted), part.width, dtype=torch.float32, device="cpu")
        kernels, code = self._kernels, CPU_PACKED_KINDS[part.kind]
        pool = kernels.thread_pool if thread_pool is None else thread_pool
        kernels.rows(part.data.data_ptr(), code, part.width, wanted.data_ptr(), len(wanted), out.data_ptr(), pool)
        return out
