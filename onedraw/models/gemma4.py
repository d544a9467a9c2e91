"""Gemma 4 (31B, 26B-A4B, E4B, E2B): sliding and full layers with different head sizes and ropes, norms before and after.

In: the config of the text model or of the multimodal model around it, in the form published on the hub or rewritten by
transformers, or the metadata of a GGUF file. Out: ModelSpec. Images and audio are not supported.

The models differ: full layers of 31B and 26B-A4B have no v projection; 26B-A4B has experts in parallel with each feed-forward;
the last layers of E4B and E2B reuse the keys and values of earlier layers, and every layer has an input embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.config_reader import (
    FULL,
    IGNORED_KEYS,
    MAX_LAYERS,
    SLIDING,
    ConfigReader,
    code_notes,
    layer_types,
    refuse_quantized,
    text_config_keys,
)
from onedraw.models.family import IGNORED_METADATA, Family, gguf_outer_fields, validated
from onedraw.models.rope import DEFAULT_THETA, rope_from_divisors, ropes_by_layer_type
from onedraw.models.source import ModelSource
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec
from onedraw.models.weight_names import GGUF_NAMES, PLAIN_NAMES, SAFETENSORS_NAMES, WeightNames, name_table
from onedraw.models.weight_transforms import EXPERT_WEIGHT_ALIAS, experts, gguf_experts

ACTIVATION = "gelu_pytorch_tanh"
PATTERN = 6  # without layer_types every sixth layer is full attention; by config.json the last one too
HEAD_DIM, GLOBAL_HEAD_DIM, WINDOW = 256, 512, 512  # if the config has no head_dim, global_head_dim, sliding_window
# The rope of each layer type, if the config does not say otherwise.
ROPES: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, slots=True)
class _LayerSizes:
    """The sizes that differ between layers."""

    full: bool
    head_dim: int
    kv_heads: int
    rope: RopeSpec
    keys_as_values: bool  # whether values are the keys before norm and rope, so that there is no v projection
    width: int  # feed-forward width


def _layers(
    sizes: list[_LayerSizes], *, heads: int, window: int, shared: int, parallel_experts: MoeSpec | None, inputs: int, origin: str
) -> tuple[LayerSpec, ...]:
    """The layers; each of the last `shared` reuses the keys and values of the last layer of its type before them."""
    own, layers = len(sizes) - shared, []
    for index, size in enumerate(sizes):
        reuses = None
        if index >= own:
            alike = [i for i in range(own) if sizes[i].full == size.full]
            if not alike:
                raise CorruptFile(
                    f"{origin}: layer {index} reuses keys and values, but no earlier layer of its type computes any"
                )
            reuses = alike[-1]
        attention = AttentionSpec(
            heads=heads,
            kv_heads=size.kv_heads,
            head_dim=size.head_dim,
            rope=size.rope,
            scale=1.0,
            window=None if size.full else window,
            qk_norm=True,
            v_norm=True,
            keys_as_values=size.keys_as_values and reuses is None,
            reuses=reuses,
        )
        feed_forward = MlpSpec(size.width, "gelu_tanh")
        layers.append(
            LayerSpec(attention, feed_forward, sandwich=True, parallel_experts=parallel_experts, inputs=inputs, scaled=True)
        )
    return tuple(layers)


def _experts(*, count: int, used: int, width: int) -> MoeSpec:
    return MoeSpec(experts=count, used=used, width=width, activation="gelu_tanh", expert_scale=True, own_router_norm=True)


# ------------------------------------------------------------------ config.json


def _from_config(config: Mapping[str, Any], origin: str) -> ModelSpec:
    keys, tied = text_config_keys(config, origin=origin)
    refuse_quantized(keys, origin)
    keys.expect("hidden_activation", ACTIVATION)
    keys.expect("hidden_act", ACTIVATION)
    keys.expect("attention_bias", False)
    keys.expect("use_bidirectional_attention", "vision")  # applies to tokens of images only, which are not supported
    count, max_context = keys.integer("num_hidden_layers", most=MAX_LAYERS), keys.integer("max_position_embeddings")
    default = [SLIDING if (index + 1) % PATTERN else FULL for index in range(count - 1)] + [FULL]
    types = layer_types(keys, count, accepted=(SLIDING, FULL), default=default, origin=origin)
    if types[-1] != FULL:
        raise CorruptFile(f"{origin}: layer_types: the last layer must be {FULL}, not {types[-1]}")
    shared = keys.integer("num_kv_shared_layers", 0, least=0, most=count - 1)
    hidden, vocab = keys.integer("hidden_size"), keys.integer("vocab_size")
    inputs = keys.integer("hidden_size_per_layer_input", 0, least=0)
    if inputs:
        keys.expect("vocab_size_per_layer_input", vocab)
    keys.get("vocab_size_per_layer_input")  # mark the key as read; without per-layer inputs it has no effect
    spec = ModelSpec(
        family="gemma4",
        layers=_layers(
            _layer_sizes(keys, types, shared=shared, max_context=max_context, origin=origin),
            heads=keys.integer("num_attention_heads"),
            window=keys.integer("sliding_window", WINDOW),
            shared=shared,
            parallel_experts=_config_experts(keys),
            inputs=inputs,
            origin=origin,
        ),
        hidden=hidden,
        vocab=vocab,
        eps=keys.number("rms_norm_eps", 1e-6),
        tied=keys.flag("tie_word_embeddings", True) if tied is None else tied,
        max_context=max_context,
        softcap=keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else None,
        norm="wide",
        embed_scale=math.sqrt(hidden),
        notes=code_notes(keys),
    )
    keys.refuse_unknown(IGNORED_KEYS | {"tie_word_embeddings"})
    return validated(spec, origin)


def _layer_sizes(keys: ConfigReader, types: list[str], *, shared: int, max_context: int, origin: str) -> list[_LayerSizes]:
    head_dim, kv_heads = keys.integer("head_dim", HEAD_DIM), keys.integer("num_key_value_heads")
    width = keys.integer("intermediate_size")
    widened = 2 * width if keys.flag("use_double_wide_mlp") else width
    keys_as_values = keys.flag("attention_k_eq_v")
    sizes = _sizes(keys, types, head_dim=head_dim, kv_heads=kv_heads, keys_as_values=keys_as_values, origin=origin)
    head_dims = {kind: size[0] for kind, size in zip(types, sizes, strict=True)}
    ropes = ropes_by_layer_type(keys, head_dims=head_dims, defaults=ROPES, max_context=max_context, origin=origin)
    return [
        _LayerSizes(
            full=kind == FULL,
            head_dim=size,
            kv_heads=kv,
            rope=ropes[kind],
            keys_as_values=keys_as_values and kind == FULL,
            width=widened if index >= len(types) - shared else width,
        )
        for index, (kind, (size, kv)) in enumerate(zip(types, sizes, strict=True))
    ]


def _sizes(
    keys: ConfigReader, types: list[str], *, head_dim: int, kv_heads: int, keys_as_values: bool, origin: str
) -> list[tuple[int, int]]:
    """Head size and key/value heads of every layer. Hub configs have keys for all full layers together; those
    rewritten by transformers have `per_layer_config`, with the sizes by layer index."""
    global_dim = keys.integer("global_head_dim", GLOBAL_HEAD_DIM)
    global_kv = keys.integer("num_global_key_value_heads", kv_heads)
    named = keys.mapping("per_layer_config")
    if named is None:
        wide = (global_dim, global_kv if keys_as_values else kv_heads)
        return [wide if kind == FULL else (head_dim, kv_heads) for kind in types]
    sizes, outer = [], ConfigReader(named, origin=f"{origin}: per_layer_config")
    for index in range(len(types)):
        inner = ConfigReader(outer.mapping(str(index)) or {}, origin=f"{origin}: per_layer_config: {index}")
        sizes.append((inner.integer("head_dim", head_dim), inner.integer("num_key_value_heads", kv_heads)))
        inner.refuse_unknown()
    outer.refuse_unknown()
    for kind in (SLIDING, FULL):
        if len({size for size, of in zip(sizes, types, strict=True) if of == kind}) > 1:
            raise UnsupportedModel(f"{origin}: per_layer_config gives layers of the type {kind} different sizes; not supported")
    return sizes


def _config_experts(keys: ConfigReader) -> MoeSpec | None:
    if not keys.flag("enable_moe_block"):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            keys.get(name)  # mark the key as read: it has no effect here
        return None
    return _experts(
        count=keys.integer("num_experts"), used=keys.integer("top_k_experts"), width=keys.integer("moe_intermediate_size")
    )


# ------------------------------------------------------------------ GGUF


def _from_metadata(source: ModelSource) -> ModelSpec:
    origin = source.path.name
    keys = ConfigReader(source.config, origin=origin, prefix="gemma4.")
    count = keys.integer("block_count", most=MAX_LAYERS)
    shared = keys.integer("attention.shared_kv_layers", 0, least=0, most=count - 1)
    hidden = keys.integer("embedding_length")
    spec = ModelSpec(
        family="gemma4",
        layers=_layers(
            _gguf_layer_sizes(keys, source, count=count, origin=origin),
            heads=keys.integer("attention.head_count"),
            window=keys.integer("attention.sliding_window"),
            shared=shared,
            parallel_experts=_gguf_experts(keys),
            inputs=keys.integer("embedding_length_per_layer_input", 0, least=0),
            origin=origin,
        ),
        hidden=hidden,
        **gguf_outer_fields(keys, source),
        max_context=keys.integer("context_length"),
        softcap=keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else None,
        norm="wide",
        embed_scale=math.sqrt(hidden),
    )
    keys.refuse_unknown(IGNORED_METADATA)
    return validated(spec, origin)


def _gguf_layer_sizes(keys: ConfigReader, source: ModelSource, *, count: int, origin: str) -> list[_LayerSizes]:
    full_dim = keys.integer("attention.key_length", GLOBAL_HEAD_DIM)
    sliding_dim = keys.integer("attention.key_length_swa", HEAD_DIM)
    for suffix, size in (("", full_dim), ("_swa", sliding_dim)):
        keys.expect(f"attention.value_length{suffix}", size)
        keys.expect(f"rope.dimension_count{suffix}", size)
    sliding = keys.flags("attention.sliding_window_pattern", count, [(i + 1) % PATTERN != 0 for i in range(count)])
    kv_heads, widths = keys.integers("attention.head_count_kv", count), keys.integers("feed_forward_length", count)
    ropes = {
        True: _full_rope(keys, source, head_dim=full_dim, origin=origin),
        False: RopeSpec(theta=keys.number("rope.freq_base_swa", DEFAULT_THETA), dims=sliding_dim),
    }
    return [
        _LayerSizes(
            full=not sliding[index],
            head_dim=sliding_dim if sliding[index] else full_dim,
            kv_heads=kv_heads[index],
            rope=ropes[not sliding[index]],
            # A GGUF file has no key that says whether a layer has a v projection, so its tensor is looked up.
            keys_as_values=not sliding[index] and f"blk.{index}.attn_v.weight" not in source.tensors,
            width=widths[index],
        )
        for index in range(count)
    ]


def _full_rope(keys: ConfigReader, source: ModelSource, *, head_dim: int, origin: str) -> RopeSpec:
    theta = keys.number("rope.freq_base", ROPES[FULL]["rope_theta"])
    keys.expect("rope.scaling.type", "none")
    divisors = source.tensors.get("rope_freqs.weight")
    if divisors is None:
        return RopeSpec(theta=theta, dims=head_dim)
    if divisors.shape != (head_dim // 2,):
        raise CorruptFile(
            f"{origin}: tensor {divisors.name} has shape {list(divisors.shape)}, a head of {head_dim} needs [{head_dim // 2}]"
        )
    return rope_from_divisors(divisors, theta=theta, dims=head_dim)


def _gguf_experts(keys: ConfigReader) -> MoeSpec | None:
    count, used = keys.integer("expert_count", 0, least=0), keys.integer("expert_used_count", 0, least=0)
    width = keys.integer("expert_feed_forward_length", 0, least=0)
    keys.expect("expert_gating_func", 1)  # 1 stands for softmax, the only routing that these layers implement
    keys.expect("expert_weights_norm", True)
    keys.expect("expert_weights_scale", 1, 1.0)
    return _experts(count=count, used=used, width=width) if count else None


# ------------------------------------------------------------------ weights

IN = "model.layers.{layer}."
SAFETENSORS_WEIGHTS = WeightNames(
    outer={**SAFETENSORS_NAMES.outer}
    | name_table("model.", "inputs_embed=embed_tokens_per_layer.weight inputs_project=per_layer_model_projection.weight")
    | name_table("model.", "inputs_project_norm=per_layer_projection_norm.weight"),
    layer={**SAFETENSORS_NAMES.layer}
    | name_table(IN, "post_attn_norm=post_attention_layernorm.weight mlp_norm=pre_feedforward_layernorm.weight")
    | name_table(IN, "post_mlp_norm=post_feedforward_layernorm.weight dense_norm=post_feedforward_layernorm_1.weight")
    | name_table(IN, "experts_norm=pre_feedforward_layernorm_2.weight post_experts_norm=post_feedforward_layernorm_2.weight")
    | name_table(IN, "router=router.proj.weight router_scale=router.scale expert_scale=router.per_expert_scale")
    | name_table(IN, "inputs_gate=per_layer_input_gate.weight inputs_out=per_layer_projection.weight")
    | name_table(IN, "inputs_norm=post_per_layer_input_norm.weight layer_scale=layer_scalar"),
    transforms=experts(IN + "experts."),
    aliases=(
        (r"^model\.language_model\.", "model."),
        (r"^(model\.layers\.\d+\.)moe\.((?:gate_up|gate|up|down)_proj)", r"\1experts.\2"),  # older files call the experts `moe`
        (r"^(model\.layers\.\d+\.)moe\.per_expert_scale$", r"\1router.per_expert_scale"),
        EXPERT_WEIGHT_ALIAS,
    ),
    ignored=SAFETENSORS_NAMES.ignored,
    unused=(
        (r"model\.(vision_tower|embed_vision|vision_embedder)\..*", "the vision tower: images are not supported"),
        (r"model\.(audio_tower|embed_audio)\..*", "the audio tower: audio is not supported"),
    ),
)
BLK = "blk.{layer}."
GGUF_WEIGHTS = WeightNames(
    outer={**GGUF_NAMES.outer}
    | name_table("", "inputs_embed=per_layer_token_embd.weight inputs_project=per_layer_model_proj.weight")
    | name_table("", "inputs_project_norm=per_layer_proj_norm.weight"),
    layer={**GGUF_NAMES.layer}
    | name_table(BLK, "post_attn_norm=post_attention_norm.weight mlp_norm=ffn_norm.weight post_mlp_norm=post_ffw_norm.weight")
    | name_table(
        BLK, "dense_norm=post_ffw_norm_1.weight experts_norm=pre_ffw_norm_2.weight post_experts_norm=post_ffw_norm_2.weight"
    )
    | name_table(BLK, "router=ffn_gate_inp.weight router_scale=ffn_gate_inp.scale expert_scale=ffn_down_exps.scale")
    | name_table(BLK, "inputs_gate=inp_gate.weight inputs_out=proj.weight inputs_norm=post_norm.weight")
    | name_table(BLK, "layer_scale=layer_output_scale.weight"),
    transforms=gguf_experts(),
    ignored=GGUF_NAMES.ignored,
)

GEMMA4 = Family(
    name="gemma4",
    model_types=("gemma4", "gemma4_text"),
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    gguf=("gemma4",),
    from_config=_from_config,
    from_metadata=_from_metadata,
    weight_names={"safetensors": SAFETENSORS_WEIGHTS, "gguf": GGUF_WEIGHTS, "plain": PLAIN_NAMES},
)
