"""What a model reads from: the least that every kind of checkpoint offers. Protocols only.

The readers live in `checkpoints`; this package names what it needs of them and imports none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

# How a checkpoint names its tensors and describes its model: a transformers folder, a GGUF file, or our own names.
CheckpointFormat = Literal["safetensors", "gguf", "plain"]


class LazyTensor(Protocol):
    """A named tensor, not read yet. The shape is row-major."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str: ...

    def require_readable(self) -> None:
        """Raise UnsupportedModel if its kind cannot be turned into numbers here."""

    def float32(self) -> NDArray[np.float32]: ...

    def int64(self) -> NDArray[np.int64]:
        """The values of a tensor of whole numbers; UnsupportedModel for any other kind."""

    def into(self, out: NDArray[np.float32]) -> None: ...

    @property
    def stays_packed(self) -> bool:
        """Whether `packed` gives bytes."""

    def packed(self) -> NDArray[np.uint8] | None:
        """All rows as they are stored, [rows, bytes], the leading axes as one; None where values change on the way."""

    def factors(self) -> NDArray[np.float32] | None:
        """What each of those rows is multiplied with besides, [rows]; None for 1. NVFP4 alone has factors."""

    def take_rows(self, order: NDArray[np.intp]) -> LazyTensor:
        """Some rows in some order, still packed; the others are not read."""

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        """The same values in the same order; a packed tensor keeps its last axis."""


class ModelSource(Protocol):
    """Named tensors and the description that came with them."""

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
        """generation_config.json; empty where there is none."""


class WeightSource(Protocol):
    """A model's weights by layer and name; layer None for weights outside the layers. Each is read when requested."""

    def tensor(self, layer: int | None, weight: str) -> LazyTensor: ...
