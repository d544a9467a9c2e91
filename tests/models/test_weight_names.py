from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.models.weight_names import (
    GGUF_NAMES,
    GGUF_PERMUTED_NAMES,
    PLAIN_NAMES,
    SAFETENSORS_NAMES,
    ModelWeights,
    WeightNames,
    unpermuted_row_order,
    weight_shapes,
)
from tests.support.memory_source import MemorySource

FULL = AttentionSpec(
    heads=4, kv_heads=2, head_dim=8, rope=RopeSpec(1e4, 8), scale=1.0, qkv_bias=True, out_bias=True, qk_norm=True
)
SPEC = ModelSpec(
    family="made",
    layers=(LayerSpec(FULL, MlpSpec(24, bias=True)), LayerSpec(FULL, MlpSpec(40, bias=True))),
    hidden=16,
    vocab=11,
    eps=1e-5,
    tied=False,
    max_context=64,
)


def made(rules: WeightNames, spec: ModelSpec = SPEC) -> MemorySource:
    source = MemorySource()
    for seed, (where, shape) in enumerate(weight_shapes(spec).items()):
        source.add(rules.stored_name(where), np.random.default_rng(seed).normal(size=shape).astype(np.float32))
    return source


@pytest.mark.parametrize("rules", [SAFETENSORS_NAMES, GGUF_NAMES, PLAIN_NAMES], ids=["safetensors", "gguf", "plain"])
def test_every_weight_is_read_from_its_own_tensor(rules: WeightNames) -> None:
    source = made(rules)
    weights = ModelWeights(source, SPEC, rules)
    read = {(None, name): value for name, value in weights.outer().items()}
    for index in range(2):
        read |= {(index, name): value for name, value in weights.layer(index).items()}
    assert list(read) == list(weight_shapes(SPEC))
    for seed, (where, shape) in enumerate(weight_shapes(SPEC).items()):
        np.testing.assert_array_equal(read[where], np.random.default_rng(seed).normal(size=shape).astype(np.float32))
    assert len({rules.stored_name(where) for where in read}) == len(read)


def test_shapes_sum_up_to_the_parameters_of_the_spec() -> None:
    bare = AttentionSpec(heads=4, kv_heads=2, head_dim=8, rope=RopeSpec(1e4, 8), scale=1.0)
    for spec in (SPEC, replace(SPEC, tied=True), replace(SPEC, layers=(LayerSpec(bare, MlpSpec(24)),))):
        assert sum(int(np.prod(shape)) for shape in weight_shapes(spec).values()) == spec.parameters
    assert set(SPEC.outer_shapes()) == {"embed", "norm", "head"}
    assert set(SPEC.layers[0].shapes(SPEC.hidden)) == set(SAFETENSORS_NAMES.layer)


def test_permuted_rows_are_restored_to_half_split_order() -> None:
    """Converters permute (heads, 2, half) to (heads, half, 2); here one head of 8 is written out."""
    assert unpermuted_row_order(1, 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert unpermuted_row_order(2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    source = made(GGUF_NAMES)
    plain, undone = ModelWeights(source, SPEC, GGUF_NAMES).layer(1), ModelWeights(source, SPEC, GGUF_PERMUTED_NAMES).layer(1)
    for name, heads in (("q", 4), ("k", 2), ("q_bias", 4), ("k_bias", 2)):
        rows = plain[name].reshape(heads, 4, 2, -1)  # per head: half, then the pair
        expected = np.concatenate([rows[:, :, 0], rows[:, :, 1]], axis=1).reshape(plain[name].shape)
        np.testing.assert_array_equal(undone[name], expected)
    for name in set(plain) - {"q", "k", "q_bias", "k_bias"}:
        np.testing.assert_array_equal(undone[name], plain[name])


def test_a_missing_tensor_is_named() -> None:
    source = made(SAFETENSORS_NAMES)
    del source.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CorruptFile, match=r"made: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        ModelWeights(source, SPEC, SAFETENSORS_NAMES)


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    source = made(SAFETENSORS_NAMES)
    source.add("model.norm.weight", np.zeros(17))
    with pytest.raises(CorruptFile, match=r"tensor model\.norm\.weight has shape \[17\], the model needs \[16\]"):
        ModelWeights(source, SPEC, SAFETENSORS_NAMES)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.experts.weight", "lora_A"])
def test_an_unknown_tensor_is_refused_by_name(name: str) -> None:
    source = made(SAFETENSORS_NAMES)
    source.add(name, np.zeros(3))
    with pytest.raises(UnsupportedModel, match=rf"tensor {name} is unexpected: .* made model"):
        ModelWeights(source, SPEC, SAFETENSORS_NAMES)


def test_a_bias_that_the_config_does_not_enable_is_refused() -> None:
    unbiased = replace(SPEC, layers=tuple(replace(layer, mixer=replace(FULL, out_bias=False)) for layer in SPEC.layers))
    with pytest.raises(UnsupportedModel, match=r"o_proj\.bias"):
        ModelWeights(made(SAFETENSORS_NAMES), unbiased, SAFETENSORS_NAMES)


def test_rotary_frequency_tensors_are_ignored() -> None:
    source = made(SAFETENSORS_NAMES)
    source.add("model.layers.1.self_attn.rotary_emb.inv_freq", np.zeros(4))
    ModelWeights(source, SPEC, SAFETENSORS_NAMES)
    source = made(GGUF_NAMES)
    source.add("rope_freqs.weight", np.zeros(4))
    ModelWeights(source, SPEC, GGUF_NAMES)


def test_a_tied_head_may_be_stored_twice_and_is_not_read() -> None:
    weights = ModelWeights(made(SAFETENSORS_NAMES), replace(SPEC, tied=True), SAFETENSORS_NAMES)
    assert set(weights.outer()) == {"embed", "norm"}


def test_an_unreadable_type_is_refused_before_weights_are_read() -> None:
    source = made(SAFETENSORS_NAMES)
    norm = source.tensors["model.norm.weight"]
    source.tensors["model.norm.weight"] = replace(norm, kind="F8_E4M3", data=norm.data[:16])
    with pytest.raises(UnsupportedModel, match=r"tensor model\.norm\.weight: type F8_E4M3"):
        ModelWeights(source, SPEC, SAFETENSORS_NAMES)
