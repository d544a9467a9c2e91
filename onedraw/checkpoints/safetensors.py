"""Reads a transformers folder with safetensors files, memory-mapped.

In: a folder with config.json and model.safetensors, or with several files and model.safetensors.index.json. Out: a
SafetensorsCheckpoint. A file is the length of the header (8 bytes), a JSON header (name → dtype, shape, byte range), and data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onedraw.checkpoints.base import StoredTensor, fingerprint, map_file, read_json, refuse_overlaps, stamp
from onedraw.checkpoints.dequantize import QUANT_TYPES, Bytes
from onedraw.errors import CorruptFile, ModelNotFound
from onedraw.models.source import CheckpointFormat

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit


class SafetensorsCheckpoint:
    """An open transformers folder. Owner: the code that opened it, which closes it."""

    format: CheckpointFormat = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path}: the folder has weights but no config.json, which describes the model; add it")
        self.config: Mapping[str, Any] = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = read_json(generation) if generation.is_file() else {}
        self.tensors: Mapping[str, StoredTensor] = dict(self._read())

    def fingerprint(self) -> str:
        return fingerprint(self.tensors, self.config)

    def stamp(self) -> str:
        return stamp(file for file in (*self.path.glob("*.safetensors"), self.path / "config.json") if file.is_file())

    def close(self) -> None:
        """Drop the references to the files; each is unmapped with its last view."""
        self.tensors = {}

    def _read(self) -> Iterator[tuple[str, StoredTensor]]:
        if not (self.path / INDEX).is_file():
            yield from _single(self.path)
            return
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) and "/" not in file for file in index.values()):
            raise CorruptFile(f"{self.path / INDEX}: weight_map must map tensor names to file names in the same folder")
        shards: dict[str, dict[str, StoredTensor]] = {}
        for name, file in index.items():
            if file not in shards:
                if not os.path.isfile(self.path / file):  # unlike Path.is_file, false for a name that is too long
                    raise CorruptFile(f"{self.path / file}: the file is missing; tensor {name} should be in it")
                shards[file] = read_file(self.path / file)
            if name not in shards[file]:
                raise CorruptFile(f"{self.path / file}: tensor {name} is missing")
            yield name, shards[file][name]


def _single(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a folder without an index, which must have one file."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        files = [folder / "model.safetensors"]
    if len(files) != 1:
        raise CorruptFile(f"{folder}: {INDEX} is missing, which lists the tensors of the {len(files)} safetensors files")
    yield from read_file(files[0]).items()


def read_file(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one safetensors file, memory-mapped."""
    data = map_file(path)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little") if len(data) >= 8 else 0
    if not 8 < start <= min(len(data), HEADER_LIMIT):
        raise CorruptFile(f"{path}: not a complete safetensors file: the header does not fit in its {len(data)} bytes")
    try:
        header = json.loads(data[8:start].tobytes())
    except (ValueError, RecursionError):
        raise CorruptFile(f"{path}: the header is not JSON") from None
    if not isinstance(header, dict):
        raise CorruptFile(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, data[start:]) for name, entry in header.items()}
    refuse_overlaps(path, ((*map(int, header[name]["data_offsets"]), name) for name in tensors))
    return tensors


def _tensor(path: Path, name: str, entry: Any, data: Bytes) -> StoredTensor:
    try:
        kind, shape, (begin, end) = str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
        begin, end = int(begin), int(end)
    except (TypeError, KeyError, ValueError, OverflowError):
        raise CorruptFile(f"{path}: tensor {name}: the header entry lacks dtype, shape or data_offsets") from None
    if kind not in QUANT_TYPES:
        raise CorruptFile(f"{path}: tensor {name}: unknown dtype {kind}")
    if not 0 <= begin <= end or min(shape, default=0) < 0 or end - begin != math.prod(shape) * QUANT_TYPES[kind].block_bytes:
        raise CorruptFile(f"{path}: tensor {name}: {end - begin} bytes cannot hold {kind} of shape {list(shape)}")
    if end > len(data):
        raise CorruptFile(f"{path}: tensor {name} ends {end - len(data)} bytes beyond the end of the file; the file is truncated")
    return StoredTensor(name=name, shape=shape, kind=kind, data=data[begin:end])
