"""A ModelSource made of numpy arrays, without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onedraw.checkpoints.base import StoredTensor
from onedraw.models.source import CheckpointFormat


@dataclass
class MemorySource:
    config: Mapping[str, Any] = field(default_factory=dict)
    format: CheckpointFormat = "safetensors"
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    path: Path = Path("made")

    def add(self, name: str, values: np.ndarray) -> None:
        data = np.frombuffer(values.astype(np.float32).tobytes(), np.uint8)
        self.tensors[name] = StoredTensor(name, values.shape, "F32", data)
