"""Packed weights of a given shape without a file: tensors of random blocks, and which kind llama.cpp's mixtures give to which.

In: a mixture's name. Out: a kind per weight, and tensors that are read like those of a GGUF file. Rows are windows into one pool
of blocks, each a block further than the row before, so that a model of many billions takes the memory of one tensor.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from onedraw.checkpoints.quants import KINDS, Bytes, Floats
from onedraw.checkpoints.random_blocks import random_blocks
from onedraw.checkpoints.tensor import StoredTensor
from onedraw.errors import UnsupportedModel
from onedraw.models.source import Tensor

PURE = {f"{kind.lower()}": kind for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")}
MIXTURES = ("q4_k_m", *PURE)
NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that are no whole number of 256
NEVER = ("conv", "router", "shared_route")  # small, and kept as numbers


def mixture_kind(mixture: str, layer: int | None, weight: str, shape: tuple[int, ...], *, layers: int, tied: bool) -> str:
    """The kind that a quantizer gives a weight of a model of so many layers."""
    if len(shape) < 2 or weight in NEVER or shape[-1] % 32:
        return "F32"
    kind = PURE.get(mixture) or _q4_k_m(layer, weight, layers=layers, tied=tied)
    return NARROWER.get(kind, kind) if shape[-1] % KINDS[kind].values else kind


def _q4_k_m(layer: int | None, weight: str, *, layers: int, tied: bool) -> str:
    """Four bits, and more where it was found to matter: the head, values and down projections of every third layer and of the
    first and last eighth, and projections that are stored as one."""
    if weight == "head" or (weight == "embed" and tied):
        return "Q6_K"
    if weight == "delta_qkv":
        return "Q5_K"
    eighth = layers // 8
    better = layer is not None and (layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2)
    return "Q6_K" if better and weight in ("v", "down", "expert_down", "shared_down") else "Q4_K"


@dataclass(frozen=True, slots=True, eq=False)
class RandomPacked:
    name: str
    shape: tuple[int, ...]
    kind: str
    seed: int
    spread: float

    @property
    def stays_packed(self) -> bool:
        return True

    def require_readable(self) -> None:
        """Our own kinds only."""

    def packed(self) -> Bytes:
        """Windows into the pool, [rows, bytes]; nothing is copied."""
        packing = KINDS[self.kind]
        rows, blocks = math.prod(self.shape[:-1]), self.shape[-1] // packing.values
        first = int.from_bytes(hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()[:2], "little")
        pool = _pool(self.kind, self.spread, 1 << (first + rows + blocks).bit_length())
        return np.lib.stride_tricks.as_strided(pool[first:], (rows, blocks * packing.size), (packing.size, 1), writeable=False)

    def factors(self) -> None:
        return None

    def float32(self) -> Floats:
        return self._stored().float32()

    def into(self, out: Floats) -> None:
        self._stored().into(out)

    def int64(self) -> NDArray[np.int64]:
        raise UnsupportedModel(f"tensor {self.name}: random blocks are no whole numbers")

    def take_rows(self, order: NDArray[np.intp]) -> Tensor:
        rows = self.packed().reshape(self.shape[0], -1) if len(self.shape) > 2 else self.packed()
        return StoredTensor(self.name, (len(order), *self.shape[1:]), self.kind, rows[order].reshape(-1))

    def reshaped(self, shape: tuple[int, ...]) -> Tensor:
        return RandomPacked(self.name, shape, self.kind, self.seed, self.spread)

    def _stored(self) -> StoredTensor:
        return StoredTensor(self.name, self.shape, self.kind, np.ascontiguousarray(self.packed()).reshape(-1))


@lru_cache(maxsize=32)  # a model of 27 billion has thirty
def _pool(kind: str, spread: float, count: int) -> Bytes:
    """So many blocks, one below the other."""
    return random_blocks(kind, count, KINDS[kind].values, np.random.default_rng(7), spread)
