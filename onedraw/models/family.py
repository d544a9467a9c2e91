"""A model family as data: how it is recognised, how its configuration is read, and how its weights are named.

Families of the Llama form (attention, then a gated feed-forward, each after an RMSNorm) differ by a few traits;
`dense_family` builds them from a Traits. Other families (`qwen3_5.py`, `gemma4.py`, `laguna.py`) write their own readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, assert_never

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.config_reader import (
    FULL,
    IGNORED_KEYS,
    IGNORED_MOE_KEYS,
    MAX_LAYERS,
    SLIDING,
    ConfigReader,
    code_notes,
    default_head_dim,
    layer_types,
    layer_windows,
    refuse_quantized,
)
from onedraw.models.rope import rope_from_config, rope_from_metadata
from onedraw.models.source import CheckpointFormat, ModelSource
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from onedraw.models.weight_names import GGUF_NAMES, GGUF_PERMUTED_NAMES, PLAIN_NAMES, SAFETENSORS_NAMES, WeightNames


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    model_types: tuple[str, ...]  # values of `model_type` in config.json
    architectures: tuple[str, ...]  # values of `architectures` in config.json
    gguf: tuple[str, ...]  # values of `general.architecture` in a GGUF file
    from_config: Callable[[Mapping[str, Any], str], ModelSpec]  # reads config.json; errors name its path, the second argument
    from_metadata: Callable[[ModelSource], ModelSpec]  # reads the metadata of a GGUF file
    weight_names: Mapping[CheckpointFormat, WeightNames]


@dataclass(frozen=True, slots=True)
class Traits:
    """The differences between families of the Llama form."""

    family: str
    # Whether projections have biases. "config": by the config key attention_bias.
    qkv_bias: Literal["config", "always", "never"] = "config"
    out_bias: Literal["config", "never"] = "config"
    mlp_bias: bool = False  # whether the config key mlp_bias is supported
    qk_norm: bool = False
    # Which layers have a sliding window. The config key use_sliding_window turns it on for "gated" (layers from max_window_layers
    # on) and for "switched" (all layers).
    window: Literal["never", "all", "gated", "switched"] = "never"
    head_dim: int | None = None  # head size of a config without head_dim; None: hidden // heads
    kv_heads_named: bool = True  # whether the config key num_key_value_heads is required
    permuted: bool = False  # whether GGUF converters permute the rows of q and k
    experts: bool = False  # whether some layers have experts instead of a dense feed-forward


def dense_family(
    traits: Traits,
    *,
    model_types: tuple[str, ...],
    architectures: tuple[str, ...],
    gguf: tuple[str, ...],
    weight_names: Mapping[CheckpointFormat, WeightNames] | None = None,
) -> Family:
    return Family(
        name=traits.family,
        model_types=model_types,
        architectures=architectures,
        gguf=gguf,
        from_config=lambda config, origin: _from_config(config, origin, traits),
        from_metadata=lambda source: _from_metadata(source, traits),
        weight_names=weight_names
        or {
            "safetensors": SAFETENSORS_NAMES,
            "gguf": GGUF_PERMUTED_NAMES if traits.permuted else GGUF_NAMES,
            "plain": PLAIN_NAMES,
        },
    )


# ------------------------------------------------------------------ config.json


def _from_config(config: Mapping[str, Any], origin: str, traits: Traits) -> ModelSpec:
    keys = ConfigReader(config, origin=origin)
    keys.expect("hidden_act", "silu")
    refuse_quantized(keys, origin)
    count, max_context = keys.integer("num_hidden_layers", most=MAX_LAYERS), keys.integer("max_position_embeddings")
    mixer = _mixer(keys, traits, max_context=max_context, origin=origin)
    windows, fed = _windows(keys, count, traits, origin), _feed_forwards(keys, count, traits, origin)
    spec = ModelSpec(
        family=traits.family,
        layers=tuple(LayerSpec(replace(mixer, window=window), each) for window, each in zip(windows, fed, strict=True)),
        hidden=keys.integer("hidden_size"),
        vocab=keys.integer("vocab_size"),
        eps=keys.number("rms_norm_eps", 1e-6),
        tied=keys.flag("tie_word_embeddings"),
        max_context=max_context,
        notes=code_notes(keys),
    )
    keys.refuse_unknown(IGNORED_KEYS | IGNORED_MOE_KEYS if traits.experts else IGNORED_KEYS)
    return validated(spec, origin)


def _mixer(keys: ConfigReader, traits: Traits, *, max_context: int, origin: str) -> AttentionSpec:
    """The attention of every layer, without its window."""
    heads = keys.integer("num_attention_heads")
    head_dim = (
        keys.optional_integer("head_dim") or traits.head_dim or default_head_dim(keys.integer("hidden_size"), heads, origin)
    )
    bias = keys.flag("attention_bias")
    if bias and traits.qkv_bias != "config":
        raise UnsupportedModel(f"{origin}: attention_bias = true is not supported for {traits.family} models")
    return AttentionSpec(
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", None if traits.kv_heads_named else heads),
        head_dim=head_dim,
        rope=rope_from_config(keys, head_dim=head_dim, max_context=max_context, origin=origin),
        scale=head_dim**-0.5,
        qkv_bias=bias or traits.qkv_bias == "always",
        out_bias=bias and traits.out_bias == "config",
        qk_norm=traits.qk_norm,
    )


DEFAULT_WINDOW = 4096  # sliding window of layers that have one, if the config lacks the key sliding_window; null means none


def _windows(keys: ConfigReader, count: int, traits: Traits, origin: str) -> list[int | None]:
    """The sliding window of every layer."""
    if traits.window == "never":
        keys.expect("layer_types", [FULL] * count)
        keys.expect("sliding_window")
        return [None] * count
    window = keys.optional_integer("sliding_window")
    if traits.window == "all" and not keys.has("sliding_window"):
        window = DEFAULT_WINDOW
    first = 0
    if traits.window == "gated":
        used, first = keys.flag("use_sliding_window"), keys.integer("max_window_layers", count, least=0)
        window = window if used else None
    if traits.window == "switched":
        window = window if keys.flag("use_sliding_window") else None
        keys.get("max_window_layers")  # present in older configs, without effect in this family
    by_index = [SLIDING if window and index >= first else FULL for index in range(count)]
    return layer_windows(layer_types(keys, count, accepted=(FULL, SLIDING), default=by_index, origin=origin), window, origin)


def _feed_forwards(keys: ConfigReader, count: int, traits: Traits, origin: str) -> list[MlpSpec | MoeSpec]:
    """The feed-forward of every layer. Experts are in every decoder_sparse_step-th layer except mlp_only_layers."""
    if not traits.experts:
        return [MlpSpec(keys.integer("intermediate_size"), bias=traits.mlp_bias and keys.flag("mlp_bias"))] * count
    sparse = MoeSpec(
        experts=keys.integer("num_experts", keys.optional_integer("num_local_experts")),
        used=keys.integer("num_experts_per_tok"),
        width=keys.integer("moe_intermediate_size"),
        normalised=keys.flag("norm_topk_prob"),
    )
    step, named = keys.integer("decoder_sparse_step", 1), keys.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(index, int) for index in named):
        raise CorruptFile(f"{origin}: mlp_only_layers must be a list of layer indices, not {named!r}")
    flat = [index in named or (index + 1) % step != 0 for index in range(count)]
    # If no layer is dense, the width is not used and its key may be missing.
    dense = MlpSpec(keys.integer("intermediate_size", None if any(flat) else 1))
    return [dense if each else sparse for each in flat]


# ------------------------------------------------------------------ GGUF

# Metadata keys under the architecture's prefix that do not affect the computation.
IGNORED_METADATA = frozenset({"tensor_data_layout", "source.url"})


def _from_metadata(source: ModelSource, traits: Traits) -> ModelSpec:
    metadata, tensors, origin = source.config, source.tensors, source.path.name
    keys = ConfigReader(metadata, origin=origin, prefix=f"{metadata['general.architecture']}.")
    count = keys.integer("block_count", most=MAX_LAYERS)
    hidden, max_context = keys.integer("embedding_length"), keys.integer("context_length")
    heads = keys.integers("attention.head_count", count)
    kv_heads = keys.integers("attention.head_count_kv", count, heads)
    fed = _gguf_feed_forwards(keys, source, count, traits)
    head_dim = keys.optional_integer("attention.key_length") or default_head_dim(hidden, heads[0], origin)
    keys.expect("attention.value_length", head_dim)
    window = keys.optional_integer("attention.sliding_window", least=0) or None
    rope = rope_from_metadata(keys, tensors.get("rope_freqs.weight"), head_dim=head_dim, max_context=max_context, origin=origin)
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                heads=heads[index],
                kv_heads=kv_heads[index],
                head_dim=head_dim,
                rope=rope,
                scale=head_dim**-0.5,
                window=window,
                # A GGUF file has no key for biases: a layer has one if the tensor is there.
                qkv_bias=traits.qkv_bias == "always" or f"blk.{index}.attn_q.bias" in tensors,
                out_bias=f"blk.{index}.attn_output.bias" in tensors,
                qk_norm=traits.qk_norm,
            ),
            fed[index],
        )
        for index in range(count)
    )
    spec = ModelSpec(
        family=traits.family,
        layers=layers,
        hidden=hidden,
        max_context=max_context,
        **gguf_outer_fields(keys, source),
    )
    keys.refuse_unknown(IGNORED_METADATA)
    return validated(spec, origin)


def gguf_outer_fields(keys: ConfigReader, source: ModelSource) -> dict[str, Any]:
    """ModelSpec fields outside the layers, common to all GGUF files. The vocabulary size is optional, and the head is tied if
    the file has no tensor for it."""
    embedding = source.tensors.get("token_embd.weight")
    return {
        "vocab": keys.integer("vocab_size", embedding.shape[0] if embedding is not None and embedding.shape else None),
        "eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tied": "output.weight" not in source.tensors,
    }


def _gguf_feed_forwards(keys: ConfigReader, source: ModelSource, count: int, traits: Traits) -> list[MlpSpec | MoeSpec]:
    """The feed-forward of every layer. Biases and expert layers are found by their tensors: a GGUF file has no key for them."""
    if not traits.experts:
        widths = keys.integers("feed_forward_length", count)
        return [MlpSpec(width, bias=f"blk.{i}.ffn_down.bias" in source.tensors) for i, width in enumerate(widths)]
    keys.expect("expert_gating_func", 1)  # 1 stands for softmax, the only routing that these layers implement
    keys.expect("expert_weights_scale", 1, 1.0)
    sparse = MoeSpec(
        experts=keys.integer("expert_count"),
        used=keys.integer("expert_used_count"),
        width=keys.integer("expert_feed_forward_length"),
        normalised=keys.flag("expert_weights_norm", True),
    )
    flat = [f"blk.{index}.ffn_gate_inp.weight" not in source.tensors for index in range(count)]
    # If no layer is dense, the width is not used and its key may be missing.
    dense = MlpSpec(keys.integer("feed_forward_length", None if any(flat) else 1))
    return [dense if each else sparse for each in flat]


def validated(spec: ModelSpec, origin: str) -> ModelSpec:
    check_layer_sizes(spec.layers, origin)
    return spec


def check_layer_sizes(layers: tuple[LayerSpec, ...], origin: str) -> None:
    """Raise CorruptFile if head counts, head sizes or expert counts do not fit together."""
    for layer in layers:
        match layer.mixer:
            case AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim):
                if heads % kv_heads:
                    raise CorruptFile(f"{origin}: {heads} query heads are not a multiple of {kv_heads} key/value heads")
                if head_dim % 2 or layer.mixer.rope.dims % 2:
                    raise CorruptFile(f"{origin}: a head size of {head_dim} is odd; rotary embeddings need pairs of dimensions")
            case DeltaSpec(key_heads=key_heads, value_heads=value_heads):
                if value_heads % key_heads:
                    raise CorruptFile(f"{origin}: {value_heads} value heads are not a multiple of {key_heads} key heads")
            case _:
                assert_never(layer.mixer)
        for experts in (layer.feed_forward, layer.parallel_experts):
            if isinstance(experts, MoeSpec) and experts.used > experts.experts:
                raise CorruptFile(f"{origin}: {experts.used} experts per token are more than the {experts.experts} experts")
