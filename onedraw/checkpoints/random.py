"""Weights of a given shape without a checkpoint, for benchmarks and tests.

In: a ModelSpec and a seed. Out: Weights, read like those of any checkpoint. A tensor's values depend on the seed and
its own name alone, so layers may be read in any order, or twice. Scales keep activations of order one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onedraw.checkpoints.quants import Floats
from onedraw.models.source import Dialect
from onedraw.models.spec import ModelSpec
from onedraw.models.weights import PLAIN, Weights, all_shapes


@dataclass(frozen=True, slots=True, eq=False)
class RandomTensor:
    name: str
    shape: tuple[int, ...]
    seed: int
    spread: float  # standard deviation
    mean: float = 0.0
    order: NDArray[np.intp] | None = None
    kind: str = "F32"

    def require_readable(self) -> None:
        """Numbers need no unpacking."""

    def float32(self) -> Floats:
        out = np.empty(self.shape, np.float32)
        self.into(out)
        return out

    def int64(self) -> NDArray[np.int64]:
        return self.float32().astype(np.int64)

    def into(self, out: Floats) -> None:
        digest = hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
        generator.standard_normal(dtype=np.float32, out=out)
        out *= np.float32(self.spread)
        out += np.float32(self.mean)
        if self.order is not None:
            out[...] = out[self.order]

    def take_rows(self, order: NDArray[np.intp]) -> RandomTensor:
        return replace(self, order=order if self.order is None else self.order[order])


class RandomCheckpoint:
    """A source whose tensors are made when read."""

    dialect: Dialect = "plain"

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        self.path = Path(f"random-{spec.family}")
        self.config: dict[str, Any] = {}
        self.generation_config: dict[str, Any] = {}
        self._name = f"{seed} {spec}"
        self.tensors = {
            name: _tensor(name, where[1], shape, spec=spec, seed=seed)
            for where, shape in all_shapes(spec).items()
            for name in (PLAIN.stored(where),)
        }

    def fingerprint(self) -> str:
        return hashlib.sha256(self._name.encode()).hexdigest()[:16]

    def close(self) -> None:
        """Nothing is held."""


def _tensor(name: str, weight: str, shape: tuple[int, ...], *, spec: ModelSpec, seed: int) -> RandomTensor:
    """Norms lie around one and biases around zero; a matrix keeps the size of what it multiplies."""
    if weight.endswith("norm"):
        return RandomTensor(name, shape, seed, spread=0.2, mean=1.0)
    if weight.endswith("bias"):
        return RandomTensor(name, shape, seed, spread=0.1)
    if weight == "embed":
        return RandomTensor(name, shape, seed, spread=0.1 if spec.tied else 0.5)
    if weight == "head":
        return RandomTensor(name, shape, seed, spread=2 / math.sqrt(shape[-1]))
    return RandomTensor(name, shape, seed, spread=1 / math.sqrt(shape[-1]))


def random_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    return Weights(RandomCheckpoint(spec, seed), spec, PLAIN)
