"""A checkpoint without files: its tensors are in host memory, or random (`random_weights.py`).

In: an open checkpoint, whose tensors are copied, or tensors by name with the configuration of a checkpoint. Out: an
InMemoryCheckpoint. An update of weights reads from it: files may be overwritten or removed meanwhile."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onedraw.checkpoints.base import Checkpoint, StoredTensor, fingerprint
from onedraw.errors import CorruptFile
from onedraw.models.source import CheckpointFormat, LazyTensor


@dataclass(frozen=True, slots=True)
class InMemoryCheckpoint:
    path: Path
    format: CheckpointFormat
    tensors: Mapping[str, LazyTensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""  # fingerprint of the weights: of samples of every tensor, or of all that random weights depend on
    files: str = ""  # identity of the files that the weights were read from; random if weights were sent; "" for random weights

    def fingerprint(self) -> str:
        return self.identity

    def stamp(self) -> str:
        return self.files

    def close(self) -> None:
        """No-op: there are no files."""


def copy_to_memory(checkpoint: Checkpoint) -> InMemoryCheckpoint:
    """Read all tensors of an open checkpoint."""
    tensors = {name: _copied(checkpoint.path, tensor) for name, tensor in checkpoint.tensors.items()}
    return InMemoryCheckpoint(
        path=checkpoint.path,
        format=checkpoint.format,
        tensors=tensors,
        config=checkpoint.config,
        generation_config=checkpoint.generation_config,
        identity=checkpoint.fingerprint(),
        files=checkpoint.stamp(),
    )


def with_tensors(checkpoint: InMemoryCheckpoint, tensors: Mapping[str, StoredTensor]) -> InMemoryCheckpoint:
    """A checkpoint with the same configuration and other tensors. Its identity of files is random, so no later start of the
    server finds snapshots of its state."""
    return replace(checkpoint, tensors=tensors, identity=fingerprint(tensors, checkpoint.config), files=secrets.token_hex(8))


def described(checkpoint: Checkpoint) -> InMemoryCheckpoint:
    """The configuration of a checkpoint, without its tensors."""
    return InMemoryCheckpoint(
        checkpoint.path, checkpoint.format, {}, checkpoint.config, checkpoint.generation_config, checkpoint.fingerprint()
    )


def _copied(path: Path, tensor: LazyTensor) -> StoredTensor:
    if not isinstance(tensor, StoredTensor):
        raise CorruptFile(f"{path}: tensor {tensor.name} is not stored in a file")
    return replace(tensor, data=np.array(tensor.data))
