"""A DFlash drafter of a known shape without a file: `random:qwen3.6-27b-dflash`, for benchmarks and memory plans.

In: a drafter's published config, perhaps a mixture of packed kinds. Out: a checkpoint that describes itself as such
a drafter does and whose weights are made when they are read. What it guesses is never right; it costs what a
trained one costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onedraw.checkpoints.random import random_tensor
from onedraw.checkpoints.random_packed import RandomPacked, mixture_kind
from onedraw.models.dflash import RULES, outer_shapes
from onedraw.models.dflash_layouts import layout_of, read_description
from onedraw.models.source import Dialect, Tensor
from onedraw.models.weights import Shape, Where


@dataclass(frozen=True, slots=True)
class RandomDrafter:
    config: Mapping[str, Any]
    path: Path
    mixture: str = ""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    dialect: Dialect = "safetensors"
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.config} {self.mixture}".encode()).hexdigest()[:16]

    def stamp(self) -> str:
        """There are no files."""
        return ""

    def close(self) -> None:
        """Nothing is held."""


def make_drafter(config: Mapping[str, Any], name: str, *, mixture: str = "", seed: int = 0) -> RandomDrafter:
    bare = RandomDrafter(config, Path(name), mixture)
    layout = layout_of(bare)
    spec = read_description(bare, layout)
    shapes: dict[Where, Shape] = {(None, weight): shape for weight, shape in outer_shapes(spec).items()}
    for index, layer in enumerate(spec.layers):
        shapes |= {(index, weight): shape for weight, shape in layer.shapes(spec.hidden).items()}
    tensors: dict[str, Tensor] = {}
    for where, shape in shapes.items():
        made = random_tensor(RULES[layout].stored(where), where[1], shape, tied=False, seed=seed)
        kind = mixture_kind(mixture, *where, shape, layers=len(spec.layers), tied=False) if mixture else "F32"
        packed = RandomPacked(made.name, shape, kind, seed, made.spread)
        tensors[made.name] = replace(made, anywhere=True) if kind == "F32" else packed
    return replace(bare, tensors=tensors)
