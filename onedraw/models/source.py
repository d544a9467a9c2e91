"""The protocols that connect models to checkpoint readers: LazyTensor and ModelSource.

The readers are in `onedraw.checkpoints`; `models` imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

# How tensors are named and the model is described: a transformers folder, a GGUF file, or the names of `spec.py` (plain).
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
        """Whether `packed` returns the stored bytes."""

    def packed(self) -> NDArray[np.uint8] | None:
        """All rows as stored, [rows, bytes], with the leading axes flattened; None if the values differ from the stored ones."""

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
        """config.json, or the key-values of a GGUF file."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """generation_config.json; empty if there is none."""


class WeightSource(Protocol):
    """A model's weights by layer and name; layer None for weights outside the layers. Each is read when requested."""

    def tensor(self, layer: int | None, weight: str) -> LazyTensor: ...
