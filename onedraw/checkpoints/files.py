"""What the readers share: mapped files, JSON files, and a cheap name for the weights.

In: paths and open tensors. Out: bytes, objects, a fingerprint. Trouble is CorruptFile, with the name of the file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onedraw.checkpoints.quants import Bytes
from onedraw.checkpoints.tensor import StoredTensor
from onedraw.errors import CorruptFile

SAMPLE_BYTES = 256  # of every tensor, for the fingerprint


def fingerprint(tensors: Mapping[str, StoredTensor], description: Mapping[str, Any]) -> str:
    """A cheap name for the weights: the table of tensors, a sample of each, and the description.

    Not a proof against forgery: two checkpoints that differ in a few bytes outside the samples share it.
    """
    digest = hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        middle = max(0, (tensor.nbytes - SAMPLE_BYTES) // 2)
        digest.update(f"\n{name} {tensor.kind} {tensor.shape} ".encode())
        digest.update(tensor.data[middle : middle + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:16]


def stamp(files: Iterable[Path]) -> str:
    """What tells files from others at their place without reading them: name, size and when each was written. What was computed
    with weights is kept under it, beside their fingerprint, since that looks at samples alone."""
    known = [(file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in sorted(files)]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


def refuse_overlaps(path: Path, places: Iterable[tuple[int, int, str]]) -> None:
    """Places of tensors in a file: where each begins, where it ends, its name. No byte belongs to two."""
    end, before = 0, ""
    for begin, stop, name in sorted(place for place in places if place[0] < place[1]):
        if begin < end:
            raise CorruptFile(f"{path}: tensors {before} and {name} lie on the same bytes")
        end, before = stop, name


def map_file(path: Path) -> Bytes:
    """The whole file as read-only bytes that the system pages in when touched."""
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except ValueError:  # what mmap says of an empty file
        raise CorruptFile(f"{path}: the file is empty") from None
    except FileNotFoundError:
        raise CorruptFile(f"{path}: the file is missing") from None
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CorruptFile, with the file's name, when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
