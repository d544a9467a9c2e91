"""Laguna (Poolside): a softplus gate on the attention output, head counts that differ by layer, sigmoid routing with a bias.

In: config.json, or the metadata of a GGUF file. Out: ModelSpec. Attention sinks, and biases under other keys than
attention_bias, are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.config_reader import (
    FULL,
    IGNORED_KEYS,
    IGNORED_MOE_KEYS,
    MAX_LAYERS,
    SLIDING,
    ConfigReader,
    code_notes,
    layer_types,
    layer_windows,
    refuse_quantized,
)
from onedraw.models.family import IGNORED_METADATA, Family, gguf_outer_fields, validated
from onedraw.models.rope import DEFAULT_THETA, rope_from_metadata, ropes_by_layer_type, rotary_dims
from onedraw.models.source import ModelSource
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec
from onedraw.models.weight_names import GGUF_NAMES, PLAIN_NAMES, SAFETENSORS_NAMES, WeightNames, name_table
from onedraw.models.weight_transforms import EXPERT_WEIGHT_ALIAS, experts, gguf_experts

DENSE, SPARSE = "dense", "sparse"
PATTERN = 4  # in a GGUF file without a sliding_window_pattern, the first of every four layers is full attention
HEAD_DIM = 128
ROPES: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
GatePer = Literal["element", "head"]


def _from_config(config: Mapping[str, Any], origin: str) -> ModelSpec:
    keys = ConfigReader(config, origin=origin)
    refuse_quantized(keys, origin)
    keys.expect("hidden_act", "silu")
    keys.expect("rope_style", "rotate-half")
    count, max_context = keys.integer("num_hidden_layers", most=MAX_LAYERS), keys.integer("max_position_embeddings")
    types = layer_types(keys, count, accepted=(FULL, SLIDING), default=[FULL] * count, origin=origin)
    windows = layer_windows(types, keys.optional_integer("sliding_window"), origin)
    head_dim, bias = keys.integer("head_dim", HEAD_DIM), keys.flag("attention_bias")
    heads = keys.integers("num_attention_heads_per_layer", count, [keys.integer("num_attention_heads")] * count)
    kv_heads, gate_per = keys.integer("num_key_value_heads"), read_gate(keys, origin)
    head_dims = dict.fromkeys(types, head_dim)
    rope_keys = _rope_keys(keys, origin)
    ropes = ropes_by_layer_type(rope_keys, head_dims=head_dims, defaults=ROPES, max_context=max_context, origin=origin)
    mixers = [
        AttentionSpec(
            heads=heads[index],
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=ropes[kind],
            scale=head_dim**-0.5,
            window=windows[index],
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            gate="softplus",
            gate_per=gate_per,
        )
        for index, kind in enumerate(types)
    ]
    dense, sparse = MlpSpec(keys.integer("intermediate_size")), _config_experts(keys)
    spec = ModelSpec(
        family="laguna",
        layers=tuple(
            LayerSpec(m, dense if flat else sparse) for m, flat in zip(mixers, _dense(keys, count, origin), strict=True)
        ),
        hidden=keys.integer("hidden_size"),
        vocab=keys.integer("vocab_size"),
        eps=keys.number("rms_norm_eps", 1e-6),
        tied=keys.flag("tie_word_embeddings"),
        max_context=max_context,
        notes=code_notes(keys),
    )
    keys.refuse_unknown(IGNORED_KEYS | IGNORED_MOE_KEYS)
    return validated(spec, origin)


def read_gate(keys: ConfigReader, origin: str) -> GatePer:
    """Return whether config.json asks for one gate value per head or per element of a head, or raise UnsupportedModel."""
    gating = keys.get("gating")
    if gating not in (None, True, "per-head", "per-element"):
        raise UnsupportedModel(f"{origin}: gating = {gating!r} is not supported; supported: true, 'per-head', 'per-element'")
    per: GatePer = "element" if gating == "per-element" else "head"
    named = keys.get("gating_types")  # this key repeats `gating` for every layer
    if named is not None and {str(kind).replace("_", "-") for kind in named} != {f"per-{per}"}:
        raise UnsupportedModel(f"{origin}: gating_types = {named!r} with gating = {gating!r} is not supported")
    return per


def _dense(keys: ConfigReader, count: int, origin: str) -> list[bool]:
    """Return for each layer whether its feed-forward is dense: by mlp_layer_types, or by mlp_only_layers and
    decoder_sparse_step."""
    types, named, step = keys.get("mlp_layer_types"), keys.get("mlp_only_layers"), keys.integer("decoder_sparse_step", 1)
    if named is not None and not isinstance(named, list):
        raise CorruptFile(f"{origin}: mlp_only_layers must be a list of layers, not {named!r}")
    by_index = [index in ([0] if named is None else named) or (index + 1) % step != 0 for index in range(count)]
    if types is None:
        return by_index
    if not isinstance(types, list) or len(types) != count or not all(kind in (DENSE, SPARSE) for kind in types):
        raise CorruptFile(f"{origin}: mlp_layer_types must list {count} layers, each {DENSE} or {SPARSE}, not {types!r}")
    dense = [kind == DENSE for kind in types]
    if named is not None and dense != by_index:
        raise CorruptFile(f"{origin}: mlp_layer_types and mlp_only_layers contradict each other; keep one")
    return dense


def _rope_keys(keys: ConfigReader, origin: str) -> ConfigReader:
    """Return keys whose rope_parameters has one entry per layer type. In older configs rope_parameters itself is the entry of
    full attention layers, and swa_rope_parameters that of sliding layers."""
    ropes, sliding = keys.mapping("rope_parameters"), keys.mapping("swa_rope_parameters")
    nested = ropes is not None and any(isinstance(value, dict) for value in ropes.values())
    if nested:
        keys.get("rope_theta")  # Mark the key as read, so that it is not refused as unknown: it duplicates a nested key.
        keys.get("partial_rotary_factor")
    if nested or ropes is None:
        return keys
    return ConfigReader({"rope_parameters": {FULL: ropes} | ({} if sliding is None else {SLIDING: sliding})}, origin=origin)


def _config_experts(keys: ConfigReader) -> MoeSpec:
    keys.expect("norm_topk_prob", True)
    keys.expect("moe_router_use_sigmoid", True)
    keys.expect("moe_router_score_func", "sigmoid")
    return MoeSpec(
        experts=keys.integer("num_experts"),
        used=keys.integer("num_experts_per_tok"),
        width=keys.integer("moe_intermediate_size"),
        scores="sigmoid",
        scale=keys.number("moe_routed_scaling_factor", 1.0),
        softcap=keys.number("moe_router_logit_softcapping") if keys.get("moe_router_logit_softcapping") else None,
        select_bias=True,
        shared=keys.integer("shared_expert_intermediate_size"),
    )


# ------------------------------------------------------------------ GGUF


def _from_metadata(source: ModelSource) -> ModelSpec:
    tensors, origin = source.tensors, source.path.name
    keys = ConfigReader(source.config, origin=origin, prefix="laguna.")
    count, max_context = keys.integer("block_count", most=MAX_LAYERS), keys.integer("context_length")
    head_dim = keys.integer("attention.key_length", HEAD_DIM)
    keys.expect("attention.value_length", head_dim)
    heads, kv_heads = keys.integers("attention.head_count", count), keys.integers("attention.head_count_kv", count)
    window = keys.optional_integer("attention.sliding_window", least=0) or None
    pattern = [window is not None and index % PATTERN != 0 for index in range(count)]
    sliding = keys.flags("attention.sliding_window_pattern", count, pattern)
    full_rope = rope_from_metadata(keys, None, head_dim=head_dim, max_context=max_context, origin=origin, partial=True)
    sliding_rope = RopeSpec(
        theta=keys.number("rope.freq_base_swa", DEFAULT_THETA),
        dims=rotary_dims(keys, "rope.dimension_count_swa", head_dim=head_dim, partial=True, origin=origin),
    )
    mixers = [
        AttentionSpec(
            heads=heads[index],
            kv_heads=kv_heads[index],
            head_dim=head_dim,
            rope=sliding_rope if sliding[index] else full_rope,
            scale=head_dim**-0.5,
            window=window if sliding[index] else None,
            qkv_bias=f"blk.{index}.attn_q.bias" in tensors,
            out_bias=f"blk.{index}.attn_output.bias" in tensors,
            qk_norm=True,
            gate="softplus",
            gate_per=stored_gate(source, index, heads[index]),
        )
        for index in range(count)
    ]
    leading = keys.integer("leading_dense_block_count", 1, least=0)
    dense, sparse = MlpSpec(keys.integer("feed_forward_length")), _gguf_experts(keys)
    spec = ModelSpec(
        family="laguna",
        layers=tuple(LayerSpec(mixer, dense if index < leading else sparse) for index, mixer in enumerate(mixers)),
        hidden=keys.integer("embedding_length"),
        **gguf_outer_fields(keys, source),
        max_context=max_context,
    )
    keys.refuse_unknown(IGNORED_METADATA)
    return validated(spec, origin)


def stored_gate(source: ModelSource, index: int, heads: int) -> GatePer:
    """Return whether the gate is per head or per element, by the number of rows of its matrix: a GGUF file has no key for it."""
    gate = source.tensors.get(f"blk.{index}.attn_gate.weight")
    return "element" if gate is not None and gate.shape[0] != heads else "head"


def _gguf_experts(keys: ConfigReader) -> MoeSpec:
    keys.expect("expert_gating_func", 2)  # 2 stands for sigmoid, the only routing that these layers implement
    keys.expect("expert_weights_norm", True)
    keys.expect("expert_shared_count", 1)
    return MoeSpec(
        experts=keys.integer("expert_count"),
        used=keys.integer("expert_used_count"),
        width=keys.integer("expert_feed_forward_length"),
        scores="sigmoid",
        scale=keys.number("expert_weights_scale", 1.0),
        select_bias=True,
        shared=keys.integer("expert_shared_feed_forward_length"),
    )


# ------------------------------------------------------------------ weights

MLP = "model.layers.{layer}.mlp."
SAFETENSORS_WEIGHTS = WeightNames(
    outer=SAFETENSORS_NAMES.outer,
    layer={**SAFETENSORS_NAMES.layer}
    | name_table("model.layers.{layer}.", "attn_gate=self_attn.g_proj.weight")
    | name_table(MLP, "router=gate.weight select_bias=experts.e_score_correction_bias")
    | name_table(MLP + "shared_expert.", "shared_gate=gate_proj.weight shared_up=up_proj.weight shared_down=down_proj.weight"),
    transforms=experts(MLP + "experts."),
    aliases=(
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.experts.e_score_correction_bias"),
        EXPERT_WEIGHT_ALIAS,
    ),
    ignored=SAFETENSORS_NAMES.ignored,
)
BLK = "blk.{layer}."
GGUF_WEIGHTS = WeightNames(
    outer=GGUF_NAMES.outer,
    layer={**GGUF_NAMES.layer}
    | name_table(BLK, "attn_gate=attn_gate.weight router=ffn_gate_inp.weight select_bias=exp_probs_b.bias")
    | name_table(BLK, "shared_gate=ffn_gate_shexp.weight shared_up=ffn_up_shexp.weight shared_down=ffn_down_shexp.weight"),
    transforms=gguf_experts(),
    ignored=GGUF_NAMES.ignored,
)

LAGUNA = Family(
    name="laguna",
    model_types=("laguna",),
    architectures=("LagunaForCausalLM",),
    gguf=("laguna",),
    from_config=_from_config,
    from_metadata=_from_metadata,
    weight_names={"safetensors": SAFETENSORS_WEIGHTS, "gguf": GGUF_WEIGHTS, "plain": PLAIN_NAMES},
)
