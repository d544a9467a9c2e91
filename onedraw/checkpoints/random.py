"""Weights of a given shape without a checkpoint, for benchmarks and tests.

In: a ModelSpec and a seed. Out: Weights, read like those of any checkpoint. A tensor's values depend on the seed and
its own name alone, so layers may be read in any order, or twice; a large tensor repeats its numbers, so that a model of
many billions is made at the speed of copying. Scales keep activations of order one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onedraw.checkpoints.quants import Floats
from onedraw.checkpoints.random_packed import RandomPacked, mixture_kind
from onedraw.models.source import Dialect, Tensor
from onedraw.models.spec import ModelSpec
from onedraw.models.views import Folded
from onedraw.models.weights import PLAIN, Weights, all_shapes

POOL = 4_194_301  # numbers that are drawn for one tensor; a prime, so that repeats do not line up with rows


@dataclass(frozen=True, slots=True, eq=False)
class RandomTensor:
    name: str
    shape: tuple[int, ...]
    seed: int
    spread: float  # standard deviation
    mean: float = 0.0
    below: bool = False  # no value is above the mean
    order: NDArray[np.intp] | None = None  # of the rows that were taken
    height: int = 0  # how many rows they were taken from
    anywhere: bool = False  # a device may draw numbers of its own instead
    kind: str = "F32"

    def require_readable(self) -> None:
        """Numbers need no unpacking."""

    def float32(self) -> Floats:
        out = np.empty(self.shape, np.float32)
        self.into(out)
        return out

    def int64(self) -> NDArray[np.int64]:
        return self.float32().astype(np.int64)

    @property
    def stays_packed(self) -> bool:
        return False

    def packed(self) -> NDArray[np.uint8] | None:
        return None

    def factors(self) -> None:
        return None

    def into(self, out: Floats) -> None:
        if not out.flags.c_contiguous:  # a reshape would copy
            out[...] = self.float32()
            return
        rows, width = self.height or self.shape[0], math.prod(self.shape[1:])
        if rows * width <= POOL:
            values = _draw(self.seed, self.name, rows * width).reshape(rows, *self.shape[1:])
            out[...] = values if self.order is None else values[self.order]
            self._size(out)
        elif self.order is None:
            pool = _pool(self.seed, self.name).copy()
            self._size(pool)  # once, and not in every repeat
            _repeat(pool, out.reshape(self.shape[0], -1), None)
        else:
            _repeat(_pool(self.seed, self.name), out.reshape(self.shape[0], -1), self.order)
            self._size(out)

    def _size(self, values: Floats) -> None:
        """Bring numbers around zero to this tensor's mean and spread, in place."""
        if self.below:
            np.negative(np.abs(values, out=values), out=values)
        values *= np.float32(self.spread)
        values += np.float32(self.mean)

    def take_rows(self, order: NDArray[np.intp]) -> RandomTensor:
        taken = np.asarray(order) if self.order is None else self.order[order]
        return replace(self, shape=(len(taken), *self.shape[1:]), order=taken, height=self.height or self.shape[0])

    def reshaped(self, shape: tuple[int, ...]) -> Tensor:
        if self.order is not None:
            return Folded(self, shape)
        return replace(self, shape=shape)


def _draw(seed: int, name: str, count: int) -> Floats:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    return generator.standard_normal(count, dtype=np.float32)


@lru_cache(maxsize=2)
def _pool(seed: int, name: str) -> Floats:
    """Numbers of a large tensor, kept for the next rows that are taken of it."""
    return _draw(seed, name, POOL)


def _repeat(pool: Floats, out: Floats, order: NDArray[np.intp] | None) -> None:
    """Value i of the whole tensor is number i of the pool, over and over. Only the asked rows are written."""
    width = out.shape[1]
    if order is None:
        flat = out.reshape(-1)
        for start in range(0, flat.size, POOL):
            flat[start : start + POOL] = pool[: flat.size - start]
        return
    for row, index in zip(out, order.tolist(), strict=True):
        for start in range(0, width, POOL):
            first = (index * width + start) % POOL
            part = row[start : start + POOL]
            head = min(part.size, POOL - first)
            part[:head], part[head:] = pool[first : first + head], pool[: part.size - head]


class RandomCheckpoint:
    """A source whose tensors are made when read: numbers, or the blocks of a quantizer's mixture."""

    dialect: Dialect = "plain"

    def __init__(
        self,
        spec: ModelSpec,
        seed: int = 0,
        *,
        config: dict[str, Any] | None = None,
        name: str = "",
        anywhere: bool = False,
        mixture: str = "",
    ) -> None:
        self.path = Path(name or f"random-{spec.family}")
        self.config: dict[str, Any] = config or {}
        self.generation_config: dict[str, Any] = {}
        self._name = f"{seed} {spec} {mixture}"
        self.tensors: dict[str, Tensor] = {}
        for where, shape in all_shapes(spec).items():
            tensor = replace(random_tensor(PLAIN.stored(where), where[1], shape, tied=spec.tied, seed=seed), anywhere=anywhere)
            kind = mixture_kind(mixture, *where, shape, layers=len(spec.layers), tied=spec.tied) if mixture else "F32"
            packed = RandomPacked(tensor.name, shape, kind, seed, tensor.spread)
            self.tensors[tensor.name] = tensor if kind == "F32" else packed

    def fingerprint(self) -> str:
        return hashlib.sha256(self._name.encode()).hexdigest()[:16]

    def stamp(self) -> str:
        """There are no files."""
        return ""

    def close(self) -> None:
        """Nothing is held."""


# Weights of a size of their own, as (mean, spread).
SIZES = {
    "delta_bias": (-1.0, 0.5),
    "layer_scale": (0.8, 0.1),
    "expert_scale": (1.0, 0.15),
    "router_scale": (1.0, 0.15),
    "conv": (0.0, 0.5),
    "inputs_embed": (0.0, 0.1),
}


def random_tensor(name: str, weight: str, shape: tuple[int, ...], *, tied: bool, seed: int) -> RandomTensor:
    """Norms lie around one and biases around zero; a matrix keeps the size of what it multiplies."""
    if weight in SIZES:
        mean, spread = SIZES[weight]
        return RandomTensor(name, shape, seed, spread=spread, mean=mean)
    if weight == "decay":
        return RandomTensor(name, shape, seed, spread=1.5, mean=-0.05, below=True)
    if weight.endswith("norm"):
        return RandomTensor(name, shape, seed, spread=0.2, mean=1.0)
    if weight.endswith("bias"):
        return RandomTensor(name, shape, seed, spread=0.1)
    if weight == "embed":
        return RandomTensor(name, shape, seed, spread=0.1 if tied else 0.5)
    if weight == "head":
        return RandomTensor(name, shape, seed, spread=2 / math.sqrt(shape[-1]))
    return RandomTensor(name, shape, seed, spread=1 / math.sqrt(shape[-1]))


def random_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    return Weights(RandomCheckpoint(spec, seed), spec, PLAIN)
