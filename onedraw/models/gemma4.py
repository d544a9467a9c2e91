"""Gemma 4 (31B, 26B-A4B, E4B, E2B): sliding and full layers of different head sizes and ropes, norms on both sides.

In: a config of the text model or of the multimodal model around it, as the hub has them or as transformers writes them
again, or the key-values of a GGUF file. Out: ModelSpec. Images and sound are not read.

What the sizes differ in: 31B and 26B-A4B have full layers without a v projection, 26B-A4B has experts beside each
feed-forward, E4B and E2B have last layers that read the keys and values of others, and an input per layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.config_reader import (
    IGNORED_KEYS,
    MAX_LAYERS,
    ConfigReader,
    code_notes,
    layer_types,
    refuse_quantized,
    text_part,
)
from onedraw.models.family import IGNORED_METADATA, Family, checked, stored_ends
from onedraw.models.rope import DEFAULT_THETA, rope_of_divisors, ropes_by_layer_type
from onedraw.models.source import ModelSource
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec
from onedraw.models.weight_names import GGUF_NAMES, PLAIN_NAMES, SAFETENSORS_NAMES, WeightNames, name_table
from onedraw.models.weight_transforms import PLAIN_EXPERT_NAMES, experts, gguf_experts

SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATION = "gelu_pytorch_tanh"
PATTERN = 6  # every sixth layer is full, where a config names no layer types
HEAD_DIM, GLOBAL_HEAD_DIM, WINDOW = 256, 512, 512
ROPES: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """In what one layer differs from another, before it is known whose keys and values it reads."""

    full: bool
    head_dim: int
    kv_heads: int
    rope: RopeSpec
    keys_as_values: bool
    width: int  # of the feed-forward


def _layers(
    shapes: list[Shape], *, heads: int, window: int, shared: int, beside: MoeSpec | None, inputs: int, origin: str
) -> tuple[LayerSpec, ...]:
    """The last `shared` layers read the keys and values of the last layer before them that is of their kind."""
    own, layers = len(shapes) - shared, []
    for index, shape in enumerate(shapes):
        reuses = None
        if index >= own:
            alike = [i for i in range(own) if shapes[i].full == shape.full]
            if not alike:
                raise CorruptFile(f"{origin}: layer {index} reads the keys and values of another, and none of its kind has any")
            reuses = alike[-1]
        attention = AttentionSpec(
            heads=heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rope=shape.rope,
            scale=1.0,
            window=None if shape.full else window,
            qk_norm=True,
            v_norm=True,
            keys_as_values=shape.keys_as_values and reuses is None,
            reuses=reuses,
        )
        feed_forward = MlpSpec(shape.width, "gelu_tanh")
        layers.append(LayerSpec(attention, feed_forward, sandwich=True, beside=beside, inputs=inputs, scaled=True))
    return tuple(layers)


def _experts(*, count: int, used: int, width: int) -> MoeSpec:
    return MoeSpec(experts=count, used=used, width=width, activation="gelu_tanh", expert_scale=True, own_router_norm=True)


# ------------------------------------------------------------------ config.json


def _from_config(config: Mapping[str, Any], origin: str) -> ModelSpec:
    keys, tied = text_part(config, origin=origin)
    refuse_quantized(keys, origin)
    keys.only("hidden_activation", ACTIVATION)
    keys.only("hidden_act", ACTIVATION)
    keys.only("attention_bias", False)
    keys.only("use_bidirectional_attention", "vision")  # inside images alone
    count, max_context = keys.whole("num_hidden_layers", most=MAX_LAYERS), keys.whole("max_position_embeddings")
    default = [SLIDING if (index + 1) % PATTERN else FULL for index in range(count - 1)] + [FULL]
    types = layer_types(keys, count, accepted=(SLIDING, FULL), default=default, origin=origin)
    if types[-1] != FULL:
        raise CorruptFile(f"{origin}: layer_types: the last layer must be {FULL}, not {types[-1]}")
    shared = keys.whole("num_kv_shared_layers", 0, least=0, most=count - 1)
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    inputs = keys.whole("hidden_size_per_layer_input", 0, least=0)
    if inputs:
        keys.only("vocab_size_per_layer_input", vocab)
    keys.get("vocab_size_per_layer_input")  # without such inputs it says nothing
    spec = ModelSpec(
        family="gemma4",
        layers=_layers(
            _shapes(keys, types, shared=shared, max_context=max_context, origin=origin),
            heads=keys.whole("num_attention_heads"),
            window=keys.whole("sliding_window", WINDOW),
            shared=shared,
            beside=_config_experts(keys),
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
    keys.refuse_rest(IGNORED_KEYS | {"tie_word_embeddings"})
    return checked(spec, origin)


def _shapes(keys: ConfigReader, types: list[str], *, shared: int, max_context: int, origin: str) -> list[Shape]:
    head_dim, kv_heads = keys.whole("head_dim", HEAD_DIM), keys.whole("num_key_value_heads")
    width = keys.whole("intermediate_size")
    widened = 2 * width if keys.flag("use_double_wide_mlp") else width
    keys_as_values = keys.flag("attention_k_eq_v")
    sizes = _sizes(keys, types, head_dim=head_dim, kv_heads=kv_heads, keys_as_values=keys_as_values, origin=origin)
    head_dims = {kind: size[0] for kind, size in zip(types, sizes, strict=True)}
    ropes = ropes_by_layer_type(keys, head_dims=head_dims, defaults=ROPES, max_context=max_context, origin=origin)
    return [
        Shape(
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
    """Head size and key/value heads of every layer. The hub names those of full layers, transformers those of each index."""
    global_dim = keys.whole("global_head_dim", GLOBAL_HEAD_DIM)
    global_kv = keys.whole("num_global_key_value_heads", kv_heads)
    named = keys.mapping("per_layer_config")
    if named is None:
        wide = (global_dim, global_kv if keys_as_values else kv_heads)
        return [wide if kind == FULL else (head_dim, kv_heads) for kind in types]
    sizes, outer = [], ConfigReader(named, origin=f"{origin}: per_layer_config")
    for index in range(len(types)):
        inner = ConfigReader(outer.mapping(str(index)) or {}, origin=f"{origin}: per_layer_config: {index}")
        sizes.append((inner.whole("head_dim", head_dim), inner.whole("num_key_value_heads", kv_heads)))
        inner.refuse_rest()
    outer.refuse_rest()
    for kind in (SLIDING, FULL):
        if len({size for size, of in zip(sizes, types, strict=True) if of == kind}) > 1:
            raise UnsupportedModel(f"{origin}: per_layer_config gives layers of the type {kind} different sizes")
    return sizes


def _config_experts(keys: ConfigReader) -> MoeSpec | None:
    if not keys.flag("enable_moe_block"):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            keys.get(name)  # switched off
        return None
    return _experts(count=keys.whole("num_experts"), used=keys.whole("top_k_experts"), width=keys.whole("moe_intermediate_size"))


# ------------------------------------------------------------------ GGUF


def _from_metadata(source: ModelSource) -> ModelSpec:
    origin = source.path.name
    keys = ConfigReader(source.config, origin=origin, prefix="gemma4.")
    count = keys.whole("block_count", most=MAX_LAYERS)
    shared = keys.whole("attention.shared_kv_layers", 0, least=0, most=count - 1)
    hidden = keys.whole("embedding_length")
    spec = ModelSpec(
        family="gemma4",
        layers=_layers(
            _gguf_shapes(keys, source, count=count, shared=shared, origin=origin),
            heads=keys.whole("attention.head_count"),
            window=keys.whole("attention.sliding_window"),
            shared=shared,
            beside=_gguf_experts(keys),
            inputs=keys.whole("embedding_length_per_layer_input", 0, least=0),
            origin=origin,
        ),
        hidden=hidden,
        **stored_ends(keys, source),
        max_context=keys.whole("context_length"),
        softcap=keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else None,
        norm="wide",
        embed_scale=math.sqrt(hidden),
    )
    keys.refuse_rest(IGNORED_METADATA)
    return checked(spec, origin)


def _gguf_shapes(keys: ConfigReader, source: ModelSource, *, count: int, shared: int, origin: str) -> list[Shape]:
    full_dim = keys.whole("attention.key_length", GLOBAL_HEAD_DIM)
    sliding_dim = keys.whole("attention.key_length_swa", HEAD_DIM)
    for suffix, size in (("", full_dim), ("_swa", sliding_dim)):
        keys.only(f"attention.value_length{suffix}", size)
        keys.only(f"rope.dimension_count{suffix}", size)
    sliding = keys.flags("attention.sliding_window_pattern", count, [(i + 1) % PATTERN != 0 for i in range(count)])
    kv_heads, widths = keys.wholes("attention.head_count_kv", count), keys.wholes("feed_forward_length", count)
    ropes = {
        True: _full_rope(keys, source, head_dim=full_dim, origin=origin),
        False: RopeSpec(theta=keys.number("rope.freq_base_swa", DEFAULT_THETA), dims=sliding_dim),
    }
    return [
        Shape(
            full=not sliding[index],
            head_dim=sliding_dim if sliding[index] else full_dim,
            kv_heads=kv_heads[index],
            rope=ropes[not sliding[index]],
            # A GGUF has no key for it: a layer has a v projection or not.
            keys_as_values=not sliding[index] and f"blk.{index}.attn_v.weight" not in source.tensors,
            width=widths[index],
        )
        for index in range(count)
    ]


def _full_rope(keys: ConfigReader, source: ModelSource, *, head_dim: int, origin: str) -> RopeSpec:
    theta = keys.number("rope.freq_base", ROPES[FULL]["rope_theta"])
    keys.only("rope.scaling.type", "none")
    divisors = source.tensors.get("rope_freqs.weight")
    if divisors is None:
        return RopeSpec(theta=theta, dims=head_dim)
    if divisors.shape != (head_dim // 2,):
        raise CorruptFile(
            f"{origin}: tensor {divisors.name} has shape {list(divisors.shape)}, a head of {head_dim} needs [{head_dim // 2}]"
        )
    return rope_of_divisors(divisors, theta=theta, dims=head_dim)


def _gguf_experts(keys: ConfigReader) -> MoeSpec | None:
    count, used = keys.whole("expert_count", 0, least=0), keys.whole("expert_used_count", 0, least=0)
    width = keys.whole("expert_feed_forward_length", 0, least=0)
    keys.only("expert_gating_func", 1)  # softmax
    keys.only("expert_weights_norm", True)
    keys.only("expert_weights_scale", 1, 1.0)
    return _experts(count=count, used=used, width=width) if count else None


# ------------------------------------------------------------------ weights

IN = "model.layers.{layer}."
FROM_FOLDER = WeightNames(
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
        (r"^(model\.layers\.\d+\.)moe\.((?:gate_up|gate|up|down)_proj)", r"\1experts.\2"),  # an older name
        (r"^(model\.layers\.\d+\.)moe\.per_expert_scale$", r"\1router.per_expert_scale"),
        PLAIN_EXPERT_NAMES,
    ),
    ignored=SAFETENSORS_NAMES.ignored,
    unused=(
        (r"model\.(vision_tower|embed_vision|vision_embedder)\..*", "the vision tower: images are not read"),
        (r"model\.(audio_tower|embed_audio)\..*", "the audio tower: sound is not read"),
    ),
)
BLK = "blk.{layer}."
FROM_GGUF = WeightNames(
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
    weight_names={"safetensors": FROM_FOLDER, "gguf": FROM_GGUF, "plain": PLAIN_NAMES},
)
