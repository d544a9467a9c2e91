"""Every key of a configuration is read, known to be irrelevant, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.config_reader import IGNORED_KEYS
from onedraw.models.registry import LLAMA, MISTRAL, QWEN2, QWEN3
from onedraw.models.spec import ModelSpec
from tests.support.memory_source import MemorySource

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 100,
}


def llama(**changed: Any) -> ModelSpec:
    return LLAMA.from_config({**BASE, **changed}, "config.json")


def test_absent_and_null_keys_take_the_defaults_of_the_family() -> None:
    spec = llama(head_dim=None, rope_scaling=None, sliding_window=None, tie_word_embeddings=None)
    mixer = spec.layers[0].mixer
    assert (mixer.head_dim, mixer.scale, mixer.rope.theta, mixer.window) == (16, 0.25, 10000.0, None)
    assert (spec.eps, spec.tied, mixer.qkv_bias, mixer.qk_norm) == (1e-6, False, False, False)
    assert QWEN3.from_config(BASE, "config.json").layers[0].mixer.head_dim == 128


def test_llama_without_key_value_heads_has_as_many_as_query_heads() -> None:
    config = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert LLAMA.from_config(config, "config.json").layers[0].mixer.kv_heads == 4
    with pytest.raises(CorruptFile, match="num_key_value_heads is missing"):
        QWEN2.from_config(config, "config.json")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*GGUF"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'.*default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 3}}, "rope_scaling: twist = 3"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale = 0.7"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types"),
    ],
)
def test_a_key_that_would_change_the_model_is_refused_by_name(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        llama(**changed)


def test_mistral_has_a_sliding_window_by_default() -> None:
    windows = [
        MISTRAL.from_config({**BASE, **changes}, "config.json").layers[0].attention.window
        for changes in ({}, {"sliding_window": 9})
    ]
    assert windows == [4096, 9]
    assert MISTRAL.from_config({**BASE, "sliding_window": None}, "config.json").layers[0].attention.window is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_attention_heads": 128}, "the head size is missing, and hidden size 64 is less than 128 heads"),
        (
            {
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0}
                | {"original_max_position_embeddings": 64}
            },
            "llama3 rope give frequencies that are not finite",
        ),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn rope give frequencies"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308}}, "yarn rope give frequencies"),
    ],
)
def test_sizes_that_do_not_fit_together_are_corrupt(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CorruptFile, match=words):
        llama(**changed)


def test_ignored_and_disabled_keys_are_accepted() -> None:
    plain = llama()
    assert llama(use_mrope=False, pretraining_tp=2, num_experts=0, extra=None, quantization_config=None) == plain
    assert llama(**dict.fromkeys(IGNORED_KEYS, "anything")) == plain


def test_code_in_a_checkpoint_is_noted_as_not_run() -> None:
    assert "never run" in llama(auto_map={"AutoModelForCausalLM": "modeling.Mine"}).notes[0]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number from 1 to 2147483647, not '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers must be a whole number from 1 to 4096"),
        ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}, "contradict"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3 key/value heads"),
        ({"head_dim": 15}, "odd"),
    ],
)
def test_an_invalid_value_is_corrupt(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CorruptFile, match=words):
        llama(**changed)


# ------------------------------------------------------------------ windows


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.mixer.window for layer in spec.layers]


def test_mistral_slides_in_every_layer_unless_its_window_is_null() -> None:
    assert windows(MISTRAL.from_config({**BASE, "sliding_window": 32}, "c")) == [32, 32, 32]
    assert windows(MISTRAL.from_config({**BASE, "sliding_window": None}, "c")) == [None, None, None]


def test_qwen_has_a_window_only_if_enabled_and_from_max_window_layers_on() -> None:
    named = {**BASE, "sliding_window": 32, "max_window_layers": 2}
    assert windows(QWEN2.from_config(named, "c")) == [None, None, None]
    assert windows(QWEN2.from_config({**named, "use_sliding_window": False}, "c")) == [None, None, None]
    assert windows(QWEN2.from_config({**named, "use_sliding_window": True}, "c")) == [None, None, 32]
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(QWEN3.from_config({**named, "use_sliding_window": True, "layer_types": types}, "c")) == [32, None, None]
    with pytest.raises(CorruptFile, match="no sliding_window is set"):
        QWEN3.from_config({**named, "layer_types": types}, "c")


def test_biases_follow_the_family() -> None:
    assert QWEN2.from_config(BASE, "c").layers[0].mixer.qkv_bias
    assert not QWEN2.from_config(BASE, "c").layers[0].mixer.out_bias
    assert llama(attention_bias=True).layers[0].mixer.out_bias
    assert llama(mlp_bias=True).layers[0].feed_forward.bias
    with pytest.raises(UnsupportedModel, match="attention_bias"):
        MISTRAL.from_config({**BASE, "attention_bias": True}, "c")
    with pytest.raises(UnsupportedModel, match="mlp_bias"):
        MISTRAL.from_config({**BASE, "mlp_bias": True}, "c")


# ------------------------------------------------------------------ GGUF

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 100,
    "tokenizer.ggml.model": "gpt2",
}


def from_gguf(**changed: Any) -> ModelSpec:
    named = {f"llama.{key.replace('__', '.')}": value for key, value in changed.items()}
    return LLAMA.from_metadata(MemorySource({**METADATA, **named}, "gguf"))


def test_metadata_may_give_one_number_for_all_layers_or_one_for_each() -> None:
    spec = from_gguf(attention__head_count=[4, 2], attention__head_count_kv=[2, 1], attention__key_length=16)
    assert [(layer.mixer.heads, layer.mixer.kv_heads) for layer in spec.layers] == [(4, 2), (2, 1)]
    with pytest.raises(CorruptFile, match="head_count must be 2 positive whole numbers"):
        from_gguf(attention__head_count=[4])


def test_a_window_in_metadata_applies_to_every_layer() -> None:
    assert windows(from_gguf()) == [None, None]
    assert windows(from_gguf(attention__sliding_window=32)) == [32, 32]


def test_ropes_in_metadata() -> None:
    assert from_gguf().layers[0].mixer.rope.kind == "default"
    linear = from_gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).layers[0].mixer.rope
    assert (linear.kind, linear.factor) == ("linear", 4.0)
    yarn = from_gguf(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=128)
    assert (yarn.layers[0].mixer.rope.kind, yarn.layers[0].mixer.rope.original_context) == ("yarn", 128)
    source = MemorySource(METADATA, "gguf")
    source.add("rope_freqs.weight", np.array([1, 1, 1, 2, 3, 4, 8, 8.0]))
    assert LLAMA.from_metadata(source).layers[0].mixer.rope.divisors == (1, 1, 1, 2, 3, 4, 8, 8)
    with pytest.raises(UnsupportedModel, match="longrope"):
        from_gguf(rope__scaling__type="longrope")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ({"attention__value_length": 8}, "llama.attention.value_length = 8"),
        ({"logit_scale": 0.1}, "llama.logit_scale"),
    ],
)
def test_metadata_that_would_change_the_model_is_refused_by_name(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        from_gguf(**changed)


def test_metadata_without_a_needed_key_is_corrupt() -> None:
    with pytest.raises(CorruptFile, match=r"llama\.embedding_length is missing"):
        from_gguf(embedding_length=None)
