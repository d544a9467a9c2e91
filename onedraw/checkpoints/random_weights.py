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

from onedraw.checkpoints.base import StoredTensor
from onedraw.checkpoints.dequantize import QUANT_TYPES, Bytes, Floats
from onedraw.errors import UnsupportedModel
from onedraw.models.source import CheckpointFormat, LazyTensor
from onedraw.models.spec import ModelSpec
from onedraw.models.tensor_views import ReshapedRows
from onedraw.models.weight_names import PLAIN_NAMES, ModelWeights, weight_shapes

# -------------------- Random blocks of the packed kinds: weights without a file, as GGUF has them.


def random_blocks(kind: str, rows: int, width: int, rng: np.random.Generator, size: float = 1.0) -> Bytes:
    """Rows of random codes whose values have about this size: [rows, bytes]."""
    packing = QUANT_TYPES[kind]
    if packing.block_values == 1:
        values = (rng.standard_normal((rows, width)) * size).astype(np.float32)
        made = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}[kind]
        return np.ascontiguousarray(made).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * width // packing.block_values, packing.block_bytes), dtype=np.uint8)
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
        case "NVFP4":  # scales that are tiny floats, the nearest above what is wanted
            sizes = np.array(
                [np.ldexp(code & 7, -9) if code < 8 else np.ldexp(8 + (code & 7), (code >> 3) - 10) for code in range(127)]
            )
            blocks[:, :4] = np.minimum(np.searchsorted(sizes, size / 3 * rng.uniform(0.5, 1.5, (count, 4))), 126)
        case "MXFP4":  # an exponent with a bias of 127; codes up to six, three on average
            blocks[:, 0] = 127 + round(np.log2(size / 3)) + rng.integers(-1, 2, count)
    return blocks.reshape(rows, -1)


# -------------------- Packed weights of a given shape without a file: tensors of random blocks, and which kind l


PURE = {f"{kind.lower()}": kind for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")}
MIXTURES = ("q4_k_m", *PURE)
NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that are no whole number of 256
NEVER = ("conv", "router", "shared_route")  # small, and kept as numbers


def mixture_kind(mixture: str, layer: int | None, weight: str, shape: tuple[int, ...], *, layers: int, tied: bool) -> str:
    """The kind that a quantizer gives a weight of a model of so many layers."""
    if len(shape) < 2 or weight in NEVER or shape[-1] % 32:
        return "F32"
    kind = PURE.get(mixture) or _q4_k_m(layer, weight, layers=layers, tied=tied)
    return NARROWER.get(kind, kind) if shape[-1] % QUANT_TYPES[kind].block_values else kind


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
class RandomQuantTensor:
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
        packing = QUANT_TYPES[self.kind]
        rows, blocks = math.prod(self.shape[:-1]), self.shape[-1] // packing.block_values
        first = int.from_bytes(hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()[:2], "little")
        pool = _block_pool(self.kind, self.spread, 1 << (first + rows + blocks).bit_length())
        return np.lib.stride_tricks.as_strided(
            pool[first:], (rows, blocks * packing.block_bytes), (packing.block_bytes, 1), writeable=False
        )

    def factors(self) -> None:
        return None

    def float32(self) -> Floats:
        return self._stored().float32()

    def into(self, out: Floats) -> None:
        self._stored().into(out)

    def int64(self) -> NDArray[np.int64]:
        raise UnsupportedModel(f"tensor {self.name}: random blocks are no whole numbers")

    def take_rows(self, order: NDArray[np.intp]) -> LazyTensor:
        rows = self.packed().reshape(self.shape[0], -1) if len(self.shape) > 2 else self.packed()
        return StoredTensor(self.name, (len(order), *self.shape[1:]), self.kind, rows[order].reshape(-1))

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        return RandomQuantTensor(self.name, shape, self.kind, self.seed, self.spread)

    def _stored(self) -> StoredTensor:
        return StoredTensor(self.name, self.shape, self.kind, np.ascontiguousarray(self.packed()).reshape(-1))


@lru_cache(maxsize=32)  # a model of 27 billion has thirty
def _block_pool(kind: str, spread: float, count: int) -> Bytes:
    """So many blocks, one below the other."""
    return random_blocks(kind, count, QUANT_TYPES[kind].block_values, np.random.default_rng(7), spread)


# -------------------- Weights of a given shape without a checkpoint, for benchmarks and tests.


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

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        if self.order is not None:
            return ReshapedRows(self, shape)
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

    format: CheckpointFormat = "plain"

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
        self.tensors: dict[str, LazyTensor] = {}
        for where, shape in weight_shapes(spec).items():
            tensor = replace(
                random_tensor(PLAIN_NAMES.stored_name(where), where[1], shape, tied=spec.tied, seed=seed), anywhere=anywhere
            )
            kind = mixture_kind(mixture, *where, shape, layers=len(spec.layers), tied=spec.tied) if mixture else "F32"
            packed = RandomQuantTensor(tensor.name, shape, kind, seed, tensor.spread)
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


def random_weights(spec: ModelSpec, seed: int = 0) -> ModelWeights:
    return ModelWeights(RandomCheckpoint(spec, seed), spec, PLAIN_NAMES)
