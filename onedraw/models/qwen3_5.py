"""Qwen3.5, 3.6 and 3.8, dense and with experts: layers of Gated DeltaNet, every fourth one full attention with a gate.

In: a config of the text model or of the multimodal model around it, or the key-values of a GGUF file. Out: ModelSpec.
Images are not read; for text the three rows of their positions are one, which is an ordinary partial rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onedraw.errors import UnsupportedModel
from onedraw.models.config_reader import (
    IGNORED_KEYS,
    IGNORED_MOE_KEYS,
    MAX_LAYERS,
    ConfigReader,
    code_notes,
    layer_types,
    refuse_quantized,
    text_part,
)
from onedraw.models.family import IGNORED_METADATA, Family, checked, stored_ends
from onedraw.models.rope import TEXT_ALIKE, rope_from_config, rope_from_metadata
from onedraw.models.source import ModelSource
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from onedraw.models.weight_names import GGUF_NAMES, MTP_NOTE, PLAIN_NAMES, SAFETENSORS_NAMES, WeightNames, as_stored, name_table
from onedraw.models.weight_transforms import (
    PLAIN_EXPERT_NAMES,
    add_one,
    as_row,
    by_mixer,
    experts,
    gguf_experts,
    grouped_columns,
    grouped_rows,
    negative_exponential,
    of_each_head,
    squeezed,
)

LINEAR, FULL = "linear_attention", "full_attention"
INTERVAL = 4  # of full attention, where a description names none
TURNING = 0.25  # the share of a head that turns, where a config names none
HEAD_DIM = 256

# How the head that guesses ahead is made; `mtp.py` reads it where it is asked for.
GUESSING_KEYS = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "unsloth_fixed_mtp"})


# ------------------------------------------------------------------ config.json


def _from_config(config: Mapping[str, Any], origin: str, *, family: str, sparse: bool) -> ModelSpec:
    keys, tied = text_part(config, origin=origin)
    refuse_quantized(keys, origin)
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("attn_output_gate", True)
    keys.only("output_gate_type", "swish", "silu")
    keys.only("mamba_ssm_dtype", "float32")
    count, max_context = keys.whole("num_hidden_layers", most=MAX_LAYERS), keys.whole("max_position_embeddings")
    interval = keys.whole("full_attention_interval", INTERVAL)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
    types = layer_types(keys, count, accepted=(LINEAR, FULL), default=default, origin=origin)
    head_dim = keys.whole("head_dim", HEAD_DIM)
    attention = AttentionSpec(
        heads=keys.whole("num_attention_heads"),
        kv_heads=keys.whole("num_key_value_heads"),
        head_dim=head_dim,
        rope=rope_from_config(
            keys, head_dim=head_dim, max_context=max_context, origin=origin, share=TURNING, harmless=TEXT_ALIKE
        ),
        scale=head_dim**-0.5,
        qk_norm=True,
        gate="sigmoid",
    )
    delta = DeltaSpec(
        key_heads=keys.whole("linear_num_key_heads"),
        value_heads=keys.whole("linear_num_value_heads"),
        key_dim=keys.whole("linear_key_head_dim"),
        value_dim=keys.whole("linear_value_head_dim"),
        conv=keys.whole("linear_conv_kernel_dim", least=2),
    )
    feed_forward = _experts(keys) if sparse else MlpSpec(keys.whole("intermediate_size"))
    spec = ModelSpec(
        family=family,
        layers=tuple(LayerSpec(attention if kind == FULL else delta, feed_forward) for kind in types),
        hidden=keys.whole("hidden_size"),
        vocab=keys.whole("vocab_size"),
        eps=keys.number("rms_norm_eps", 1e-6),
        tied=keys.flag("tie_word_embeddings") if tied is None else tied,
        max_context=max_context,
        norm="wide",
        notes=code_notes(keys),
    )
    keys.refuse_rest(IGNORED_KEYS | IGNORED_MOE_KEYS | GUESSING_KEYS | {"tie_word_embeddings"})
    return checked(spec, origin)


def _experts(keys: ConfigReader) -> MoeSpec:
    keys.only("norm_topk_prob", True)
    keys.only("decoder_sparse_step", 1)
    keys.get("intermediate_size")  # of a dense layer, and there is none
    return MoeSpec(
        experts=keys.whole("num_experts"),
        used=keys.whole("num_experts_per_tok"),
        width=keys.whole("moe_intermediate_size"),
        shared=keys.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )


# ------------------------------------------------------------------ GGUF


def _from_metadata(source: ModelSource, *, family: str, sparse: bool) -> ModelSpec:
    metadata, origin = source.config, source.path.name
    keys = ConfigReader(metadata, origin=origin, prefix=f"{metadata['general.architecture']}.")
    guessing = keys.whole("nextn_predict_layers", 0, least=0)
    if guessing > 1:
        raise UnsupportedModel(f"{origin}: nextn_predict_layers = {guessing} is not supported; supported: 0, 1")
    count = keys.whole("block_count", least=guessing + 1, most=MAX_LAYERS) - guessing
    hidden, max_context = keys.whole("embedding_length"), keys.whole("context_length")
    head_dim = keys.whole("attention.key_length", HEAD_DIM)
    keys.only("attention.value_length", head_dim)
    keys.get("rope.dimension_sections")  # of images
    attention = AttentionSpec(
        heads=keys.whole("attention.head_count"),
        kv_heads=keys.whole("attention.head_count_kv"),
        head_dim=head_dim,
        rope=rope_from_metadata(keys, None, head_dim=head_dim, max_context=max_context, origin=origin, partial=True),
        scale=head_dim**-0.5,
        qk_norm=True,
        gate="sigmoid",
    )
    value_heads = keys.whole("ssm.time_step_rank")
    delta = DeltaSpec(
        key_heads=keys.whole("ssm.group_count"),
        value_heads=value_heads,
        key_dim=keys.whole("ssm.state_size"),
        value_dim=max(keys.whole("ssm.inner_size") // value_heads, 1),
        conv=keys.whole("ssm.conv_kernel", least=2),
    )
    feed_forward = _gguf_experts(keys) if sparse else MlpSpec(keys.whole("feed_forward_length"))
    spec = ModelSpec(
        family=family,
        layers=tuple(
            LayerSpec(delta if linear else attention, feed_forward) for linear in _linear(keys, count + guessing)[:count]
        ),
        hidden=hidden,
        **stored_ends(keys, source),
        max_context=max_context,
        norm="wide",
    )
    keys.refuse_rest(IGNORED_METADATA)
    return checked(spec, origin)


def _linear(keys: ConfigReader, count: int) -> list[bool]:
    """Which blocks are Gated DeltaNet."""
    interval = keys.whole("full_attention_interval", INTERVAL)
    return keys.flags("attention.recurrent_layers", count, [(index + 1) % interval != 0 for index in range(count)])


def _gguf_experts(keys: ConfigReader) -> MoeSpec:
    keys.only("expert_weights_norm", True)
    keys.only("expert_weights_scale", 1, 1.0)
    keys.only("expert_gating_func", 1)  # softmax
    keys.only("expert_shared_count", 1)
    keys.get("feed_forward_length")  # of a dense layer, and there is none
    return MoeSpec(
        experts=keys.whole("expert_count"),
        used=keys.whole("expert_used_count"),
        width=keys.whole("expert_feed_forward_length"),
        shared=keys.whole("expert_shared_feed_forward_length"),
        shared_gate=True,
    )


# ------------------------------------------------------------------ weights

MIX, MLP = "model.layers.{layer}.linear_attn.", "model.layers.{layer}.mlp."
FROM_FOLDER = WeightNames(
    outer=SAFETENSORS_NAMES.outer,
    layer={**SAFETENSORS_NAMES.layer}
    | name_table(MIX, "delta_qkv=in_proj_qkv.weight delta_z=in_proj_z.weight delta_a=in_proj_a.weight delta_b=in_proj_b.weight")
    | name_table(MIX, "delta_bias=dt_bias delta_norm=norm.weight")
    | name_table(MLP, "router=gate.weight shared_route=shared_expert_gate.weight")
    | name_table(MLP + "shared_expert.", "shared_gate=gate_proj.weight shared_up=up_proj.weight shared_down=down_proj.weight"),
    transforms={
        **{name: add_one(SAFETENSORS_NAMES.layer[name]) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")},
        "norm": add_one(SAFETENSORS_NAMES.outer["norm"]),
        "q": of_each_head(SAFETENSORS_NAMES.layer["q"], 0),
        "attn_gate": of_each_head(SAFETENSORS_NAMES.layer["q"], 1),
        "conv": squeezed(MIX + "conv1d.weight"),
        "decay": negative_exponential(MIX + "A_log"),
        "o": by_mixer(attention=as_stored(SAFETENSORS_NAMES.layer["o"]), delta=as_stored(MIX + "out_proj.weight")),
        **experts(MLP + "experts."),
    },
    aliases=((r"^model\.language_model\.", "model."), PLAIN_EXPERT_NAMES),
    ignored=SAFETENSORS_NAMES.ignored,
    unused=((r"(model\.)?mtp\..*", MTP_NOTE), (r"model\.visual\..*", "the vision tower: images are not read")),
)
BLK = "blk.{layer}."
FROM_GGUF = WeightNames(
    outer=GGUF_NAMES.outer,
    layer={**GGUF_NAMES.layer}
    | name_table(BLK, "mlp_norm=post_attention_norm.weight delta_norm=ssm_norm.weight")
    | name_table(BLK, "router=ffn_gate_inp.weight")
    | name_table(BLK, "shared_gate=ffn_gate_shexp.weight shared_up=ffn_up_shexp.weight shared_down=ffn_down_shexp.weight"),
    transforms={
        "q": of_each_head(GGUF_NAMES.layer["q"], 0),
        "attn_gate": of_each_head(GGUF_NAMES.layer["q"], 1),
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
        weight_names={"safetensors": FROM_FOLDER, "gguf": FROM_GGUF, "plain": PLAIN_NAMES},
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
