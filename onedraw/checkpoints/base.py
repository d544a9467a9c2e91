"""What the checkpoint readers share: the Checkpoint protocol, stored tensors, memory-mapped files and fingerprints.

A StoredTensor is a name, a shape, a type and a view of the mapped file. It gives its values as float32 (integers as int64),
or some of its rows in some order, still quantized. Shapes are row-major: the last axis is the innermost.
Unreadable files raise CorruptFile with the file's path.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onedraw.checkpoints.dequantize import QUANT_TYPES, Bytes, Floats, dequantize_into, unpacker
from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.source import ModelSource, TensorBase

INTEGER_TYPES = {"I32": "<i4", "I64": "<i8"}
SAMPLE_BYTES = 256  # bytes of every tensor that enter the fingerprint


class Checkpoint(ModelSource, Protocol):
    """An open checkpoint: tensors and configuration, with an identity."""

    def fingerprint(self) -> str:
        """A cheap identity of the weights and the configuration, from samples of the content."""

    def stamp(self) -> str:
        """An identity of the files from their names, sizes and modification times; "" without files."""

    def close(self) -> None: ...


# ------------------------------------------------------------------ tensors


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor(TensorBase):
    name: str
    shape: tuple[int, ...]
    kind: str  # storage type, a key of QUANT_TYPES in `dequantize.py`
    data: Bytes  # the stored bytes as a flat, read-only view of the file

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes on disk."""
        return int(self.data.nbytes)

    def require_readable(self) -> None:
        """Raise UnsupportedModel if this type cannot be dequantized here."""
        unpacker(self.kind, self.name)

    def int64(self) -> NDArray[np.int64]:
        """The values of an integer tensor."""
        if self.kind not in INTEGER_TYPES:
            raise UnsupportedModel(f"tensor {self.name}: integers stored as {self.kind} are not supported; supported: I32, I64")
        return self.data.view(INTEGER_TYPES[self.kind]).reshape(self.shape).astype(np.int64)

    def into(self, out: Floats) -> None:
        """Write the values into `out`, which has this tensor's shape."""
        if out.shape != self.shape:
            raise ValueError(f"tensor {self.name} has shape {self.shape}, out has {out.shape}")
        dequantize_into(self.data, self.kind, out, tensor=self.name)

    @property
    def stays_packed(self) -> bool:
        return True

    def packed(self) -> Bytes:
        """The rows as they are stored on disk, [rows, bytes]; nothing is converted."""
        return self.data.reshape(math.prod(self.shape[:-1]), -1)

    def take_rows(self, order: NDArray[np.intp]) -> StoredTensor:
        """A tensor whose row i is row order[i] of this one. A row is a whole number of blocks, so rows are copied without
        dequantizing."""
        if QUANT_TYPES[self.kind].block_values > 1 and len(self.shape) == 1:
            raise ValueError(f"tensor {self.name} is one packed row")
        rows = self.data.reshape(self.shape[0], -1)
        return replace(self, shape=(len(order), *self.shape[1:]), data=rows[order].reshape(-1))

    def reshaped(self, shape: tuple[int, ...]) -> StoredTensor:
        """The same values in the same order. Blocks run along the last axis, so a quantized tensor must keep it."""
        packed = QUANT_TYPES[self.kind].block_values > 1
        if math.prod(shape) != self.count or (packed and shape[-1:] != self.shape[-1:]):
            raise ValueError(f"tensor {self.name} of shape {self.shape} as {self.kind} cannot be reshaped to {shape}")
        return replace(self, shape=shape)


def packed_bytes(shape: tuple[int, ...], kind: str) -> int | None:
    """Bytes of a tensor of this shape and type; None if its rows are not a whole number of blocks."""
    quant = QUANT_TYPES[kind]
    if quant.block_values > 1 and (not shape or shape[-1] % quant.block_values):
        return None
    return math.prod(shape) // quant.block_values * quant.block_bytes


def refuse_overlaps(path: Path, ranges: Iterable[tuple[int, int, str]]) -> None:
    """Raise CorruptFile if two tensors share bytes of a file. `ranges`: (start, stop, name) of every tensor."""
    end, before = 0, ""
    for start, stop, name in sorted(one for one in ranges if one[0] < one[1]):
        if start < end:
            raise CorruptFile(f"{path}: the byte ranges of tensors {before} and {name} overlap")
        end, before = stop, name


# ------------------------------------------------------------------ identity


def fingerprint(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> str:
    """A cheap identity of the weights: the table of tensors, a sample of each, and the configuration.

    It does not protect against forgery: checkpoints that differ only outside the samples have the same fingerprint.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        middle = max(0, (tensor.nbytes - SAMPLE_BYTES) // 2)
        digest.update(f"\n{name} {tensor.kind} {tensor.shape} ".encode())
        digest.update(tensor.data[middle : middle + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:16]


def stamp(files: Iterable[Path]) -> str:
    """An identity of files by name, size and modification time. Cached results are keyed by it in addition to the
    fingerprint, because the fingerprint reads only samples."""
    known = [(file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in sorted(files)]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


# ------------------------------------------------------------------ files


def map_file(path: Path) -> Bytes:
    """The whole file, memory-mapped read-only."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # Opening a named pipe would wait until some process writes to it.
            raise CorruptFile(f"{path}: not a regular file")
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except ValueError:  # mmap refuses an empty file with this error
        raise CorruptFile(f"{path}: the file is empty") from None
    except FileNotFoundError:
        raise CorruptFile(f"{path}: the file is missing") from None
    except OSError as error:
        raise CorruptFile(f"{path}: the file cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: the file cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
