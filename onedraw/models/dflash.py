"""DFlash drafters: their spec, their weights, and whether a drafter fits a target.

In: an open checkpoint in one of four layouts (z-lab or speculators safetensors, GGUF `dflash` of llama.cpp, GGUF `*-dflash-draft`
of Lucebox) and the ModelSpec of the target, the model that it drafts for. Out: DrafterInfo, or UnsupportedModel.

A feature of a position is the target's residual stream there, after a layer that the drafter names. A block is the positions that
one pass of the drafter computes; its positions are called slots. Slot 0 holds the anchor, which is the last sampled token, and
the other slots hold mask tokens. Axes: n target layers with features, Ht hidden width of the target, E that of the drafter, C
committed positions, B slots of a block, V tokens of the target's vocabulary, Vd rows of the drafter's own head.

A drafter computes, for C committed positions with features F [C, n·Ht] and the anchor:
    c        = rms(F · fcᵀ) · hidden_norm                      once per position, shared by all layers, not normed again
    context  k = rope(rms(c · kᵀ) · k_norm, position)  v = c · vᵀ      per layer, at the position of the target token
    block    x = embed([anchor, mask, …, mask])                B tokens at positions C … C + B - 1
    layer    x += attention(rms(x) · attn_norm)                over the keys and values of the context and of the block
             x += down(silu(gate(h)) · up(h)), h = rms(x) · mlp_norm
    logits   head(rms(x) · norm) of slots 1 … B - 1; slot s drafts the token at position C + s
A layer with a window W attends to context positions C - W … C - 1, the same for every slot. Within the block every slot attends
to every slot, or with `causal_in_block` only to itself and the slots before it.

Laguna drafters add: a norm of every feature before fc (`feature_norms`), a gate on the output of attention, and context keys and
values of rms(c) · attn_norm instead of c (`normed_context`).
DFlash2 drafters add, in a layer and for the slots of the block only, a convolution before and after each sublayer f. With its
normed input h, taps τ, channels i and groups of channels i/G:
    δ        = h · projᵀ                                       [2, taps, groups]; side 0 before f, side 1 after it
    conv(z)  = Σ_τ (base[side, τ, i] + δ[side, τ, i/G]) · z[slot - τ, i]      without slots before the block
    x       += conv₁(f(conv₀(h)))
and a candidate selector: of a slot, the top_k tokens b score U(b) + ⟨predecessor[a] ⊙ (selector · x), successor[b]⟩. Here
U are the logits, x is the slot's output after the last norm, and a the token drafted for the slot before it, at first the anchor.

Weights, float32, matrices as [outputs, inputs]
    outer      fc [E, n·Ht]  hidden_norm [E]  norm [E]; embed [V, E] and head [Vd, E] if the drafter has its own
               feature_norms [n, Ht]; predecessor and successor [V, rank], selector [rank, E]
    layer      the names of `weight_names.py`, with q_norm and k_norm; attn_conv and mlp_conv [2, taps, E], attn_conv_proj and
               mlp_conv_proj [2 · taps · groups, E]
    target_ids int64 [Vd]: the target's token id of every row of the head, if the drafter has a reduced vocabulary
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.config_reader import (
    FULL,
    IGNORED_KEYS,
    IGNORED_MOE_KEYS,
    MAX_INTEGER,
    MAX_LAYERS,
    SLIDING,
    ConfigReader,
    code_notes,
    default_head_dim,
    layer_types,
    layer_windows,
)
from onedraw.models.family import IGNORED_METADATA, check_layer_sizes
from onedraw.models.laguna import read_gate, stored_gate
from onedraw.models.rope import rope_from_config, rope_from_metadata
from onedraw.models.source import LazyTensor, ModelSource, RowSelection, StackedTensors
from onedraw.models.spec import (
    AttentionSpec,
    ConvolutionSpec,
    DrafterLayout,
    DrafterSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    SelectorSpec,
)
from onedraw.models.weight_names import (
    GGUF_NAMES,
    SAFETENSORS_NAMES,
    NamedWeights,
    TensorShape,
    WeightKey,
    WeightLookup,
    WeightNames,
    WeightTransform,
    find_tensor,
    find_weights,
    name_table,
    refuse_unused_tensors,
)

LAGUNA, DFLASH2 = "DFlashLagunaForCausalLM", "DFlash2DraftModel"
ZLAB = ("DFlashDraftModel", DFLASH2, LAGUNA)
GGUF_DRAFTS = ("qwen35-dflash-draft", "dflash-draft", "gemma4-dflash-draft")  # architectures in files of Lucebox
SUPPORTED = f"{', '.join(ZLAB)}, speculators of type dflash, GGUF of architecture dflash, {', '.join(GGUF_DRAFTS)}"
MOST_BLOCK = 1024  # A larger block size can only be a damaged file. Rows carry at most 64 drafts.
DEFAULT_BLOCK = 16  # block size of z-lab configs and Lucebox files that name none
DEFAULT_HEAD_DIM = 128  # head size of Qwen3 configs that name none
DEFAULT_MASKS = {"qwen35-dflash-draft": 248070, "gemma4-dflash-draft": 4}  # mask tokens of Lucebox files that name none
MAX_CANDIDATES = 256  # how many tokens of a slot a candidate selector may score, at most
GEMMA4_WINDOW = 2048  # Gemma 4 drafters have this window in every layer but the last, if a Lucebox file names none

# Unsupported variants of DFlash: pattern in a name of an architecture, model type, key or tensor → description. First match wins.
VARIANTS = {
    r"dspark|markov|conf_proj|confidence": "DSpark, which adds a Markov head and a confidence head",
    r"domino": "Domino, which adds a recurrent head",
    r"dflare|fusion_": "DFlare, which fuses features per layer",
}
IGNORED_DRAFTER_KEYS = IGNORED_KEYS | {"auto_map", "tie_word_embeddings", "max_anchors", "mask_token"}
IGNORED_SPECULATOR_KEYS = {"speculators_version", "speculators_config", "has_no_defaults_at_init", *IGNORED_DRAFTER_KEYS}
# Keys about experts in configs of Laguna drafters, which have none (num_experts is 0), and a repetition of target_layer_ids.
IGNORED_LAGUNA_KEYS = (
    IGNORED_DRAFTER_KEYS
    | IGNORED_MOE_KEYS
    | {
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_routed_scaling_factor",
        "moe_router_use_sigmoid",
        "moe_router_score_func",
        "moe_router_logit_softcapping",
        "moe_apply_router_weight_on_input",
        "eagle_aux_hidden_state_layer_ids",
    }
)


def part_of_qkv(part: Literal["q", "k", "v"], names: WeightNames) -> WeightTransform:
    """A transform for q, k or v, which Laguna drafters store as one tensor with the rows of q, then k, then v."""
    separate, fused = names.layer[part], "layers.{layer}.self_attn.qkv_proj.weight"

    def transform(lookup: WeightLookup) -> LazyTensor:
        if not lookup.has(fused):
            return lookup.find(separate)
        queries, keys = lookup.attention.heads * lookup.attention.head_dim, lookup.attention.kv_heads * lookup.attention.head_dim
        starts = {"q": 0, "k": queries, "v": queries + keys}
        stored = lookup.find(fused, (queries + 2 * keys, lookup.shape[1]))
        return RowSelection(stored, np.arange(starts[part], starts[part] + lookup.shape[0]))

    return transform


def stacked_norms(name: str) -> WeightTransform:
    """A transform for norms that are stored as one vector per feature: name.0.weight, name.1.weight …"""
    return lambda lookup: StackedTensors(
        tuple(lookup.find(f"{name}.{index}.weight", lookup.shape[1:]) for index in range(lookup.shape[0]))
    )


_OUTER = "fc=fc.weight hidden_norm=hidden_norm.weight norm=norm.weight embed=embed_tokens.weight head=lm_head.weight d2t=d2t"
_BLK = "blk.{layer}."
_SAFETENSORS = WeightNames(
    outer=name_table("", f"{_OUTER} feature_norms=aux_hidden_norms.0.weight")
    | name_table("candidate_selector.", "predecessor=predecessor_codebook successor=successor_codebook")
    | name_table("candidate_selector.", "selector=hidden_projection.weight"),
    layer={weight: stored.removeprefix("model.") for weight, stored in SAFETENSORS_NAMES.layer.items()}
    | name_table("layers.{layer}.", "attn_gate=self_attn.g_proj.weight")
    | name_table("layers.{layer}.attention_conv.", "attn_conv=base_kernel attn_conv_proj=kernel_projection.weight")
    | name_table("layers.{layer}.mlp_conv.", "mlp_conv=base_kernel mlp_conv_proj=kernel_projection.weight"),
    ignored=r"t2d|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",  # t2d follows from d2t (draft to target ids)
)
_SAFETENSORS = replace(
    _SAFETENSORS,
    transforms={part: part_of_qkv(part, _SAFETENSORS) for part in ("q", "k", "v")}
    | {"feature_norms": stacked_norms("aux_hidden_norms")},
)
DRAFTER_WEIGHT_NAMES: dict[DrafterLayout, WeightNames] = {
    "z-lab": _SAFETENSORS,
    "speculators": _SAFETENSORS,
    "gguf": WeightNames(
        outer=name_table("", "fc=fc.weight hidden_norm=enc.output_norm.weight norm=output_norm.weight")
        | name_table("", "embed=token_embd.weight head=output.weight d2t=d2t feature_norms=enc.aux_norm.weight")
        | name_table("selector_", "predecessor=predecessor.weight successor=successor.weight selector=hidden.weight"),
        layer={**GGUF_NAMES.layer, "attn_gate": f"{_BLK}attn_gate.weight"}
        | name_table(_BLK, "attn_conv=attn_conv_base attn_conv_proj=attn_conv_proj.weight")
        | name_table(_BLK, "mlp_conv=ffn_conv_base mlp_conv_proj=ffn_conv_proj.weight"),
        ignored=GGUF_NAMES.ignored,
    ),
    "gguf-draft": WeightNames(
        outer=name_table("dflash.", "fc=fc.weight hidden_norm=hidden_norm.weight feature_norms=aux_hidden_norm.0.weight")
        | name_table("", "norm=output_norm.weight embed=token_embd.weight head=output.weight d2t=d2t")
        | name_table("dflash.selector.", "predecessor=pred_cb successor=succ_cb selector=hproj.weight"),
        layer={**GGUF_NAMES.layer, "attn_gate": f"{_BLK}attn_gate.weight"}
        | name_table(_BLK, "attn_conv=attn_conv.base attn_conv_proj=attn_conv.proj.weight")
        | name_table(_BLK, "mlp_conv=ffn_conv.base mlp_conv_proj=ffn_conv.proj.weight"),
        transforms={"feature_norms": stacked_norms("dflash.aux_hidden_norm")},
        aliases=(
            (r"^dflash_(fc|hidden_norm)\.weight$", r"dflash.\1.weight"),
            (r"^(blk\.\d+)\.post_attention_norm\.weight$", r"\1.ffn_norm.weight"),
        ),
        ignored=GGUF_NAMES.ignored,
    ),
}


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    spec: DrafterSpec
    weights: DrafterWeights


def is_drafter(source: ModelSource) -> bool:
    """Whether a checkpoint is a DFlash-like drafter rather than a model; it may still be unsupported."""
    config = source.config
    return (
        "speculators_model_type" in config or "dflash_config" in config or bool(re.search("dflash|dspark", _name(source), re.I))
    )


def read_drafter_info(source: ModelSource, depth: int | None = None) -> DrafterInfo:
    """Read the configuration, and check that the tensors match it. No weight is read. `depth`: the number of layers of the
    target, from which the layers with features follow if the file does not list them."""
    layout = detect_layout(source)
    _refuse_variants(source)
    spec = read_drafter_spec(source, layout, depth)
    return DrafterInfo(spec, DrafterWeights(source, spec, DRAFTER_WEIGHT_NAMES[layout]))


# ------------------------------------------------------------------ layouts and variants


def detect_layout(source: ModelSource) -> DrafterLayout:
    name = _name(source)
    if source.format == "gguf":
        if name == "dflash":
            return "gguf"
        if name in GGUF_DRAFTS:
            return "gguf-draft"
    elif "speculators_model_type" in source.config:  # checked first: such files may name z-lab's architecture too
        name = f"speculators_model_type {source.config['speculators_model_type']}"
        if source.config["speculators_model_type"] == "dflash":
            return "speculators"
    elif name in ZLAB:
        return "z-lab"
    raise UnsupportedModel(
        f"{source.path}: {name or 'a nameless model'}{_variant(name)} is not supported as a drafter; supported: {SUPPORTED}"
    )


def _refuse_variants(source: ModelSource) -> None:
    """Refuse drafters with parts that plain DFlash does not have."""
    switched_on = (key for key, value in source.config.items() if value) if source.format == "gguf" else ()
    for name in (_name(source), *source.tensors, *switched_on):
        if variant := _variant(name):
            raise UnsupportedModel(f"{source.path}: {name}{variant} is not supported; supported drafters: {SUPPORTED}")
    if (source.path / "mask_embedding.pt").exists():  # the mask token's embedding, instead of the target's
        raise UnsupportedModel(
            f"{source.path}: mask_embedding.pt is a pickle, which can run code and is never opened; this drafter is not supported"
        )


def _name(source: ModelSource) -> str:
    """The architecture that the checkpoint names."""
    if source.format == "gguf":
        return str(source.config.get("general.architecture", ""))
    names = source.config.get("architectures") or [source.config.get("model_type", "")]
    return str(names[0]) if isinstance(names, list) else str(names)


def _variant(name: str) -> str:
    for pattern, description in VARIANTS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return f" ({description})"
    return ""


def read_drafter_spec(source: ModelSource, layout: DrafterLayout, depth: int | None = None) -> DrafterSpec:
    match layout:
        case "z-lab":
            spec = _from_zlab(source)
        case "speculators":
            spec = _from_speculators(source)
        case "gguf" | "gguf-draft":
            spec = _from_metadata(source, layout, depth)
        case _:
            assert_never(layout)
    return _validated(spec, str(source.path))


# ------------------------------------------------------------------ safetensors


def _from_zlab(source: ModelSource) -> DrafterSpec:
    origin = str(source.path / "config.json")
    keys = ConfigReader(source.config, origin=origin)
    inner = ConfigReader(keys.mapping("dflash_config") or {}, origin=f"{origin}: dflash_config")
    laguna, dflash2 = _name(source) == LAGUNA, _name(source) == DFLASH2
    layers = _layers(keys, origin)
    if laguna:
        layers = _laguna_layers(layers, keys, origin)
    window = inner.optional_integer("swa_window_size") or keys.optional_integer("sliding_window")
    if inner.flag("use_swa"):  # every layer has a window, regardless of layer_types
        if window is None:
            raise CorruptFile(f"{origin}: dflash_config.use_swa is set, but neither swa_window_size nor sliding_window is")
        layers = tuple(replace(layer, mixer=replace(layer.attention, window=window)) for layer in layers)
    depth = _either(keys, inner, "num_target_layers", origin)
    ids = _target_layers(keys, inner, count=len(layers), depth=depth, origin=origin)
    inner_causal = inner.flag("causal") if inner.get("causal") is not None else None
    causal = keys.flag("is_causal") if keys.get("is_causal") is not None else inner_causal
    _refuse_switches(keys)
    _refuse_switches(inner)
    inner.expect("input_embedding_scale", 1, 1.0)
    cap = inner.get("final_logit_softcapping")
    spec = DrafterSpec(
        layout="z-lab",
        layers=layers,
        causal_in_block=tuple(layer.attention.window is not None if causal is None else causal for layer in layers),
        hidden=keys.integer("hidden_size"),
        target_hidden=keys.integer("target_hidden_size", keys.integer("hidden_size")),
        vocab=keys.integer("vocab_size"),
        draft_vocab=keys.integer("draft_vocab_size", keys.integer("vocab_size")),
        eps=keys.number("rms_norm_eps", 1e-6),
        block=_either(keys, inner, "block_size", origin, least=2, most=MOST_BLOCK) or DEFAULT_BLOCK,
        mask_token=_mask(_either(keys, inner, "mask_token_id", origin, least=0), origin),
        target_layers=ids,
        max_context=keys.integer("max_position_embeddings"),
        target_depth=depth,
        feature_norms=laguna,
        normed_context=laguna,
        convolution=_convolution(inner, "") if dflash2 else None,
        selector=_selector(inner, "") if dflash2 else None,
        logit_scale=keys.number("logit_scale", 1.0) * inner.number("output_multiplier", 1.0),
        softcap=_optional_number(keys if cap is None else inner, "final_logit_softcapping"),
        notes=code_notes(keys),
    )
    keys.refuse_unknown(IGNORED_LAGUNA_KEYS if laguna else IGNORED_DRAFTER_KEYS)
    inner.refuse_unknown({"mask_token", "num_speculative_tokens"})
    return _with_own_tensors(spec, source, embed="embed_tokens.weight", head="lm_head.weight")


def _from_speculators(source: ModelSource) -> DrafterSpec:
    origin = str(source.path / "config.json")
    keys = ConfigReader(source.config, origin=origin)
    stack = ConfigReader(keys.mapping("transformer_layer_config") or {}, origin=f"{origin}: transformer_layer_config")
    layers = _layers(stack, f"{origin}: transformer_layer_config")
    non_causal = keys.flag("sliding_window_non_causal")
    counted = keys.get("aux_hidden_state_layer_ids")
    if counted is None:
        raise CorruptFile(f"{origin}: aux_hidden_state_layer_ids is missing")
    _refuse_switches(keys)
    _refuse_switches(stack)
    keys.expect("pure_draft_prefix_len", 1)
    for part in (keys, stack):
        part.expect("logit_scale", 1, 1.0)
        part.expect("final_logit_softcapping")
    hidden, vocab = stack.integer("hidden_size"), stack.integer("vocab_size")
    spec = DrafterSpec(
        layout="speculators",
        layers=layers,
        causal_in_block=tuple(layer.attention.window is not None and not non_causal for layer in layers),
        hidden=hidden,
        target_hidden=keys.integer("target_hidden_size", hidden),
        vocab=vocab,
        draft_vocab=keys.integer("draft_vocab_size", vocab),
        eps=stack.number("rms_norm_eps", 1e-6),
        block=keys.integer("block_size", least=2, most=MOST_BLOCK),
        mask_token=_mask(keys.optional_integer("mask_token_id", least=0), origin),
        target_layers=_zero_based(counted, "aux_hidden_state_layer_ids", offset=1, origin=origin),
        max_context=stack.integer("max_position_embeddings"),
        notes=code_notes(keys),
    )
    keys.get("speculators_model_type")
    keys.refuse_unknown(IGNORED_SPECULATOR_KEYS)
    stack.refuse_unknown(IGNORED_DRAFTER_KEYS)
    return _with_own_tensors(spec, source, embed="embed_tokens.weight", head="lm_head.weight")


def _layers(keys: ConfigReader, origin: str) -> tuple[LayerSpec, ...]:
    """The Qwen3-style layers, which both safetensors layouts describe with transformers' keys."""
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("quantization_config")
    count, head_dim = keys.integer("num_hidden_layers", most=MAX_LAYERS), keys.integer("head_dim", DEFAULT_HEAD_DIM)
    heads, max_context = keys.integer("num_attention_heads"), keys.integer("max_position_embeddings")
    info: Mapping[str, Any] = keys.mapping("rope_parameters") or keys.mapping("rope_scaling") or {}
    if keys.get("rope_theta") is None and "rope_theta" not in info:
        raise CorruptFile(f"{origin}: rope_theta is missing; with a wrong value drafts would be rejected more often, unnoticed")
    mixer = AttentionSpec(
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope_from_config(keys, head_dim=head_dim, max_context=max_context, origin=origin),
        scale=head_dim**-0.5,
        qk_norm=True,
    )
    feed_forward = MlpSpec(keys.integer("intermediate_size"))
    return tuple(LayerSpec(replace(mixer, window=window), feed_forward) for window in _windows(keys, count, origin))


def _laguna_layers(layers: tuple[LayerSpec, ...], keys: ConfigReader, origin: str) -> tuple[LayerSpec, ...]:
    """Add Laguna's gate to the layers, and read the keys that only Laguna drafters have."""
    keys.expect("num_experts", 0)
    keys.expect("rope_style", "rotate-half")
    keys.expect("mlp_layer_types", ["dense"] * len(layers))
    gate = read_gate(keys, origin)
    heads = keys.integers("num_attention_heads_per_layer", len(layers), [layer.attention.heads for layer in layers])
    return tuple(
        replace(layer, mixer=replace(layer.attention, heads=own, gate="softplus", gate_per=gate))
        for layer, own in zip(layers, heads, strict=True)
    )


def _windows(keys: ConfigReader, count: int, origin: str) -> list[int | None]:
    """The window of every layer: by layer_types, or by Qwen3's rule (use_sliding_window from max_window_layers on)."""
    window, used = keys.optional_integer("sliding_window"), keys.flag("use_sliding_window")
    first = keys.integer("max_window_layers", 0, least=0)
    by_index = [SLIDING if window and used and index >= first else FULL for index in range(count)]
    return layer_windows(layer_types(keys, count, accepted=(FULL, SLIDING), default=by_index, origin=origin), window, origin)


def _target_layers(keys: ConfigReader, inner: ConfigReader, *, count: int, depth: int | None, origin: str) -> tuple[int, ...]:
    """The target layers whose outputs are the features: as listed, or z-lab's default."""
    listed, named = keys.get("target_layer_ids"), inner.get("target_layer_ids")
    if listed is not None and named is not None and listed != named:
        raise CorruptFile(f"{origin}: target_layer_ids and dflash_config.target_layer_ids contradict each other; keep one")
    if listed is not None or named is not None:
        return _zero_based(named if listed is None else listed, "target_layer_ids", offset=0, origin=origin)
    if depth is None:
        raise CorruptFile(f"{origin}: target_layer_ids and num_target_layers are both missing")
    return default_target_layers(count, depth)


def default_target_layers(count: int, depth: int) -> tuple[int, ...]:
    """The layers with features that z-lab uses by default for `count` draft layers and a target of `depth` layers: spread
    evenly."""
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + index * (depth - 4) / (count - 1)) for index in range(count))


def _refuse_switches(keys: ConfigReader) -> None:
    """Refuse a drafter if one of these switches changes the computation. They may be at the top level or in a nested object."""
    keys.expect("sample_from_anchor", False)
    keys.expect("use_aux_hidden_state", True)
    keys.expect("attention_sink_bias", False)
    keys.expect("is_neox_style", True)
    keys.expect("rope_is_neox_style", True)


# ------------------------------------------------------------------ GGUF


def _from_metadata(source: ModelSource, layout: DrafterLayout, depth: int | None) -> DrafterSpec:
    """The spec of a GGUF file of llama.cpp, or of Lucebox (`gguf-draft`), whose additional keys have `dflash.` after the
    prefix, or `dflash.dflash2.` for those of DFlash2."""
    metadata, tensors, origin, arch = source.config, source.tensors, source.path.name, _name(source)
    lucebox = layout == "gguf-draft"
    own, second = ("dflash.", "dflash.dflash2.") if lucebox else ("", "")
    keys = ConfigReader(metadata, origin=origin, prefix=f"{arch}.")
    vocabulary = ConfigReader(metadata, origin=origin, prefix="tokenizer.ggml.")
    keys.expect("sample_from_anchor", False)
    keys.expect("decoder_arch", "laguna")
    names = DRAFTER_WEIGHT_NAMES[layout]
    feature_norms = any(name in tensors for name in ("enc.aux_norm.weight", "dflash.aux_hidden_norm.0.weight"))
    normed_context = bool(keys.get(own + "context_kv_layer_norm"))
    laguna = keys.get("decoder_arch") == "laguna" or feature_norms or normed_context or "blk.0.attn_gate.weight" in tensors
    layers = _metadata_layers(keys, source, laguna=laguna)
    causal = keys.flag("attention.causal", laguna) if laguna or keys.get("attention.causal") is not None else None
    hidden, width = keys.integer("embedding_length"), None
    for name in (names.outer["fc"], "dflash_fc.weight"):
        width = tensors[name].shape[-1] if name in tensors and tensors[name].shape else width
    ids = _metadata_target_layers(keys, hidden=hidden, width=width, depth=depth, origin=origin, lucebox=lucebox)
    head, tokens = tensors.get(names.outer["head"]), metadata.get("tokenizer.ggml.tokens")
    vocab = keys.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)
    mask = keys.optional_integer("dflash.mask_token_id", least=0) if lucebox else None
    mask = vocabulary.optional_integer("mask_token_id", least=0) if mask is None else mask
    dflash2 = keys.get(second + "selector_top_k") is not None
    spec = DrafterSpec(
        layout=layout,
        layers=layers,
        causal_in_block=tuple(layer.attention.window is not None if causal is None else causal for layer in layers),
        hidden=hidden,
        # Files of llama.cpp have no key for the target's hidden size. It is fc's input width divided by the number of features.
        target_hidden=keys.optional_integer("dflash.target_hidden") or (hidden if width is None else width // len(ids)),
        vocab=vocab,
        draft_vocab=head.shape[0] if head is not None and head.shape else vocab,
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        block=keys.integer(own + "block_size", DEFAULT_BLOCK if lucebox else None, least=2, most=MOST_BLOCK),
        mask_token=_mask(DEFAULT_MASKS.get(arch) if mask is None else mask, origin),
        target_layers=ids,
        max_context=keys.integer("context_length"),
        feature_norms=feature_norms,
        normed_context=laguna,
        convolution=_convolution(keys, second) if dflash2 else None,
        selector=_selector(keys, second) if dflash2 else None,
        logit_scale=keys.number("logit_scale", 1.0),
        softcap=_optional_number(keys, "dflash.logit_softcap" if lucebox else "final_logit_softcapping"),
    )
    keys.refuse_unknown(IGNORED_METADATA)
    return _with_own_tensors(spec, source, embed=names.outer["embed"], head=names.outer["head"])


def _metadata_target_layers(
    keys: ConfigReader, *, hidden: int, width: int | None, depth: int | None, origin: str, lucebox: bool
) -> tuple[int, ...]:
    """The target layers whose outputs are the features: as listed, or Lucebox's default for a target of `depth` layers."""
    if not lucebox:
        return _zero_based(keys.get("target_layers"), "dflash.target_layers", offset=1, origin=origin)
    listed = keys.get("dflash.target_layer_ids")
    count, total = keys.optional_integer("dflash.n_target_layers"), keys.optional_integer("dflash.n_target_features")
    if listed is not None:
        ids = _zero_based(listed, "dflash.target_layer_ids", offset=0, origin=origin)
        if count is not None and count != len(ids):
            raise CorruptFile(f"{origin}: dflash.target_layer_ids lists {len(ids)} layers, dflash.n_target_layers is {count}")
        return ids
    count = count or (total or width or 0) // hidden
    if depth is None or count < 1:
        raise CorruptFile(f"{origin}: dflash.target_layer_ids is missing, and the number of the target's layers is not known")
    step = (depth - 2) // max(count - 1, 1)
    return tuple(1 + index * step for index in range(count))


def _metadata_layers(keys: ConfigReader, source: ModelSource, *, laguna: bool) -> tuple[LayerSpec, ...]:
    origin, divisors = source.path.name, source.tensors.get("rope_freqs.weight")
    count, max_context = keys.integer("block_count", most=MAX_LAYERS), keys.integer("context_length")
    heads = keys.integers("attention.head_count", count)
    kv_heads = keys.integers("attention.head_count_kv", count, heads)
    widths = keys.integers("feed_forward_length", count)
    head_dim = keys.optional_integer("attention.key_length") or default_head_dim(
        keys.integer("embedding_length"), heads[0], origin
    )
    keys.expect("attention.value_length", head_dim)
    keys.number("rope.freq_base")  # required: it depends on the target, so no default is right
    rope = rope_from_metadata(keys, divisors, head_dim=head_dim, max_context=max_context, origin=origin)
    windows = _metadata_windows(keys, count, origin, arch=_name(source))
    gated = [laguna and f"blk.{index}.attn_gate.weight" in source.tensors for index in range(count)]
    return tuple(
        LayerSpec(
            AttentionSpec(
                heads[i],
                kv_heads[i],
                head_dim,
                rope,
                head_dim**-0.5,
                window=windows[i],
                qk_norm=True,
                gate="softplus" if gated[i] else None,
                gate_per=stored_gate(source, i, heads[i]) if gated[i] else "element",
            ),
            MlpSpec(widths[i]),
        )
        for i in range(count)
    )


def _metadata_windows(keys: ConfigReader, count: int, origin: str, *, arch: str) -> list[int | None]:
    """The window of every layer. Without a pattern it applies to all layers in files of llama.cpp; in Lucebox files to none, or
    to all but the last in a Gemma 4 drafter."""
    window = keys.optional_integer("attention.sliding_window", least=0) or None
    pattern = keys.get("attention.sliding_window_pattern")
    if arch in GGUF_DRAFTS:
        window = keys.optional_integer("dflash.sliding_window", least=0) or window
    if arch == "gemma4-dflash-draft" and pattern is None:
        window, pattern = window or GEMMA4_WINDOW, [True] * (count - 1) + [False]
    if pattern is None:
        return [None if arch in GGUF_DRAFTS else window] * count
    if not isinstance(pattern, list) or len(pattern) != count or not all(isinstance(slides, bool) for slides in pattern):
        raise CorruptFile(
            f"{origin}: {arch}.attention.sliding_window_pattern must be a list of {count} booleans, not {pattern!r}"
        )
    if window is None and any(pattern):
        raise CorruptFile(f"{origin}: {arch}.attention.sliding_window_pattern has sliding layers, but no sliding_window is set")
    return [window if slides else None for slides in pattern]


# ------------------------------------------------------------------ shared by all layouts


def _convolution(keys: ConfigReader, prefix: str) -> ConvolutionSpec:
    return ConvolutionSpec(keys.integer(f"{prefix}conv_kernel_size", most=64), keys.integer(f"{prefix}conv_group_size"))


def _selector(keys: ConfigReader, prefix: str) -> SelectorSpec:
    return SelectorSpec(keys.integer(f"{prefix}selector_rank"), keys.integer(f"{prefix}selector_top_k", most=MAX_CANDIDATES))


def _optional_number(keys: ConfigReader, name: str) -> float | None:
    return None if keys.get(name) is None else keys.number(name)


def _either(
    keys: ConfigReader, inner: ConfigReader, name: str, origin: str, *, least: int = 1, most: int = MAX_INTEGER
) -> int | None:
    """A number at the top level or in dflash_config; if it is in both, the two must be equal."""
    outside, inside = (part.optional_integer(name, least=least, most=most) for part in (keys, inner))
    if outside is not None and inside is not None and outside != inside:
        raise CorruptFile(f"{origin}: {name} is {outside}, but dflash_config.{name} is {inside}; keep one")
    return inside if outside is None else outside


def _mask(token: int | None, origin: str) -> int:
    if token is None:
        raise CorruptFile(f"{origin}: mask_token_id is missing: the token in the slots to be drafted")
    return token


def _zero_based(ids: Any, name: str, *, offset: int, origin: str) -> tuple[int, ...]:
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= offset for i in ids)
    if not whole or not ids:
        raise CorruptFile(f"{origin}: {name} must be a list of layers counted from {offset}, not {ids!r}")
    return tuple(i - offset for i in ids)


def _with_own_tensors(spec: DrafterSpec, source: ModelSource, *, embed: str, head: str) -> DrafterSpec:
    """The spec with `own_embedding`, `own_head` and `mapped` set by which tensors the file has, since the configuration has no
    keys for them."""
    tensors = source.tensors
    return replace(spec, own_embedding=embed in tensors, own_head=head in tensors, mapped="d2t" in tensors)


def _validated(spec: DrafterSpec, origin: str) -> DrafterSpec:
    """Raise CorruptFile if sizes do not fit together, or UnsupportedModel for a candidate selector with a reduced vocabulary."""
    check_layer_sizes(spec.layers, origin)
    if spec.mask_token >= spec.vocab:
        raise CorruptFile(f"{origin}: mask token {spec.mask_token} is outside the vocabulary of {spec.vocab}")
    if spec.convolution is not None and spec.hidden % spec.convolution.group:
        raise CorruptFile(f"{origin}: conv_group_size {spec.convolution.group} does not divide the hidden size {spec.hidden}")
    if spec.selector is not None and spec.mapped:
        raise UnsupportedModel(f"{origin}: a candidate selector together with a reduced vocabulary (d2t) is not supported")
    reduced = spec.draft_vocab != spec.vocab
    if (spec.mapped and not spec.own_head) or (reduced and not spec.mapped):
        raise CorruptFile(
            f"{origin}: a draft vocabulary of {spec.draft_vocab} tokens for a target of {spec.vocab} needs a head and d2t tensor"
        )
    return spec


# ------------------------------------------------------------------ weights


def drafter_shapes(spec: DrafterSpec) -> dict[WeightKey, TensorShape]:
    """Shapes of all weights of a drafter."""
    shapes: dict[WeightKey, TensorShape] = {(None, weight): shape for weight, shape in spec.outer_shapes().items()}
    for index in range(len(spec.layers)):
        shapes |= {(index, weight): shape for weight, shape in spec.layer_shapes(index).items()}
    return shapes


class DrafterWeights(NamedWeights):
    """The weights of one drafter. The constructor refuses missing, misshapen and unknown tensors."""

    def __init__(self, source: ModelSource, spec: DrafterSpec, names: WeightNames) -> None:
        self.spec = spec
        self._origin = str(source.path)
        used: set[str] = set()
        super().__init__(find_weights(source, spec, names, shapes=drafter_shapes(spec), used=used))
        self._map = find_tensor(source, names.outer["d2t"], (spec.draft_vocab,)) if spec.mapped else None
        used |= {self._map.name} if self._map else set()
        refuse_unused_tensors(source, used, ignored=names.ignored, kind="DFlash drafter")

    def target_ids(self) -> NDArray[np.int64] | None:
        """The target's token id of every draft id; None if they are the same."""
        if self._map is None:
            return None
        ids = self._map.int64()
        if not self.spec.layout.startswith("gguf"):  # safetensors store target id - draft id, GGUF stores the target id
            ids = ids + np.arange(len(ids))
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= self.spec.vocab:
            worst = ids.max() if ids.max() >= self.spec.vocab else ids.min()
            raise CorruptFile(f"{self._origin}: d2t has token id {worst}, outside the vocabulary of {self.spec.vocab}")
        return ids


# ------------------------------------------------------------------ drafter and target


def check_drafter_fits(spec: DrafterSpec, target: ModelSpec) -> None:
    """Refuse a drafter that was made for another model."""
    depth = len(target.layers)
    if spec.vocab != target.vocab:
        raise _unfit(f"its vocabulary has {spec.vocab} tokens, the target's has {target.vocab}")
    if spec.target_hidden != target.hidden:
        raise _unfit(f"it reads hidden states of size {spec.target_hidden}, the target's have {target.hidden}")
    if not (spec.own_embedding and spec.own_head) and spec.hidden != target.hidden:
        raise _unfit(f"its hidden size is {spec.hidden}, the target's embedding and head have {target.hidden}")
    if spec.target_depth is not None and spec.target_depth != depth:
        raise _unfit(f"it was made for a target of {spec.target_depth} layers, the target has {depth}")
    if max(spec.target_layers) >= depth:
        raise _unfit(f"it reads the target after layer {max(spec.target_layers)}, the target's last layer is {depth - 1}")
    if spec.block < 2:
        raise _unfit(f"a block of {spec.block} drafts nothing, at least 2 are needed")
    if spec.mask_token >= target.vocab:
        raise _unfit(f"its mask token is {spec.mask_token}, the target's last token is {target.vocab - 1}")


def _unfit(reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"the drafter does not fit the target: {reason}; pass the drafter of this model, or --draft none")
