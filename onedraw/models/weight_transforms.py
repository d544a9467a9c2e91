"""Transforms that build a weight from stored tensors where a checkpoint stores it in another form.

In: names of stored tensors, with {layer} for the layer index. Out: transforms for `WeightNames.transforms`; they return lazy
tensors and read nothing. They handle norms stored as weight - 1, decays stored as logarithms, convolutions with an extra axis,
q and its gate in one matrix, value heads in tiled order, and experts stored fused or one by one.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onedraw.models.source import (
    ADD_ONE,
    NEGATIVE_EXPONENTIAL,
    ColumnSelection,
    ElementwiseTensor,
    LazyTensor,
    RowSelection,
    StackedTensors,
)
from onedraw.models.spec import DeltaSpec
from onedraw.models.weight_names import WeightLookup, WeightTransform, as_stored

# ------------------------------------------------------------------ one tensor


def add_one(name: str) -> WeightTransform:
    """A transform for a norm stored as weight - 1."""
    return lambda lookup: ElementwiseTensor(lookup.find(name), ADD_ONE)


def negative_exponential(name: str) -> WeightTransform:
    """A transform for a negative decay stored as the logarithm of its magnitude."""
    return lambda lookup: ElementwiseTensor(lookup.find(name), NEGATIVE_EXPONENTIAL)


def squeeze_conv(name: str) -> WeightTransform:
    """A transform that removes the axis of length 1 of a convolution stored as [channels, 1, positions]."""
    return lambda lookup: lookup.find(name, (lookup.shape[0], 1, lookup.shape[1])).reshaped(lookup.shape)


def half_of_each_head(name: str, part: Literal[0, 1]) -> WeightTransform:
    """A transform for q (part 0) or its gate (part 1) of a matrix that stores both, alternating by head."""

    def transform(lookup: WeightLookup) -> LazyTensor:
        heads, width = lookup.attention.heads, lookup.attention.head_dim
        rows = np.arange(2 * heads * width).reshape(heads, 2, width)[:, part].reshape(-1)
        return RowSelection(lookup.find(name, (2 * heads * width, lookup.shape[1])), rows)

    return transform


def as_row(name: str) -> WeightTransform:
    """A transform for a matrix of one row, which some files store as a vector."""

    def transform(lookup: WeightLookup) -> LazyTensor:
        flat = lookup.has(name) and len(lookup.tensors[lookup.stored_name(name)].shape) == 1
        return lookup.find(name, lookup.shape[1:]).reshaped(lookup.shape) if flat else lookup.find(name)

    return transform


def by_mixer(*, attention: WeightTransform, delta: WeightTransform) -> WeightTransform:
    """A transform that applies `attention` in attention layers and `delta` in Gated DeltaNet layers."""

    def transform(lookup: WeightLookup) -> LazyTensor:
        is_delta = lookup.layer is not None and isinstance(lookup.layer.mixer, DeltaSpec)
        return delta(lookup) if is_delta else attention(lookup)

    return transform


# ------------------------------------------------------------------ value heads in tiled order

# The rows of a tensor in tiled order. "heads": one row per value head. "values": value_dim rows per value head.
# "channels": the rows of q and k, then those of "values".
TiledPart = Literal["heads", "values", "channels"]


def grouped_rows(name: str, part: TiledPart) -> WeightTransform:
    """A transform for rows in tiled order (the first value head of every key head, then the second …), regrouped by key head."""
    return lambda lookup: RowSelection(lookup.find(name), grouped_order(_delta(lookup), part))


def grouped_columns(name: str) -> WeightTransform:
    return lambda lookup: ColumnSelection(lookup.find(name), grouped_order(_delta(lookup), "values"))


def grouped_order(delta: DeltaSpec, part: TiledPart) -> NDArray[np.intp]:
    """For each row in grouped order (value heads of one key head are neighbours), its index in the tiled tensor."""
    ratio = delta.value_heads // delta.key_heads
    heads = np.arange(delta.value_heads).reshape(ratio, delta.key_heads).T.reshape(-1)
    if part == "heads":
        return heads
    values = (heads[:, None] * delta.value_dim + np.arange(delta.value_dim)).reshape(-1)
    if part == "values":
        return values
    before = 2 * delta.key_heads * delta.key_dim  # rows of q and k, which come first and are not tiled
    return np.concatenate([np.arange(before), before + values])


def _delta(lookup: WeightLookup) -> DeltaSpec:
    if lookup.layer is None or not isinstance(lookup.layer.mixer, DeltaSpec):
        raise TypeError("this weight is not in a Gated DeltaNet layer")
    return lookup.layer.mixer


# ------------------------------------------------------------------ experts


def experts(prefix: str) -> dict[str, WeightTransform]:
    """The transforms for experts of a transformers folder, where gate and up may be fused or separate, and experts may share one
    tensor or have one each."""

    def stacked_or_separate(name: str) -> WeightTransform:
        def transform(lookup: WeightLookup) -> LazyTensor:
            if lookup.has(prefix + name):
                return lookup.find(prefix + name)
            count, *shape = lookup.shape
            return StackedTensors(tuple(lookup.find(f"{prefix}{expert}.{name}.weight", tuple(shape)) for expert in range(count)))

        return transform

    return _expert_transforms(f"{prefix}gate_up_proj", *map(stacked_or_separate, ("gate_proj", "up_proj", "down_proj")))


def gguf_experts() -> dict[str, WeightTransform]:
    """The transforms for experts of a GGUF file, where gate and up may be fused or separate."""
    stored = (as_stored(f"blk.{{layer}}.ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
    return _expert_transforms("blk.{layer}.ffn_gate_up_exps.weight", *stored)


def _expert_transforms(
    fused: str, gate: WeightTransform, up: WeightTransform, down: WeightTransform
) -> dict[str, WeightTransform]:
    """The transforms for experts whose gate and up are in the tensor `fused` if the checkpoint has it."""

    def half(part: Literal["gate", "up"], separate: WeightTransform) -> WeightTransform:
        return lambda lookup: (half_of_fused(fused, part) if lookup.has(fused) else separate)(lookup)

    return {"expert_gate": half("gate", gate), "expert_up": half("up", up), "expert_down": down}


def half_of_fused(name: str, part: Literal["gate", "up"]) -> WeightTransform:
    """A transform for the gate (first half) or up (second half) of a fused tensor [experts, 2 · width, hidden]."""

    def transform(lookup: WeightLookup) -> LazyTensor:
        count, width, hidden = lookup.shape
        stored = lookup.find(name, (count, 2 * width, hidden)).reshaped((count * 2 * width, hidden))
        rows = np.arange(count * 2 * width).reshape(count, 2, width)[:, 0 if part == "gate" else 1].reshape(-1)
        return RowSelection(stored, rows).reshaped(lookup.shape)

    return transform


# Some files end the names of fused experts in .weight.
EXPERT_WEIGHT_ALIAS = (r"(\.experts\.(gate_up|gate|up|down)_proj)\.weight$", r"\1")
