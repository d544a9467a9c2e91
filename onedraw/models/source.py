"""Lazy tensors: the protocols that connect models to checkpoint readers, and views that rearrange tensors without reading them.

A view presents stored tensors as the model uses them: rows or columns in another order, stacks of matrices, parts of a stack.
The data is read only when it is requested, and a view keeps it quantized if it can. The readers are in `onedraw.checkpoints`;
`models` imports none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from onedraw.errors import UnsupportedModel

Floats = NDArray[np.float32]
Order = NDArray[np.intp]  # entry i is the number of the row or column that becomes row or column i
# How tensors are named and the model is described. safetensors: as in a transformers folder; gguf: as in a GGUF file; plain: by
# the weight names of `spec.py`, as in random models.
CheckpointFormat = Literal["safetensors", "gguf", "plain"]


class LazyTensor(Protocol):
    """A named tensor whose data is read on demand. The shape is row-major."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """The storage type: F32, BF16, Q4_K …"""

    def require_readable(self) -> None:
        """Raise UnsupportedModel if this type cannot be converted to float32."""

    def float32(self) -> NDArray[np.float32]: ...

    def int64(self) -> NDArray[np.int64]:
        """The values of an integer tensor; UnsupportedModel for any other type."""

    def into(self, out: NDArray[np.float32]) -> None:
        """Write the values into `out`, which has this tensor's shape."""

    @property
    def stays_packed(self) -> bool:
        """Whether `packed` returns the stored bytes, and not None."""

    def packed(self) -> NDArray[np.uint8] | None:
        """All rows as stored, [rows, bytes], with the leading axes flattened; None if `stays_packed` is false, since the values
        differ from the stored ones or are not stored."""

    def factors(self) -> NDArray[np.float32] | None:
        """An additional factor of each packed row, [rows]; None if all are 1. Only NVFP4 has factors."""

    def take_rows(self, order: NDArray[np.intp]) -> LazyTensor:
        """Selected rows in the given order, still quantized; other rows are not read."""

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        """The same values in the same order; a quantized tensor must keep its last axis."""


class ModelSource(Protocol):
    """The tensors and the configuration of one checkpoint."""

    @property
    def path(self) -> Path: ...

    @property
    def format(self) -> CheckpointFormat: ...

    @property
    def tensors(self) -> Mapping[str, LazyTensor]: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration: config.json, or the key-values of a GGUF file."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The content of generation_config.json; empty if there is none."""


class WeightSource(Protocol):
    """Gives a model's weights by layer and name, with layer None for weights outside the layers. Values are read when
    requested."""

    def tensor(self, layer: int | None, weight: str) -> LazyTensor: ...


class TensorBase:
    """What all tensors have in common: those in files, random ones, and views of others. A subclass implements `into` and
    `take_rows`, and overrides the other methods if it can do more, such as return the stored blocks."""

    name: str
    shape: tuple[int, ...]
    kind: str
    sources: tuple[LazyTensor, ...] = ()  # the tensors that a view rearranges

    def require_readable(self) -> None:
        for tensor in self.sources:
            tensor.require_readable()

    def into(self, out: Floats) -> None:
        raise NotImplementedError

    def float32(self) -> Floats:
        out = np.empty(self.shape, np.float32)
        self.into(out)
        return out

    def int64(self) -> NDArray[np.int64]:
        raise UnsupportedModel(f"tensor {self.name}: integers can only be read from an unmodified tensor")

    @property
    def stays_packed(self) -> bool:
        return False

    def packed(self) -> NDArray[np.uint8] | None:
        return None

    def factors(self) -> Floats | None:
        return None

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        raise ValueError(f"tensor {self.name}: this view cannot be reshaped")


class RowSelection(TensorBase):
    """Rows of another tensor, which stay quantized: row i is row order[i] of that tensor."""

    def __init__(self, tensor: LazyTensor, order: Order) -> None:
        self.name, self.kind = tensor.name, tensor.kind
        self.shape = (len(order), *tensor.shape[1:])
        self.sources, self._tensor, self._order = (tensor,), tensor, order

    @property
    def stays_packed(self) -> bool:
        return self._tensor.stays_packed

    def packed(self) -> NDArray[np.uint8] | None:
        return self._tensor.take_rows(self._order).packed()

    def factors(self) -> Floats | None:
        factors = self._tensor.factors()
        return None if factors is None else factors.reshape(self._tensor.shape[0], -1)[self._order].reshape(-1)

    def into(self, out: Floats) -> None:
        self._tensor.take_rows(self._order).into(out)

    def take_rows(self, order: Order) -> LazyTensor:
        return RowSelection(self._tensor, self._order[order])

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        return ReshapedRows(self, shape)


class ReshapedRows(TensorBase):
    """The same values in the same order with the first axis split: [experts·rows, columns] as [experts, rows, columns]."""

    def __init__(self, tensor: LazyTensor, shape: tuple[int, ...]) -> None:
        if math.prod(shape) != math.prod(tensor.shape) or tensor.shape[0] % shape[0]:
            raise ValueError(f"tensor {tensor.name} of shape {tensor.shape} cannot be reshaped to {shape}")
        self.name, self.kind, self.shape = tensor.name, tensor.kind, shape
        self.sources, self._tensor, self._inner = (tensor,), tensor, tensor.shape[0] // shape[0]

    @property
    def stays_packed(self) -> bool:
        return self._tensor.stays_packed and self._tensor.shape[-1] == self.shape[-1]

    def packed(self) -> NDArray[np.uint8] | None:
        return self._tensor.packed() if self.stays_packed else None

    def factors(self) -> Floats | None:
        return self._tensor.factors()

    def into(self, out: Floats) -> None:
        if out.flags.c_contiguous:
            self._tensor.into(out.reshape(self._tensor.shape))
        else:  # `out` is not contiguous, and writing to a reshaped copy of it would be lost
            out[...] = self._tensor.float32().reshape(self.shape)

    def take_rows(self, order: Order) -> LazyTensor:
        rows = (np.asarray(order)[:, None] * self._inner + np.arange(self._inner)).reshape(-1)
        return ReshapedRows(RowSelection(self._tensor, rows), (len(order), *self.shape[1:]))


class ColumnSelection(TensorBase):
    """Columns of another tensor: column i is column order[i] of that tensor. A quantized block spans several columns of a row, so
    the values must be dequantized."""

    def __init__(self, tensor: LazyTensor, order: Order) -> None:
        self.name, self.kind = tensor.name, tensor.kind
        self.shape = (*tensor.shape[:-1], len(order))
        self.sources, self.stored, self.order = (tensor,), tensor, order

    def into(self, out: Floats) -> None:
        np.take(self.stored.float32(), self.order, axis=-1, out=out)

    def take_rows(self, order: Order) -> LazyTensor:
        return ColumnSelection(self.stored.take_rows(order), self.order)


class ScaledRows(TensorBase):
    """A stack of matrices, each multiplied by its own factor: [experts, …] times [experts]."""

    def __init__(self, tensor: LazyTensor, factors: Floats) -> None:
        if factors.shape != tensor.shape[:1]:
            raise ValueError(f"tensor {tensor.name} of shape {tensor.shape} has {len(factors)} factors")
        self.name, self.kind, self.shape = tensor.name, tensor.kind, tensor.shape
        self.sources, self._tensor, self._factors = (tensor,), tensor, factors

    @property
    def stays_packed(self) -> bool:
        """Kernels that read NVFP4 blocks apply the factors too; for other types the values must be multiplied here."""
        return self.kind == "NVFP4" and self._tensor.stays_packed

    def packed(self) -> NDArray[np.uint8] | None:
        return self._tensor.packed() if self.stays_packed else None

    def factors(self) -> Floats | None:
        return np.repeat(self._factors.astype(np.float32), math.prod(self.shape[1:-1]))

    def into(self, out: Floats) -> None:
        self._tensor.into(out)
        out *= self._factors.reshape(-1, *(1,) * (out.ndim - 1))

    def take_rows(self, order: Order) -> LazyTensor:
        return ScaledRows(self._tensor.take_rows(order), self._factors[order])

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        """The new first axis must be a multiple of the number of factors, so that all values of an entry have the same factor."""
        if shape[0] % len(self._factors):
            raise ValueError(
                f"tensor {self.name} of shape {self.shape} with {len(self._factors)} factors cannot be reshaped to {shape}"
            )
        return ScaledRows(self._tensor.reshaped(shape), np.repeat(self._factors, shape[0] // len(self._factors)))


class StackedTensors(TensorBase):
    """Tensors of one shape, stacked along a new first axis."""

    def __init__(self, tensors: tuple[LazyTensor, ...]) -> None:
        self.name, self.kind = tensors[0].name, tensors[0].kind
        self.shape = (len(tensors), *tensors[0].shape)
        self.sources = tensors

    @property
    def stays_packed(self) -> bool:
        return all(tensor.stays_packed and tensor.kind == self.kind for tensor in self.sources)

    def packed(self) -> NDArray[np.uint8] | None:
        if not self.stays_packed:
            return None
        return np.concatenate([rows for tensor in self.sources if (rows := tensor.packed()) is not None])

    def factors(self) -> Floats | None:
        found, rows = [tensor.factors() for tensor in self.sources], math.prod(self.shape[1:-1])
        if all(own is None for own in found):
            return None
        return np.concatenate([np.ones(rows, np.float32) if own is None else own for own in found])

    def into(self, out: Floats) -> None:
        for tensor, part in zip(self.sources, out, strict=True):
            tensor.into(part)

    def take_rows(self, order: Order) -> LazyTensor:
        return StackedTensors(tuple(self.sources[index] for index in order))


class StackItem(TensorBase):
    """Matrix `number` of a stack [experts, rows, columns]."""

    def __init__(self, stack: LazyTensor, number: int) -> None:
        self.name, self.kind, self.shape = stack.name, stack.kind, stack.shape[1:]
        self.sources, self._stack, self._number = (stack,), stack, number

    @property
    def stays_packed(self) -> bool:
        return self._stack.stays_packed

    def packed(self) -> NDArray[np.uint8] | None:
        return self._alone().packed()

    def factors(self) -> Floats | None:
        return self._alone().factors()

    def into(self, out: Floats) -> None:
        self._alone().into(out[None])

    def take_rows(self, order: Order) -> LazyTensor:
        raise ValueError(f"tensor {self.name}: rows of one matrix of a stack cannot be selected")

    def _alone(self) -> LazyTensor:
        """A stack that contains only this matrix."""
        return self._stack.take_rows(np.array([self._number], dtype=np.intp))


@dataclass(frozen=True, slots=True)
class ElementwiseOp:
    """A function that replaces every value of an array by its result, in place."""

    name: str
    apply: Callable[[Floats], None]


def _add_one(values: Floats) -> None:
    values += np.float32(1)


def _negative_exponential(values: Floats) -> None:
    values[...] = -np.exp(values.astype(np.float64))  # in float64, so that the result is rounded only once


ADD_ONE = ElementwiseOp("w + 1", _add_one)
NEGATIVE_EXPONENTIAL = ElementwiseOp("-exp(w)", _negative_exponential)


class ElementwiseTensor(TensorBase):
    """A function applied to every value of another tensor."""

    def __init__(self, tensor: LazyTensor, change: ElementwiseOp) -> None:
        self.name, self.kind, self.shape = tensor.name, tensor.kind, tensor.shape
        self.sources, self._tensor, self._change = (tensor,), tensor, change

    def into(self, out: Floats) -> None:
        self._tensor.into(out)
        self._change.apply(out)

    def take_rows(self, order: Order) -> LazyTensor:
        return ElementwiseTensor(self._tensor.take_rows(order), self._change)
