"""Hybrid and other recent families: every form of a configuration gives the same spec, and unsupported settings are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.registry import FAMILIES, read_model_info
from onedraw.models.spec import AttentionSpec, DeltaSpec, MlpSpec, ModelSpec, MoeSpec
from tests.support import released_configs, tiny, tiny_modern
from tests.support.memory_source import MemorySource

FIXTURES = Path(__file__).parent.parent / "fixtures" / "gguf"
Config = dict[str, Any]


def config_of(name: str) -> Config:
    return json.loads(tiny_modern.CONFIGS[name]().to_json_string())


def spec_of(config: Config) -> ModelSpec:
    family = next(family for family in FAMILIES if config["model_type"] in family.model_types)
    return family.from_config(config, "config.json")


# ------------------------------------------------------------------ what is described


def test_qwen3_5_has_three_delta_layers_per_attention_layer() -> None:
    spec = tiny_modern.spec("qwen3_5")
    assert [type(layer.mixer) for layer in spec.layers] == [DeltaSpec] * 3 + [AttentionSpec]
    assert (spec.recurrent, spec.norm, spec.embed_scale, spec.windows) == (True, "wide", 1.0, (None,))
    attention = spec.layers[3].attention
    assert (attention.gate, attention.gate_per, attention.rope.dims, attention.qk_norm) == ("sigmoid", "element", 8, True)
    assert spec.layers[0].mixer == DeltaSpec(key_heads=2, value_heads=6, key_dim=16, value_dim=16, conv=4)
    sparse = tiny_modern.spec("qwen3_5_moe").layers[0].feed_forward
    assert sparse == MoeSpec(experts=8, used=2, width=32, shared=48, shared_gate=True)


def test_qwen3_moe_reads_the_expert_settings_of_its_config() -> None:
    first, odd = tiny_modern.spec("qwen3_moe"), tiny_modern.spec("qwen3_moe_odd")
    assert [type(layer.feed_forward) for layer in first.layers] == [MoeSpec, MlpSpec, MoeSpec]  # mlp_only_layers
    assert [type(layer.feed_forward) for layer in odd.layers] == [MlpSpec, MoeSpec, MlpSpec]  # decoder_sparse_step
    assert first.layers[0].feed_forward == MoeSpec(experts=8, used=2, width=32, normalised=True)
    assert odd.layers[1].feed_forward == MoeSpec(experts=8, used=2, width=32, normalised=False)
    sliding = spec_of({**config_of("qwen3_moe"), "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2})
    assert {layer.attention.window for layer in sliding.layers} == {8}
    older = {key: value for key, value in config_of("qwen3_moe").items() if key != "num_local_experts"}
    assert spec_of({**older, "num_experts": 8}) == first


def test_gemma4_differs_by_size() -> None:
    large, moe = tiny_modern.spec("gemma4_31b"), tiny_modern.spec("gemma4_26b")
    small, smaller = tiny_modern.spec("gemma4_e4b"), tiny_modern.spec("gemma4_e2b")
    assert large.windows == (None, 24)
    assert (large.softcap, large.embed_scale, large.tied, large.norm) == (30.0, 8.0, True, "wide")
    sliding, full = large.layers[0].attention, large.layers[5].attention
    assert (sliding.head_dim, sliding.kv_heads, sliding.window, sliding.keys_as_values) == (16, 2, 24, False)
    assert (full.head_dim, full.kv_heads, full.window, full.keys_as_values) == (32, 1, None, True)
    assert (full.rope.kind, full.rope.dims, full.rope.rotated_pairs, full.scale) == ("proportional", 32, 4, 1.0)
    assert moe.layers[0].parallel_experts is not None
    assert moe.layers[0].parallel_experts.own_router_norm
    assert all(layer.parallel_experts is None for spec in (large, small) for layer in spec.layers)
    assert [layer.attention.reuses for layer in small.layers] == [None, None, None, None, 3, 2]
    assert (small.inputs, large.inputs) == (16, 0)
    assert small.group(0) == 1
    assert small.group(5) is None
    widths = [layer.feed_forward.width for layer in smaller.layers]
    assert widths == [104] * 3 + [208] * 3


def test_laguna_differs_by_layer() -> None:
    spec = tiny_modern.spec("laguna")
    assert [layer.attention.heads for layer in spec.layers] == [4, 6, 6, 6, 4]
    assert [layer.attention.window for layer in spec.layers] == [None, 24, 24, 24, None]
    assert [type(layer.feed_forward) for layer in spec.layers] == [MlpSpec] + [MoeSpec] * 4
    full, sliding = spec.layers[0].attention, spec.layers[1].attention
    assert (full.rope.kind, full.rope.dims, full.rope.scale, sliding.rope.dims) == ("yarn", 8, 1.0, 16)
    assert (full.gate, full.gate_per, full.gate_width) == ("softplus", "head", 4)
    sparse = spec.layers[1].feed_forward
    assert sparse == MoeSpec(8, 2, 32, scores="sigmoid", scale=2.5, select_bias=True, shared=48)
    odd = tiny_modern.spec("laguna_odd").layers[1]
    assert (odd.attention.gate_per, odd.attention.gate_width, odd.attention.qkv_bias) == ("element", 72, True)
    assert odd.feed_forward.softcap == 2.0


# Billions of parameters; MiB of recurrent state per sequence; KiB of keys and values per position, in bf16, of layers with
# full attention. Layers with a window are bounded.
RELEASED = {
    "Qwen3.5-0.8B": (0.75, 19.3, 12),
    "Qwen3.6-27B": (26.9, 149.6, 64),
    "Qwen3.6-35B-A3B": (34.7, 62.8, 20),
    "Gemma 4 31B": (30.7, 0, 80),
    "Gemma 4 26B-A4B": (25.2, 0, 20),
    "Gemma 4 E4B": (7.5, 0, 16),
    "Gemma 4 E2B": (4.6, 0, 6),
    "Laguna-XS.2": (33.4, 0, 40),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_known_parameter_counts(name: str) -> None:
    spec = spec_of(released_configs.CONFIGS[name])
    billions, state, kept = RELEASED[name]
    assert spec.parameters / 1e9 == pytest.approx(billions, abs=0.06)
    assert sum(spec.lane_bytes(i) for i in range(len(spec.layers))) / 2**20 == pytest.approx(state, abs=0.1)
    assert spec.windows[0] is None
    assert spec.group_page_bytes(0, 1, "bf16") == kept * 1024


def test_rollback_of_sixteen_drafts_in_eight_lanes_of_a_large_hybrid_fits_in_a_gibibyte() -> None:
    assert 16 * 8 * spec_of(released_configs.CONFIGS["Qwen3.6-27B"]).draft_bytes() < 2**30


# ------------------------------------------------------------------ forms of configs


def older_rope(config: Config) -> Config:
    """The form of transformers 4."""
    rope = config.pop("rope_parameters")
    return config | {
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "torch_dtype": "float32",
    }


def by_interval(config: Config) -> Config:
    return {key: value for key, value in config.items() if key != "layer_types"} | {"full_attention_interval": 4}


def as_on_the_hub(config: Config) -> Config:
    extra = {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    return config | extra | {"mtp_use_dedicated_embeddings": False, "dtype": "bfloat16"}


@pytest.mark.parametrize("form", [older_rope, by_interval, as_on_the_hub], ids=lambda form: form.__name__)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_every_form_of_a_qwen3_5_config_gives_the_same_spec(name: str, form: Callable[[Config], Config]) -> None:
    assert spec_of(form(config_of(name))) == tiny_modern.spec(name)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "gemma4_e4b"])
def test_a_multimodal_config_gives_the_same_spec(name: str) -> None:
    inner = config_of(name)
    kind = inner["model_type"].removesuffix("_text")
    outer = {"architectures": ["X"], "model_type": kind, "text_config": inner, "vision_config": {"depth": 2}, "image_token_id": 7}
    assert spec_of(outer) == tiny_modern.spec(name)
    assert spec_of({**outer, "tie_word_embeddings": not inner["tie_word_embeddings"]}).tied is not inner["tie_word_embeddings"]
    with pytest.raises(UnsupportedModel, match="twist = 3"):
        spec_of({**outer, "twist": 3})
    with pytest.raises(UnsupportedModel, match="text_config: twist = 3"):
        spec_of({**outer, "text_config": {**inner, "twist": 3}})
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        spec_of({**outer, "quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize("name", ["gemma4_31b", "gemma4_26b", "gemma4_e4b", "gemma4_e2b"])
def test_the_hub_form_of_a_gemma4_config_gives_the_same_spec(name: str) -> None:
    config = config_of(name)
    del config["per_layer_config"]
    config |= {"global_head_dim": 32, "num_global_key_value_heads": 1 if config["attention_k_eq_v"] else None}
    assert spec_of(config) == tiny_modern.spec(name)


def test_missing_keys_of_a_gemma4_config_have_the_familys_defaults() -> None:
    config = config_of("gemma4_31b")
    bare = {key: value for key, value in config.items() if key not in ("layer_types", "rope_parameters", "sliding_window")}
    spec = spec_of(bare)
    assert [layer.attention.window for layer in spec.layers] == [512] * 5 + [None]
    assert spec.layers[5].attention.rope == tiny_modern.spec("gemma4_31b").layers[5].attention.rope


def test_a_misplaced_key_next_to_lagunas_ropes_is_ignored() -> None:
    config = config_of("laguna")
    config["rope_parameters"]["original_max_position_embeddings"] = 4096
    assert spec_of(config) == tiny_modern.spec("laguna")


def test_every_form_of_a_laguna_config_gives_the_same_spec() -> None:
    expected, config = tiny_modern.spec("laguna"), config_of("laguna")
    extra = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0], "gating_types": ["per_head"] * 5}
    extra |= {"moe_router_use_sigmoid": True, "moe_router_score_func": "sigmoid", "rope_style": "rotate-half", "qkv_bias": False}
    hub = {**config, **extra, "gating": "per-head", "swa_attention_sink_enabled": False, "rope_theta": 500000.0}
    assert spec_of(hub) == expected
    assert spec_of({key: value for key, value in hub.items() if key != "mlp_layer_types"}) == expected
    ropes = hub.pop("rope_parameters")
    flat = {"rope_parameters": ropes["full_attention"], "swa_rope_parameters": ropes["sliding_attention"]}
    del hub["rope_theta"]
    assert spec_of(hub | flat) == expected


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types: 'sliding_attention'"),
        ("qwen3_5", {"num_experts": 8}, "num_experts = 8"),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16'"),
        ("qwen3_5", {"indexer_n_heads": 4}, "indexer_n_heads = 4"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("qwen3_5_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
        ("qwen3_moe", {"layer_types": ["linear_attention"] * 3}, "layer_types: 'linear_attention'"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8"),
        ("gemma4_e4b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ("gemma4_e4b", {"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input = 7"),
        ("gemma4_31b", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("gemma4_31b", {"per_layer_config": {"5": {"head_dim": 32, "sliding_window": 9}}}, "sliding_window = 9"),
        ("gemma4_31b", {"per_layer_config": {"1": {"head_dim": 32}}}, "of the type sliding_attention different sizes"),
        ("gemma4_31b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("laguna", {"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled = True"),
        ("laguna", {"qkv_bias": True}, "qkv_bias = True"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True"),
        ("laguna", {"gating": False}, "gating = False"),
        ("laguna", {"gating_types": ["per_element"] * 5}, "gating_types"),
    ],
)
def test_a_key_that_would_change_the_model_is_refused_by_name(name: str, changed: Config, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        spec_of({**config_of(name), **changed})


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("qwen3_5", {"linear_num_value_heads": 5}, "5 value heads are not a multiple of 2 key heads"),
        ("qwen3_5", {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is missing"),
        ("qwen3_5_moe", {"num_experts_per_tok": 9}, "9 experts per token are more than the 8 experts"),
        ("gemma4_e4b", {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "the last layer must be full"),
        (
            "gemma4_e4b",
            {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "per_layer_config": {"5": {"head_dim": 32}}},
            "layer 5 reuses keys and values, but no earlier layer of its type",
        ),
        ("gemma4_e4b", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "has no entry for sliding_attention"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer must be 5"),
        ("laguna", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must list 5 layers"),
        ("laguna", {"mlp_layer_types": [{}, "sparse", "sparse", "sparse", "sparse"]}, "mlp_layer_types must list 5 layers"),
        ("laguna", {"mlp_only_layers": 0}, "mlp_only_layers must be a list"),
        ("laguna", {"mlp_only_layers": [1]}, "mlp_layer_types and mlp_only_layers contradict"),
        ("laguna", {"sliding_window": None}, "no sliding_window is set"),
    ],
)
def test_an_invalid_value_is_corrupt(name: str, changed: Config, words: str) -> None:
    with pytest.raises(CorruptFile, match=words):
        spec_of({**config_of(name), **changed})


# ------------------------------------------------------------------ GGUF


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("qwen3_5", {"qwen35.logit_scale": 0.5}, "qwen35.logit_scale = 0.5"),
        ("qwen3_5", {"qwen35.nextn_predict_layers": 2}, "nextn_predict_layers = 2"),
        ("qwen3_5", {"qwen35.attention.value_length": 8}, "attention.value_length = 8"),
        ("qwen3_5_moe", {"qwen35moe.expert_gating_func": 2}, "expert_gating_func = 2"),
        ("gemma4_26b", {"gemma4.attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma4_26b", {"gemma4.rope.dimension_count": 16}, "rope.dimension_count = 16"),
        ("laguna", {"laguna.expert_gating_func": 1}, "expert_gating_func = 1"),
        ("laguna", {"laguna.rope.scaling.type": "longrope"}, "rope type 'longrope'"),
    ],
)
def test_metadata_that_would_change_the_model_is_refused_by_name(name: str, changed: Config, words: str) -> None:
    stored = open_checkpoint(FIXTURES / f"{name}.gguf")
    source = MemorySource({**stored.config, **changed}, "gguf", dict(stored.tensors))
    with pytest.raises(UnsupportedModel, match=words):
        read_model_info(source)


def test_recurrent_layers_may_be_listed() -> None:
    stored = open_checkpoint(FIXTURES / "qwen3_5.gguf")
    listed = {**stored.config, "qwen35.attention.recurrent_layers": [True, True, True, False] * 2}
    listed["qwen35.full_attention_interval"] = 3  # the list takes precedence
    assert read_model_info(MemorySource(listed, "gguf", dict(stored.tensors))).spec == read_model_info(stored).spec


def test_rope_freqs_that_are_not_proportional_stay_divisors() -> None:
    stored = open_checkpoint(FIXTURES / "gemma4_31b.gguf")
    source = MemorySource(stored.config, "gguf", dict(stored.tensors))
    assert read_model_info(source).spec.layers[5].attention.rope.kind == "proportional"
    source.add("rope_freqs.weight", np.array([1.0] * 8 + [4.0] * 8))
    rope = read_model_info(source).spec.layers[5].attention.rope
    assert (rope.kind, rope.divisors) == ("divisors", (1.0,) * 8 + (4.0,) * 8)
    source.add("rope_freqs.weight", np.ones(8))
    with pytest.raises(CorruptFile, match=r"rope_freqs\.weight has shape \[8\]"):
        read_model_info(source)


# ------------------------------------------------------------------ files of weights


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


def same_weights(folder: Path, name: str, tmp_path: Path) -> None:
    found, expected = (
        read_model_info(open_checkpoint(at)).weights for at in (folder, tiny.write_safetensors(name, tmp_path / "as-is"))
    )
    for index in range(len(expected.spec.layers)):
        for weight, value in expected.layer(index).items():
            np.testing.assert_array_equal(found.read(index, weight), value)


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_fused_experts_give_the_same_weights(suffix: str, tmp_path: Path) -> None:
    """transformers saves experts separately; files on the hub have them fused."""
    folder = tiny.write_safetensors("qwen3_5_moe", tmp_path / "fused")

    def fuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts."
            parts = {
                part: np.stack([tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(8)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{prefix}gate_up_proj{suffix}"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
            tensors[f"{prefix}down_proj{suffix}"] = parts["down"]
        return tensors

    rewrite(folder, fuse)
    same_weights(folder, "qwen3_5_moe", tmp_path)


def test_lagunas_module_names_are_accepted_as_tensor_names(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("laguna", tmp_path / "named")
    modules = {".shared_expert.": ".shared_experts.", ".experts.e_score_correction_bias": ".gate.e_score_correction_bias"}

    def rename(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for theirs, ours in modules.items():
            tensors = {name.replace(theirs, ours): value for name, value in tensors.items()}
        return tensors

    rewrite(folder, rename)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in open_checkpoint(folder).tensors
    same_weights(folder, "laguna", tmp_path)


def test_unused_keys_and_values_of_a_layer_may_be_stored(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("gemma4_e4b", tmp_path / "hub")

    def add(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for layer in (4, 5):
            for name in ("k_proj", "v_proj", "k_norm"):
                tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = np.zeros((2, 2), np.float32)
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}

    rewrite(folder, add)
    same_weights(folder, "gemma4_e4b", tmp_path)
    rewrite(folder, lambda tensors: {**tensors, "model.layers.5.self_attn.k_proj.bias": np.zeros(2, np.float32)})
    with pytest.raises(UnsupportedModel, match=r"layers\.5\.self_attn\.k_proj\.bias is unexpected"):
        read_model_info(open_checkpoint(folder))


def test_two_tensors_for_one_weight_are_refused(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("qwen3_5", tmp_path)
    rewrite(folder, lambda t: {**t, "model.language_model.norm.weight": t["model.norm.weight"]})
    with pytest.raises(CorruptFile, match=r"model\.(language_model\.)?norm\.weight and .* are the same weight"):
        read_model_info(open_checkpoint(folder))


def test_tensors_outside_the_text_model_are_noted(tmp_path: Path) -> None:
    info = read_model_info(open_checkpoint(tiny.write_safetensors("qwen3_5_vl", tmp_path)))
    assert info.spec.notes == info.weights.spec.notes
    assert len(info.spec.notes) == 1
    assert "images are not supported (21 tensors)" in info.spec.notes[0]
    assert read_model_info(open_checkpoint(FIXTURES / "qwen3_5.gguf")).spec.notes == ()


def test_quantized_weights_keep_their_values_when_reordered(tmp_path: Path) -> None:
    """Rows of a Q8_0 file are selected while quantized; the columns of the output matrix are dequantized first."""
    name = "qwen3_5"
    packed = read_model_info(open_checkpoint(tiny.write_gguf(name, tmp_path / "q.gguf", kind="Q8_0"))).weights
    plain = read_model_info(open_checkpoint(tiny.write_gguf(name, tmp_path / "f.gguf"))).weights
    assert packed.tensor(0, "delta_qkv").kind == "Q8_0"
    for index in range(4):
        for weight, value in plain.layer(index).items():
            np.testing.assert_allclose(packed.read(index, weight), value, atol=0.02)
