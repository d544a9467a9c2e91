"""Packed weights of every kind without a file: random blocks as GGUF has them, and tiny models made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onedraw.checkpoints.quants import KINDS, Bytes
from onedraw.checkpoints.tensor import StoredTensor
from onedraw.models.source import Dialect
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.models.weights import PLAIN, Weights, all_shapes

PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
PLAIN_KINDS = ("F32", "F16", "BF16")


def random_blocks(kind: str, rows: int, width: int, rng: np.random.Generator, size: float = 1.0) -> Bytes:
    """Rows of random codes whose values have about this size: [rows, bytes]."""
    packing = KINDS[kind]
    if packing.values == 1:
        values = (rng.standard_normal((rows, width)) * size).astype(np.float32)
        made = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}[kind]
        return np.ascontiguousarray(made).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * width // packing.values, packing.size), dtype=np.uint8)
    count = len(blocks)

    def put(at: int, typical: float) -> None:
        drawn = typical * rng.uniform(0.5, 1.5, (count, 1))
        blocks[:, at : at + 2] = np.ascontiguousarray(drawn.astype(np.float16)).view(np.uint8)

    match kind:
        case "Q4_0" | "Q5_0" | "Q8_0":
            put(0, size / {"Q4_0": 4.6, "Q5_0": 9.2, "Q8_0": 74}[kind])
        case "Q4_1" | "Q5_1":
            step = size / (4.6 if kind == "Q4_1" else 9.2)
            put(0, step)
            put(2, -step * (7.5 if kind == "Q4_1" else 15.5))
        case "Q4_K" | "Q5_K":  # scales and minima of six bits, 31 on average
            step = size / (4.6 if kind == "Q4_K" else 9.2) / 31
            put(0, step)
            put(2, step * (7.5 if kind == "Q4_K" else 15.5))
        case "Q3_K":
            put(108, size / 100)
        case "Q6_K":  # signed scales of eight bits
            put(208, size / 18.5 / 74)
    return blocks.reshape(rows, -1)


def stored(name: str, shape: tuple[int, ...], kind: str, rng: np.random.Generator, size: float = 1.0) -> StoredTensor:
    rows = int(np.prod(shape[:-1]))
    return StoredTensor(name, shape, kind, random_blocks(kind, rows, shape[-1], rng, size).reshape(-1))


def tiny_spec(*, tied: bool, width: int = 256, qk_norm: bool = False) -> ModelSpec:
    mixer = AttentionSpec(heads=4, kv_heads=2, head_dim=64, rope=RopeSpec(1e4, 64), scale=0.125, qk_norm=qk_norm)
    layer = LayerSpec(mixer=mixer, feed_forward=MlpSpec(width))
    return ModelSpec(family="packed", layers=(layer,) * 2, hidden=256, vocab=300, eps=1e-5, tied=tied, max_context=1024)


class PackedCheckpoint:
    """A source whose matrices are stored as these kinds, one after the other."""

    dialect: Dialect = "plain"

    def __init__(self, spec: ModelSpec, kinds: tuple[str, ...], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.path = Path("packed")
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for number, (where, shape) in enumerate(all_shapes(spec).items()):
            name = PLAIN.stored(where)
            if len(shape) == 1:
                values = (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
                self.tensors[name] = StoredTensor(name, shape, "F32", values.view(np.uint8).reshape(-1))
            else:
                size = {"embed": 0.1 if spec.tied else 0.5, "head": 2 / 16}.get(where[1], shape[-1] ** -0.5)
                self.tensors[name] = stored(name, shape, kinds[number % len(kinds)], rng, size)

    def fingerprint(self) -> str:
        return "packed"

    def close(self) -> None:
        """Nothing is held."""


def packed_weights(spec: ModelSpec, kinds: tuple[str, ...], seed: int = 0) -> Weights:
    return Weights(PackedCheckpoint(spec, kinds, seed), spec, PLAIN)
