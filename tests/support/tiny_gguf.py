"""GGUF versions of the modern tiny models: the same weights in the form that converters write.

In: a transformers model. Out: metadata and tensors for a writer. Norms are stored with 1 added, decays
with their sign, value heads in tiled order, experts stacked, the MTP head as the block after the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import gguf
import numpy as np
import transformers

from tests.support import tiny_modern

ARCHS = {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "gemma4_text": "gemma4",
    "laguna": "laguna",
}
Tensors = dict[str, np.ndarray]
Config = transformers.PretrainedConfig

NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.g_proj": "attn_gate",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
} | {f"mlp.shared_expert{s}.{part}_proj": f"ffn_{part}_shexp" for s in ("", "s") for part in ("gate", "up", "down")}
WHOLE = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}


def arch_of(model: transformers.PreTrainedModel) -> str:
    return ARCHS[tiny_modern.text_config(model.config).model_type]


def tensors(model: transformers.PreTrainedModel, mtp: Tensors | None = None) -> Iterator[tuple[str, np.ndarray]]:
    config, arch = tiny_modern.text_config(model.config), arch_of(model)
    state: Tensors = {name: value.numpy().astype(np.float32) for name, value in model.state_dict().items()} | (mtp or {})
    if arch == "gemma4":
        full = next(index for index, kind in enumerate(config.layer_types) if kind == "full_attention")
        half = state[f"model.layers.{full}.self_attn.q_norm.weight"].size // 2
        rotated = int(config.rope_parameters["full_attention"]["partial_rotary_factor"] * half)
        yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)
    for name, value in state.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        place, inner = _place(name, depth=config.num_hidden_layers)
        value = _changed(inner, value, config, arch)
        for part, piece in _experts(inner, value, fused=arch == "gemma4"):
            yield place + part, piece
        if ".experts." not in f".{inner}":
            yield place + _renamed(inner, arch, mtp=name == "mtp.norm.weight"), value


def _place(name: str, *, depth: int) -> tuple[str, str]:
    """'model.layers.2.mlp.…' → 'blk.2.', 'mlp.…'; the MTP head becomes the block after the last."""
    name = name.replace("mtp.layers.0.", f"model.layers.{depth}.")
    if found := re.match(r"model\.layers\.(\d+)\.(.+)", name):
        return f"blk.{found[1]}.", found[2]
    if name.startswith("mtp."):
        return f"blk.{depth}.", name.removeprefix("mtp.")
    return "", name.removeprefix("model.")


def _renamed(inner: str, arch: str, *, mtp: bool) -> str:
    if mtp:
        return "nextn.shared_head_norm.weight"
    if inner in NAMES or inner in WHOLE:
        return NAMES.get(inner) or WHOLE[inner]
    stem, _, suffix = inner.rpartition(".")
    if stem == "post_attention_layernorm":
        return ("ffn_norm" if arch in ("qwen3moe", "laguna") else "post_attention_norm") + f".{suffix}"
    return f"{LAYER[stem]}.{suffix}"


def _experts(inner: str, value: np.ndarray, *, fused: bool) -> Iterator[tuple[str, np.ndarray]]:
    match inner.rpartition("experts.")[2] if ".experts." in f".{inner}" else "":
        case "gate_up_proj" if fused:
            yield "ffn_gate_up_exps.weight", value
        case "gate_up_proj":
            yield from zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), np.split(value, 2, axis=1), strict=True)
        case "down_proj":
            yield "ffn_down_exps.weight", value


def _changed(inner: str, value: np.ndarray, config: Config, arch: str) -> np.ndarray:
    if arch not in ("qwen35", "qwen35moe"):
        return value
    if "norm" in inner and inner != "linear_attn.norm.weight":
        return value + np.float32(1)
    if "linear_attn" not in inner:
        return value
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    match inner.split(".")[1]:
        case "A_log":
            return tiled(-np.exp(value.astype(np.float64)).astype(np.float32), config)
        case "dt_bias" | "in_proj_a" | "in_proj_b" | "in_proj_z":
            return tiled(value, config)
        case "in_proj_qkv":
            return np.concatenate([value[:before], tiled(value[before:], config)])
        case "conv1d":
            return np.concatenate([value[:before, 0], tiled(value[before:, 0], config)])
        case "out_proj":
            return np.ascontiguousarray(tiled(value.T, config).T)
    return value


def tiled(value: np.ndarray, config: Config) -> np.ndarray:
    """Value heads grouped by key head → the first of every key head, then the second of every key head, …"""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    rows = value.reshape(keys, values // keys, -1, *value.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(0, 1).reshape(value.shape))


# ------------------------------------------------------------------ metadata


def metadata(writer: gguf.GGUFWriter, model: transformers.PreTrainedModel, *, mtp: bool) -> None:
    c, arch = tiny_modern.text_config(model.config), arch_of(model)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers + mtp)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    heads = getattr(c, "num_attention_heads_per_layer", None) or c.num_attention_heads
    writer.add_head_count(heads)
    if getattr(c, "intermediate_size", None):
        writer.add_feed_forward_length(c.intermediate_size)
    if arch != "gemma4":
        writer.add_head_count_kv(c.num_key_value_heads)
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    if getattr(c, "num_experts", None) or getattr(c, "num_local_experts", None):
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(getattr(c, "num_experts_per_tok", None) or c.top_k_experts)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    if shared := getattr(c, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)
    {"gemma4": _gemma4, "laguna": _laguna, "qwen3moe": _qwen3_moe}.get(arch, _qwen3_5)(writer, c)
    if mtp:
        writer.add_uint32(f"{arch}.nextn_predict_layers", 1)


def _qwen3_moe(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_expert_weights_norm(c.norm_topk_prob)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])


def _qwen3_5(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(c.head_dim * c.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_ssm_state_size(c.linear_key_head_dim)
    writer.add_ssm_group_count(c.linear_num_key_heads)
    writer.add_ssm_time_step_rank(c.linear_num_value_heads)
    writer.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
    writer.add_full_attention_interval(4)


def _gemma4(writer: gguf.GGUFWriter, c: Config) -> None:
    d = c.to_dict()  # attributes that differ by layer cannot be read from the config object
    each = [d["per_layer_config"].get(index, d["per_layer_config"].get(str(index), {})) for index in range(c.num_hidden_layers)]
    kv_heads = [layer.get("num_key_value_heads", d["num_key_value_heads"]) for layer in each]
    head_dim = next(layer["head_dim"] for layer in each if "head_dim" in layer)
    writer.add_head_count_kv(kv_heads if len({*kv_heads}) > 1 else kv_heads[0])
    if c.use_double_wide_mlp:
        first = c.num_hidden_layers - c.num_kv_shared_layers
        widths = [c.intermediate_size * (2 if index >= first else 1) for index in range(c.num_hidden_layers)]
        del writer.kv_data[0]["gemma4.feed_forward_length"]
        writer.add_feed_forward_length(widths)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        writer.add_uint32(f"gemma4.{key}", head_dim)
        writer.add_uint32(f"gemma4.{key}_swa", d["head_dim"])
    writer.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32("gemma4.rope.freq_base_swa", c.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(c.sliding_window)
    writer.add_array("gemma4.attention.sliding_window_pattern", [kind != "full_attention" for kind in c.layer_types])
    writer.add_uint32("gemma4.attention.shared_kv_layers", c.num_kv_shared_layers)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", c.hidden_size_per_layer_input)
    writer.add_float32("gemma4.final_logit_softcapping", c.final_logit_softcapping)


def _laguna(writer: gguf.GGUFWriter, c: Config) -> None:
    full, sliding = (c.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_vocab_size(c.vocab_size)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_float32("laguna.rope.freq_base_swa", sliding["rope_theta"])
    writer.add_rope_dimension_count(int(c.head_dim * full.get("partial_rotary_factor", 1.0)))
    writer.add_uint32("laguna.rope.dimension_count_swa", int(c.head_dim * sliding.get("partial_rotary_factor", 1.0)))
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(full["factor"])
    writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    for key in ("attention_factor", "beta_fast", "beta_slow"):
        if key in full:
            writer.add_float32(f"laguna.rope.scaling.yarn_{key.replace('attention', 'attn')}", full[key])
    writer.add_sliding_window(c.sliding_window)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(c.moe_routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(c.mlp_layer_types.count("dense"))
