"""Reads GGUF files, memory-mapped: metadata and tensors.

In: a .gguf file, or any part of a split one. Out: a GgufCheckpoint. A file is a header (metadata, then a table of tensors) and
aligned data. Files list the innermost dimension first; shapes here are row-major. Versions 2 and 3, little-endian.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onedraw.checkpoints.base import StoredTensor, fingerprint, map_file, packed_bytes, refuse_overlaps, stamp
from onedraw.checkpoints.dequantize import QUANT_TYPE_BY_GGML_TYPE, Bytes
from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.source import CheckpointFormat, LazyTensor, ScaledRows

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
MAX_DIMENSIONS = 8


class GgufCheckpoint:
    """An open GGUF model. Owner: the code that opened it, which closes it."""

    format: CheckpointFormat = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = [read_file(part) for part in _parts(path)]
        self.metadata: Mapping[str, Any] = parts[0].metadata
        tensors: dict[str, StoredTensor] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in tensors:
                    raise CorruptFile(f"{part.path}: tensor {name} occurs twice")
                tensors[name] = tensor
        expected = self.metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise CorruptFile(f"{path}: its parts contain {len(tensors)} tensors, split.tensors.count is {expected}")
        self._stored = tensors
        self.tensors: Mapping[str, LazyTensor] = with_factors(path, tensors, str(self.metadata.get("general.architecture", "")))

    @property
    def config(self) -> Mapping[str, Any]:
        return self.metadata

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return {}

    def fingerprint(self) -> str:
        scalars = {key: value for key, value in self.metadata.items() if not isinstance(value, list)}
        return fingerprint(self._stored, scalars)

    def stamp(self) -> str:
        return stamp(_parts(self.path))

    def close(self) -> None:
        """Drop the references to the files; each is unmapped with its last view."""
        self.tensors, self._stored = {}, {}


# ------------------------------------------------------------------ NVFP4 factors

FACTOR, INPUT_FACTOR = (".scale", ".weight.scale"), (".input_scale", ".weight.input_scale")  # suffixes of tensor names


def with_factors(path: Path, tensors: Mapping[str, StoredTensor], arch: str) -> dict[str, LazyTensor]:
    """Combine each NVFP4 matrix with its float32 factor (one per matrix or per expert), which is stored in a separate tensor.

    Factors of the inputs are dropped: they serve kernels with 4-bit activations, which do not exist here."""
    found: dict[str, LazyTensor] = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.kind != "NVFP4":
            continue
        stem = name.removesuffix(".weight")
        if arch == "gemma4" and stem.endswith("ffn_down_exps"):  # the router's scale has the same name
            raise UnsupportedModel(
                f"{path}: tensor {name}: NVFP4 experts of Gemma 4 are not supported, because their factors have the same name as "
                f"the router's scale; use a file of another quantization, such as Q4_K_M or MXFP4"
            )
        for ending in INPUT_FACTOR:
            found.pop(stem + ending, None)
        factor = next((own for ending in FACTOR if (own := found.pop(stem + ending, None)) is not None), None)
        if factor is not None:
            values = factor.float32().reshape(-1)
            if len(values) not in (1, tensor.shape[0]):
                raise CorruptFile(f"{path}: tensor {factor.name} has {len(values)} factors, {name} has {tensor.shape[0]} rows")
            found[name] = ScaledRows(tensor, np.broadcast_to(values, tensor.shape[:1]))
    return found


# ------------------------------------------------------------------ split files


class SplitName(NamedTuple):
    """The name of one part of a split model: stem-00002-of-00005.gguf."""

    stem: str
    number: int  # which part of the model this file is, counted from 1
    total: int


def split_name(path: Path) -> SplitName | None:
    found = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    return SplitName(found[1], int(found[2]), int(found[3])) if found else None


def _parts(path: Path) -> Iterator[Path]:
    """All files of the model that `path` is a part of, in order."""
    name = split_name(path)
    if name is None:
        yield path
        return
    if not 1 <= name.number <= name.total:
        raise CorruptFile(f"{path}: the file name says part {name.number} of {name.total}, which is impossible")
    for number in range(1, name.total + 1):
        part = path.with_name(f"{name.stem}-{number:05}-of-{name.total:05}.gguf")
        if not part.is_file():
            raise CorruptFile(f"{part}: the file is missing; it is part {number} of {name.total} of this model")
        yield part


# ------------------------------------------------------------------ one file


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_file(path: Path) -> GgufFile:
    data = map_file(path)
    cursor = _Cursor(path, data)
    if data[:4].tobytes() != MAGIC:
        raise CorruptFile(f"{path}: not a GGUF file: it does not begin with GGUF")
    cursor.position = 4
    version = cursor.integer("<I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        wrong = "big-endian" if swapped else f"version {version}"
        raise UnsupportedModel(f"{path}: GGUF {wrong} is not supported; versions 2 and 3, little-endian, are")
    tensor_count, key_count = cursor.integer("<Q"), cursor.integer("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        cursor.doing = f"key {key}"
        if key in metadata:
            raise CorruptFile(f"{path}: key {key} occurs twice")
        metadata[key] = cursor.value(cursor.integer("<I"))
    _refuse_lone_part(path, metadata)
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CorruptFile(f"{path}: general.alignment must be a positive whole number, not {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {entry.name: _tensor(path, entry, data[start:], alignment) for entry in entries}
    if len(tensors) != len(entries):
        raise CorruptFile(f"{path}: a tensor name occurs twice")
    refuse_overlaps(path, ((entry.offset, entry.offset + tensors[entry.name].nbytes, entry.name) for entry in entries))
    return GgufFile(path, metadata, tensors)


def _refuse_lone_part(path: Path, metadata: Mapping[str, Any]) -> None:
    count = metadata.get("split.count", 1)
    name = split_name(path)
    if isinstance(count, int) and count > 1 and (name is None or name.total != count):
        raise CorruptFile(f"{path}: one of {count} parts of a model; rename it to the form stem-00001-of-{count:05}.gguf")


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]  # in row-major order, unlike in the file
    code: int
    offset: int


def _entry(cursor: _Cursor) -> _Entry:
    cursor.doing = "the table of tensors"
    name = cursor.text()
    cursor.doing = f"tensor {name}"
    dimensions = cursor.integer("<I")
    if dimensions > MAX_DIMENSIONS:
        raise CorruptFile(f"{cursor.path}: tensor {name} has {dimensions} dimensions, the maximum is {MAX_DIMENSIONS}")
    shape = tuple(cursor.integer("<Q") for _ in range(dimensions))[::-1]
    return _Entry(name, shape, cursor.integer("<I"), cursor.integer("<Q"))


def _tensor(path: Path, entry: _Entry, data: Bytes, alignment: int) -> StoredTensor:
    kind = QUANT_TYPE_BY_GGML_TYPE.get(entry.code)
    if kind is None:
        raise UnsupportedModel(f"{path}: tensor {entry.name}: GGML type {entry.code} is not known")
    size = packed_bytes(entry.shape, kind.name)
    if size is None:
        raise CorruptFile(
            f"{path}: tensor {entry.name}: rows of shape {list(entry.shape)} are not a whole number of {kind.name} blocks"
        )
    if entry.offset % alignment:
        raise CorruptFile(f"{path}: tensor {entry.name}: the offset {entry.offset} is not a multiple of {alignment}")
    end = entry.offset + size
    if end > len(data):
        raise CorruptFile(
            f"{path}: tensor {entry.name} ends {end - len(data)} bytes beyond the end of the file; the file is truncated"
        )
    return StoredTensor(name=entry.name, shape=entry.shape, kind=kind.name, data=data[entry.offset : end])


class _Cursor:
    """Reads a header sequentially. `doing` is the part being read, for errors."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path = path
        self.doing = "the header"
        self.position = 0
        self._data = data
        self._view = memoryview(data)  # type: ignore[arg-type]
        self._size = len(data)

    def _take(self, size: int) -> int:
        """Skip `size` bytes and return where they start."""
        start = self.position
        if size > self._size - start:
            raise CorruptFile(f"{self.path}: the file ends within {self.doing}; it is truncated or not a GGUF file")
        self.position = start + size
        return start

    def integer(self, form: str) -> int:
        return int(struct.unpack_from(form, self._view, self._take(struct.calcsize(form)))[0])

    def text(self) -> str:
        size = self.integer("<Q")
        start = self._take(size)
        return _decode(self._view[start : start + size])

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.integer("<I"), self.integer("<Q")
            if inner == STRING:
                return self._texts(count)
            if inner == ARRAY:
                raise CorruptFile(f"{self.path}: {self.doing} is an array of arrays, which is not supported")
            return self._numbers(inner, count)
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise CorruptFile(f"{self.path}: {self.doing} has the unknown type {kind}")
        form = np.dtype(SCALARS[kind])
        start = self._take(count * form.itemsize)
        return self._data[start : self.position].view(form).tolist()  # type: ignore[no-any-return]

    def _texts(self, count: int) -> list[str]:
        """A list of strings in one tight loop: vocabularies have a quarter of a million entries."""
        view, position, size = self._view, self.position, self._size
        length_at, decode = struct.Struct("<Q").unpack_from, _decode
        texts: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(view, position)[0]
                if position > size:
                    break
                texts.append(decode(view[start:position]))
        except struct.error:
            pass
        if len(texts) != count:
            self._take(self._size + 1)  # more bytes than the file has, so this raises CorruptFile
        self.position = position
        return texts


def _decode(data: memoryview) -> str:
    return str(data, "utf-8", "surrogateescape")  # this error handler keeps different invalid bytes different
