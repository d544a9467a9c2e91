"""Weight transforms invert the forms in which files store weights; here against plain loops that apply those forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onedraw.errors import CorruptFile
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec
from onedraw.models.weight_names import WeightLookup, WeightTransform
from onedraw.models.weight_transforms import (
    add_one,
    as_row,
    experts,
    gguf_experts,
    grouped_columns,
    grouped_order,
    grouped_rows,
    half_of_each_head,
    negative_exponential,
    squeeze_conv,
)
from tests.support.memory_source import MemorySource

ATTENTION = AttentionSpec(heads=3, kv_heads=1, head_dim=4, rope=RopeSpec(1e4, 4), scale=1.0, gate="sigmoid")
DELTA = DeltaSpec(key_heads=2, value_heads=6, key_dim=3, value_dim=2, conv=4)
MOE = MoeSpec(experts=3, used=2, width=5)
RANDOM = np.random.default_rng(0)


def apply(transform: WeightTransform, source: MemorySource, shape: tuple[int, ...], layer: LayerSpec | None = None) -> np.ndarray:
    layer = layer or LayerSpec(ATTENTION, MlpSpec(8))
    lookup = WeightLookup("made", source.tensors, index=7, layer=layer, shape=shape, used=set())
    tensor = transform(lookup)
    assert tensor.shape == shape
    assert {name for name in source.tensors if name.startswith("blk.7") or name.startswith("l.7")} == lookup.used
    return tensor.float32()


def test_norms_stored_minus_one_and_decays_stored_as_logarithms() -> None:
    source = MemorySource()
    source.add("l.7.a", np.array([-0.5, 0.0, 0.25]))
    np.testing.assert_array_equal(apply(add_one("l.{layer}.a"), source, (3,)), [0.5, 1.0, 1.25])
    found = apply(negative_exponential("l.{layer}.a"), source, (3,))
    np.testing.assert_allclose(found, [-0.60653, -1, -1.28403], rtol=1e-5)


def test_an_extra_axis_is_removed_and_a_vector_becomes_a_row() -> None:
    source, values = MemorySource(), RANDOM.normal(size=(6, 1, 4)).astype(np.float32)
    source.add("l.7.conv", values)
    np.testing.assert_array_equal(apply(squeeze_conv("l.{layer}.conv"), source, (6, 4)), values[:, 0])
    for stored in (np.arange(5.0), np.arange(5.0)[None]):
        source = MemorySource()
        source.add("l.7.row", stored)
        np.testing.assert_array_equal(apply(as_row("l.{layer}.row"), source, (1, 5)), np.arange(5.0)[None])


def test_q_and_its_gate_are_separated_in_every_head() -> None:
    source, stored = MemorySource(), RANDOM.normal(size=(24, 6)).astype(np.float32)
    source.add("l.7.q", stored)
    heads = stored.reshape(3, 8, 6)
    np.testing.assert_array_equal(apply(half_of_each_head("l.{layer}.q", 0), source, (12, 6)), heads[:, :4].reshape(12, 6))
    np.testing.assert_array_equal(apply(half_of_each_head("l.{layer}.q", 1), source, (12, 6)), heads[:, 4:].reshape(12, 6))


def test_tiled_value_heads_are_grouped_by_key_head() -> None:
    """Value head 3·k + j in grouped order is at 2·j + k in a tiled file."""
    assert grouped_order(DELTA, "heads").tolist() == [0, 2, 4, 1, 3, 5]
    assert grouped_order(DELTA, "values").tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert grouped_order(DELTA, "channels").tolist() == [*range(12), *(12 + i for i in (0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11))]
    assert grouped_order(replace(DELTA, value_heads=2), "values").tolist() == [0, 1, 2, 3]
    layer, source = LayerSpec(DELTA, MlpSpec(8)), MemorySource()
    rows = RANDOM.normal(size=(6, 5)).astype(np.float32)
    source.add("blk.7.a", rows)
    np.testing.assert_array_equal(apply(grouped_rows("blk.{layer}.a", "heads"), source, (6, 5), layer), rows[[0, 2, 4, 1, 3, 5]])
    source = MemorySource()
    out = RANDOM.normal(size=(5, 12)).astype(np.float32)
    source.add("blk.7.out", out)
    found = apply(grouped_columns("blk.{layer}.out"), source, (5, 12), layer)
    np.testing.assert_array_equal(found, out[:, grouped_order(DELTA, "values")])


# ------------------------------------------------------------------ experts

GATE, UP, DOWN = (RANDOM.normal(size=shape).astype(np.float32) for shape in ((3, 5, 4), (3, 5, 4), (3, 4, 5)))
SPARSE = LayerSpec(ATTENTION, MOE)


def fused(source: MemorySource) -> None:
    source.add("l.7.experts.gate_up_proj", np.concatenate([GATE, UP], axis=1))
    source.add("l.7.experts.down_proj", DOWN)


def together(source: MemorySource) -> None:
    for name, values in (("gate", GATE), ("up", UP), ("down", DOWN)):
        source.add(f"l.7.experts.{name}_proj", values)


def apart(source: MemorySource) -> None:
    for expert in range(3):
        for name, values in (("gate", GATE), ("up", UP), ("down", DOWN)):
            source.add(f"l.7.experts.{expert}.{name}_proj.weight", values[expert])


@pytest.mark.parametrize("layout", [fused, together, apart], ids=lambda layout: layout.__name__)
def test_experts_are_the_same_for_every_safetensors_form(layout: object) -> None:
    source, used = MemorySource(), set[str]()
    layout(source)  # type: ignore[operator]
    for weight, expected in (("expert_gate", GATE), ("expert_up", UP), ("expert_down", DOWN)):
        lookup = WeightLookup("made", source.tensors, index=7, layer=SPARSE, shape=expected.shape, used=used)
        found = experts("l.{layer}.experts.")[weight](lookup)
        np.testing.assert_array_equal(found.float32(), expected)
        np.testing.assert_array_equal(found.take_rows(np.array([2])).float32(), expected[[2]])
    assert used == set(source.tensors)


@pytest.mark.parametrize("joined", [True, False])
def test_experts_are_the_same_for_every_gguf_form(joined: bool) -> None:
    source, used = MemorySource(), set[str]()
    if joined:
        source.add("blk.7.ffn_gate_up_exps.weight", np.concatenate([GATE, UP], axis=1))
    else:
        source.add("blk.7.ffn_gate_exps.weight", GATE)
        source.add("blk.7.ffn_up_exps.weight", UP)
    source.add("blk.7.ffn_down_exps.weight", DOWN)
    for weight, expected in (("expert_gate", GATE), ("expert_up", UP), ("expert_down", DOWN)):
        lookup = WeightLookup("made", source.tensors, index=7, layer=SPARSE, shape=expected.shape, used=used)
        np.testing.assert_array_equal(gguf_experts()[weight](lookup).float32(), expected)
    assert used == set(source.tensors)


def test_a_missing_expert_is_named() -> None:
    source = MemorySource()
    apart(source)
    del source.tensors["l.7.experts.1.up_proj.weight"]
    lookup = WeightLookup("made", source.tensors, index=7, layer=SPARSE, shape=(3, 5, 4), used=set())
    with pytest.raises(CorruptFile, match=r"tensor l\.7\.experts\.1\.up_proj\.weight is missing"):
        experts("l.{layer}.experts.")["expert_up"](lookup)
