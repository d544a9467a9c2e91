"""Qwen3.5, 3.6 and 3.8, dense and with experts: Gated DeltaNet layers, and every fourth layer full attention with a gate.

In: the config of the text model or of the multimodal model around it, or the metadata of a GGUF file. Out: ModelSpec.
Images are not supported. For text the three position sections of M-RoPE are equal, which makes it an ordinary partial rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onedraw.errors import UnsupportedModel
from onedraw.models.config_reader import (
    FULL,
    IGNORED_KEYS,
    IGNORED_MOE_KEYS,
    MAX_LAYERS,
    ConfigReader,
    code_notes,
    layer_types,
    refuse_quantized,
    text_config_keys,
)
from onedraw.models.family import IGNORED_METADATA, Family, gguf_outer_fields, validated
from onedraw.models.rope import MROPE_KEYS, rope_from_config, rope_from_metadata
from onedraw.models.source import ModelSource
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from onedraw.models.weight_names import GGUF_NAMES, MTP_NOTE, PLAIN_NAMES, SAFETENSORS_NAMES, WeightNames, as_stored, name_table
from onedraw.models.weight_transforms import (
    EXPERT_WEIGHT_ALIAS,
    add_one,
    as_row,
    by_mixer,
    experts,
    gguf_experts,
    grouped_columns,
    grouped_rows,
    half_of_each_head,
    negative_exponential,
    squeeze_conv,
)

LINEAR = "linear_attention"  # the layer type of Gated DeltaNet layers
INTERVAL = 4  # every fourth layer is full attention if the config has no full_attention_interval
ROTARY_FACTOR = 0.25  # share of a head that is rotated if the config has no partial_rotary_factor
HEAD_DIM = 256

# Keys about the MTP head (multi-token prediction), which `mtp.py` reads.
MTP_KEYS = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "unsloth_fixed_mtp"})


# ------------------------------------------------------------------ config.json


def _from_config(config: Mapping[str, Any], origin: str, *, family: str, sparse: bool) -> ModelSpec:
    keys, tied = text_config_keys(config, origin=origin)
    refuse_quantized(keys, origin)
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("attn_output_gate", True)
    keys.expect("output_gate_type", "swish", "silu")
    keys.expect("mamba_ssm_dtype", "float32")
    count, max_context = keys.integer("num_hidden_layers", most=MAX_LAYERS), keys.integer("max_position_embeddings")
    interval = keys.integer("full_attention_interval", INTERVAL)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
    types = layer_types(keys, count, accepted=(LINEAR, FULL), default=default, origin=origin)
    head_dim = keys.integer("head_dim", HEAD_DIM)
    attention = AttentionSpec(
        heads=keys.integer("num_attention_heads"),
        kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=rope_from_config(
            keys, head_dim=head_dim, max_context=max_context, origin=origin, share=ROTARY_FACTOR, ignored=MROPE_KEYS
        ),
        scale=head_dim**-0.5,
        qk_norm=True,
        gate="sigmoid",
    )
    delta = DeltaSpec(
        key_heads=keys.integer("linear_num_key_heads"),
        value_heads=keys.integer("linear_num_value_heads"),
        key_dim=keys.integer("linear_key_head_dim"),
        value_dim=keys.integer("linear_value_head_dim"),
        conv=keys.integer("linear_conv_kernel_dim", least=2),
    )
    feed_forward = _experts(keys) if sparse else MlpSpec(keys.integer("intermediate_size"))
    spec = ModelSpec(
        family=family,
        layers=tuple(LayerSpec(attention if kind == FULL else delta, feed_forward) for kind in types),
        hidden=keys.integer("hidden_size"),
        vocab=keys.integer("vocab_size"),
        eps=keys.number("rms_norm_eps", 1e-6),
        tied=keys.flag("tie_word_embeddings") if tied is None else tied,
        max_context=max_context,
        norm="wide",
        notes=code_notes(keys),
    )
    keys.refuse_unknown(IGNORED_KEYS | IGNORED_MOE_KEYS | MTP_KEYS | {"tie_word_embeddings"})
    return validated(spec, origin)


def _experts(keys: ConfigReader) -> MoeSpec:
    keys.expect("norm_topk_prob", True)
    keys.expect("decoder_sparse_step", 1)
    keys.get("intermediate_size")  # Mark as read: the width of dense layers, which these models do not have.
    return MoeSpec(
        experts=keys.integer("num_experts"),
        used=keys.integer("num_experts_per_tok"),
        width=keys.integer("moe_intermediate_size"),
        shared=keys.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


# ------------------------------------------------------------------ GGUF


def _from_metadata(source: ModelSource, *, family: str, sparse: bool) -> ModelSpec:
    metadata, origin = source.config, source.path.name
    keys = ConfigReader(metadata, origin=origin, prefix=f"{metadata['general.architecture']}.")
    mtp_layers = keys.integer("nextn_predict_layers", 0, least=0)
    if mtp_layers > 1:
        raise UnsupportedModel(f"{origin}: nextn_predict_layers = {mtp_layers} is not supported; supported: 0, 1")
    count = keys.integer("block_count", least=mtp_layers + 1, most=MAX_LAYERS) - mtp_layers
    hidden, max_context = keys.integer("embedding_length"), keys.integer("context_length")
    head_dim = keys.integer("attention.key_length", HEAD_DIM)
    keys.expect("attention.value_length", head_dim)
    keys.get("rope.dimension_sections")  # Mark as read: M-RoPE sections matter for images only.
    attention = AttentionSpec(
        heads=keys.integer("attention.head_count"),
        kv_heads=keys.integer("attention.head_count_kv"),
        head_dim=head_dim,
        rope=rope_from_metadata(keys, None, head_dim=head_dim, max_context=max_context, origin=origin, partial=True),
        scale=head_dim**-0.5,
        qk_norm=True,
        gate="sigmoid",
    )
    value_heads = keys.integer("ssm.time_step_rank")
    delta = DeltaSpec(
        key_heads=keys.integer("ssm.group_count"),
        value_heads=value_heads,
        key_dim=keys.integer("ssm.state_size"),
        value_dim=max(keys.integer("ssm.inner_size") // value_heads, 1),
        conv=keys.integer("ssm.conv_kernel", least=2),
    )
    feed_forward = _gguf_experts(keys) if sparse else MlpSpec(keys.integer("feed_forward_length"))
    spec = ModelSpec(
        family=family,
        layers=tuple(
            LayerSpec(delta if linear else attention, feed_forward) for linear in _linear(keys, count + mtp_layers)[:count]
        ),
        hidden=hidden,
        **gguf_outer_fields(keys, source),
        max_context=max_context,
        norm="wide",
    )
    keys.refuse_unknown(IGNORED_METADATA)
    return validated(spec, origin)


def _linear(keys: ConfigReader, count: int) -> list[bool]:
    """Return for each layer whether it is Gated DeltaNet; else it is full attention."""
    interval = keys.integer("full_attention_interval", INTERVAL)
    return keys.flags("attention.recurrent_layers", count, [(index + 1) % interval != 0 for index in range(count)])


def _gguf_experts(keys: ConfigReader) -> MoeSpec:
    keys.expect("expert_weights_norm", True)
    keys.expect("expert_weights_scale", 1, 1.0)
    keys.expect("expert_gating_func", 1)  # 1 stands for softmax, the only routing that these layers implement
    keys.expect("expert_shared_count", 1)
    keys.get("feed_forward_length")  # Mark as read: the width of dense layers, which these models do not have.
    return MoeSpec(
        experts=keys.integer("expert_count"),
        used=keys.integer("expert_used_count"),
        width=keys.integer("expert_feed_forward_length"),
        shared=keys.integer("expert_shared_feed_forward_length"),
        shared_gate=True,
    )


# ------------------------------------------------------------------ weights

MIX, MLP = "model.layers.{layer}.linear_attn.", "model.layers.{layer}.mlp."
SAFETENSORS_WEIGHTS = WeightNames(
    outer=SAFETENSORS_NAMES.outer,
    layer={**SAFETENSORS_NAMES.layer}
    | name_table(MIX, "delta_qkv=in_proj_qkv.weight delta_z=in_proj_z.weight delta_a=in_proj_a.weight delta_b=in_proj_b.weight")
    | name_table(MIX, "delta_bias=dt_bias delta_norm=norm.weight")
    | name_table(MLP, "router=gate.weight shared_route=shared_expert_gate.weight")
    | name_table(MLP + "shared_expert.", "shared_gate=gate_proj.weight shared_up=up_proj.weight shared_down=down_proj.weight"),
    transforms={
        **{name: add_one(SAFETENSORS_NAMES.layer[name]) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")},
        "norm": add_one(SAFETENSORS_NAMES.outer["norm"]),
        "q": half_of_each_head(SAFETENSORS_NAMES.layer["q"], 0),
        "attn_gate": half_of_each_head(SAFETENSORS_NAMES.layer["q"], 1),
        "conv": squeeze_conv(MIX + "conv1d.weight"),
        "decay": negative_exponential(MIX + "A_log"),
        "o": by_mixer(attention=as_stored(SAFETENSORS_NAMES.layer["o"]), delta=as_stored(MIX + "out_proj.weight")),
        **experts(MLP + "experts."),
    },
    aliases=((r"^model\.language_model\.", "model."), EXPERT_WEIGHT_ALIAS),
    ignored=SAFETENSORS_NAMES.ignored,
    unused=((r"(model\.)?mtp\..*", MTP_NOTE), (r"model\.visual\..*", "the vision tower: images are not supported")),
)
BLK = "blk.{layer}."
GGUF_WEIGHTS = WeightNames(
    outer=GGUF_NAMES.outer,
    layer={**GGUF_NAMES.layer}
    | name_table(BLK, "mlp_norm=post_attention_norm.weight delta_norm=ssm_norm.weight")
    | name_table(BLK, "router=ffn_gate_inp.weight")
    | name_table(BLK, "shared_gate=ffn_gate_shexp.weight shared_up=ffn_up_shexp.weight shared_down=ffn_down_shexp.weight"),
    transforms={
        "q": half_of_each_head(GGUF_NAMES.layer["q"], 0),
        "attn_gate": half_of_each_head(GGUF_NAMES.layer["q"], 1),
        "delta_qkv": grouped_rows(BLK + "attn_qkv.weight", "channels"),
        "conv": grouped_rows(BLK + "ssm_conv1d.weight", "channels"),
        "delta_z": grouped_rows(BLK + "attn_gate.weight", "values"),
        "delta_a": grouped_rows(BLK + "ssm_alpha.weight", "heads"),
        "delta_b": grouped_rows(BLK + "ssm_beta.weight", "heads"),
        "decay": grouped_rows(BLK + "ssm_a", "heads"),
        "delta_bias": grouped_rows(BLK + "ssm_dt.bias", "heads"),
        "o": by_mixer(attention=as_stored(GGUF_NAMES.layer["o"]), delta=grouped_columns(BLK + "ssm_out.weight")),
        "shared_route": as_row(BLK + "ffn_gate_inp_shexp.weight"),
        **gguf_experts(),
    },
    ignored=GGUF_NAMES.ignored,
    mtp_marker=BLK + "nextn.eh_proj.weight",
)


def _family(name: str, *, model_types: tuple[str, ...], classes: tuple[str, ...], gguf: str, sparse: bool) -> Family:
    return Family(
        name=name,
        model_types=model_types,
        architectures=classes,
        gguf=(gguf,),
        from_config=lambda config, origin: _from_config(config, origin, family=name, sparse=sparse),
        from_metadata=lambda source: _from_metadata(source, family=name, sparse=sparse),
        weight_names={"safetensors": SAFETENSORS_WEIGHTS, "gguf": GGUF_WEIGHTS, "plain": PLAIN_NAMES},
    )


QWEN3_5 = _family(
    "qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    classes=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    gguf="qwen35",
    sparse=False,
)
QWEN3_5_MOE = _family(
    "qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    classes=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    gguf="qwen35moe",
    sparse=True,
)
