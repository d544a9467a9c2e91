"""Loads weights from a source onto a device.

In: a source of named weights (`models/weight_names.py` and `models/spec.py` list the names). Out: tensors in the model's dtype,
joined and padded for the products. To join weights is to concatenate their rows, so that one product computes all of them.
Packed weights stay in their quantized blocks. Axes: T tokens, V' vocabulary with padding, E hidden width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from onedraw.backends.torch.ops.plain.experts import ExpertBank
from onedraw.checkpoints.random_weights import RandomTensor
from onedraw.models.source import LazyTensor, WeightSource
from onedraw.models.spec import Activation, Norm

if TYPE_CHECKING:
    from onedraw.backends.torch.ops.base import Ops
    from onedraw.backends.torch.ops.plain.linear import Linear

LANE = 64  # widths are padded to a multiple of this, so that vectors are whole (`ops/plain/elementwise.py`)


class WeightLoader:
    """Reads weights by layer and name. Owner: the model, while it is being loaded.

    Matrices pass through one buffer on the host. A fresh buffer per layer would fragment the heap between the weights that
    stay, and the process would grow by an eighth.
    """

    def __init__(
        self, source: WeightSource, *, ops: Ops, dtype: torch.dtype, device: torch.device, norm: Norm = "narrow"
    ) -> None:
        self._source, self.ops, self.dtype, self._device, self._norm = source, ops, dtype, device, norm
        self._buffer = torch.empty(0)

    def kept(self, layer: int | None, *names: str, pad: int = 1) -> Tensor:
        """Weights joined by rows, each padded with zeros to a multiple of `pad` rows, in memory of their own."""
        return self._joined(layer, names, pad=pad, take=torch.empty)

    def wide(self, layer: int | None, name: str) -> Tensor:
        """One small weight in float32, whatever the model's dtype."""
        return torch.from_numpy(self._source.tensor(layer, name).float32()).to(self._device)

    def norm(self, layer: int | None, name: str) -> Tensor:
        """The weight of a norm: in float32 for models that apply it before rounding, else in the model's dtype."""
        return self.wide(layer, name) if self._norm == "wide" else self.kept(layer, name)

    def linear(self, layer: int | None, *names: str, bias: Tensor | None = None, pad: int = 1, pad_columns: int = 1) -> Linear:
        """The product with matrices joined by rows. They stay packed if the operations can read them so."""
        tensors = [self._source.tensor(layer, name) for name in names]
        found = self.ops.packed_linear(tensors, bias=bias, pad=pad, pad_columns=pad_columns)
        return found or self.ops.linear(self.passing(layer, *names, pad=pad, pad_columns=pad_columns), bias)

    def passing(self, layer: int | None, *names: str, pad: int = 1, pad_columns: int = 1) -> Tensor:
        """Matrices joined by rows, for a caller that copies them into its own layout. In float32 on a CPU the result is a view of
        the buffer, valid until the next call."""
        return self._joined(layer, names, pad=pad, pad_columns=pad_columns, take=self._take)

    def bank(self, layer: int, activation: Activation) -> ExpertBank:
        """The experts of a layer. Their matrices stay packed if the operations can read them so."""
        gate, up, down = (self._source.tensor(layer, name) for name in ("expert_gate", "expert_up", "expert_down"))
        found = self.ops.packed_expert_bank([gate, up], down, activation)
        if found is not None:
            return found
        first = self.experts(layer, "expert_gate", "expert_up", pad=LANE)
        return self.ops.expert_bank(first, self.experts(layer, "expert_down", pad_columns=LANE), activation)

    def experts(self, layer: int, *names: str, pad: int = 1, pad_columns: int = 1) -> list[Tensor]:
        """For each expert, its matrices of these names joined by rows and padded, in memory of their own. The checkpoint stores
        stacks [experts, rows, columns]."""
        stacks = [self._stack(self._source.tensor(layer, name)) for name in names]
        found = []
        for parts in zip(*stacks, strict=True):
            padded = [F.pad(m, (0, -m.shape[1] % pad_columns, 0, -m.shape[0] % pad)) for m in parts]
            found.append(torch.cat(padded).to(device=self._device, dtype=self.dtype))
        return found

    def _stack(self, tensor: LazyTensor) -> Tensor:
        if can_make(tensor, self._device):
            return make(tensor, device=self._device, dtype=self.dtype)
        return torch.from_numpy(tensor.float32())

    def _take(self, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if self._buffer.numel() < count:
            self._buffer = torch.empty(0)  # free the old buffer before the larger one is allocated
            self._buffer = torch.empty(count)
        return self._buffer[:count].view(shape)

    def _joined(
        self,
        layer: int | None,
        names: tuple[str, ...],
        *,
        pad: int,
        pad_columns: int = 1,
        take: Callable[[tuple[int, ...]], Tensor],
    ) -> Tensor:
        stored = [self._source.tensor(layer, name) for name in names]
        heights = [padded(tensor.shape[0], pad) for tensor in stored]
        width = tuple(padded(columns, pad_columns) for columns in stored[0].shape[1:])  # () for vectors, which have no columns
        if all(can_make(tensor, self._device) for tensor in stored):
            return self._made(stored, heights, width)
        out = take((sum(heights), *width))
        for part, tensor in zip(torch.split(out, heights), stored, strict=True):
            rows = tensor.shape[0]
            part[rows:] = 0
            if width == tensor.shape[1:]:
                tensor.into(part[:rows].numpy())
            else:
                part[:rows] = F.pad(torch.from_numpy(tensor.float32()), (0, width[0] - tensor.shape[1]))
        return out.to(device=self._device, dtype=self.dtype)

    def _made(self, stored: list[LazyTensor], heights: list[int], width: tuple[int, ...]) -> Tensor:
        """Random weights, generated, joined and padded on the device, which saves the copy from the host."""
        out = torch.zeros((sum(heights), *width), device=self._device, dtype=self.dtype)
        for part, tensor in zip(torch.split(out, heights), stored, strict=True):
            part[tuple(slice(0, size) for size in tensor.shape)] = make(tensor, device=self._device, dtype=self.dtype)
        return out


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class EmbeddingRows(Protocol):
    """A function from tokens [T] to their rows of the embedding [T, E]. `thread_pool`: address of the C thread pool that reads
    the rows; None: that of the table's own operations."""

    def __call__(self, tokens: Tensor, thread_pool: int | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of an embedding table [V', E], on its device."""

    table: Tensor

    def __call__(self, tokens: Tensor, thread_pool: int | None = None) -> Tensor:
        return self.table.index_select(0, tokens.to(self.table.device))


@dataclass(frozen=True, slots=True)
class ProductRows:
    """Rows of the weight of a product: of an embedding that is kept packed, or of a tied head, on its device."""

    product: Linear

    def __call__(self, tokens: Tensor, thread_pool: int | None = None) -> Tensor:
        return self.product.rows(tokens.to(self.product.device), thread_pool)


@dataclass(slots=True)
class StoredRows:
    """Rows that stay in the checkpoint, mapped from its file or in host memory. Owner: the model; an update of the weights
    replaces `stored`."""

    stored: LazyTensor

    def __call__(self, tokens: Tensor, thread_pool: int | None = None) -> Tensor:
        return torch.from_numpy(self.stored.take_rows(tokens.numpy()).float32())


# ------------------------------------------------------------------ random weights on the device


def can_make(tensor: LazyTensor, device: torch.device) -> bool:
    return device.type == "cuda" and isinstance(tensor, RandomTensor) and tensor.on_device and tensor.order is None


def make(tensor: LazyTensor, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    assert isinstance(tensor, RandomTensor)
    digest = hashlib.sha256(f"{tensor.seed} {tensor.name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.randn(tensor.shape, generator=generator, device=device, dtype=dtype)
    if tensor.negative:
        values.abs_().neg_()
    return values.mul_(tensor.std).add_(tensor.mean)
