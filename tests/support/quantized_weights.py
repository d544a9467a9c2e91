"""Random quantized weights of every type in memory, and tiny models made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onedraw.checkpoints.base import StoredTensor
from onedraw.checkpoints.random_weights import random_blocks
from onedraw.models.source import CheckpointFormat
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.models.weight_names import PLAIN_NAMES, ModelWeights, weight_shapes

QUANTIZED_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FLOAT_KINDS = ("F32", "F16", "BF16")


def random_tensor(name: str, shape: tuple[int, ...], kind: str, rng: np.random.Generator, size: float = 1.0) -> StoredTensor:
    rows = int(np.prod(shape[:-1]))
    return StoredTensor(name, shape, kind, random_blocks(kind, rows, shape[-1], rng, size).reshape(-1))


def tiny_spec(*, tied: bool, width: int = 256, qk_norm: bool = False) -> ModelSpec:
    mixer = AttentionSpec(heads=4, kv_heads=2, head_dim=64, rope=RopeSpec(1e4, 64), scale=0.125, qk_norm=qk_norm)
    layer = LayerSpec(mixer=mixer, feed_forward=MlpSpec(width))
    return ModelSpec(family="packed", layers=(layer,) * 2, hidden=256, vocab=300, eps=1e-5, tied=tied, max_context=1024)


class QuantizedCheckpoint:
    """A source whose matrices have the given types in turn."""

    format: CheckpointFormat = "plain"

    def __init__(self, spec: ModelSpec, kinds: tuple[str, ...], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.path = Path("packed")
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for number, (where, shape) in enumerate(weight_shapes(spec).items()):
            name = PLAIN_NAMES.stored_name(where)
            if len(shape) == 1:
                values = (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
                self.tensors[name] = StoredTensor(name, shape, "F32", values.view(np.uint8).reshape(-1))
            else:
                size = {"embed": 0.1 if spec.tied else 0.5, "head": 2 / 16}.get(where[1], shape[-1] ** -0.5)
                self.tensors[name] = random_tensor(name, shape, kinds[number % len(kinds)], rng, size)

    def fingerprint(self) -> str:
        return "packed"

    def close(self) -> None:
        """No-op: there are no files."""


def quantized_weights(spec: ModelSpec, kinds: tuple[str, ...], seed: int = 0) -> ModelWeights:
    return ModelWeights(QuantizedCheckpoint(spec, kinds, seed), spec, PLAIN_NAMES)
