"""Recipes: how a weight is made of what a file holds, where a name alone does not say it.

In: names of stored tensors, with {layer} for the index. Out: recipes for `Rules.made`, which give tensors in our form
and read nothing. What they undo: norms stored as their distance from one, decays stored as logarithms, a convolution
with an axis too many, q and its gate in one matrix, value heads in tiled order, experts fused or one by one.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onedraw.models.source import LazyTensor
from onedraw.models.spec import DeltaSpec
from onedraw.models.tensor_views import (
    ADD_ONE,
    NEGATIVE_EXPONENTIAL,
    ColumnSelection,
    ElementwiseTensor,
    RowSelection,
    StackedTensors,
)
from onedraw.models.weight_names import WeightLookup, WeightTransform

# ------------------------------------------------------------------ one tensor, changed


def add_one(name: str) -> WeightTransform:
    """A norm that is stored as its distance from one."""
    return lambda site: ElementwiseTensor(site.find(name), ADD_ONE)


def negative_exponential(name: str) -> WeightTransform:
    """A decay that is stored as the logarithm of its size."""
    return lambda site: ElementwiseTensor(site.find(name), NEGATIVE_EXPONENTIAL)


def squeezed(name: str) -> WeightTransform:
    """[channels, 1, positions] → [channels, positions]"""
    return lambda site: site.find(name, (site.shape[0], 1, site.shape[1])).reshaped(site.shape)


def of_each_head(name: str, part: Literal[0, 1]) -> WeightTransform:
    """q (0) or its gate (1), which lie side by side in every head of one matrix."""

    def recipe(site: WeightLookup) -> LazyTensor:
        heads, width = site.attention.heads, site.attention.head_dim
        rows = np.arange(2 * heads * width).reshape(heads, 2, width)[:, part].reshape(-1)
        return RowSelection(site.find(name, (2 * heads * width, site.shape[1])), rows)

    return recipe


def as_row(name: str) -> WeightTransform:
    """One row, which a file may hold as a vector."""

    def recipe(site: WeightLookup) -> LazyTensor:
        flat = site.has(name) and len(site.tensors[site.named(name)].shape) == 1
        return site.find(name, site.shape[1:]).reshaped(site.shape) if flat else site.find(name)

    return recipe


def by_mixer(*, attention: WeightTransform, delta: WeightTransform) -> WeightTransform:
    """A weight that has one name under attention and another under Gated DeltaNet."""

    def recipe(site: WeightLookup) -> LazyTensor:
        of_delta = site.layer is not None and isinstance(site.layer.mixer, DeltaSpec)
        return delta(site) if of_delta else attention(site)

    return recipe


# ------------------------------------------------------------------ value heads in tiled order

TiledPart = Literal["heads", "values", "channels"]  # one row per value head, its values, or q and k before its values


def grouped_rows(name: str, part: TiledPart) -> WeightTransform:
    """Rows that a converter laid out by tiles: value heads of all key heads in turn. Ours are grouped by key head."""
    return lambda site: RowSelection(site.find(name), grouped_order(_delta(site), part))


def grouped_columns(name: str) -> WeightTransform:
    return lambda site: ColumnSelection(site.find(name), grouped_order(_delta(site), "values"))


def grouped_order(delta: DeltaSpec, part: TiledPart) -> NDArray[np.intp]:
    """Where each of our rows stands in a tiled tensor."""
    ratio = delta.value_heads // delta.key_heads
    heads = np.arange(delta.value_heads).reshape(ratio, delta.key_heads).T.reshape(-1)
    if part == "heads":
        return heads
    values = (heads[:, None] * delta.value_dim + np.arange(delta.value_dim)).reshape(-1)
    if part == "values":
        return values
    before = 2 * delta.key_heads * delta.key_dim  # q and k stand where they stood
    return np.concatenate([np.arange(before), before + values])


def _delta(site: WeightLookup) -> DeltaSpec:
    if site.layer is None or not isinstance(site.layer.mixer, DeltaSpec):
        raise TypeError("this weight belongs to no delta layer")
    return site.layer.mixer


# ------------------------------------------------------------------ experts


def experts(prefix: str) -> dict[str, WeightTransform]:
    """From a transformers folder: gate and up fused or not, all experts in one tensor or each in its own."""

    def inner(part: Literal["gate", "up"]) -> WeightTransform:
        def recipe(site: WeightLookup) -> LazyTensor:
            if site.has(f"{prefix}gate_up_proj"):
                return half_of_fused(f"{prefix}gate_up_proj", part)(site)
            return together_or_apart(f"{part}_proj")(site)

        return recipe

    def together_or_apart(name: str) -> WeightTransform:
        def recipe(site: WeightLookup) -> LazyTensor:
            if site.has(prefix + name):
                return site.find(prefix + name)
            count, *shape = site.shape
            return StackedTensors(tuple(site.find(f"{prefix}{expert}.{name}.weight", tuple(shape)) for expert in range(count)))

        return recipe

    return {"expert_gate": inner("gate"), "expert_up": inner("up"), "expert_down": together_or_apart("down_proj")}


def gguf_experts() -> dict[str, WeightTransform]:
    """From a GGUF file: gate and up fused or not."""

    def inner(part: Literal["gate", "up"]) -> WeightTransform:
        def recipe(site: WeightLookup) -> LazyTensor:
            fused = "blk.{layer}.ffn_gate_up_exps.weight"
            if site.has(fused):
                return half_of_fused(fused, part)(site)
            return site.find(f"blk.{{layer}}.ffn_{part}_exps.weight")

        return recipe

    return {
        "expert_gate": inner("gate"),
        "expert_up": inner("up"),
        "expert_down": lambda site: site.find("blk.{layer}.ffn_down_exps.weight"),
    }


def half_of_fused(name: str, part: Literal["gate", "up"]) -> WeightTransform:
    """[experts, 2 · width, hidden] → its gates, which come first, or its ups."""

    def recipe(site: WeightLookup) -> LazyTensor:
        count, width, hidden = site.shape
        stored = site.find(name, (count, 2 * width, hidden)).reshaped((count * 2 * width, hidden))
        rows = np.arange(count * 2 * width).reshape(count, 2, width)[:, 0 if part == "gate" else 1].reshape(-1)
        return RowSelection(stored, rows).reshaped(site.shape)

    return recipe


# Names of fused experts may or may not end in .weight.
PLAIN_EXPERT_NAMES = (r"(\.experts\.(gate_up|gate|up|down)_proj)\.weight$", r"\1")
