"""One tensor of a checkpoint, as it lies on disk.

In: a name, a shape, a kind and a view of the mapped file. Out: its values as float32 (whole numbers as int64), or some
of its rows in some order, still packed. Shapes are row-major: the last axis is the innermost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onedraw.checkpoints.quants import KINDS, Bytes, Floats, dequantize_into, unpacker
from onedraw.errors import UnsupportedModel

WHOLE = {"I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    kind: str  # a name in quants.KINDS
    data: Bytes  # flat, read-only

    @property
    def count(self) -> int:
        """How many values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes on disk."""
        return int(self.data.nbytes)

    def require_readable(self) -> None:
        """Raise UnsupportedModel if this kind cannot be unpacked here."""
        unpacker(self.kind, self.name)

    def float32(self) -> Floats:
        out = np.empty(self.shape, np.float32)
        self.into(out)
        return out

    def int64(self) -> NDArray[np.int64]:
        """The values of a tensor of whole numbers."""
        if self.kind not in WHOLE:
            raise UnsupportedModel(f"tensor {self.name}: whole numbers as {self.kind} are not supported; supported: I32, I64")
        return self.data.view(WHOLE[self.kind]).reshape(self.shape).astype(np.int64)

    def into(self, out: Floats) -> None:
        """Write the values into `out`, which has this tensor's shape."""
        if out.shape != self.shape:
            raise ValueError(f"tensor {self.name} has shape {self.shape}, out has {out.shape}")
        dequantize_into(self.data, self.kind, out, tensor=self.name)

    @property
    def stays_packed(self) -> bool:
        return True

    def packed(self) -> Bytes:
        """All rows as they lie on disk, [rows, bytes]."""
        return self.data.reshape(math.prod(self.shape[:-1]), -1)

    def factors(self) -> None:
        """Those of NVFP4 stand in a tensor of their own: `gguf.py` brings them together."""
        return

    def take_rows(self, order: NDArray[np.intp]) -> StoredTensor:
        """Row i is row order[i] of this tensor. Rows are whole runs of blocks, so nothing is unpacked or read besides."""
        if KINDS[self.kind].values > 1 and len(self.shape) == 1:
            raise ValueError(f"tensor {self.name} is one packed row")
        rows = self.data.reshape(self.shape[0], -1)
        return replace(self, shape=(len(order), *self.shape[1:]), data=rows[order].reshape(-1))

    def reshaped(self, shape: tuple[int, ...]) -> StoredTensor:
        """The same values in the same order. Blocks run along the last axis, so a packed tensor keeps it."""
        packed = KINDS[self.kind].values > 1
        if math.prod(shape) != self.count or (packed and shape[-1:] != self.shape[-1:]):
            raise ValueError(f"tensor {self.name} of shape {self.shape} as {self.kind} has no shape {shape}")
        return replace(self, shape=shape)


def packed_bytes(shape: tuple[int, ...], kind: str) -> int | None:
    """Bytes of a tensor of this shape and kind; None where its rows are no whole number of blocks."""
    packing = KINDS[kind]
    if packing.values > 1 and (not shape or shape[-1] % packing.values):
        return None
    return math.prod(shape) // packing.values * packing.size
